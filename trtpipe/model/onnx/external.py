"""The files that an ONNX file keeps its large tensors in, found without reading these."""

from __future__ import annotations

from pathlib import Path


def data_files(path: Path) -> tuple[Path, ...]:
    """The external data of an ONNX file, in the order of their names; none where it is no ONNX file."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # noqa: BLE001  # whatever protobuf raises: loading the model will say what is wrong with it
        return ()
    names = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(path.parent / name for name in sorted(names))

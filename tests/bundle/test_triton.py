"""Triton export, parsed and validated by Triton's own published protobuf schema."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import shipping

from trtpipe.bundle.format import Bundle
from trtpipe.bundle.manifest import EngineInfo
from trtpipe.bundle.triton import export_triton, triton_model
from trtpipe.errors import InputError
from trtpipe.job.sections import Build
from trtpipe.values import DimRange, LayerPrecision, TensorSpec


@pytest.fixture(scope="module")
def schema() -> Any:
    """The module protoc made of Triton's model_config.proto, from NVIDIA's tritonclient package, without its gRPC."""
    listed = importlib.metadata.files("tritonclient") or []
    path = next(p for p in listed if p.name == "model_config_pb2.py" and p.parent.name == "grpc")
    spec = importlib.util.spec_from_file_location("model_config_pb2", path.locate())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(schema: Any, text: str) -> Any:
    """The configuration as Triton reads it: an unknown field or a wrong type raises."""
    from google.protobuf import text_format

    return text_format.Parse(text, schema.ModelConfig())


def with_engine(tmp_path: Path, target: str, inputs: Any = None, outputs: Any = None) -> Bundle:
    """A bundle that says it holds a TensorRT engine; its bytes are nobody's business here."""
    bundle = shipping.bundle(tmp_path / "c", extra={"model.onnx": shipping.graph()})
    engine = EngineInfo(file="model.engine", target=target, version="10.3.0", os="linux", machine="x86_64")  # type: ignore[arg-type]
    changes: dict[str, Any] = {"engine": engine, "build": Build(target=target)}  # type: ignore[arg-type]
    changes |= {"inputs": inputs or bundle.manifest.inputs, "outputs": outputs or bundle.manifest.outputs}

    class Stub(Bundle):
        def read(self, name: str) -> bytes:
            return b"plan" if name == "model.engine" else super().read(name)

    return Stub(bundle.path, bundle.manifest.model_copy(update=changes), bundle.manifest_bytes, None)


def test_labels_are_a_line_each_whatever_is_in_a_name(tmp_path: Path) -> None:
    names = ("a\nb", 'with "quotes", comma', "c\r\nd")
    model = triton_model(shipping.bundle(tmp_path / "c", class_names=names))
    assert model.files["labels.txt"].decode().splitlines() == ["a b", names[1], "c d"]
    (note,) = model.notes
    assert note == ("labels.txt has a name a line: line breaks in names are spaces there ('a\\nb', 'c\\r\\nd').")


def test_onnx_repository(tmp_path: Path, schema: Any) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    folder, model = export_triton(bundle, tmp_path / "repository")
    assert folder == tmp_path / "repository" / "colour"
    written = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert written == {
        "config.pbtxt": model.config.encode(),
        "1/model.onnx": shipping.graph(),
        "labels.txt": b"red\ngreen\nblue\n",
    }
    config = parsed(schema, (folder / "config.pbtxt").read_text())
    assert (config.name, config.platform, config.backend) == ("colour", "onnxruntime_onnx", "onnxruntime")
    assert config.max_batch_size == 8
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [("image", schema.TYPE_FP32, [3, 8, 8])]
    assert [(o.name, o.data_type, list(o.dims), o.label_filename) for o in config.output] == [
        ("logits", schema.TYPE_FP32, [3], "labels.txt")
    ]
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert [(g.count, g.kind) for g in config.instance_group] == [(1, schema.ModelInstanceGroup.KIND_CPU)]
    assert model.notes == ()


def test_engine_with_odd_bindings(tmp_path: Path, schema: Any) -> None:
    n, side = DimRange(1, 2, 16), DimRange(8, 16, 32)
    inputs = (
        TensorSpec("pixels", "uint8", ("N", 3, "S", "S"), {"N": n, "S": side}),
        TensorSpec('a"b\\c\n', "int64", ("N",), {"N": n}),
    )
    outputs = (TensorSpec("y", "float16", ("N", 5), {"N": n}), TensorSpec("flag", "bool", ("N",), {"N": n}))
    model = triton_model(with_engine(tmp_path, "tensorrt", inputs, outputs))
    config = parsed(schema, model.config)
    assert (config.platform, config.backend, config.max_batch_size) == ("tensorrt_plan", "tensorrt", 16)
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [
        ("pixels", schema.TYPE_UINT8, [3, -1, -1]),
        ('a"b\\c\n', schema.TYPE_INT64, [1]),
    ]
    assert config.input[1].HasField("reshape")
    assert list(config.input[1].reshape.shape) == []
    assert [(o.name, o.data_type) for o in config.output] == [("y", schema.TYPE_FP16), ("flag", schema.TYPE_BOOL)]
    assert all(o.label_filename == "" for o in config.output)
    assert config.instance_group[0].kind == schema.ModelInstanceGroup.KIND_GPU
    assert model.files == {"1/model.plan": b"plan"}


def test_plugins_are_for_triton_to_load(tmp_path: Path) -> None:
    bundle = with_engine(tmp_path, "tensorrt", (shipping.INPUT,), (shipping.OUTPUT,))
    build = Build(target="tensorrt", plugins=("liba.so", "libb.so"))
    holding = dataclasses.replace(bundle, manifest=bundle.manifest.model_copy(update={"build": build}))
    assert triton_model(holding).notes == (
        "Start Triton with the bundle's libraries: --backend-config=tensorrt,plugins=liba.so;libb.so",
    )


@pytest.mark.parametrize("batch", [4, DimRange(2, 4, 8)])
def test_a_batch_triton_cannot_choose(tmp_path: Path, schema: Any, batch: Any) -> None:
    first, dims = ("N", {"N": batch}) if isinstance(batch, DimRange) else (batch, {})
    inputs = (TensorSpec("x", "float32", (first, 7), dims),)
    outputs = (TensorSpec("y", "float32", (first, 2), dims),)
    model = triton_model(with_engine(tmp_path, "tensorrt", inputs, outputs))
    config = parsed(schema, model.config)
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [4 if isinstance(batch, int) else -1, 7]
    assert not config.HasField("dynamic_batching")
    assert model.notes == ("Triton does no batching: the batch is fixed, begins above 1 or differs between bindings.",)


def test_a_batch_of_one_is_joined_to_none(tmp_path: Path, schema: Any) -> None:
    one = {"N": DimRange(1, 1, 1)}
    inputs = (TensorSpec("x", "float32", ("N", 7), one),)
    model = triton_model(with_engine(tmp_path, "tensorrt", inputs, (TensorSpec("y", "float32", ("N", 2), one),)))
    config = parsed(schema, model.config)
    assert (config.max_batch_size, list(config.input[0].dims)) == (1, [7])
    assert not config.HasField("dynamic_batching")


def test_requests_of_samples_that_change_each_other_are_not_joined(tmp_path: Path, schema: Any) -> None:
    bundle = with_engine(tmp_path, "tensorrt", (shipping.INPUT,), (shipping.OUTPUT,))
    mixed = dataclasses.replace(bundle, manifest=bundle.manifest.model_copy(update={"mixed": ("logits",)}))
    model = triton_model(mixed)
    config = parsed(schema, model.config)
    assert config.max_batch_size == 8
    assert not config.HasField("dynamic_batching")
    assert model.notes == (
        "Triton is told not to join requests to batches: output logits of a sample depends on the others in its batch.",
    )


def test_what_is_sent_together_counts_where_nothing_is_joined_too(tmp_path: Path, schema: Any) -> None:
    whole = TensorSpec("all", "float32", (4,), {}, None)
    bundle = with_engine(tmp_path, "tensorrt", (shipping.INPUT,), (shipping.OUTPUT, whole))
    mixed = dataclasses.replace(bundle, manifest=bundle.manifest.model_copy(update={"mixed": ("logits",)}))
    assert triton_model(mixed).notes[-1] == (
        "What is sent in one request counts: output logits of a sample depends on the others in its batch."
    )


def test_every_binding_dtype_has_a_type(schema: Any) -> None:
    from trtpipe.bundle.triton import _TYPES
    from trtpipe.values import BINDING_DTYPES

    assert set(_TYPES) == set(BINDING_DTYPES)
    assert set(_TYPES.values()) <= set(schema.DataType.keys())


def test_what_triton_cannot_serve(tmp_path: Path) -> None:
    rtx = with_engine(tmp_path, "tensorrt_rtx")
    with pytest.raises(
        InputError, match=r"must be an engine of TensorRT, which Triton runs \(got tensorrt_rtx, for which"
    ):
        triton_model(rtx)
    assert "1/model.onnx" in triton_model(rtx, graph=True).files
    nvfp4 = shipping.bundle(tmp_path / "n", layers=(LayerPrecision("head", "linear", "nvfp4", "", ""),))
    with pytest.raises(InputError) as caught:
        triton_model(nvfp4, graph=True)
    assert str(caught.value) == (
        f"{nvfp4.path}: must be a graph that ONNX Runtime has kernels of (got NVFP4). Build with precision.weights: "
        "int4, or int8_mode."
    )
    kit = shipping.bundle(tmp_path / "k", kind="kit", engine=None)
    with pytest.raises(InputError, match=r"k: is a kit, not a bundle. Finish it first: trtpipe build"):
        triton_model(kit)
    bundle = shipping.bundle(tmp_path / "c")
    files = {n: f for n, f in bundle.manifest.files.items() if n != "model.onnx"}
    bare = dataclasses.replace(bundle, manifest=bundle.manifest.model_copy(update={"files": files}))
    with pytest.raises(InputError) as caught:
        triton_model(bare, graph=True)
    assert str(caught.value) == (
        f"{bundle.path}: must hold model.onnx to serve it (it does not). Export the engine instead."
    )
    export_triton(bundle, tmp_path / "r")
    with pytest.raises(
        InputError, match=r"r/colour: must not exist yet \(it does\)\. Remove it, or choose another repository\.$"
    ):
        export_triton(bundle, tmp_path / "r")

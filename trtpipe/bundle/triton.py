"""A bundle as a model of a Triton Inference Server model repository.

Layout and fields are those of Triton's documentation ("Model Repository", "Model Configuration") and of its
`model_config.proto`: `<repository>/<name>/config.pbtxt` and `<repository>/<name>/1/model.plan` or `model.onnx`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtpipe.atomic import sibling
from trtpipe.bundle.format import Bundle
from trtpipe.bundle.manifest import GRAPH, Manifest
from trtpipe.errors import InputError, shell
from trtpipe.outputs import naming
from trtpipe.values import TensorSpec

_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
}
_LABELS = "labels.txt"
#: Triton's number for each graph optimization level of its ONNX Runtime (README of its onnxruntime backend).
_LEVELS = {"extended": 1, "basic": -1, "none": 2}


@dataclass(frozen=True)
class TritonModel:
    """One model of a repository: what goes into `config.pbtxt`, and its files by path below the model's folder."""

    config: str
    files: Mapping[str, bytes]
    notes: tuple[str, ...] = ()


def serves_graph(bundle: Bundle, graph: bool) -> bool:
    """Whether Triton is given the ONNX graph: because that is wanted, or because the engine is one."""
    engine = bundle.manifest.engine
    return graph or (engine is not None and engine.target == "onnxruntime")


def foreign_format(manifest: Manifest) -> str:
    """The number format of the graph that ONNX Runtime by itself, without trtpipe, cannot execute; empty for none."""
    return "NVFP4" if any(layer.precision == "nvfp4" for layer in manifest.layers) else ""


def triton_model(bundle: Bundle, *, graph: bool = False, optimization: str = "all") -> TritonModel:
    """The bundle for Triton: by its tensorrt backend, or its onnxruntime backend where the engine is an ONNX graph.

    Args:
        bundle: read and admitted.
        graph: export the ONNX graph instead of the engine.
        optimization: how much Triton's ONNX Runtime may optimize the graph: all, extended, basic or none.

    Raises:
        InputError: a kit, a TensorRT-RTX engine (Triton has no backend for it), or no graph in the bundle, or one that
            ONNX Runtime cannot execute.
    """
    manifest = bundle.manifest
    engine = manifest.engine
    if engine is None:
        raise InputError(
            f"{bundle.path}: is a kit, not a bundle. Finish it first: {shell('trtpipe', 'build', bundle.path)}."
        )
    graph = serves_graph(bundle, graph)
    if not graph and engine.target != "tensorrt":
        raise InputError(
            f"{bundle.path}: must be an engine of TensorRT, which Triton runs (got {engine.target}, for which it has "
            "no backend). Add --graph to serve the ONNX graph, or build with target tensorrt."
        )
    if not graph and engine.fallback:
        raise InputError(
            f"{bundle.path}: must be a whole engine, which Triton runs (got a hybrid one, which needs "
            "PyTorch). Add --graph to serve the ONNX graph, or build without build.allow_torch_fallback."
        )
    if graph and GRAPH not in manifest.files:
        raise InputError(f"{bundle.path}: must hold {GRAPH} to serve it (it does not). Export the engine instead.")
    if graph and (foreign := foreign_format(manifest)):
        raise InputError(
            f"{bundle.path}: must be a graph that ONNX Runtime has kernels of (got {foreign}). Build with "
            "precision.weights: int4, or int8_mode."
        )
    source, target = (GRAPH, "model.onnx") if graph else (engine.file, "model.plan")
    files = {f"1/{target}": bundle.read(source)}
    labelled = _labelled(manifest)
    if labelled:
        files[_LABELS] = "".join(f"{_one_line(name)}\n" for name in manifest.class_names or ()).encode()
    batch = _batch(manifest)
    notes: tuple[str, ...] = (
        () if batch else ("Triton does no batching: the batch is fixed, begins above 1 or differs between bindings.",)
    )
    if labelled and (broken := [name for name in manifest.class_names or () if name != _one_line(name)]):
        notes += (
            f"{_LABELS} has a name a line: line breaks in names are spaces there ({', '.join(map(repr, broken))}).",
        )
    if manifest.mixed:
        what = "Triton is told not to join requests to batches" if batch else "What is sent in one request counts"
        notes += (f"{what}: output {manifest.mixed[0]} of a sample depends on the others in its batch.",)
    if manifest.build.plugins:
        libraries = ";".join(manifest.build.plugins)
        notes += (f"Start Triton with the bundle's libraries: --backend-config=tensorrt,plugins={libraries}",)
    config = _config(manifest, graph=graph, batch=batch, labelled=labelled)
    if graph and optimization in _LEVELS:
        config += f"optimization {{\n  graph {{\n    level: {_LEVELS[optimization]}\n  }}\n}}\n"
    return TritonModel(config, files, notes)


def _one_line(name: str) -> str:
    return " ".join(name.splitlines())


def export_triton(
    bundle: Bundle, repository: Path, *, graph: bool = False, optimization: str = "all"
) -> tuple[Path, TritonModel]:
    """Write `triton_model` to `<repository>/<name>`, whole or not at all, and return that folder and the model.

    Raises:
        InputError: as `triton_model`, or the folder exists already.
        OSError: it cannot be written; its filename is that folder.
    """
    model = triton_model(bundle, graph=graph, optimization=optimization)
    folder = repository / bundle.manifest.name
    if os.path.lexists(folder):
        raise InputError(f"{folder}: must not exist yet (it does). Remove it, or choose another repository.")
    with naming(folder):
        _write(folder, {"config.pbtxt": model.config.encode(), **model.files})
    return folder, model


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with sibling(folder) as temporary:
        for name, data in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)
        os.rename(temporary, folder)


def _batch(manifest: Manifest) -> tuple[int, int] | None:
    """(best, largest) batch if Triton may batch: one named dimension leads every binding and its range begins at 1."""
    specs = (*manifest.inputs, *manifest.outputs)
    leading = {s.shape[0] if s.shape else None for s in specs}
    name = next(iter(leading))
    if len(leading) != 1 or not isinstance(name, str) or any(name in s.shape[1:] for s in specs):
        return None
    ranges = [s.dims[name] for s in specs]
    if any(r.min != 1 for r in ranges):
        return None
    return min(r.opt for r in ranges), min(r.max for r in ranges)


def _labelled(manifest: Manifest) -> str | None:
    """The output whose classes the labels name."""
    classes = len(manifest.class_names or ())
    return next((s.name for s in manifest.outputs if s.scores_classes and classes in s.row_shape), None)


def _config(manifest: Manifest, *, graph: bool, batch: tuple[int, int] | None, labelled: str | None) -> str:
    backend, platform = ("onnxruntime", "onnxruntime_onnx") if graph else ("tensorrt", "tensorrt_plan")
    lines = [
        f"name: {_quoted(manifest.name)}",
        f"platform: {_quoted(platform)}",
        f"backend: {_quoted(backend)}",
        f"max_batch_size: {batch[1] if batch else 0}",
    ]
    for side, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            lines += _tensor(side, spec, batched=batch is not None, labels=spec.name == labelled and side == "output")
    if batch and batch[1] > 1 and not manifest.mixed:
        lines += ["dynamic_batching {", f"  preferred_batch_size: [ {batch[0]} ]", "}"]
    kind = "KIND_CPU" if graph else "KIND_GPU"
    lines += ["instance_group [", "  {", "    count: 1", f"    kind: {kind}", "  }", "]"]
    return "\n".join(lines) + "\n"


def _tensor(side: str, spec: TensorSpec, *, batched: bool, labels: bool) -> list[str]:
    dims = [d if isinstance(d, int) else -1 for d in (spec.shape[1:] if batched else spec.shape)]
    lines = [f"{side} [", "  {", f"    name: {_quoted(spec.name)}", f"    data_type: {_TYPES[spec.dtype]}"]
    if dims:
        lines.append(f"    dims: [ {', '.join(map(str, dims))} ]")
    else:
        # Triton has no tensors without dimensions: it says one, and reshapes.
        lines += ["    dims: [ 1 ]", "    reshape { shape: [ ] }"]
    if labels:
        lines.append(f"    label_filename: {_quoted(_LABELS)}")
    return [*lines, "  }", "]"]


def _quoted(text: str) -> str:
    """A string of protobuf's text format."""
    escaped = "".join(
        c
        if re.fullmatch(r'[^"\\\x00-\x1f\x7f-\uffff\U00010000-\U0010ffff]', c)
        else "".join(f"\\{b:03o}" for b in c.encode())
        for c in text
    )
    return f'"{escaped}"'

"""trtpipe inspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import TypeAdapter

from calib.errors import CalibError
from calib.files import open_regular, read_regular, suffix_of, unreadable
from calib.table import CalibrationTable
from calib.trt_cache import CACHE_MAGIC, read_cache
from calib.types import JsonObject
from trtpipe.bundle.format import read_bundle
from trtpipe.bundle.manifest import is_packed
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import figure_lines
from trtpipe.cli.commands.options import InputPath, json_option
from trtpipe.errors import InputError, MissingError, first_line, shell, titled
from trtpipe.model.onnx.names import WEIGHTED_OPERATORS
from trtpipe.packages import pip_install, present
from trtpipe.progress import size
from trtpipe.routes.compiled_precision import dequantizer, stored_type
from trtpipe.trt.element_types import element_types
from trtpipe.trt.plan import MAGICS, read_header
from trtpipe.values import MANIFEST, CheckReport

if TYPE_CHECKING:
    from onnx import GraphProto, ValueInfoProto


#: What can be looked at.
_KINDS = "a bundle, an engine, an ONNX file, a calibration table or a calibration cache"


@click.command("inspect", short_help="Say what is in a bundle, an engine, an ONNX file or a table.")
@click.argument("file", type=InputPath())
@json_option
def command(file: Path, as_json: bool) -> None:
    """Say what is in FILE, running nothing of it.

    FILE is a bundle or kit, an engine, an ONNX file, a calibration table, or a calibration cache of TensorRT.
    """
    description = console.jsonable(described(file))
    if as_json:
        console.out_json(description)
    else:
        console.out("\n".join(_LINES.get(description["kind"], _lines)(console.one_line(description))))


def described(path: Path) -> JsonObject:
    """The content of `path`, as `{"kind": bundle | kit | engine | onnx | calibration | calibration cache, ...}`.

    Raises:
        InputError: nothing is there, it is of none of these kinds, or it is damaged.
    """
    if path.is_dir():
        if not (path / MANIFEST).is_file():
            raise InputError(f"{path}: must be a bundle (got a folder without {MANIFEST}). Check the path.")
        return _bundle(path)
    try:
        with open_regular(path) as file:
            head = file.read(64)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file or folder. Give {_KINDS}.") from None
    except OSError as error:
        raise InputError(unreadable(path, error)) from None
    if path.name == MANIFEST:
        return _bundle(path.parent)
    if suffix_of(path) == ".onnx":
        return _onnx(path)
    if is_packed(head):
        raise InputError(f"{path}: is a packed bundle. Run `{shell('trtpipe', 'unpack', path, 'FOLDER')}`.")
    if any(magic in head for magic in MAGICS):
        return _engine(path)
    if head.startswith(CACHE_MAGIC.encode()):
        return _cache(path)
    if head.lstrip().startswith(b"{"):
        return _table(path)
    with suppress(InputError, MissingError):  # protobuf has no magic number: what ONNX reads is ONNX
        return _onnx(path)
    shown = head[:8].hex(" ") or "an empty file"
    raise InputError(f"{path}: must be {_KINDS} (got a file that begins with {shown}). Check the path.")


def _bundle(path: Path) -> JsonObject:
    bundle = read_bundle(path)
    return {"kind": "bundle", "path": str(path), **bundle.manifest.model_dump(mode="json")}


def _engine(path: Path) -> JsonObject:
    header: JsonObject = console.jsonable(read_header(read_regular(path)))
    return {"kind": "engine", "path": str(path), "bytes": path.stat().st_size, **header}


def _table(path: Path) -> JsonObject:
    try:
        table = CalibrationTable.load(path)
    except CalibError as error:
        raise InputError(str(error)) from None
    return {
        "kind": "calibration",
        "path": str(path),
        "digest": table.digest,
        "algorithm": table.algorithm,
        "digests": table.digests,
        "amax": table.amax,
        "corrections": [] if table.corrections is None else list(table.corrections.lines),
    }


def _cache(path: Path) -> JsonObject:
    """A TensorRT calibration cache: amax by TensorRT's own names of the tensors."""
    data = read_regular(path)
    try:
        cache = read_cache(data, str(path))
    except CalibError as error:
        raise InputError(str(error)) from None
    return {"kind": "calibration cache", "path": str(path), "header": cache.header, "amax": cache.amax}


def _onnx(path: Path) -> JsonObject:
    """An ONNX file: bindings, opsets, operators, and the types that its operators compute in."""
    if not present("onnx"):
        raise MissingError(f"{path}: onnx, which reads ONNX files, is not installed. Run: {pip_install('onnx')}")
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
        graph, numbers = model.graph, element_types(model)
    except Exception as error:  # noqa: BLE001  # protobuf and onnx raise whatever they like on damaged files
        raise InputError(f"{path}: must be an ONNX file (got: {first_line(error)[:200]}). Export it again.") from None
    if not graph.node:
        raise InputError(f"{path}: is an ONNX file without nodes. Export it again.")
    names = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}
    names[onnx.TensorProto.FLOAT], names[onnx.TensorProto.DOUBLE] = "float32", "float64"
    operators = Counter(node.op_type for node in graph.node)
    constants = {i.name for i in graph.initializer}
    return {
        "kind": "onnx",
        "path": str(path),
        "bytes": path.stat().st_size,
        "opsets": {o.domain or "ai.onnx": o.version for o in model.opset_import},
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "inputs": [_binding(v, names) for v in graph.input if v.name not in constants],
        "outputs": [_binding(v, names) for v in graph.output],
        "nodes": len(graph.node),
        "quantize_linear": operators["QuantizeLinear"],
        "dequantize_linear": operators["DequantizeLinear"],
        "precisions": dict(Counter(_computes_in(graph, numbers, names)).most_common()),
        "operators": dict(operators.most_common()),
    }


def _binding(value: ValueInfoProto, names: Mapping[int, str]) -> JsonObject:
    """Name, element type and shape of an input or output; a shape that the file does not have is None."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return {"name": value.name, "dtype": str(value.type.WhichOneof("value")).removesuffix("_type"), "shape": None}
    shape = [d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in kind.shape.dim]
    return {"name": value.name, "dtype": names[kind.elem_type], "shape": shape if kind.HasField("shape") else None}


def _computes_in(graph: GraphProto, types: Mapping[str, int], names: Mapping[int, str]) -> Iterator[str]:
    """The type that each convolution and matrix product computes in: that of both Q/DQ inputs; else its own, with that
    of the weight where it alone is quantized."""
    makers = {name: node for node in graph.node for name in node.output}
    weights = {i.name for i in graph.initializer}
    for node in graph.node:
        if node.op_type not in WEIGHTED_OPERATORS:
            continue
        read = [dequantizer(name, makers, weights) for name in node.input[:2]]
        quantized = ["" if made is None else names[stored_type(made, types, makers)] for made in read]
        if all(quantized):
            yield quantized[0]
            continue
        alone = next((f" with {q} weights" for q in quantized if q), "")
        yield names.get(types.get(node.output[0], -1), "unknown") + alone


def _bundle_lines(description: JsonObject) -> Iterator[str]:
    """A bundle in lines for people; --json has the whole manifest."""
    engine, check = description["engine"], description["check"]
    yield f"{description['kind']} {description['name']} in {description['path']}"
    if engine is None:
        gpus = ", ".join(description["build"]["compute_capability"])
        wanted = gpus and f" for compute capability {gpus}"
        yield f"to be built: {description['build']['target']}{wanted}, on its device"
    else:
        engine_size = size(description["files"][engine["file"]]["size"])
        least = engine["minimum_compute_capability"]
        anything = "any that its kind of engine allows" if least is None else f"{least} and later"
        gpus = ", ".join(engine["compute_capabilities"]) or anything
        yield f"engine: {engine['target']} {engine['version']}, {engine_size}, compute capability {gpus}"
        if engine["int8_weights"]:
            stored, total = engine["int8_weights"]["int8"], engine["int8_weights"]["total"]
            yield f"INT8 weights: {size(stored)} of {size(total)} were found in the engine in INT8"
        if engine["fallback"]:
            needed = description["environment"].get("torch", "with CUDA")
            count = len(engine["fallback"])
            run = "operation runs" if count == 1 else "operations run"
            yield f"hybrid: needs PyTorch {needed}, in which {count} {run}"
        for kept in engine["fallback"]:
            yield f"  {titled(kept['module']):<40} {kept['op']:<32} {kept['reason']}".rstrip()
    for way in ("inputs", "outputs"):
        for spec in description[way]:
            ranges = ", ".join(f"{d} {r['min']}/{r['opt']}/{r['max']}" for d, r in spec["dims"].items())
            yield f"{way[:-1]}: {spec['name']} {spec['dtype']} {_short(spec['shape'])}" + (ranges and f" ({ranges})")
    counts = Counter(layer["precision"] for layer in description["layers"])
    yield "layers: " + (", ".join(f"{n} {precision}" for precision, n in sorted(counts.items())) or "none recorded")
    for layer in description["layers"]:
        yield f"  {layer['precision']:<5} {layer['module']:<40} {layer['op']:<20} {layer['reason']}".rstrip()
    if check is not None:
        report = TypeAdapter(CheckReport).validate_python(check)
        yield f"check: {'passed' if report.passed else 'FAILED'}, {report.who}"
        yield from figure_lines(report)
    for key in ("calibration_digest", "weights_digest", "fingerprint"):
        if description[key]:
            yield f"{key.replace('_', ' ')}: {description[key]}"
    for note in description["notes"]:
        yield f"note: {note}"
    for name, file in description["files"].items():
        yield f"file: {name}, {size(file['size'])}"


def _onnx_lines(description: JsonObject) -> Iterator[str]:
    """An ONNX file in lines for people."""
    opsets = ", ".join(f"{domain} {version}" for domain, version in description["opsets"].items())
    yield f"ONNX file {description['path']}, {size(description['bytes'])}"
    yield f"opset: {opsets}" + (f"; written by {description['producer']}" if description["producer"] else "")
    for way in ("inputs", "outputs"):
        for spec in description[way]:
            shape = "of unknown shape" if spec["shape"] is None else _short(spec["shape"])
            yield f"{way[:-1]}: {spec['name']} {spec['dtype']} {shape}"
    precisions = ", ".join(f"{n} in {name}" for name, n in description["precisions"].items())
    yield f"convolutions and matrix products: {precisions or 'none'}"
    quantizers, dequantizers = description["quantize_linear"], description["dequantize_linear"]
    yield f"quantization: {quantizers} QuantizeLinear, {dequantizers} DequantizeLinear"
    yield f"nodes: {description['nodes']}: " + ", ".join(f"{n} {name}" for name, n in description["operators"].items())


def _lines(description: JsonObject, indent: str = "") -> Iterator[str]:
    """A value as indented `key: value` lines; None, False and empty values are left out."""
    for key, value in description.items():
        if value is None or value is False or value in ([], {}, ""):
            continue
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
            yield f"{indent}{key}:"
            for item in value:
                yield f"{indent}  - {_short(item)}"
        else:
            yield f"{indent}{key}: {_short(value)}"


def _short(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_short(v) for v in value)}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    return "-" if value is None else str(value)


_LINES = {"bundle": _bundle_lines, "kit": _bundle_lines, "onnx": _onnx_lines}

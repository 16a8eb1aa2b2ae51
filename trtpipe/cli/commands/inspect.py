"""trtpipe inspect."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from calib.table import CalibrationTable
from trtpipe.bundle.format import read_bundle
from trtpipe.cli import console
from trtpipe.cli.commands.options import json_option
from trtpipe.errors import InputError
from trtpipe.trt.plan import read_header

_PLANS = (b"ftrt", b"vtrt", b"ptrt")


@click.command("inspect", short_help="Say what is in a bundle, an engine or a table.")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def command(file: Path, as_json: bool) -> None:
    """Say what is in FILE: a bundle, an engine or a calibration table. Told by content; nothing is run."""
    found = console.jsonable(described(file))
    if as_json:
        console.out_json(found)
    else:
        console.out("\n".join(_bundle_lines(found) if found["kind"] == "bundle" else _lines(found)))


def described(path: Path) -> Mapping[str, Any]:
    """What `path` holds, as `{"kind": bundle | engine | calibration | calibration cache, ...}`.

    Raises:
        InputError: nothing is there, or nothing of these kinds; or it is damaged (said by whoever reads that kind).
    """
    if path.is_dir():
        if not (path / "manifest.json").is_file():
            raise InputError(f"{path}: must be a bundle (got a folder without manifest.json).")
        return _bundle(path)
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except FileNotFoundError:
        raise InputError(f"{path}: must be a bundle, an engine or a calibration table (got nothing there).") from None
    except OSError as error:
        raise InputError(f"{path}: must be readable (got {error.strerror}).") from None
    if path.name == "manifest.json":
        return _bundle(path.parent)
    if any(magic in head for magic in _PLANS):
        return _engine(path)
    if head.startswith(b"TRT-"):
        return _cache(path)
    if head.lstrip().startswith(b"{"):
        return _table(path)
    shown = head[:8].hex(" ") or "an empty file"
    raise InputError(
        f"{path}: must be a bundle, an engine or a calibration table (got a file that begins with {shown})."
    )


def _bundle(path: Path) -> Mapping[str, Any]:
    bundle = read_bundle(path)
    return {"kind": "bundle", "path": str(path), **bundle.manifest.model_dump(mode="json")}


def _engine(path: Path) -> Mapping[str, Any]:
    header: Mapping[str, Any] = console.jsonable(read_header(path.read_bytes()))
    return {"kind": "engine", "path": str(path), "bytes": path.stat().st_size, **header}


def _table(path: Path) -> Mapping[str, Any]:
    table = CalibrationTable.load(path)
    return {
        "kind": "calibration",
        "path": str(path),
        "digest": table.digest,
        "algorithm": table.algorithm,
        "digests": table.digests,
        "amax": table.amax,
    }


def _cache(path: Path) -> Mapping[str, Any]:
    """A TensorRT calibration cache: `TRT-<N>-<algorithm>`, then `tensor: 8 hex digits` of a big-endian float32."""
    header, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    scales: dict[str, float] = {}
    for number, line in enumerate(lines, start=2):
        name, colon, digits = line.rpartition(":")
        if not line.strip():
            continue
        try:
            if not colon:
                raise ValueError
            scales[name.strip()] = struct.unpack(">f", bytes.fromhex(digits.strip()))[0]
        except (ValueError, struct.error):
            raise InputError(f"{path}:{number}: must be 'tensor: 8 hex digits' (got {line[:60]!r}).") from None
    amax = {name: scale * 127 for name, scale in scales.items()}
    return {"kind": "calibration cache", "path": str(path), "header": header, "amax": amax}


def _bundle_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What a person asks of a bundle; --json has the whole manifest."""
    engine, check = found["engine"], found["check"]
    yield f"{found['kind']} {found['name']} in {found['path']}"
    if engine is not None:
        size = console.size(found["files"][engine["file"]]["size"])
        gpus = ", ".join(engine["compute_capabilities"]) or "any that its kind of engine allows"
        yield f"engine: {engine['target']} {engine['version']}, {size}, compute capability {gpus}"
        if engine["int8_weights"]:
            stored, total = engine["int8_weights"]["int8"], engine["int8_weights"]["total"]
            yield f"INT8 weights: {console.size(stored)} of {console.size(total)} were found in the engine in INT8"
        if engine["fallback"]:
            needed = found["environment"].get("torch", "with CUDA")
            count = len(engine["fallback"])
            run = "operation runs" if count == 1 else "operations run"
            yield f"hybrid: needs PyTorch {needed}, in which {count} {run}"
        for kept in engine["fallback"]:
            yield f"  {kept['module'] or 'the model itself':<40} {kept['op']:<32} {kept['reason']}".rstrip()
    for way in ("inputs", "outputs"):
        for spec in found[way]:
            ranges = ", ".join(f"{d} {r['min']}/{r['opt']}/{r['max']}" for d, r in spec["dims"].items())
            yield f"{way[:-1]}: {spec['name']} {spec['dtype']} {_short(spec['shape'])}" + (ranges and f" ({ranges})")
    counts = Counter(layer["precision"] for layer in found["layers"])
    yield "layers: " + (", ".join(f"{n} {precision}" for precision, n in sorted(counts.items())) or "none recorded")
    for layer in found["layers"]:
        yield f"  {layer['precision']:<5} {layer['module']:<40} {layer['op']:<20} {layer['reason']}".rstrip()
    if check is not None:
        yield f"check: {'passed' if check['passed'] else 'FAILED'}, {check['executed']} executed by {check['runner']}"
        for metric in check["metrics"]:
            limit = "" if metric["limit"] is None else f"limit {metric['limit']:g}"
            yield f"  {metric['output']}.{metric['name']:<28} {_short(metric['value']):<12} {limit}".rstrip()
        for problem in check["problems"]:
            yield f"  problem: {problem}"
    for key in ("calibration_digest", "weights_digest", "fingerprint"):
        if found[key]:
            yield f"{key.replace('_', ' ')}: {found[key]}"
    for note in found["notes"]:
        yield f"note: {note}"
    for name, file in found["files"].items():
        yield f"file: {name}, {console.size(file['size'])}"


def _lines(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A value as indented `key: value` lines; what is absent, empty or off is left to --json."""
    for key, value in found.items():
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


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_short(v) for v in value)}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    return "-" if value is None else str(value)

"""The manifest of a bundle or kit: `manifest.json`, one pydantic model, canonical JSON.

The same values give the same bytes: keys sorted, no timestamps, no paths of the machine that wrote it. Reading refuses
what it does not know, so a manifest never means more than this version understands. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, model_validator

from calib.corrections import corrections_path
from calib.files import open_regular
from calib.frozen import Frozen
from calib.strictjson import first_problem, loads
from calib.table import SHA256
from calib.types import JsonObject
from trtpipe.errors import InputError, shell
from trtpipe.job.build_options import CAPABILITY, MOST_EXTENT, HardwareCompatibility
from trtpipe.job.limits import Limits
from trtpipe.job.sections import Build, Precision, Transform
from trtpipe.jsontext import plain
from trtpipe.outputs import MOST_NAME, PLAIN_NAME
from trtpipe.trt import driver
from trtpipe.trt.platforms import machine_name
from trtpipe.values import (
    ARCHIVE_SUFFIX,
    BINDING_DTYPES,
    EXTENTS,
    GOLDEN,
    MANIFEST,
    CheckReport,
    DimRange,
    Engine,
    Executed,
    Fallback,
    LayerPrecision,
    Target,
    TensorSpec,
    WeightBytes,
)

#: Raised by one whenever an old reader would misunderstand a new manifest. New optional keys do not raise it: an old
#: reader refuses a key that it does not know.
SCHEMA_VERSION: Literal[1] = 1

#: A manifest larger than this is refused before it is parsed.
MAX_MANIFEST_BYTES = 64 << 20

SIGNATURE = "manifest.sig"
ENGINE: Literal["model.engine"] = "model.engine"
GRAPH: Literal["model.onnx"] = "model.onnx"
HYBRID: Literal["model.hybrid"] = "model.hybrid"
#: What an engine is written as.
EngineFile = Literal["model.engine", "model.hybrid", "model.onnx"]
CALIBRATION = "calibration.json"
#: The key of the digest of all others.
_DIGEST = "digest"
#: The mappings of which the last glob that fits decides; canonical JSON has them sorted, so that an order which is
#: another one stands beside them, by their path.
_ORDERS = "orders"
_ORDERED = (("build", "device_types"), ("precision", "formats"))
REPORT = "report.html"
TIMING_CACHE = "timing.cache"
#: What a bundle may be made of, beside plugins; a manifest that can be read says which.
PARTS = frozenset((
    MANIFEST, SIGNATURE, ENGINE, GRAPH, HYBRID, GOLDEN, CALIBRATION, corrections_path(Path(CALIBRATION)).name, REPORT,
    TIMING_CACHE,
))  # fmt: skip

#: Builder options that change nothing in the engine: paths of the machine that built, and how much was shown.
UNRECORDED = ("timing_cache", "calibration_cache", "log_level")

#: The next step where a bundle is damaged.
AGAIN = "Fetch or build the bundle again."

#: Names of files in a bundle: flat, portable, never hidden, so that none can lead out of it.
FileName = Annotated[str, Field(pattern=PLAIN_NAME, max_length=MOST_NAME)]
_VERSION = r"^[0-9]+(\.[0-9]+){0,3}([a-z+.-][A-Za-z0-9.+-]*)?$"


def _strict_build(raw: object) -> object:
    """`raw` with tuples for lists and `DimRange` for ranges: the job's models are strict and take nothing else."""
    if isinstance(raw, list | tuple):
        return tuple(_strict_build(v) for v in raw)
    if not isinstance(raw, dict):
        return raw
    if set(raw) == set(EXTENTS) and all(type(v) is int for v in raw.values()):
        return DimRange(**raw)
    return {k: _strict_build(v) for k, v in raw.items()}


class FileEntry(Frozen):
    """One file beside the manifest."""

    size: int = Field(ge=0, description="bytes")
    sha256: str = Field(pattern=SHA256)


class EngineInfo(Frozen):
    """What the engine file is and where it may run."""

    file: EngineFile
    target: Target
    version: str = Field(pattern=_VERSION, description="of the TensorRT (or ONNX Runtime) that wrote it")
    compute_capabilities: tuple[Annotated[str, Field(pattern=CAPABILITY)], ...] = Field(
        default=(), description='like "8.6"; empty for a portable engine'
    )
    minimum_compute_capability: str | None = Field(
        default=None,
        pattern=CAPABILITY,
        description="of a portable engine whose number formats need more than Ampere's 8.0",
    )
    hardware_compatibility: HardwareCompatibility = "none"
    gpu: str | None = Field(default=None, description="model of the GPU that an engine of TensorRT was built on")
    version_compatible: bool = False
    os: str | None = Field(description='like "linux"; None runs on any')
    machine: str | None = Field(description='like "x86_64" or "aarch64"; None runs on any')
    device_memory_bytes: int | None = Field(default=None, ge=0, description="activation memory of one context")
    int8_weights: WeightBytes | None = Field(
        default=None,
        description="bytes of the graph's INT8 weights, and how the engine stores them where that is known",
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="the builder options as they were honoured")
    fallback: tuple[Fallback, ...] = Field(
        default=(), description="operations that stayed in PyTorch, which has to be there to run model.hybrid"
    )


class Manifest(Frozen):
    """Everything a device has to know about a bundle, or a kit, before it touches the engine."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["bundle", "kit"] = "bundle"
    name: str = Field(pattern=PLAIN_NAME)
    engine: EngineInfo | None = Field(description="None in a kit: a device has still to build it")
    inputs: tuple[TensorSpec, ...] = Field(min_length=1)
    outputs: tuple[TensorSpec, ...] = Field(min_length=1)
    build: Annotated[Build, BeforeValidator(_strict_build)] = Field(
        description="what the engine was, or is to be, compiled with"
    )
    opset: int | None = Field(default=None, ge=1, description="of model.onnx")
    precision: Precision = Field(default=Precision(), description="as the job asked")
    layers: tuple[LayerPrecision, ...] = Field(default=(), description="precision by operation, and why")
    preprocessing: Transform | None = Field(default=None, description="image to input; None: inputs are arrays")
    class_names: tuple[str, ...] | None = None
    calibration_digest: str | None = Field(default=None, pattern=SHA256)
    weights_digest: str | None = Field(default=None, pattern=SHA256)
    baseline: str = Field(default="TorchScript", description="what computed the outputs that the check compares with")
    mixed: tuple[str, ...] = Field(default=(), description="outputs of a sample that depend on the others in its batch")
    check: CheckReport | None = Field(default=None, description="what was compared with the baseline, how far off")
    limits: Limits = Limits()
    require: Executed = Field(default="graph", description="engine: the check fails where only the graph was executed")
    job: str = Field(default="", description="the job as JSON, without what has no effect")
    environment: dict[str, str] = Field(default_factory=dict, description="versions of what built it")
    fingerprint: str = Field(default="", pattern=r"^([0-9a-f]{64})?$", description="of all that decides the engine")
    notes: tuple[str, ...] = Field(default=(), description="fallbacks, skipped samples, layers kept: nothing silent")
    files: dict[FileName, FileEntry] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Manifest:
        """Refuse what is well formed and contradicts itself."""
        if self.kind == "kit" and self.engine is not None:
            raise ValueError("engine: a kit has none")
        if self.kind == "bundle" and self.engine is None:
            raise ValueError("engine: a bundle has one")
        if self.engine is not None:
            if self.engine.target != self.build.target:
                raise ValueError(f"engine.target: must be build.target (got {self.engine.target}, {self.build.target})")
            plan = HYBRID if self.engine.fallback else ENGINE
            if self.engine.file != (GRAPH if self.engine.target == "onnxruntime" else plan):
                raise ValueError(
                    f"engine.file: is not what a {self.engine.target} engine is kept in ({self.engine.file})"
                )
        for reserved in (MANIFEST, SIGNATURE):
            if reserved in self.files:
                raise ValueError(f"files: must not list {reserved}")
        lowered = [name.lower() for name in self.files]
        if len(set(lowered)) != len(lowered):
            raise ValueError("files: two names differ only in case")
        for side, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            _check_specs(side, specs)
        if odd := set(self.mixed) - {s.name for s in self.outputs}:
            raise ValueError(f"mixed: must name outputs (got {min(odd)})")
        for number, profile in enumerate(self.build.profiles):
            _check_ranges(f"build.profiles[{number}]", profile)
        return self

    @property
    def engine_file(self) -> str:
        """The file that holds the engine, or in a kit the graph to compile."""
        return self.engine.file if self.engine is not None else GRAPH

    @property
    def failed(self) -> bool:
        """Whether its check failed where it was built: such a bundle is never signed."""
        return self.check is not None and not self.check.passed

    @property
    def required_files(self) -> tuple[str, ...]:
        """Files that a bundle or kit like this one cannot be without."""
        return (self.engine_file, GOLDEN, *((CALIBRATION,) if self.calibration_digest else ()), *self.build.plugins)


def _check_specs(side: str, specs: tuple[TensorSpec, ...]) -> None:
    """Refuse bindings that no engine can have."""
    names = [s.name for s in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"{side}: two bindings have one name")
    for spec in specs:
        where = f"{side}.{spec.name}"
        if not spec.name:
            raise ValueError(f"{side}: a binding has no name")
        if spec.dtype not in BINDING_DTYPES:
            raise ValueError(f"{where}.dtype: must be one of {', '.join(BINDING_DTYPES)} (got {spec.dtype})")
        if any(isinstance(d, int) and d < 0 for d in spec.shape):
            raise ValueError(f"{where}.shape: a dimension is negative")
        if set(spec.dynamic) != set(spec.dims):
            raise ValueError(f"{where}.dims: must give the range of each named dimension and no other")
        _check_ranges(f"{where}.dims", spec.dims)
        if any(d > MOST_EXTENT for d in spec.at("max")):
            raise ValueError(f"{where}.shape: a dimension is over {MOST_EXTENT}")


def _check_ranges(where: str, ranges: Mapping[str, DimRange]) -> None:
    for name, dim in ranges.items():
        if not 1 <= dim.min <= dim.opt <= dim.max:
            raise ValueError(f"{where}.{name}: must have 1 <= min <= opt <= max")


def describe_engine(
    engine: Engine,
    build: Build,
    *,
    device_memory_bytes: int | None = None,
    int8_weights: WeightBytes | None = None,
) -> EngineInfo:
    """`engine` as the manifest describes it: for this machine, or for Windows where the build asked for it; an ONNX
    graph is for any.

    Args:
        engine: its version, capabilities and honoured options are taken as they are.
        build: says what compatibility was asked for.
        device_memory_bytes: of one execution context, where it is known.
        int8_weights: how it stores the graph's INT8 weights, where that was looked for.
    """
    # TensorRT's plans do not name the GPU that they were built on.
    built_on = driver.probe().devices[:1] if engine.target == "tensorrt" else ()
    capabilities = engine.compute_capabilities or tuple(d.compute_capability for d in built_on)
    portable = engine.target == "onnxruntime"
    system, machine = build.other_platform or (sys.platform, machine_name(platform.machine()))
    return EngineInfo(
        file=GRAPH if portable else HYBRID if engine.fallback else ENGINE,
        target=engine.target,
        version=engine.version,
        compute_capabilities=capabilities,
        minimum_compute_capability=engine.minimum_compute_capability,
        hardware_compatibility="none" if portable else build.hardware_compatibility,
        gpu=next((d.name for d in built_on), None),
        version_compatible=not portable and build.version_compatible,
        os=None if portable else system,
        machine=None if portable else machine,
        device_memory_bytes=device_memory_bytes,
        int8_weights=int8_weights,
        options=plain({n: v for n, v in engine.options.items() if n not in UNRECORDED}),
        fallback=engine.fallback,
    )


def to_json(manifest: Manifest) -> bytes:
    """The canonical bytes: sorted keys, two spaces, UTF-8, non-finite floats as "NaN", "Infinity", "-Infinity"; with
    `orders`, the globs of which the last that fits decides, where they are not sorted; and with `digest`, the SHA-256
    of what they are without it."""
    raw: JsonObject = plain(manifest.model_dump())
    orders = {f"{section}.{key}": list(raw[section][key]) for section, key in _ORDERED}
    if unsorted := {path: names for path, names in orders.items() if names != sorted(names)}:
        raw[_ORDERS] = unsorted
    return _canonical(raw | {_DIGEST: hashlib.sha256(_canonical(raw)).hexdigest()})


def _canonical(raw: object) -> bytes:
    """The one spelling of a JSON value."""
    return (json.dumps(raw, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def from_json(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, which messages call `where`.

    Raises:
        InputError: not JSON, another schema version, another digest, an unknown or ill-typed key, a contradiction.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise InputError(
            f"{where}: must be at most {MAX_MANIFEST_BYTES} bytes (got {len(data)}). It is not a manifest."
        )
    try:
        raw = loads(data.decode())
        canonical = _canonical(raw) == data
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: must be JSON (got: {error}). {AGAIN}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{where}: must be a JSON object (got {type(raw).__name__}). {AGAIN}")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        step = "Update trtpipe on this machine." if newer else "Build the bundle again with this trtpipe."
        raise InputError(f"{where}: schema_version must be {SCHEMA_VERSION} (got {json.dumps(version)[:40]}). {step}")
    if not canonical:
        raise InputError(f"{where}: must be in canonical form (it was edited or reformatted). {AGAIN}")
    digest = raw.pop(_DIGEST, None)  # bundles of before have none
    if digest is not None and digest != hashlib.sha256(_canonical(raw)).hexdigest():
        raise InputError(f"{where}: is damaged, or was edited (its digest is of other content). {AGAIN}")
    if (orders := raw.pop(_ORDERS, None)) is not None and not _put_in_order(raw, orders):
        raise InputError(f"{where}: {_ORDERS} must name what the manifest holds, otherwise than sorted. {AGAIN}")
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{where}: must follow the manifest's schema (got {first_problem(error)}). {AGAIN}") from None
    foreign = _foreign("", raw, plain(manifest.model_dump()))
    if foreign is not None:
        raise InputError(f"{where}: must hold only what schema {SCHEMA_VERSION} knows (got {foreign}). Update trtpipe.")
    return manifest


def _put_in_order(raw: JsonObject, orders: object) -> bool:
    """Give mappings of `raw` the orders of their keys; whether each is one of `_ORDERED`, and names its keys alone."""
    places = {f"{section}.{key}": (section, key) for section, key in _ORDERED}
    if not isinstance(orders, dict) or not orders or orders.keys() - places.keys():
        return False
    for path, names in orders.items():
        section, key = places[path]
        held = raw[section].get(key) if isinstance(raw.get(section), dict) else None
        if not isinstance(held, dict) or not isinstance(names, list) or names == sorted(held):
            return False
        if not all(isinstance(name, str) for name in names) or sorted(names) != sorted(held):
            return False
        raw[section][key] = {name: held[name] for name in names}
    return True


def _foreign(where: str, raw: object, known: object) -> str | None:
    """The first value of `raw` that the validated manifest lacks or holds otherwise, as text; None without one."""
    if isinstance(raw, dict) and isinstance(known, dict):
        for key, value in raw.items():
            path = f"{where}.{key}" if where else str(key)
            unknown = f"unknown key {path}" if key not in known else _foreign(path, value, known[key])
            if unknown:
                return unknown
        return None
    if isinstance(raw, list) and isinstance(known, list) and len(raw) == len(known):
        return next(
            (f for i, (r, k) in enumerate(zip(raw, known, strict=True)) if (f := _foreign(f"{where}.{i}", r, k))), None
        )
    same = raw == known and isinstance(raw, bool) == isinstance(known, bool)
    return None if same else f"{json.dumps(raw)[:60]} at {where}, read as {json.dumps(known)[:60]}"


def is_packed(head: bytes) -> bool:
    """Whether a file that begins with `head`, 16 bytes or more, is a packed bundle: its first part is the manifest."""
    return head.startswith(f"{MANIFEST}\0".encode())


def step_to_folder(path: Path) -> str:
    """What to do about a path that is no bundle's folder: unpack what it is, or what was packed of it; or give another
    one."""
    for packed in (path, path.with_name(f"{path.name}{ARCHIVE_SUFFIX}")):
        with suppress(OSError), open_regular(packed) as file:
            if is_packed(file.read(16)):
                folder = "FOLDER" if packed == path else path
                return f"Unpack {packed.name} first: {shell('trtpipe', 'unpack', packed, folder)}."
    return "Give the path of a bundle."

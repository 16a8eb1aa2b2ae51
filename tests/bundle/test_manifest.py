"""The manifest: canonical bytes, and every message of a refused one."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import shipping
from pydantic import ValidationError

from trtpipe.bundle.manifest import _ORDERED, MAX_MANIFEST_BYTES, Manifest, describe_engine, from_json, to_json
from trtpipe.errors import InputError
from trtpipe.job.sections import Build, KeepGlobs, Precision
from trtpipe.trt.platforms import machine_name
from trtpipe.values import DimRange, Engine

SHA = "0" * 64


def canonical(raw: Any) -> bytes:
    """The spelling the format page promises, written down independently of the module; without its digest, which a
    manifest of before has not."""
    raw = {k: v for k, v in raw.items() if k != "digest"} if isinstance(raw, dict) else raw
    return (json.dumps(raw, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def test_what_is_written_is_read_back() -> None:
    written = shipping.manifest()
    read = from_json(to_json(written), "m")
    assert read == written
    assert read.inputs[0] == shipping.INPUT
    assert read.inputs[0].dims["N"] == DimRange(1, 4, 8)
    assert read.check is not None
    assert read.check.control.failed is True
    assert {m.name: m.value for m in read.check.metrics}["sqnr_db"] == math.inf


def test_every_kind_of_build_option_is_read_back() -> None:
    build = Build(
        target="onnxruntime",
        profiles=({"N": DimRange(1, 2, 3)},),
        tensor_formats={"image": ("hwc8",)},
        memory_pools={"tactic_dram": 5},
        compute_capability=("8.6",),
    )
    written = shipping.manifest(build=build, precision=Precision(int8_mode=True, keep=KeepGlobs(fp32=("head.*",))))
    assert from_json(to_json(written), "m") == written


@pytest.mark.parametrize("names", [("layer*", "*"), ("*", "layer*"), ("b", "a", "c"), ("*",), ()])
def test_globs_keep_their_order(names: tuple[str, ...]) -> None:
    """The last that fits decides: a device that finishes a kit would put other layers on its DLA."""
    build = Build(target="tensorrt", device_types={name: "dla" if k else "gpu" for k, name in enumerate(names)})
    formats = {name: "int8" if k else "fp8" for k, name in enumerate(names)}
    precision = Precision(int8_mode=True, fp8_mode=True, formats=formats)
    written = shipping.manifest(kind="kit", engine=None, check=None, build=build, precision=precision)
    data = to_json(written)
    read = from_json(data, "m")
    assert (tuple(read.build.device_types), tuple(read.precision.formats)) == (names, names)
    assert to_json(read) == data
    assert (b'"orders"' in data) is (names != tuple(sorted(names)))


@pytest.mark.parametrize(
    "orders",
    [{}, [], {"build.device_types": ["a"]}, {"build.device_types": ["a", "b"]}, {"build.memory_pools": ["b", "a"]},
     {"build.device_types": ["b", "c"]}, {"build.device_types": ["b", "a", "a"]}, {"build.device_types": [["b"], "a"]}],
)  # fmt: skip
def test_an_order_of_other_globs_is_refused(orders: Any) -> None:
    build = Build(target="tensorrt", device_types={"b": "dla", "a": "gpu"})
    raw = json.loads(to_json(shipping.manifest(kind="kit", engine=None, check=None, build=build)))
    raw = {k: v for k, v in raw.items() if k != "digest"} | {"orders": orders}
    with pytest.raises(
        InputError, match=r"^m: orders must name what the manifest holds, otherwise than sorted\. Fetch"
    ):
        from_json(canonical(raw), "m")


def test_bytes_are_canonical_and_stable() -> None:
    data = to_json(shipping.manifest())
    digest = json.loads(data)["digest"]
    assert digest == hashlib.sha256(canonical(json.loads(data))).hexdigest()
    assert data.replace(f'  "digest": "{digest}",\n'.encode(), b"") == canonical(json.loads(data))
    assert to_json(from_json(data, "m")) == data
    assert b'"value": "Infinity"' in data


def test_any_damaged_byte_is_found() -> None:
    data = to_json(shipping.manifest())
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(InputError, match=r"^m: "):
            from_json(bytes(damaged), "m")
    edited = data.replace(b'"passed": true', b'"passed": false', 1)
    assert edited != data
    message = "m: is damaged, or was edited (its digest is of other content). Fetch or build the bundle again."
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        from_json(edited, "m")


def test_a_key_missing_for_its_default_is_no_problem() -> None:
    raw = json.loads(to_json(shipping.manifest()))
    del raw["notes"]
    assert from_json(canonical(raw), "m").notes == ()


def test_describe_engine_names_the_platform_of_a_plan_and_none_of_a_graph() -> None:
    plan = Engine(b"x", "tensorrt", "10.3.0.26", ("8.6",), (), (), None, {"tf32": True, "level": 3})
    build = Build(target="tensorrt", hardware_compatibility="ampere_plus", version_compatible=True)
    info = describe_engine(plan, build)
    assert (info.file, info.os, info.machine) == ("model.engine", sys.platform, machine_name(platform.machine()))
    assert (info.hardware_compatibility, info.version_compatible) == ("ampere_plus", True)
    assert info.options == {"tf32": True, "level": 3}
    windows = describe_engine(plan, Build(target="tensorrt", runtime_platform="windows_amd64"))
    assert (windows.os, windows.machine) == ("win32", "x86_64")
    graph = describe_engine(Engine(b"x", "onnxruntime", "1.20.0", (), (), (), None), Build(target="onnxruntime"))
    assert (graph.file, graph.os, graph.machine) == ("model.onnx", None, None)


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of a raw manifest: `a.b.0` becomes `value`."""

    def edit(raw: dict[str, Any]) -> None:
        at: Any = raw
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        for part in parents:
            at = at[part]
        at[last] = value

    return edit


HOSTILE = [
    (put("schema_version", 2), "m: schema_version must be 1 (got 2). Update trtpipe on this machine."),
    (put("schema_version", 0), "m: schema_version must be 1 (got 0). Build the bundle again with this trtpipe."),
    (put("schema_version", True), "m: schema_version must be 1 (got true). Build the bundle again with this trtpipe."),
    (put("colour", 1), "colour: Extra inputs are not permitted"),
    (put("engine.extra", 1), "engine.extra: Extra inputs are not permitted"),
    (
        put("inputs.0.extra", 1),
        "m: must follow the manifest's schema (got inputs.0.extra: Unexpected keyword argument). Fetch",
    ),
    (put("check.control.extra", 1), "check.control.extra: Unexpected keyword argument"),
    (
        put("check.samples", "4"),
        'm: must hold only what schema 1 knows (got "4" at check.samples, read as 4). Update trtpipe.',
    ),
    (put("check.passed", 1), "(got 1 at check.passed, read as true)"),
    (put("name", "../x"), "name: String should match pattern"),
    (put("engine", None), "engine: a bundle has one"),
    (put("kind", "kit"), "engine: a kit has none"),
    (put("kind", "tar"), "kind: Input should be 'bundle' or 'kit'"),
    (put("engine.file", "model.engine"), "engine.file: is not what a onnxruntime engine is kept in (model.engine)"),
    (put("engine.file", "/bin/sh"), "engine.file: Input should be 'model.engine', 'model.hybrid' or 'model.onnx'"),
    (put("build.target", "tensorrt"), "engine.target: must be build.target (got onnxruntime, tensorrt)"),
    (put("inputs.0.dtype", "object"), "inputs.image.dtype: must be one of float32, "),
    (put("inputs.0.shape", ["N", -3, 8, 8]), "inputs.image.shape: a dimension is negative"),
    (put("inputs.0.shape", ["N", 3, 2**31, 8]), "inputs.image.shape: a dimension is over 2147483647"),
    (put("inputs.0.dims.N.max", 2**60), "inputs.image.shape: a dimension is over 2147483647"),
    (put("inputs.0.dims", {}), "inputs.image.dims: must give the range of each named dimension and no other"),
    (put("inputs.0.dims.N.min", 0), "inputs.image.dims.N: must have 1 <= min <= opt <= max"),
    (put("build.profiles", [{"N": {"min": 4, "opt": 2, "max": 8}}]), "build.profiles[0].N: must have 1 <= min <= opt"),
    (put("inputs.0.name", ""), "inputs: a binding has no name"),
    (put("files", {"manifest.json": {"size": 1, "sha256": SHA}}), "files: must not list manifest.json"),
    (put("files", {"../../etc/passwd": {"size": 1, "sha256": SHA}}), "String should match pattern"),
    (put("files", {"a": {"size": 1, "sha256": SHA}, "A": {"size": 1, "sha256": SHA}}), "two names differ only in case"),
    (put("files", {"a": {"size": -1, "sha256": SHA}}), "files.a.size: Input should be greater than or equal to 0"),
    (put("files", {"a": {"size": 1, "sha256": "0"}}), "files.a.sha256: String should match pattern"),
    (put("calibration_digest", "x"), "calibration_digest: String should match pattern"),
]


@pytest.mark.parametrize(("edit", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_refused(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    raw = json.loads(to_json(shipping.manifest()))
    edit(raw)
    with pytest.raises(InputError) as caught:
        from_json(canonical(raw), "m")
    assert message in str(caught.value)
    assert str(caught.value).startswith("m: ")


MALFORMED = [
    (b"", "m: must be JSON (got: "),
    (b"[]\n", "m: must be a JSON object (got list). Fetch or build the bundle again."),
    (b'{"a": 1, "a": 2}', "m: must be JSON (got: a key is given twice)"),
    (b'{"a": NaN}', "m: must be JSON (got: NaN is not JSON)"),
    (b'{"a": 1e999}', "m: must be JSON (got: "),
    (b'{"a": "\\ud800"}', "m: must be JSON (got: "),
    (b"\xff", "m: must be JSON (got: "),
    (b"[" * 100_000, "m: must be JSON (got: "),
    (
        b" " * (MAX_MANIFEST_BYTES + 1),
        f"m: must be at most {MAX_MANIFEST_BYTES} bytes (got {MAX_MANIFEST_BYTES + 1}). It is not a manifest.",
    ),
    (to_json(shipping.manifest())[:-1], "m: must be in canonical form (it was edited or reformatted)"),
]


@pytest.mark.parametrize(("data", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed(data: bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        from_json(data, "m")
    assert message in str(caught.value)


def test_outputs_that_depend_on_their_batch_are_outputs() -> None:
    with pytest.raises(ValidationError, match=r"mixed: must name outputs \(got other\)"):
        Manifest.model_validate({**shipping.manifest().model_dump(), "mixed": ("logits", "other")})


def test_two_bindings_of_one_name() -> None:
    with pytest.raises(ValidationError, match="inputs: two bindings have one name"):
        Manifest.model_validate({**shipping.manifest().model_dump(), "inputs": (shipping.INPUT, shipping.INPUT)})


def test_every_mapping_of_which_the_last_glob_decides_keeps_its_order():
    models = {"build": Build, "precision": Precision}
    globs = [
        (section, name)
        for section, model in models.items()
        for name, field in model.model_fields.items()
        if "the last glob that fits decides" in (field.description or "")
    ]
    assert sorted(globs) == sorted(_ORDERED)

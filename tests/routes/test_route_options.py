"""Every option of the job schema on the routes torch_tensorrt and torch2trt: honoured, or refused at plan time."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import re
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch2trt_double
import yaml
from models import job, line, tiny

from trtpipe.cli.main import main
from trtpipe.errors import BuildError
from trtpipe.job.build_options import BuildOptions
from trtpipe.job.job import Job
from trtpipe.job.load import JobErrors
from trtpipe.job.sections import Build
from trtpipe.model.data import open_calibration
from trtpipe.packages import install_command
from trtpipe.pipeline import validate as validating
from trtpipe.pipeline.cache.environment import ROUTE_PACKAGES
from trtpipe.pipeline.validate import validate
from trtpipe.progress import Silent
from trtpipe.routes import options, support
from trtpipe.routes.native import native_calibration
from trtpipe.routes.registry import ROUTES
from trtpipe.routes.torch2trt import route as torch2trt
from trtpipe.routes.torch_tensorrt import route as torch_tensorrt
from trtpipe.runtime import doctor
from trtpipe.trt import driver, flavour
from trtpipe.trt.monitor import Watch
from trtpipe.trt.options import in_words

#: Field: (value, other fields it needs, what torch_tensorrt says, what torch2trt says); "" is honoured.
LEAVE = "Leave it out, or use build.route onnx."
TABLE = {
    "compute_capability": (["8.6"], {}, "Leave it out for a portable engine, or use build.route onnx.",
                           LEAVE),
    "platform": ("jetson_orin_nano", {}, "", ""),
    "quantization": ("implicit", {}, "use explicit.", ""),
    "calibration_cache": ("int8.cache", {"quantization": "implicit"}, "Torch-TensorRT has no calibrators.", ""),
    "profiles": ([{"N": {"min": 1, "opt": 2, "max": 32}}], {}, "", "Give one range under inputs"),
    "workspace": (1 << 20, {}, "", ""),
    "memory_pools": ({"tactic_dram": 1}, {}, "Leave tactic_dram out, or use build.route onnx.", LEAVE),
    "optimization_level": (2, {}, "", LEAVE),
    "tiling_optimization_level": ("fast", {}, "", LEAVE),
    "l2_limit_for_tiling": (1, {"tiling_optimization_level": "fast"}, "", LEAVE),
    "max_num_tactics": (4, {}, LEAVE, LEAVE),
    "avg_timing_iterations": (3, {}, "", ""),
    "max_aux_streams": (2, {}, "", LEAVE),
    "tactic_sources": (["jit_convolutions"], {}, LEAVE, LEAVE),
    "timing_cache": ("caches", {}, "", LEAVE),
    "editable_timing_cache": (True, {"timing_cache": "caches"}, LEAVE, LEAVE),
    "error_on_timing_cache_miss": (True, {"timing_cache": "caches"}, LEAVE, LEAVE),
    "profiling_verbosity": ("none", {}, "Use layer_names_only", "Use layer_names_only"),
    "log_level": ("info", {}, "", ""),
    "tf32": (False, {}, "", LEAVE),
    "sparse_weights": (True, {}, "", LEAVE),
    "strict_nans": (True, {}, LEAVE, LEAVE),
    "direct_io": (True, {}, LEAVE, LEAVE),
    "tensor_formats": ({"image": ["linear"]}, {}, LEAVE, LEAVE),
    "hardware_compatibility": ("same_compute_capability", {}, "Use ampere_plus, or build.route onnx.", LEAVE),
    "version_compatible": (True, {}, "Set both", LEAVE),
    "exclude_lean_runtime": (True, {"version_compatible": True}, "", LEAVE),
    "runtime_platform": ("windows_amd64", {}, LEAVE, LEAVE),
    "strip_plan": (True, {}, "Set build.refit", LEAVE),
    "refit": ("individual", {}, "Use identical, or build.route onnx.", LEAVE),
    "weight_streaming": (True, {}, "", LEAVE),
    "default_device_type": ("dla", {}, "", ""),
    "dla_core": (1, {"default_device_type": "dla"}, "", ""),
    "gpu_fallback": (True, {"default_device_type": "dla"}, "", ""),
    "device_types": ({"body*": "gpu"}, {}, "Use build.default_device_type, or build.route onnx.", ""),
    "plugins": (["libtwice.so"], {}, "Torch-TensorRT has converters for plugins", LEAVE),
}  # fmt: skip


def build(route, **fields):
    return Build.model_validate({"route": route, "target": "tensorrt", **fields})


def test_the_tables_have_a_row_for_every_option():
    assert set(TABLE) == set(BuildOptions.model_fields)
    assert [s.field for s in support.ROUTE_OPTIONS] == sorted(
        BuildOptions.model_fields, key=list(BuildOptions.model_fields).index
    )


@pytest.mark.parametrize("route", ["torch_tensorrt", "torch2trt"])
@pytest.mark.parametrize("field", TABLE)
def test_an_option_is_honoured_or_refused_with_the_nearest_legal_one(route, field):
    value, others, torch_tensorrt, torch2trt = TABLE[field]
    expected = torch_tensorrt if route == "torch_tensorrt" else torch2trt
    section = build(route, **{field: value}, **others)
    found = dict(options.refusals(section, route))
    if not expected:
        assert f"build.{field}" not in found
        return
    message = found[f"build.{field}"]
    assert message.startswith(f"build.{field}: must ")
    assert f"on route {route} (got " in message
    assert expected in message


def test_an_engine_for_other_releases_has_no_lean_runtime_of_its_own() -> None:
    found = dict(options.refusals(build("torch_tensorrt", version_compatible=True), "torch_tensorrt"))
    assert found["build.version_compatible"] == (
        "build.version_compatible: must go with build.exclude_lean_runtime, which Torch-TensorRT always sets on route "
        "torch_tensorrt (got true). Set both, or use build.route onnx."
    )


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"memory_pools": {"dla_managed_sram": 1}}, "build.memory_pools"),
        ({"dla_core": 0, "device_types": {"*": "dla"}}, "build.dla_core"),
    ],
)
def test_dla_options_need_dla_as_the_default(fields, path):
    found = dict(options.refusals(build("torch_tensorrt", **fields), "torch_tensorrt"))
    assert f"{path}: must go with build.default_device_type dla on route torch_tensorrt (got " in found[path]


#: What torch_tensorrt takes of the options whose value in TABLE it refuses, with the fields it needs.
LEGAL = {
    "hardware_compatibility": ("ampere_plus", {}),
    "version_compatible": (True, {"exclude_lean_runtime": True}),
    "strip_plan": (True, {"refit": "identical"}),
    "refit": ("identical", {}),
    "profiling_verbosity": ("layer_names_only", {}),
    "memory_pools": ({"dla_managed_sram": 4096}, {"default_device_type": "dla"}),
}


@pytest.mark.parametrize("field", LEGAL)
def test_the_legal_values_of_half_honoured_options(field):
    value, others = LEGAL[field]
    assert options.refusals(build("torch_tensorrt", **{field: value}, **others), "torch_tensorrt") == ()
    assert options.refusals(build("torch_tensorrt", refit="all"), "torch_tensorrt") == ()


#: Options that are taken though nothing is made of them, and why.
WITHOUT_EFFECT = {
    ("torch_tensorrt", "platform"): "the job is held against what the device can do",
    ("torch2trt", "platform"): "the job is held against what the device can do",
    ("torch_tensorrt", "quantization"): "explicit alone is taken, its default",
    ("torch_tensorrt", "profiling_verbosity"): "layer names are what it keeps in any case",
    ("torch2trt", "profiling_verbosity"): "layer names are what it keeps in any case",
    ("torch_tensorrt", "exclude_lean_runtime"): "it leaves the lean runtime out in any case",
}
TAKEN = [
    (route, row.field)
    for row in support.ROUTE_OPTIONS
    for route in ("torch_tensorrt", "torch2trt")
    if isinstance(getattr(row, route), support.Taken) and (route, row.field) not in WITHOUT_EFFECT
]


@pytest.fixture(scope="module")
def small():
    return line(tiny(), 16, 5)


@pytest.fixture
def handed(monkeypatch, small, tmp_path):
    """What the frontend of a route is given for a job, as text without addresses."""
    np.save(tmp_path / "calibration.npy", np.zeros((8, 3, 16, 16), np.float32))
    tensorrt = flavour.Flavour("tensorrt", torch2trt_double.tensorrt(), "8.6.1", frozenset({"timing_cache"}))
    frontend = SimpleNamespace(Device=dict, Input=dict, torch2trt=None, __version__="2.14.0", dynamo=SimpleNamespace(
        convert_exported_program_to_serialized_trt_engine=None))  # fmt: skip
    gpu = driver.Driver("12.6", (driver.Gpu(0, "NVIDIA Orin", "8.7", 8 << 30),))
    monkeypatch.setattr(driver, "probe", lambda: gpu)
    monkeypatch.setattr(flavour, "load", lambda _target: tensorrt)
    given = {}
    quantized = small.quantized()
    monkeypatch.setattr(torch_tensorrt, "checked_program", lambda *_: quantized.program)

    def stop(*arguments):
        given["arguments"] = arguments[-2 if isinstance(arguments[-1], Watch) else -1]
        raise BuildError("build: enough.")

    def logged(_watch, level):
        given["level"] = level
        return contextlib.nullcontext()

    def calibrator(_tensorrt, own):
        given["file"] = own.file
        return contextlib.nullcontext()

    monkeypatch.setattr(torch_tensorrt, "load", lambda _target: (frontend, tensorrt))
    monkeypatch.setattr(torch_tensorrt, "logged", logged)
    monkeypatch.setattr(torch2trt, "load", lambda: frontend)
    monkeypatch.setattr(torch2trt, "DEVICE", "cpu")
    monkeypatch.setattr(torch2trt, "own_calibrator", calibrator)
    monkeypatch.setattr(torch2trt, "quantized_module", lambda *_: small.loaded.module)
    for module in (torch_tensorrt, torch2trt):
        monkeypatch.setattr(module, "_known", lambda *_: None)
        monkeypatch.setattr(module, "converted", stop)

    def hand(route, options, **sections):
        given.clear()
        wanted = job(route, "tensorrt", build=options, **sections)
        calibration = None if wanted.calibration is None else native_calibration(wanted, open_calibration(wanted))
        compiling = (torch_tensorrt if route == "torch_tensorrt" else torch2trt).compile_engine
        with pytest.raises(BuildError, match=r"^build: enough\.$"):
            compiling(wanted, small.loaded, quantized, Silent(), calibration)
        return re.sub(rf" at 0x\w+|{re.escape(tempfile.gettempdir())}/tmp\w+", "", repr(given))

    return hand


@pytest.mark.parametrize(("route", "field"), TAKEN)
def test_what_is_not_refused_reaches_the_frontend(route, field, handed, tmp_path):
    value, others = LEGAL[field] if route == "torch_tensorrt" and field in LEGAL else TABLE[field][:2]
    static = {"inputs": {"image": {"shape": [8, 3, 16, 16]}}} if "dla" in (value, *others.values()) else {}
    sections = {**static, "precision": {"fp16_mode": True}}
    if "implicit" in (value, *others.values()):
        data = {"arrays": str(tmp_path / "calibration.npy"), "batch_size": 8}
        sections = {"precision": {"int8_mode": True}, "calibration": data}
    without = handed(route, others, **sections)
    assert handed(route, others, **sections) == without
    assert handed(route, {field: value, **others}, **sections) != without


def test_another_version_of_torch_tensorrt_is_refused():
    section = build("torch_tensorrt")
    assert options.refusals(section, "torch_tensorrt", frontend="2.14.1") == ()
    assert options.refusals(section, "torch_tensorrt", frontend="2.12.0") == (
        (
            "build.route",
            "build.route: torch_tensorrt must be version 2.14, whose arguments are known (got 2.12.0). "
            "Run: pip install 'torch-tensorrt==2.14.*'",
        ),
    )


def job_text(folder, route, **sections):
    """A job file that has nothing wrong with it but what `sections` put there."""
    (folder / "check.npy").write_bytes(b"")
    (folder / "tiny.py").write_text("def make(): ...\n")
    raw = {
        "name": "tiny",
        "model": {"factory": "tiny:make"},
        "inputs": {"image": {"shape": ["N", 3, 16, 16], "N": {"min": 1, "opt": 8, "max": 32}}},
        "outputs": {"logits": {}},
        "build": {"route": route, "target": "tensorrt"},
        "check": {"arrays": "check.npy"},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


HALVES = {"mean": [0.5], "std": [0.5]}
CALIBRATED = {"arrays": "check.npy", "batch_size": 8}
IMPLICIT = {"build": {"quantization": "implicit"}, "precision": {"int8_mode": True}}


@pytest.mark.parametrize(
    ("sections", "release", "path", "text"),
    [
        ({}, "11.4", "build.route", "torch2trt must have TensorRT 8.6 to 10, whose weak typing and calibrators it uses "
         "(got 11.4). Use build.route onnx."),
        ({"build": {"workspace": 1024}}, "10.3", "build.workspace",
         "must not be set on route torch2trt with TensorRT 10, where it ignores it (got 1024). Leave it out, or use "
         "build.route onnx."),
        ({"inputs": {"image": {"dtype": "uint8", "shape": [8, 3, 16, 16]}}}, "10.3", "inputs.image.dtype",
         "must be float32 or float16 on route torch2trt, which drops others (got uint8). Use build.route onnx."),
        ({"outputs": {"logits": {"dtype": "int64"}}}, "10.3", "outputs.logits.dtype",
         "must be float32 or float16 on route torch2trt, which drops others (got int64). Use build.route onnx."),
        ({"outputs": {"logits": {"dtype": "float16"}}}, "10.3", "outputs.logits.dtype",
         "must be float32 as the other bindings are on route torch2trt, which converts no casts (got float16). "
         "Use build.route onnx."),
        ({"inputs": {"image": {"dtype": "float16", "shape": [8, 3, 16, 16], "normalize": HALVES}},
          "outputs": {"logits": {"dtype": "float16"}}}, "10.3", "inputs.image.normalize",
         "must be given only for float32 on route torch2trt (got float16). Normalize in the transform."),
        ({"precision": {"fp16_mode": True, "keep": {"fp32": ["head"]}}}, "10.3", "precision.keep.fp32",
         "must be empty on route torch2trt (got head): TensorRT chooses what runs in a lower precision there. "
         "Use build.route onnx."),
        ({"precision": {"fp16_mode": True, "int8_mode": True, "keep": {"fp32": ["head"]}}, "calibration": CALIBRATED},
         "10.3", "precision.keep.fp32", "must be empty on route torch2trt (got head): TensorRT chooses what runs"),
        ({"precision": {"int8_mode": True}, "calibration": CALIBRATED, "build": {"use_onnx": True}}, "10.3",
         "build.use_onnx",
         "must be false for explicit INT8 on route torch2trt, whose Q/DQ go through its converters (got true). Leave "
         "it out, or use build.quantization implicit."),
        ({"precision": {"int8_mode": True}, "calibration": CALIBRATED, "build": {"device_types": {"*": "dla"}}}, "10.3",
         "build.quantization", "must be implicit for INT8 on a DLA on route torch2trt (got explicit). Set it."),
        ({"build": {"default_device_type": "dla"}, "precision": {"fp16_mode": True}}, "10.3",
         "build.default_device_type",
         "must be gpu for inputs with dynamic dimensions (got dla). Declare numbers in inputs.*.shape."),
        ({**IMPLICIT, "calibration": {**CALIBRATED, "batch_size": 32}}, "10.3", "calibration.batch_size",
         "must be 8, the opt batch of the inputs, for implicit INT8 on route torch2trt, which calibrates with the "
         "engine's own profile (got 32). Set it to 8."),
    ],
)  # fmt: skip
def test_what_torch2trt_cannot_do_is_said_at_plan_time(tmp_path, sections, release, path, text):
    problems = validate(job_text(tmp_path, "torch2trt", **sections), here=False, version=release)
    assert any(p.path == path and p.text.startswith(text) for p in problems), problems


def test_jobs_that_are_right_have_no_problem(tmp_path):
    for route, release, sections in (
        ("torch2trt", "10.3", {**IMPLICIT, "calibration": CALIBRATED}),
        ("torch2trt", "10.3", {"precision": {"int8_mode": True, "keep": {"fp32": ["head"]}},
                               "calibration": {**CALIBRATED, "algorithm": "mse", "batch_size": 5}}),
        ("torch2trt", "10.3", {"precision": {"int8_mode": True, "fp16_mode": True, "keep": {"fp16": ["head"]}},
                               "calibration": CALIBRATED}),
        ("torch2trt", "8.6.1", {"build": {"workspace": 1024}, "precision": {"fp16_mode": True}}),
        ("torch_tensorrt", "11.4", {"precision": {"int8_mode": True}, "calibration": CALIBRATED}),
    ):  # fmt: skip
        assert validate(job_text(tmp_path, route, **sections), here=False, version=release) == ()


@pytest.mark.parametrize("route", ["torch_tensorrt", "torch2trt"])
@pytest.mark.parametrize("field", [f for f in Build.model_fields if f not in ("route", "target")])
def test_a_misspelt_option_exits_2_with_the_nearest_one(tmp_path, capsys, route, field):
    wrong = field[:-1] + "x" + field[-1]
    assert main(["validate", str(job_text(tmp_path, route, build={wrong: 1}))]) == 2
    assert f"Did you mean {field}?" in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize("route", ["torch_tensorrt", "torch2trt"])
def test_an_unsupported_option_exits_2(tmp_path, capsys, route):
    path = job_text(tmp_path, route, build={"strict_nans": True})
    assert main(["build", str(path), "-o", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"build.strict_nans: must not be set on route {route} (got true). {LEAVE}" in said


def test_use_onnx_is_torch2trts_alone(tmp_path):
    path = job_text(tmp_path, "torch_tensorrt", build={"use_onnx": True})
    (problem,) = validate(path, here=False, version="11.4")
    assert problem.path == "build.use_onnx"
    assert problem.text.startswith("must be given only for route torch2trt (got torch_tensorrt).")


@pytest.mark.parametrize(("route", "target"), [("onnx", "tensorrt"), ("torch2trt", "tensorrt")])
def test_allow_torch_fallback_is_torch_tensorrts_alone(tmp_path, capsys, route, target):
    path = job_text(tmp_path, route, build={"allow_torch_fallback": True, "target": target})
    assert main(["validate", str(path)]) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert (
        f"build.allow_torch_fallback: must be given only for route torch_tensorrt (got {route}). Remove it: other "
        "routes make a whole engine or none. Or use route torch_tensorrt."
    ) in said


@pytest.mark.parametrize(
    ("fields", "path", "reason"),
    [
        ({"strip_plan": True, "refit": "all"}, "strip_plan", "the weights of a hybrid module are in several engines, "
         "and no graph gives them back"),
        ({"refit": "identical"}, "refit", "the weights of a hybrid module are in several engines, under names that "
         "Torch-TensorRT makes up"),
        ({"default_device_type": "dla"}, "default_device_type", "PyTorch runs on the GPU, and DLA engines between its "
         "operations are untried"),
    ],
)  # fmt: skip
def test_what_a_hybrid_cannot_do_is_said_at_plan_time(tmp_path, fields, path, reason):
    asking = job_text(tmp_path, "torch_tensorrt", build={"allow_torch_fallback": True, **fields})
    found = [p.text for p in validate(asking, here=False, version="10.3") if p.path == f"build.{path}"]
    must = "must be left out with build.allow_torch_fallback"
    assert f"{must} (got {in_words(fields[path])}): {reason}. Remove one of the two." in found
    alone = job_text(tmp_path, "torch_tensorrt", build=fields)
    assert not any("allow_torch_fallback" in p.text for p in validate(alone, here=False, version="10.3"))


def test_a_hybrid_is_not_timed_against_an_engine(tmp_path):
    limits = {"cosine_min": 0.9, "speedup_over_fp16_min": 1.2}
    asking = job_text(
        tmp_path, "torch_tensorrt", build={"allow_torch_fallback": True}, check={"limits": limits, "require": "engine"}
    )
    found = {p.path: p.text for p in validate(asking, here=False, version="11.4")}
    assert found["check.limits.speedup_over_fp16_min"] == (
        "must be left out with build.allow_torch_fallback (got 1.2). It times whole engines: remove one of the two."
    )


def test_fallback_alone_is_all_right(tmp_path):
    asking = job_text(tmp_path, "torch_tensorrt", build={"allow_torch_fallback": True, "optimization_level": 2})
    assert validate(asking, here=False, version="11.4") == ()


@pytest.mark.parametrize(
    ("route", "name", "step"),
    [
        ("torch_tensorrt", "torch-tensorrt", "pip install 'torch-tensorrt==2.14.*'; or use route onnx."),
        ("torch2trt", "torch2trt", "pip install git+https://github.com/NVIDIA-AI-IOT/torch2trt; or use route onnx."),
    ],
)
def test_a_missing_frontend_is_said_with_how_to_get_it(tmp_path, monkeypatch, route, name, step):
    real = importlib.metadata.version

    def version(package):
        if package == name:
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    problems = validate(job_text(tmp_path, route), version="10.3")
    assert any(p.path == "build.route" and f"{name} is not installed" in p.text and step in p.text for p in problems)


@pytest.mark.parametrize(
    ("route", "release", "needed"),
    [
        ("torch_tensorrt", "8.6.1", "11, which Torch-TensorRT 2.14 is built for"),
        ("torch_tensorrt", "10.3.0", "11, which Torch-TensorRT 2.14 is built for"),
        ("torch_tensorrt", "10.16.1", "11, which Torch-TensorRT 2.14 is built for"),
        ("torch2trt", "11.4", "8.6 to 10, whose weak typing and calibrators it uses"),
    ],
)
def test_a_release_that_the_route_does_not_work_with_is_refused(tmp_path, monkeypatch, route, release, needed):
    text = f"{route} must have TensorRT {needed} (got {release}). Use build.route onnx."
    path = job_text(tmp_path, route)
    assert ("build.route", text) in [(p.path, p.text) for p in validate(path, here=False, version=release)]
    for module in (flavour, validating):  # `build` goes by the release that is installed
        monkeypatch.setattr(module, "installed", lambda: {"tensorrt": ("tensorrt-cu12", release)})
    with pytest.raises(JobErrors) as refused:
        validating.plan(path)
    assert text in [p.text for p in refused.value.problems]


@pytest.mark.parametrize(
    ("route", "release"), [("torch_tensorrt", "11.4"), ("torch2trt", "8.6.1"), ("torch2trt", "10.3.0")]
)
def test_a_release_that_the_route_works_with_is_not_refused(tmp_path, route, release):
    assert not [p for p in validate(job_text(tmp_path, route), here=False, version=release) if p.path == "build.route"]


def test_every_route_of_the_schema_has_its_row_in_each_table():
    routes = set(Build.model_json_schema()["properties"]["route"]["enum"])
    assert set(ROUTES) == set(options.REQUIREMENTS) == set(ROUTE_PACKAGES) == routes
    assert {f.name for f in dataclasses.fields(support.Support)} == {"field"} | routes - {"onnx"}
    abilities = {a.what for a in doctor.examine().abilities}
    assert {r for r in routes if f"build by route {r}" in abilities} == routes - {"onnx"}  # onnx is said by its targets
    assert Job.model_fields["build"].annotation is Build


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("package", ["torch2trt", None])
def test_validate_asks_for_what_the_table_says_that_a_route_needs(tmp_path, monkeypatch, route, gpu, package):
    monkeypatch.setattr(driver, "probe", lambda: driver.Driver(problem="no driver"))
    for module in (flavour, validating):
        monkeypatch.setattr(module, "installed", lambda: {"tensorrt": ("tensorrt-cu12", "10.3.0")})
    monkeypatch.setattr(validating, "package_version", lambda name: None)
    needed = options.Requirements({} if package is None else {"tensorrt": package}, gpu)
    monkeypatch.setitem(options.REQUIREMENTS, route, needed)
    said = [p.text for p in validate(job_text(tmp_path, route)) if p.path == "build.route"]
    assert any(f"{route} needs an NVIDIA GPU and its driver (no driver)" in text for text in said) == gpu
    assert any("torch2trt is not installed" in text for text in said) == (package is not None)


def test_what_a_route_needs_can_be_installed():
    for needed in options.REQUIREMENTS.values():
        assert all(install_command(name).startswith("pip install ") for name in needed.packages.values())


def test_pools_that_torch_tensorrt_does_not_know_are_named():
    found = dict(options.refusals(build("torch_tensorrt", memory_pools={"tactic_dram": 1}), "torch_tensorrt"))
    assert found["build.memory_pools"] == (
        "build.memory_pools: must name pools among dla_managed_sram, dla_local_dram, dla_global_dram on route "
        "torch_tensorrt (got tactic_dram: 1). Leave tactic_dram out, or use build.route onnx."
    )


def test_a_stripped_plan_goes_with_refit(tmp_path):
    path = job_text(tmp_path, "torch_tensorrt", build={"strip_plan": True})
    (problem,) = validate(path, here=False, version="11.4")
    assert (problem.path, problem.text) == (
        "build.strip_plan",
        "must go with build.refit all or identical on route torch_tensorrt (got true). Set build.refit, or use "
        "build.route onnx.",
    )


@pytest.mark.parametrize("route", ["onnx", "torch2trt"])
@pytest.mark.parametrize("key", ["default_device_type", "device_types"])
def test_a_dla_takes_no_dynamic_dimension(tmp_path, route, key):
    build = {key: "dla" if key == "default_device_type" else {"stem": "dla", "*": "gpu"}}
    sections = {"build": build, "precision": {"fp16_mode": True}}
    assert [
        p.text
        for p in validate(job_text(tmp_path, route, **sections), here=False, version="10.3")
        if p.path == f"build.{key}"
    ] == ["must be gpu for inputs with dynamic dimensions (got dla). Declare numbers in inputs.*.shape."]

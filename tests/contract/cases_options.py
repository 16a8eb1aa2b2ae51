"""Every builder option on real bindings over stub libraries: seen in the recorded calls, or refused. No third case."""

from __future__ import annotations

import pytest
import tensorrt_libs as stub
from stubbed import engine_of, flag
from world import MODEL, ORIN, VERSION, build

from trtpipe import errors
from trtpipe.job.build_options import BuildOptions
from trtpipe.job.sections import Precision
from trtpipe.progress import Silent
from trtpipe.trt import driver
from trtpipe.trt.builder import build_engine
from trtpipe.trt.options import refusals
from trtpipe.trt.placement import naming_a_dla
from trtpipe.values import DimRange

FP16 = Precision(fp16_mode=True)


#: Field: (value, other fields, the call that shows it: name and arguments). One row for every field of BuildOptions.
def _set(*names):
    return lambda world: set(names) <= world.flags()


def _called(name, *arguments):
    return lambda world: tuple(a() if callable(a) else a for a in arguments) in world.asked(name)


def _placed(devices):
    """The last call for each of these layers."""
    last = {layer: flag("DeviceType", device) for layer, device in devices.items()}
    return lambda world: last.items() <= dict(world.asked("set_device_type")).items()


def _enum(name, member):
    return lambda: flag(name, member)


DLA = {"default_device_type": "dla", "dla_core": 0}
OPTIONS = {
    "compute_capability": (("8.6",), {}, None),
    "platform": ("l4", {}, "test_a_platform_is_where_the_engine_is_built"),
    "quantization": ("implicit", {}, "cases_implicit.py"),
    "calibration_cache": ("FILE", {"quantization": "implicit"}, "cases_implicit.py"),
    "profiles": (({"N": DimRange(2, 2, 2)},), {}, _called("set_shape", "image", "max", (2, 3, 8, 8))),
    "workspace": (1 << 20, {}, _called("set_memory_pool_limit", _enum("MemoryPoolType", "WORKSPACE"), 1 << 20)),
    "memory_pools": (
        {"tactic_dram": 5, "dla_local_dram": 1 << 30}, DLA,
        _called("set_memory_pool_limit", _enum("MemoryPoolType", "DLA_LOCAL_DRAM"), 1 << 30),
    ),
    "optimization_level": (5, {}, _called("builder_optimization_level", 5)),
    "tiling_optimization_level": (
        "fast", {}, _called("tiling_optimization_level", _enum("TilingOptimizationLevel", "FAST")),
    ),
    "l2_limit_for_tiling": (4096, {"tiling_optimization_level": "full"}, _called("l2_limit_for_tiling", 4096)),
    "max_num_tactics": (3, {}, _called("max_num_tactics", 3)),
    "avg_timing_iterations": (4, {}, _called("avg_timing_iterations", 4)),
    "max_aux_streams": (2, {}, _called("max_aux_streams", 2)),
    "tactic_sources": (
        ("jit_convolutions",), {},
        _called("set_tactic_sources", lambda: 1 << flag("TacticSource", "JIT_CONVOLUTIONS")),
    ),
    "timing_cache": ("FOLDER", {}, lambda world: "set_timing_cache" in world.names()),
    "editable_timing_cache": (True, {"timing_cache": "FOLDER"}, _set("EDITABLE_TIMING_CACHE")),
    "error_on_timing_cache_miss": (True, {"timing_cache": "FOLDER"}, _set("ERROR_ON_TIMING_CACHE_MISS")),
    "profiling_verbosity": ("none", {}, _called("profiling_verbosity", _enum("ProfilingVerbosity", "NONE"))),
    "log_level": ("verbose", {}, "test_log_level"),
    "tf32": (False, {}, _called("clear_flag", _enum("BuilderFlag", "TF32"))),
    "sparse_weights": (True, {}, _set("SPARSE_WEIGHTS")),
    "strict_nans": (True, {}, _set("STRICT_NANS")),
    "direct_io": (True, {}, _set("DIRECT_IO")),
    "tensor_formats": (
        {"image": ("hwc", "linear")}, {},
        _called(
            "allowed_formats.image", lambda: 1 << flag("TensorFormat", "HWC") | 1 << flag("TensorFormat", "LINEAR"),
        ),
    ),
    "hardware_compatibility": (
        "ampere_plus", {}, _called("hardware_compatibility_level", _enum("HardwareCompatibilityLevel", "AMPERE_PLUS")),
    ),
    "version_compatible": (True, {}, _set("VERSION_COMPATIBLE")),
    "exclude_lean_runtime": (True, {"version_compatible": True}, _set("VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME")),
    "runtime_platform": (
        "windows_amd64", {}, _called("runtime_platform", _enum("RuntimePlatform", "WINDOWS_AMD64")),
    ),
    "strip_plan": (True, {}, _set("STRIP_PLAN")),
    "refit": ("individual", {}, _set("REFIT_INDIVIDUAL")),
    "weight_streaming": (True, {}, _set("WEIGHT_STREAMING")),
    "default_device_type": ("dla", {"dla_core": 0}, _called("default_device_type", _enum("DeviceType", "DLA"))),
    "dla_core": (1, {"default_device_type": "dla"}, _called("DLA_core", 1)),
    "gpu_fallback": (True, DLA, _set("GPU_FALLBACK")),
    "device_types": (
        {"layer*": "dla", "layer2.*": "gpu"}, {}, _placed({"layer1.conv": "DLA", "layer2.conv": "GPU"}),
    ),
    "plugins": (("libplugin.so",), {}, "tests/trt/test_trt_plugins.py"),
}  # fmt: skip
#: What each release refuses; everything else must be seen in the calls.
REFUSED_BEFORE_10 = {
    "tiling_optimization_level", "l2_limit_for_tiling", "max_num_tactics", "editable_timing_cache",
    "error_on_timing_cache_miss", "strict_nans", "runtime_platform", "strip_plan", "refit", "weight_streaming",
}  # fmt: skip
REFUSED = {
    (8, 6): REFUSED_BEFORE_10,
    (10, 3): {
        "tiling_optimization_level", "l2_limit_for_tiling", "max_num_tactics", "editable_timing_cache", "strict_nans",
    },
    (10, 16): set(),
    (11, 4): {"quantization", "calibration_cache"},
}  # fmt: skip


def test_every_option_has_its_row():
    assert set(OPTIONS) == set(BuildOptions.model_fields)


@pytest.mark.parametrize("option", [n for n, row in OPTIONS.items() if not isinstance(row[2], str)])
def test_an_option_is_honoured_or_refused(world, option, tmp_path, monkeypatch):
    value, others, shown = OPTIONS[option]
    others = {k: str(tmp_path) if v == "FOLDER" else v for k, v in others.items()}
    options = build(**{option: str(tmp_path) if value == "FOLDER" else value}, **others)
    if naming_a_dla(options):
        monkeypatch.setattr(driver, "probe", lambda: ORIN)
    refused = dict(refusals(options, FP16, "tensorrt", stub.VERSION))
    if option in REFUSED[VERSION[:2]] | {"compute_capability"}:
        message = refused[f"build.{option}"]
        assert message.startswith(f"build.{option}: TensorRT {stub.VERSION} does not support ")
        with pytest.raises(errors.InputError) as raised:
            build_engine(MODEL, options, progress=Silent(), precision=FP16)
        assert message in str(raised.value)
        assert "build" not in world.names()
    else:
        assert not refused
        if "timing_cache" in option:
            stub.host_memory(lambda: world.config.get_timing_cache().serialize(), b"timings")
            world.seen.clear()
        build_engine(MODEL, options, progress=Silent(), precision=FP16)
        assert shown(world), world.seen


@pytest.mark.skipif(VERSION >= (11,), reason="what 11 refuses is in the table")
@pytest.mark.parametrize("source", ["cublas", "cublas_lt", "cudnn"])
def test_tactic_sources_before_11(world, source):
    engine_of(tactic_sources=(source,))
    assert world.asked("set_tactic_sources") == [(1 << flag("TacticSource", source.upper()),)]


@pytest.mark.skipif(VERSION < (11,), reason="10 and before have calibrators: see cases_implicit.py")
def test_implicit_quantization_is_refused_by_11(world):
    with pytest.raises(errors.InputError, match="does not support calibrators and implicit quantization"):
        engine_of(quantization="implicit")
    assert "build" not in world.names()


@pytest.mark.skipif(VERSION < (11,), reason="10 and before have them")
def test_tactic_sources_of_11():
    ((path, message),) = refusals(build(tactic_sources=("cudnn",)), None, "tensorrt", stub.VERSION)
    assert path == "build.tactic_sources"
    assert message == (
        f"build.tactic_sources: TensorRT {stub.VERSION} does not support tactic sources CUBLAS, "
        "CUBLAS_LT, CUDNN (got cudnn). "
        "Name only edge_mask_convolutions and jit_convolutions, or on TensorRT-RTX leave it out. TensorRT before 11 "
        "has it."
    )


@pytest.mark.parametrize("refit", ["all", "identical", "individual"])
def test_refit(world, refit):
    if VERSION < (10,) and refit != "all":
        with pytest.raises(errors.InputError, match=r"Use TensorRT 10\.0 or later or TensorRT-RTX, or leave it out"):
            engine_of(refit=refit)
        return
    marked = []
    if refit == "individual":
        stub.hook(lambda: world.network.mark_weights_refittable("x"), lambda a, b, c, s: marked.append(stub.text(a)))
        marked.clear()
    engine_of(refit=refit)
    assert marked == (["w"] if refit == "individual" else [])
    assert {"all": "REFIT", "identical": "REFIT_IDENTICAL", "individual": "REFIT_INDIVIDUAL"}[refit] in world.flags()

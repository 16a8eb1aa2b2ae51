from __future__ import annotations

import pytest
from pydantic import ValidationError

from trtpipe.job.build_options import BuildOptions
from trtpipe.job.sections import Build, KeepGlobs, Precision
from trtpipe.trt.flavour import CAPABILITIES
from trtpipe.trt.options import OPTIONS, asked, binding_refusals, needs_driver, refusals, without_driver
from trtpipe.values import DimRange

FP16 = Precision(fp16_mode=True)
INT8 = Precision(int8_mode=True)
RTX, OLD, TEN, NEW = (
    ("tensorrt_rtx", "1.7.1.116"),
    ("tensorrt", "8.6.1"),
    ("tensorrt", "10.3.0"),
    ("tensorrt", "11.4.0.106"),
)
SINCE_10 = "Use TensorRT 10.0 or later or TensorRT-RTX, or leave it out."


def test_every_field_has_one_row():
    assert sorted(o.field for o in OPTIONS) == sorted(BuildOptions.model_fields)


def test_an_empty_build_asks_for_nothing():
    assert asked(Build()) == {}
    for release in (RTX, OLD, TEN, NEW):
        assert refusals(Build(), FP16, *release) == ()


#: (options, precision, release, the messages it gets).
REFUSED = [
    ({"plugins": ("libtwice.so",)}, FP16, RTX,
     ["build.plugins: TensorRT-RTX 1.7.1.116 does not support plugins (got libtwice.so). Write the operation in others "
      "that it has. TensorRT 10.0 or later has it."]),
    ({"plugins": ("libtwice.so",)}, FP16, OLD,
     ["build.plugins: TensorRT 8.6.1 does not support plugins (got libtwice.so). Write the operation in others that it "
      "has. TensorRT 10.0 or later has it."]),
    ({"strip_plan": True}, FP16, OLD,
     [f"build.strip_plan: TensorRT 8.6.1 does not support STRIP_PLAN (got true). {SINCE_10}"]),
    ({"refit": "identical"}, FP16, OLD,
     [f"build.refit: TensorRT 8.6.1 does not support REFIT_IDENTICAL (got identical). {SINCE_10}"]),
    ({"tiling_optimization_level": "fast"}, FP16, TEN,
     ["build.tiling_optimization_level: TensorRT 10.3.0 does not support tiling optimization level (got fast). "
      "Use TensorRT 10.8 or later, or leave it out."]),
    ({"hardware_compatibility": "same_compute_capability"}, FP16, TEN,
     ["build.hardware_compatibility: TensorRT 10.3.0 does not support hardware compatibility SAME_COMPUTE_CAPABILITY "
      "(got same_compute_capability). Use none, or on TensorRT-RTX build.compute_capability. TensorRT "
      "10.9 or later has it."]),
    ({"compute_capability": ("8.6", "8.9")}, FP16, TEN,
     ["build.compute_capability: TensorRT 10.3.0 does not support a choice of compute capabilities "
      "(got 8.6, 8.9). TensorRT "
      "proper builds for the GPU at hand: leave it out, or use build.hardware_compatibility. TensorRT-RTX has it."]),
    ({"compute_capability": ("9.0",)}, FP16, RTX,
     ["build.compute_capability: must be among 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 (got 9.0: TensorRT-RTX does not name "
      "compute capability 9.0; a portable engine does not run there (on an H200 1.7.1 said: Supported compute "
      "capabilities: 8.0 8.6 8.9 12.0 12.1 >12.0)). Use build.target tensorrt on the device."]),
    ({"compute_capability": ("10.0",)}, FP16, RTX,
     ["build.compute_capability: must be among 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 (got 10.0: TensorRT-RTX does not name "
      "compute capability 10.0; whether a portable engine runs there is not known). Use build.target tensorrt on the "
      "device."]),
    ({"timing_cache": "x"}, FP16, RTX,
     ["build.timing_cache: TensorRT-RTX 1.7.1.116 does not support timing cache (got x). It times no "
      "tactic while building: "
      "leave it out. TensorRT has it."]),
    ({"quantization": "implicit"}, INT8, NEW,
     ["build.quantization: TensorRT 11.4.0.106 does not support calibrators and implicit "
      "quantization (got implicit). Use "
      "explicit: Q/DQ in the graph. TensorRT before 11 has it."]),
    ({"quantization": "implicit", "weight_streaming": True}, INT8, TEN,
     ["build.weight_streaming: must be built strongly typed (got build.quantization implicit). Use explicit, or leave "
      "it out."]),
    ({"quantization": "implicit", "profiles": ({"N": DimRange(1, 1, 1)}, {"N": DimRange(2, 2, 2)})}, INT8, TEN,
     ["build.profiles: at most one profile can be calibrated (got 2). Use quantization explicit."]),
    ({"quantization": "implicit"}, Precision(int8_mode=True, keep=KeepGlobs(fp16=("a", "b"))), TEN,
     ["precision.keep: must be empty with build.quantization implicit (got a, b). Use explicit, or keep nothing."]),
    ({"quantization": "implicit"}, Precision(int8_mode=True, fp16_mode=True, placement="all"), TEN,
     ["precision.placement: must be auto with build.quantization implicit, where TensorRT places INT8 (got all). Use "
      "explicit, or leave it out."]),
    ({"quantization": "implicit"}, Precision(int8_mode=True, bf16_mode=True), TEN,
     ["build.quantization: implicit must go with FP16 or FP32 (got precision.bf16_mode). Use explicit."]),
    ({}, Precision(bf16_mode=True), OLD,
     ["precision.bf16_mode: TensorRT 8.6.1 does not support BF16 (got true). Use precision.fp16_mode."]),
    ({"exclude_lean_runtime": True}, FP16, TEN,
     ["build.exclude_lean_runtime: build.version_compatible must be set too (got none). Set it, or leave this out."]),
    ({"error_on_timing_cache_miss": True}, FP16, TEN,
     ["build.error_on_timing_cache_miss: build.timing_cache must be set too (got none). Set it, or leave this out."]),
    ({"version_compatible": True}, FP16, RTX,
     ["build.version_compatible: the lean runtime must be left out on TensorRT-RTX, whose package has none (got true). "
      "Set build.exclude_lean_runtime too."]),
    ({"default_device_type": "dla"}, Precision(), TEN,
     ["build.default_device_type: DLA must compute in FP16 or INT8 (got FP32). Turn on precision.fp16_mode."]),
    ({"default_device_type": "dla"}, Precision(bf16_mode=True), TEN,
     ["build.default_device_type: DLA must compute in FP16 or INT8 (got BF16). Turn on precision.fp16_mode."]),
    ({"hardware_compatibility": "ampere_plus", "platform": "jetson_agx_orin"}, FP16, TEN,
     ["build.hardware_compatibility: Jetson AGX Orin must have an engine of its own, as none of ampere_plus runs on "
      "JetPack (got ampere_plus). Leave it out."]),
    ({"hardware_compatibility": "ampere_plus", "platform": "t4"}, FP16, TEN,
     ["build.hardware_compatibility: T4 must have an engine of its own, as none of ampere_plus runs before compute "
      "capability 8.0 (got ampere_plus). Leave it out."]),
    ({"hardware_compatibility": "ampere_plus", "platform": "l4"}, FP16, TEN, []),
    ({"runtime_platform": "windows_amd64", "platform": "jetson_agx_orin"}, FP16, TEN,
     ["build.runtime_platform: Jetson AGX Orin must have an engine for its own system (got windows_amd64). Leave it "
      "out."]),
    ({"device_types": {"stem.*": "dla"}}, INT8, TEN,
     ["build.quantization: DLA must get INT8 by implicit quantization on TensorRT 10.3.0 (got explicit). "
      "Use implicit, and build on the device: a kit holds no calibration samples."]),
    ({"default_device_type": "dla"}, FP16, ("tensorrt", "11.2.0"),
     ["build.default_device_type: TensorRT 11.2.0 does not support DLA (got dla). Use TensorRT "
      "before 11 or TensorRT 11.4 or "
      "later, or leave it out."]),
    ({"memory_pools": {"dla_local_dram": 1 << 30}}, FP16, RTX,
     ["build.memory_pools: TensorRT-RTX 1.7.1.116 does not support DLA (got dla_local_dram: "
      "1073741824). Use TensorRT before "
      "11 or TensorRT 11.4 or later, or leave it out."]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "precision", "release", "messages"), REFUSED)
def test_refused_with_its_message(options, precision, release, messages):
    found = refusals(Build(**options), precision, *release)
    assert [message for _, message in found] == messages
    assert all(message.startswith(f"{path}: ") for path, message in found)


def test_platforms_of_rtx():
    def refused(**options):
        return dict(refusals(Build(**options), FP16, *RTX))

    assert refused(platform="rtx_40") == {}
    assert refused(platform="rtx_40", compute_capability=("8.6", "8.9")) == {}
    assert refused(platform="rtx_40", compute_capability=("8.6",))["build.platform"] == (
        "build.platform: build.compute_capability must hold that of GeForce RTX 40, 8.9 (got 8.6). Add it."
    )
    assert refused(platform="t4")["build.platform"] == (
        "build.platform: build.compute_capability must hold that of T4, 7.5 (got a portable engine, which is for 8.0 "
        "and later). Add it."
    )
    assert refused(platform="jetson_agx_orin")["build.platform"] == (
        "build.platform: Jetson AGX Orin must be of a compute capability that TensorRT-RTX builds for, 7.5, 8.0, 8.6, "
        "8.9, 12.0, 12.1 (got 8.7). Use build.target tensorrt on the device."
    )


def test_int8_on_a_jetson_nano_is_refused_at_plan_time():
    found = dict(refusals(Build(target="tensorrt", platform="jetson_nano"), INT8, *OLD))
    assert found == {
        "precision.int8_mode": "precision.int8_mode: Jetson Nano (compute capability 5.3) must compute in INT8 (got a "
        "platform with FP32, FP16). Use precision.fp16_mode.",
        "build.platform": "build.platform: Jetson Nano must have TensorRT 8.6 or later (got JetPack 4.6 as its last, "
        "with TensorRT 8.2). Use a Jetson Orin or Thor.",
    }


def test_several_problems_come_at_once():
    found = refusals(Build(strip_plan=True, weight_streaming=True, runtime_platform="windows_amd64"), FP16, *OLD)
    assert [path for path, _ in found] == ["build.runtime_platform", "build.strip_plan", "build.weight_streaming"]


def test_what_was_found_by_looking_goes_before_the_record():
    everything = frozenset(c.name for c in CAPABILITIES)
    assert refusals(Build(strip_plan=True), FP16, *OLD, capabilities=everything) == ()


def test_what_needs_a_gpu():
    assert needs_driver(Build(), "tensorrt") == ("build.target",)
    assert needs_driver(Build(), "tensorrt_rtx") == ()
    assert needs_driver(Build(refit="all", strip_plan=True), "tensorrt_rtx") == ("build.refit", "build.strip_plan")
    assert needs_driver(Build(refit="individual"), "tensorrt_rtx") == ("build.refit",)
    assert without_driver("build.target") == "build for target tensorrt_rtx, which needs no GPU"
    assert without_driver("build.refit") == "leave out build.refit"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"optimization_level": 6}, "optimization_level"), ({"workspace": 0}, "workspace"),
        ({"compute_capability": ("86",)}, "compute_capability"), ({"refit": "some"}, "refit"),
        ({"tactic_sources": ("cuda",)}, "tactic_sources"), ({"memory_pools": {"workspace": 1}}, "memory_pools"),
        ({"tensor_formats": {"x": ("nchw",)}}, "tensor_formats"), ({"dla_core": -1}, "dla_core"),
        ({"avg_timing_iterations": 0}, "avg_timing_iterations"), ({"fp16": True}, "fp16"),
        ({"log_level": "debug"}, "log_level"), ({"max_aux_streams": -1}, "max_aux_streams"),
    ],
)  # fmt: skip
def test_illegal_values_do_not_validate(options, field):
    with pytest.raises(ValidationError, match=field):
        Build(**options)


@pytest.mark.parametrize(
    ("release", "refused"), [(OLD, True), (("tensorrt", "9.3.0"), True), (TEN, False), (NEW, False), (RTX, False)]
)
def test_a_binding_of_a_dtype_that_a_release_lacks(release: tuple[str, str], refused: bool) -> None:
    found = binding_refusals({"inputs.ids": "int64", "inputs.x": "float32", "outputs.y": "int64"}, *release)
    assert [path for path, _ in found] == (["inputs.ids.dtype", "outputs.y.dtype"] if refused else [])
    step = "Use int32, or TensorRT 10.0 or later or TensorRT-RTX."
    said = [f"{path}: TensorRT {release[1]} has no INT64 bindings (got int64). {step}" for path, _ in found]
    assert [message for _, message in found] == said

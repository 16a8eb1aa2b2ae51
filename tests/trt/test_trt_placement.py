"""What is for a DLA alone, or for GPUs from Ampere on, is refused where there is none: by key, platform and release."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from trtpipe.job.build_options import BuildOptions, MemoryPool, TensorFormat
from trtpipe.job.sections import Build, Precision
from trtpipe.trt.flavour import expected
from trtpipe.trt.options import refusals
from trtpipe.trt.placement import DLA_FORMATS, FROM_AMPERE, NAMING_A_DLA, naming_a_dla, refused_here
from trtpipe.trt.platforms import PLATFORMS
from trtpipe.trt.versions import RELEASES

FP16 = Precision(fp16_mode=True)
TEN = ("tensorrt", "10.3.0")
#: Every value of `build` that is for a DLA alone.
NAMED = [
    *(("memory_pools", {pool: 1 << 20}) for pool in get_args(MemoryPool) if pool.startswith("dla_")),
    ("memory_pools", {"tactic_dram": 1, "dla_managed_sram": 1}),
    *(("tensor_formats", {"image": (form,)}) for form in DLA_FORMATS),
    ("tensor_formats", {"image": ("linear",), "logits": ("linear", "dla_linear")}),
    ("default_device_type", "dla"),
    ("dla_core", 0),
    ("gpu_fallback", True),
    ("device_types", {"stem.*": "gpu", "layer1.*": "dla"}),
]
PLACING = ("default_device_type", "device_types")
EVERY_RELEASE = (*RELEASES, ("tensorrt", "9.3.0"), ("tensorrt", "11.0.0"))


def test_every_field_that_speaks_of_a_dla_is_in_the_table():
    fields = BuildOptions.model_fields.items()
    assert {n for n, f in fields if "dla" in f"{n} {f.annotation} {f.description}".lower()} == set(NAMING_A_DLA)
    assert {form for form in get_args(TensorFormat) if form.startswith("dla_")} < set(DLA_FORMATS)
    assert {field for field, _ in NAMED} == set(NAMING_A_DLA)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(("field", "value"), NAMED)
def test_what_names_a_dla_is_refused_wherever_there_is_none(field, value, placed):
    """A release, a platform and layers: each of them is wanted, and what is wanting is said once."""
    for release, platform in itertools.product(EVERY_RELEASE, (None, *PLATFORMS)):
        options = {field: value} | ({"default_device_type": "dla"} if placed else {})
        build = Build(target=release[0], platform=platform, **options)
        honoured = (
            "dla" in expected(*release)
            and (platform is None or PLATFORMS[platform].dla)
            and (placed or field in PLACING)
        )  # fmt: skip
        said = [message for path, message in refusals(build, FP16, *release) if path == f"build.{field}"]
        assert bool(said) != honoured, (release, platform)
        if "dla" in expected(*release):
            assert len(said) == (not honoured), (release, platform)


#: (options, release, the messages).
SAID = [
    ({"tensor_formats": {"image": ("chw16",)}}, ("tensorrt_rtx", "1.7.1.116"),
     ["build.tensor_formats: TensorRT-RTX 1.7.1.116 does not support DLA (got image: chw16). Only a DLA has chw16, "
      "dla_linear, dla_hwc4: use another format. TensorRT before 11 or TensorRT 11.4 or later has it."]),
    ({"tensor_formats": {"image": ("linear", "dla_hwc4")}, "platform": "t4"}, TEN,
     ["build.tensor_formats: T4 has no DLA (got dla_hwc4). Leave it out."]),
    ({"memory_pools": {"dla_local_dram": 1, "dla_global_dram": 1}, "platform": "l4"}, TEN,
     ["build.memory_pools: L4 has no DLA (got dla_local_dram, dla_global_dram). Leave it out."]),
    ({"device_types": {"a": "dla", "b": "dla", "c": "gpu"}, "platform": "jetson_orin_nano"}, TEN,
     ["build.device_types: Jetson Orin Nano has no DLA (got a: dla, b: dla). Leave it out."]),
    ({"dla_core": 0, "gpu_fallback": True}, TEN,
     ["build.dla_core: must go with layers on a DLA (got 0, and every layer on the GPU). Set build.default_device_type "
      "or build.device_types to dla, or leave this out.",
      "build.gpu_fallback: must go with layers on a DLA (got true, and every layer on the GPU). Set "
      "build.default_device_type or build.device_types to dla, or leave this out."]),
    ({"dla_core": 0, "device_types": {"*": "gpu"}}, TEN,
     ["build.dla_core: must go with layers on a DLA (got 0, and every layer on the GPU). Set build.default_device_type "
      "or build.device_types to dla, or leave this out."]),
    ({"default_device_type": "dla", "hardware_compatibility": "ampere_plus"}, TEN,
     ["build.hardware_compatibility: A device with a DLA must have an engine of its own, as none of ampere_plus runs "
      "on JetPack (got ampere_plus). Leave it out."]),
    ({"device_types": {"*": "dla"}, "runtime_platform": "windows_amd64"}, TEN,
     ["build.runtime_platform: A device with a DLA must have an engine for its own system (got windows_amd64). Leave "
      "it out."]),
    ({"default_device_type": "dla", "sparse_weights": True, "tensor_formats": {"image": ("hwc16",)}}, TEN, []),
    ({"sparse_weights": True, "platform": "t4"}, TEN,
     ["build.sparse_weights: T4 must be of compute capability 8.0 or later for 2:4 sparse kernels (got 7.5). Leave it "
      "out."]),
    ({"tensor_formats": {"image": ("linear", "hwc16")}, "platform": "rtx_20"}, TEN,
     ["build.tensor_formats: GeForce RTX 20 must be of compute capability 8.0 or later for hwc16 (got 7.5). Leave it "
      "out."]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "release", "messages"), SAID)
def test_what_is_said(options, release, messages):
    found = refusals(Build(target=release[0], **options), FP16, *release)
    assert [message for _, message in found] == messages
    assert all(message.startswith(f"{path}: ") for path, message in found)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("field", "value"), [("sparse_weights", True), ("tensor_formats", {"image": ("hwc16",)})]
)  # fmt: skip
def test_what_came_with_ampere(field, value, platform):
    assert {"sparse_weights", "tensor_formats"} == set(FROM_AMPERE)
    capability = tuple(map(int, PLATFORMS[platform].compute_capability.split(".")))
    found = dict(refusals(Build(target="tensorrt", platform=platform, **{field: value}), FP16, *TEN))
    assert (f"build.{field}" in found) == (capability < (8, 0))


@pytest.mark.parametrize("field", [field for field, _ in NAMED])
@pytest.mark.parametrize(
    ("gpu", "capability", "jetson", "refused"),
    [("NVIDIA L4", "8.9", False, True), ("Tesla T4", "7.5", False, True), ("Orin", "8.7", True, False),
     ("Thor", "11.0", True, True), ("Next", "13.0", False, False)],
)  # fmt: skip
def test_the_gpu_here_has_a_dla_or_may_have_one(field, gpu, capability, jetson, refused):
    build = Build(target="tensorrt", **{"default_device_type": "dla", field: dict(NAMED)[field]})
    found = dict(refused_here(gpu, capability, jetson, build, FP16, "10.16.1"))
    assert set(found) == (set(naming_a_dla(build)) if refused else set())
    assert all(f": {gpu} has no DLA (got " in message for message in found.values())


@pytest.mark.parametrize("level", ["ampere_plus", "same_compute_capability"])
@pytest.mark.parametrize("source", ["cublas", "cublas_lt", "cudnn"])
def test_tactics_of_other_libraries_are_not_of_an_engine_for_several_gpus(level, source):
    sources = ("jit_convolutions", source)
    build = Build(target="tensorrt", hardware_compatibility=level, tactic_sources=sources)
    assert refusals(build, FP16, "tensorrt", "10.9.0") == (
        (
            "build.tactic_sources",
            f"build.tactic_sources: must not name what build.hardware_compatibility {level} turns off (got {source}). "
            "Leave them out, or use hardware_compatibility none.",
        ),
    )
    for legal in ({"tactic_sources": ("jit_convolutions",)}, {"tactic_sources": ()}, {}):
        assert (
            refusals(Build(target="tensorrt", hardware_compatibility=level, **legal), FP16, "tensorrt", "10.9.0") == ()
        )
    assert refusals(Build(target="tensorrt", tactic_sources=sources), FP16, "tensorrt", "10.9.0") == ()

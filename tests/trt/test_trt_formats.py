"""What each TensorRT release and each GPU cannot do in FP8 and 4 bits: the exact words of every refusal."""

from __future__ import annotations

import itertools
import re

import pytest

from trtpipe.job.sections import Build, Precision
from trtpipe.trt.flavour import CAPABILITIES
from trtpipe.trt.formats import SUPPORT, asked, floor
from trtpipe.trt.options import refusals
from trtpipe.trt.platforms import BY_CAPABILITY, PLATFORMS, RTX_COMPUTE_CAPABILITIES, unable
from trtpipe.version_numbers import parse_version

FP8 = Precision(fp8_mode=True)
INT4 = Precision(weights="int4")
NVFP4 = Precision(nvfp4_mode=True)
NVFP4_WEIGHTS = Precision(weights="nvfp4")
RTX = ("tensorrt_rtx", "1.7.1")
AMPERE = "FP32, FP16, BF16, INT8, INT4"


def job(target="tensorrt_rtx", **build):
    return Build(target=target, **build)


#: (what is asked, the build, the release, the messages).
REFUSED = [
    (FP8, job("tensorrt"), ("tensorrt", "8.6.1"),
     ["precision.fp8_mode: TensorRT 8.6.1 does not support FP8 Q/DQ. Use TensorRT 10.0 or later or TensorRT-RTX, "
      "or precision.int8_mode."]),
    (INT4, job("tensorrt"), ("tensorrt", "8.6.1"),
     ["precision.weights: TensorRT 8.6.1 does not support INT4 weights. Use TensorRT 10.0 or later or "
      "TensorRT-RTX, or precision.int8_mode."]),
    (NVFP4, job("tensorrt"), ("tensorrt", "8.6.1"),
     ["precision.nvfp4_mode: TensorRT 8.6.1 does not support FP4. Use TensorRT 10.8 or later or TensorRT-RTX, or "
      "precision.int8_mode."]),
    (NVFP4, job("tensorrt"), ("tensorrt", "10.3.0"),
     ["precision.nvfp4_mode: TensorRT 10.3.0 does not support FP4. Use TensorRT 10.8 or later or TensorRT-RTX, or "
      "precision.fp8_mode."]),
    (NVFP4_WEIGHTS, job("tensorrt"), ("tensorrt", "10.3.0"),
     ["precision.weights: TensorRT 10.3.0 does not support FP4. Use TensorRT 10.8 or later or TensorRT-RTX, or "
      "precision.weights: int4."]),
    (FP8, job(compute_capability=("8.6",)), RTX,
     ["precision.fp8_mode: each of build.compute_capability must have FP8, as 8.9, 12.0, 12.1 do (got 8.6). Leave them "
      "out, or use precision.int8_mode."]),
    (FP8, job(compute_capability=("7.5", "8.6", "8.9")), RTX,
     ["precision.fp8_mode: each of build.compute_capability must have FP8, as 8.9, 12.0, 12.1 do (got 7.5, 8.6). Leave "
      "them out, or use precision.int8_mode."]),
    (Precision(bf16_mode=True), job(compute_capability=("7.5", "8.6")), RTX,
     ["precision.bf16_mode: each of build.compute_capability must have BF16, as 8.0, 8.6, 8.9, 12.0, 12.1 do (got 7.5)."
      " Leave them out, or use precision.fp16_mode."]),
    (INT4, job(compute_capability=("7.5",)), RTX,
     ["precision.weights: each of build.compute_capability must have INT4 weights, as 8.0, 8.6, 8.9, 12.0, 12.1 do "
      "(got 7.5). Leave them out, or use precision.int8_mode."]),
    (NVFP4, job(compute_capability=("8.9", "12.0")), RTX,
     ["precision.nvfp4_mode: each of build.compute_capability must have NVFP4, as 12.0, 12.1 do (got 8.9). Leave them "
      "out, or use precision.fp8_mode."]),
    (NVFP4_WEIGHTS, job(compute_capability=("8.6",)), RTX,
     ["precision.weights: each of build.compute_capability must have NVFP4, as 12.0, 12.1 do (got 8.6). Leave them "
      "out, or use precision.weights: int4."]),
    (FP8, job("tensorrt", platform="jetson_agx_orin"), ("tensorrt", "10.3.0"),
     [f"precision.fp8_mode: Jetson AGX Orin (compute capability 8.7) must compute in FP8 (got a platform with {AMPERE}"
      "). Use precision.int8_mode."]),
    (NVFP4, job("tensorrt", platform="jetson_orin_nano"), ("tensorrt", "10.9.0"),
     [f"precision.nvfp4_mode: Jetson Orin Nano (compute capability 8.7) must compute in FP4 (got a platform with "
      f"{AMPERE}). Use precision.int8_mode."]),
    (NVFP4, job("tensorrt", platform="h100"), ("tensorrt", "10.9.0"),
     [f"precision.nvfp4_mode: H100 (compute capability 9.0) must compute in FP4 (got a platform with {AMPERE}, FP8). "
      "Use precision.fp8_mode."]),
    (INT4, job("tensorrt", platform="t4"), ("tensorrt", "10.3.0"),
     ["precision.weights: T4 (compute capability 7.5) must compute in INT4 (got a platform with FP32, FP16, INT8). Use "
      "precision.int8_mode."]),
    (FP8, job(platform="rtx_30"), RTX,
     [f"precision.fp8_mode: GeForce RTX 30 (compute capability 8.6) must compute in FP8 (got a platform with {AMPERE})."
      " Use precision.int8_mode."]),
    (Precision(int8_mode=True, fp8_mode=True), job("tensorrt", quantization="implicit"), ("tensorrt", "10.3.0"),
     ["precision.fp8_mode: FP8 must be explicit (got build.quantization implicit). Use explicit."]),
    (Precision(int8_mode=True, weights="int4"), job("tensorrt", quantization="implicit"), ("tensorrt", "10.16.1"),
     ["precision.weights: INT4 weights must be explicit (got build.quantization implicit). Use explicit."]),
    (Precision(fp16_mode=True, fp8_mode=True), job("tensorrt", default_device_type="dla", dla_core=0),
     ("tensorrt", "10.3.0"),
     ["precision.fp8_mode: FP8 must be on the GPU, as no DLA has it (got layers on a DLA). Use FP16 or INT8."]),
    (FP8, job("tensorrt", hardware_compatibility="ampere_plus"), ("tensorrt", "10.16.1"),
     ["precision.fp8_mode: FP8 must be for GPUs that have it (got build.hardware_compatibility ampere_plus, whose "
      "engines are for Ampere too). Use none or same_compute_capability, or precision.int8_mode."]),
    (NVFP4, job("tensorrt", hardware_compatibility="ampere_plus"), ("tensorrt", "11.4.0"),
     ["precision.nvfp4_mode: NVFP4 must be for GPUs that have it (got build.hardware_compatibility ampere_plus, whose "
      "engines are for Ampere too). Use none or same_compute_capability, or precision.int8_mode."]),
]  # fmt: skip


@pytest.mark.parametrize(("precision", "build", "release", "messages"), REFUSED)
def test_the_words_of_a_refusal(precision, build, release, messages):
    assert [m for _, m in refusals(build, precision, *release)] == messages


@pytest.mark.parametrize(
    ("precision", "build", "release"),
    [
        (FP8, job(), RTX),
        (FP8, job(compute_capability=("8.9", "12.0")), RTX),
        (FP8, job("tensorrt"), ("tensorrt", "10.3.0")),
        (FP8, job("tensorrt", platform="h200"), ("tensorrt", "10.16.1.11")),
        (FP8, job("tensorrt", platform="l4"), ("tensorrt", "11.4.0.106")),
        (INT4, job(compute_capability=("8.6",)), RTX),
        (INT4, job("tensorrt", hardware_compatibility="ampere_plus"), ("tensorrt", "10.16.1")),
        (FP8, job("tensorrt", hardware_compatibility="same_compute_capability"), ("tensorrt", "10.16.1")),
        (INT4, job("tensorrt", platform="jetson_agx_orin"), ("tensorrt", "10.3.0")),
        (NVFP4, job(compute_capability=("12.0",)), RTX),
        (NVFP4, job("tensorrt", platform="b200"), ("tensorrt", "10.8.0")),
        (NVFP4_WEIGHTS, job(), RTX),
    ],
)
def test_what_is_there_is_taken(precision, build, release):
    assert refusals(build, precision, *release) == ()


BUILDS = (
    *(job("tensorrt", platform=p) for p in PLATFORMS),
    *(job(compute_capability=c) for n in (1, 2) for c in itertools.combinations(RTX_COMPUTE_CAPABILITIES, n)),
    job("tensorrt"), job("tensorrt", hardware_compatibility="ampere_plus"), job(platform="rtx_30"), job(),
)  # fmt: skip
RELEASES = ("8.6.1", "10.0.1", "10.3.0", "10.8.0", "11.4.0")


def test_what_a_refusal_advises_is_not_refused_itself():
    """Every format on every platform, set of compute capabilities and release: the option named last is one to take."""
    advised = []
    for build, precision in itertools.product(BUILDS, (FP8, INT4, NVFP4, NVFP4_WEIGHTS)):
        for release in [RTX] if build.target == "tensorrt_rtx" else [("tensorrt", v) for v in RELEASES]:
            options = {key for key in Precision.model_fields if getattr(precision, key)}
            for path, message in refusals(build, precision, *release):
                if path.removeprefix("precision.") not in options:
                    continue
                step = re.search(r"precision\.(?:(weights: int4)|(\w+_mode))\.$", message)
                assert step is not None or message.endswith("Use FP32."), message
                if step is not None:
                    taken = Precision(weights="int4") if step[1] else Precision(**{step[2]: True})
                    again = [m for p, m in refusals(build, taken, *release) if p.startswith("precision.")]
                    assert again == [], message
                    advised.append(step[0])
    assert set(advised) == {f"precision.{o}." for o in ("fp16_mode", "int8_mode", "fp8_mode", "weights: int4")}


@pytest.mark.parametrize("compute_capability", BY_CAPABILITY)
@pytest.mark.parametrize("support", SUPPORT, ids=lambda s: s.name)
def test_a_gpu_refuses_a_format_if_and_only_if_it_lacks_it(support, compute_capability):
    """Every format on every compute capability, as a GPU at hand and as one that an RTX job names."""
    precision = {"fp8": FP8, "int4": INT4, "nvfp4": NVFP4}[support.name]
    has = support.capability in BY_CAPABILITY[compute_capability].precisions
    ((path, _),) = asked(precision)
    assert [p for p, _ in unable("GPU", compute_capability, precision)] == ([] if has else [path])
    if compute_capability in RTX_COMPUTE_CAPABILITIES:
        named = refusals(job(compute_capability=(compute_capability,)), precision, *RTX)
        assert [p for p, _ in named] == ([] if has else [path])


@pytest.mark.parametrize("support", SUPPORT, ids=lambda s: s.name)
def test_a_release_refuses_a_format_if_and_only_if_it_lacks_it(support):
    precision = {"fp8": FP8, "int4": INT4, "nvfp4": NVFP4}[support.name]
    capability = next(c for c in CAPABILITIES if c.name == support.capability)
    ((since, _),) = capability.tensorrt
    for version in ("8.6.1", "10.0.1", "10.3.0", "10.7.0", "10.8.0", "10.16.1", "11.0.0", "11.4.0"):
        refused = refusals(job("tensorrt"), precision, "tensorrt", version)
        assert bool(refused) == (parse_version(version) < parse_version(since)), version


def test_formats_only_grow_from_ampere_on():
    """FP4 is only where FP8 is, FP8 only where INT4 is; never the other way round."""
    for abilities in BY_CAPABILITY.values():
        have = [s in abilities.precisions for s in ("int4", "fp8", "fp4")]
        assert have == sorted(have, reverse=True)


def test_the_floor_of_a_portable_engine():
    def portable(*precisions):
        return floor(precisions, "tensorrt_rtx", ())

    assert portable() is portable("fp16", "fp32", "int8") is portable("fp32", "int4") is None
    assert portable("fp8") == portable("fp16", "fp8", "int8") == "8.9"
    assert portable("nvfp4") == portable("fp16", "fp8", "nvfp4") == "12.0"
    assert floor(("fp8",), "tensorrt_rtx", ("8.9",)) is floor(("fp8",), "tensorrt", ()) is None


def test_no_format_is_refused_on_the_newest_platform():
    newest = PLATFORMS["rtx_50"]
    for precision in (FP8, INT4, NVFP4, NVFP4_WEIGHTS):
        assert unable(newest.title, newest.compute_capability, precision) == ()

"""Which TensorRT and which GPU can compute in FP8, INT4 and NVFP4: one table, held against every job at plan time.

What a release has is a capability of `flavour`, what a GPU has an ability of `platforms`; here is what of both a number
format needs, and the message where it is missing. Weak typing needs no flags of these formats: the releases that
have them (10.0 and later) take a strongly typed network wherever a job with one of them is accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtpipe.trt.flavour import CAPABILITIES, where
from trtpipe.trt.platforms import (
    ALWAYS,
    BY_CAPABILITY,
    OLDEST_PORTABLE,
    PLATFORMS,
    PRECISIONS,
    RTX_COMPUTE_CAPABILITIES,
    instead,
    takes_portable,
)
from trtpipe.values import PrecisionName

if TYPE_CHECKING:
    from trtpipe.job.sections import Build, Precision
    from trtpipe.values import NumberFormatName, Target

#: ATen operators without BF16: TensorRT-RTX 1.7.1's ONNX parser takes none for HardSwish, Mish and GRU, and its builder
#: infers no type of a transposed convolution in it.
NO_BF16 = ("hardswish", "mish", "gru", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
#: The largest number of E4M3 (FP8, and the scales of NVFP4), that of E2M1 (NVFP4), and how many of these share a scale.
E4M3_MAX, E2M1_MAX, NVFP4_BLOCK = 448.0, 6.0, 16
#: TensorRT's own ONNX operator that quantizes activations to NVFP4, in the domain "trt".
DYNAMIC_QUANTIZE = "TRT_FP4DynamicQuantize"


@dataclass(frozen=True)
class FormatSupport:
    """What one number format needs.

    `capability` is its name in `flavour.CAPABILITIES` and among a platform's precisions; `opset` the first of ONNX with
    its types.
    """

    name: NumberFormatName
    title: str
    capability: str
    opset: int


# Opsets against what TensorRT's ONNX parser is documented to take: 9 to 20 in 10.0 and 10.1, to 24 in 10.15
# (onnx-tensorrt, docs/operators.md of those releases), to 25 in 11 (NVIDIA's "ONNX Opset Guide"). FP8 is within that
# everywhere. INT4 is past it in 10.0 and 10.1, whose parsers take it nevertheless: they look operators up by name,
# refuse no newer opset (ModelImporter.cpp), read INT4 constants (WeightsContext.cpp) and find a block's size from the
# shape of its scales (QuantDequantLinearHelper in onnxOpImporters.cpp). FLOAT4E2M1 came to the parser with 10.8
# (onnx-tensorrt's pull request 1012), where NVFP4 begins here. No TensorRT but RTX 1.7.1 was there to parse such files.
FP8_SUPPORT = FormatSupport("fp8", "FP8", "fp8", 19)
INT4_SUPPORT = FormatSupport("int4", "INT4 weights", "int4", 21)
NVFP4_SUPPORT = FormatSupport("nvfp4", "NVFP4", "fp4", 23)
SUPPORT = (FP8_SUPPORT, INT4_SUPPORT, NVFP4_SUPPORT)


def asked(precision: Precision) -> tuple[tuple[str, FormatSupport], ...]:
    """(option path, what it needs) of the formats below INT8's generation that a job asks for."""
    names = []
    if precision.fp8_mode:
        names.append(("precision.fp8_mode", FP8_SUPPORT))
    if precision.nvfp4_mode:
        names.append(("precision.nvfp4_mode", NVFP4_SUPPORT))
    if precision.weights is not None:
        names.append(("precision.weights", INT4_SUPPORT if precision.weights == "int4" else NVFP4_SUPPORT))
    return tuple(names)


def floor(precisions: Collection[str], target: Target, capabilities: Collection[str]) -> str | None:
    """The least compute capability of a portable TensorRT-RTX engine; None: `OLDEST_PORTABLE`, or not portable.

    TensorRT-RTX 1.7.1 builds such an engine in FP8 or NVFP4 without a word, and an Ampere GPU cannot run it.

    Args:
        precisions: those that the engine's operations compute in; a job may ask for a format that nothing in it got.
        target: the engine's.
        capabilities: those that the engine is for; none for a portable engine.
    """
    if target != "tensorrt_rtx" or capabilities:
        return None
    needed = [f.capability for f in SUPPORT if f.name in precisions]
    able = [c for c in RTX_COMPUTE_CAPABILITIES if takes_portable(c)]
    fitting = [c for c in able if all(n in BY_CAPABILITY[c].precisions for n in needed)]
    return None if fitting == able else fitting[0]


def lacking(precisions: Collection[str], compute_capability: str) -> tuple[str, ...]:
    """Those precisions of an engine's operations that GPUs of a compute capability do not have, as titles; none of a
    capability that the table does not know."""
    abilities = BY_CAPABILITY.get(compute_capability)
    of_format: dict[str, str] = {f.name: f.capability for f in SUPPORT}
    named = {of_format.get(p, p): p for p in precisions}
    return tuple(
        named[p].upper() for p in PRECISIONS if p in named and abilities is not None and p not in abilities.precisions
    )


def portable_notes(least: str | None) -> tuple[str, ...]:
    """What is said of a portable engine that `floor` gives `least` for."""
    if least is None:
        return ()
    why = f"its number formats need compute capability {least} or later, not Ampere's {OLDEST_PORTABLE}"
    return (f"portable engine: {why}",)


def refusals(
    build: Build, precision: Precision, name: str, able: frozenset[str], release: str
) -> Iterator[tuple[str, str]]:
    """(option path, message) of every number format that this release, or a GPU the job names, does not have."""
    by_name = {c.name: c for c in CAPABILITIES}
    can = _common(build, name, able)
    for path, needed in asked(precision):
        other = instead(path.removeprefix("precision."), can)
        capability = by_name[needed.capability]
        if needed.capability not in able:
            yield (
                path,
                f"{release} does not support {capability.title}. Use {where(capability)}, or {other}.",
            )
        if build.quantization == "implicit":
            yield path, f"{needed.title} must be explicit (got build.quantization implicit). Use explicit."
        if build.uses_dla:
            yield path, f"{needed.title} must be on the GPU, as no DLA has it (got layers on a DLA). Use FP16 or INT8."
        oldest = BY_CAPABILITY[OLDEST_PORTABLE].precisions
        if build.hardware_compatibility == "ampere_plus" and needed.capability not in oldest:
            yield (
                path,
                f"{needed.title} must be for GPUs that have it (got build.hardware_compatibility ampere_plus, whose "
                f"engines are for Ampere too). Use none or same_compute_capability, or {other}.",
            )
        if name == "tensorrt_rtx":
            yield from not_on_all(build, path, needed.title, needed.capability, other)


def _common(build: Build, name: str, able: frozenset[str]) -> frozenset[str]:
    """What the release and every GPU that the job is for can compute in."""
    gpus = [c for c in build.compute_capability if name == "tensorrt_rtx" and c in BY_CAPABILITY]
    gpus += [] if build.platform is None else [PLATFORMS[build.platform].compute_capability]
    gpus += [OLDEST_PORTABLE] if build.hardware_compatibility == "ampere_plus" else []
    return (ALWAYS | able).intersection(PRECISIONS, *(BY_CAPABILITY[c].precisions for c in gpus))


def not_on_all(build: Build, path: str, title: str, capability: str, other: str) -> Iterator[tuple[str, str]]:
    """(option path, message) where a compute capability that a TensorRT-RTX job names lacks a type of numbers.

    Args:
        build: the job's build section.
        path: of the option that asks for the type.
        title: of the type.
        capability: the type among a platform's precisions.
        other: what all of them have.
    """
    unable = [
        c
        for c in build.compute_capability
        if c in RTX_COMPUTE_CAPABILITIES and capability not in BY_CAPABILITY[c].precisions
    ]
    if unable:
        legal = [c for c in RTX_COMPUTE_CAPABILITIES if capability in BY_CAPABILITY[c].precisions]
        yield (
            path,
            f"each of build.compute_capability must have {title}, as {', '.join(legal)} do (got "
            f"{', '.join(unable)}). Leave them out, or use {other}.",
        )


#: Formats of a weight whose other factor may be in float.
WEIGHTS_ALONE = ("int4", "nvfp4")


def product_format(left: PrecisionName | None, right: PrecisionName | None) -> PrecisionName | None:
    """The number format of a product of factors in these, None a float: of its weight where that alone is in 4 bits.

    A product with one factor in INT8 or FP8 computes in float, which is None.
    """
    return right if left == right or right in WEIGHTS_ALONE else None

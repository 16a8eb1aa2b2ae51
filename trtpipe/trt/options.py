"""Every builder option: what it needs of a TensorRT, and the message where a release cannot honour it.

`OPTIONS` has one row for each field of `BuildOptions`, which a test keeps so. `refusals` judges a job against a release
by name and version alone, so `validate` can judge a job for another machine; `config.apply` sets what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calib.types import JsonObject
from trtpipe.job.build_options import BuildOptions
from trtpipe.job.sections import Build, Precision
from trtpipe.trt import formats, placement, platforms
from trtpipe.trt.flavour import CAPABILITIES, expected, known, title, where
from trtpipe.trt.placement import needing_dla
from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES, rtx_support


@dataclass(frozen=True)
class Option:
    """One field of `BuildOptions`. `needs` gives the capabilities that a value asks for, `instead` the next step."""

    field: str
    needs: Callable[[Any], tuple[str, ...]] = lambda _value: ()
    instead: str = ""


def _always(*names: str) -> Callable[[Any], tuple[str, ...]]:
    needed = tuple(known(n) for n in names)
    return lambda _value: needed


def _when(value: object, name: str) -> Callable[[Any], tuple[str, ...]]:
    needed = (known(name),)
    return lambda got: needed if got == value else ()


def _hardware(value: str) -> tuple[str, ...]:
    same = ("hardware_same_cc",) if value == "same_compute_capability" else ()
    return ("hardware_compatibility", *same)


def _pools(value: dict[str, int]) -> tuple[str, ...]:
    of_gpu = (known(p) for p in ("tactic_dram", "tactic_shared_memory") if p in value)
    return (*needing_dla("memory_pools")(value), *of_gpu)


#: Tactics of other libraries, which an engine for several GPUs does without: "This option will disable cuDNN, cuBLAS,
#: and cuBLASLt as tactic sources" (NvInferRuntime.h, HardwareCompatibilityLevel).
EXTERNAL_TACTICS = frozenset({"cublas", "cublas_lt", "cudnn"})


def _sources(value: tuple[str, ...]) -> tuple[str, ...]:
    cublas = ("cublas_tactics",) if EXTERNAL_TACTICS & set(value) else ()
    return ("tactic_sources", *cublas)


OPTIONS: tuple[Option, ...] = (
    Option("compute_capability", _always("compute_capability"),
           "TensorRT proper builds for the GPU at hand: leave it out, or use build.hardware_compatibility."),
    Option("platform"),
    Option("quantization", _when("implicit", "implicit_quantization"), "Use explicit: Q/DQ in the graph."),
    Option("calibration_cache", _always("implicit_quantization"), "It has no calibrators: leave it out."),
    Option("profiles"),
    Option("workspace"),
    Option("memory_pools", _pools),
    Option("optimization_level", _always("tactic_search")),
    Option("tiling_optimization_level", _always("tiling")),
    Option("l2_limit_for_tiling", _always("tiling")),
    Option("max_num_tactics", _always("max_num_tactics")),
    Option("avg_timing_iterations", _always("tactic_search")),
    Option("max_aux_streams", _always("aux_streams")),
    Option("tactic_sources", _sources,
           "Name only edge_mask_convolutions and jit_convolutions, or on TensorRT-RTX leave it out."),
    Option("timing_cache", _always("timing_cache"), "It times no tactic while building: leave it out."),
    Option("editable_timing_cache", _always("editable_timing_cache")),
    Option("error_on_timing_cache_miss", _always("error_on_timing_cache_miss")),
    Option("profiling_verbosity"),
    Option("log_level"),
    Option("tf32"),
    Option("sparse_weights", _always("sparse_weights")),
    Option("strict_nans", _always("strict_nans")),
    Option("direct_io", _always("direct_io")),
    Option("tensor_formats", needing_dla("tensor_formats"),
           f"Only a DLA has {', '.join(placement.DLA_FORMATS)}: use another format."),
    Option("hardware_compatibility", _hardware,
           "Use none, or on TensorRT-RTX build.compute_capability."),
    Option("version_compatible"),
    Option("exclude_lean_runtime"),
    Option("runtime_platform", _always("runtime_platform")),
    Option("strip_plan", _always("strip_plan")),
    Option("refit", lambda v: {"identical": ("refit_identical",), "individual": ("refit_individual",)}.get(v, ())),
    Option("weight_streaming", _always("weight_streaming")),
    Option("default_device_type", needing_dla("default_device_type")),
    Option("dla_core", needing_dla("dla_core")),
    Option("gpu_fallback", needing_dla("gpu_fallback")),
    Option("device_types", needing_dla("device_types")),
    Option("plugins", _always("plugins"),
           "Write the operation in others that it has."),
)  # fmt: skip


def asked(build: BuildOptions) -> JsonObject:
    """The options that differ from their defaults, by field name."""
    fields = BuildOptions.model_fields
    values = {name: getattr(build, name) for name in fields}
    return {n: v for n, v in values.items() if v != fields[n].get_default(call_default_factory=True)}


def needs_driver(build: BuildOptions, name: str) -> tuple[str, ...]:
    """Option paths that need a GPU, of a target: all of TensorRT proper, and what TensorRT-RTX, which builds without
    one, does not (observed with 1.7.1)."""
    if name != "tensorrt_rtx":
        return ("build.target",) if name == "tensorrt" else ()
    wanted = asked(build)
    refit = ("build.refit",) if "refit" in wanted else ()
    return (*refit, *(("build.strip_plan",) if "strip_plan" in wanted else ()))


def without_driver(path: str) -> str:
    """What to do where an option of `needs_driver` has no GPU, beside going to one."""
    return "build for target tensorrt_rtx, which needs no GPU" if path == "build.target" else f"leave out {path}"


def refusals(
    build: Build,
    precision: Precision | None,
    name: str,
    version: str,
    capabilities: frozenset[str] | None = None,
) -> tuple[tuple[str, str], ...]:
    """(dotted option path, message) of everything in the job that this release cannot honour; empty when there is none.

    Args:
        build: the job's build section.
        precision: the job's precision section; None judges the builder's options alone.
        name: "tensorrt" or "tensorrt_rtx".
        version: of that TensorRT, like "10.3.0".
        capabilities: of the imported module (`flavour.look`); those recorded for `version` when None.
    """
    wanted = asked(build)
    able = expected(name, version) if capabilities is None else capabilities
    problems = [*_unable(wanted, able, title(name, version)), *_together(wanted, name)]
    if precision is not None:
        problems += _precision(build, precision, able, title(name, version))
        problems += formats.refusals(build, precision, name, able, title(name, version))
    judged = tuple((path, f"{path}: {message}") for path, message in problems)
    if "dla" in able:
        judged += tuple(placement.unplaced(build))
    if name == "tensorrt":
        judged += placement.refusals(build)
    if name == "tensorrt" and build.platform is not None and not platforms.PLATFORMS[build.platform].ends:
        platform = platforms.PLATFORMS[build.platform]
        judged += platforms.too_old_or_new(platform.title, platform.compute_capability, version)
    if precision is None or build.platform is None:
        return judged
    platform = platforms.PLATFORMS[build.platform]
    return judged + platforms.refusals(platform, precision, release=platforms.ALWAYS | able)


def _unable(wanted: JsonObject, able: frozenset[str], release: str) -> Iterator[tuple[str, str]]:
    by_name = {c.name: c for c in CAPABILITIES}
    for option in OPTIONS:
        if option.field not in wanted:
            continue
        for need in option.needs(wanted[option.field]):
            if need not in able:
                step = f"Use {where(by_name[need])}, or leave it out."
                if option.instead:
                    step = f"{option.instead} {where(by_name[need])} has it."
                got = in_words(wanted[option.field])
                yield f"build.{option.field}", f"{release} does not support {by_name[need].title} (got {got}). {step}"
                break


def binding_refusals(dtypes: Mapping[str, str], name: str, version: str) -> tuple[tuple[str, str], ...]:
    """(dotted path, message) of each binding whose dtype a release cannot have.

    Args:
        dtypes: by the path of the binding, like "inputs.ids".
        name: "tensorrt" or "tensorrt_rtx".
        version: of that TensorRT.
    """
    lacking = "int64" not in expected(name, version)
    has = where(next(c for c in CAPABILITIES if c.name == "int64"))
    return tuple(
        (
            f"{path}.dtype",
            f"{path}.dtype: {title(name, version)} has no INT64 bindings (got int64). Use int32, or {has}.",
        )
        for path, dtype in dtypes.items()
        if lacking and dtype == "int64"
    )


def _together(wanted: JsonObject, name: str) -> Iterator[tuple[str, str]]:
    """Options that only mean something, or only work, with another."""
    for path, needed in (
        ("exclude_lean_runtime", "version_compatible"),
        ("editable_timing_cache", "timing_cache"),
        ("error_on_timing_cache_miss", "timing_cache"),
        ("calibration_cache", "quantization"),
        ("l2_limit_for_tiling", "tiling_optimization_level"),
    ):
        if path in wanted and needed not in wanted:
            value, got = (": implicit", "explicit") if needed == "quantization" else ("", "none")
            yield (
                f"build.{path}",
                f"build.{needed}{value} must be set too (got {got}). Set it, or leave this out.",
            )
    if name == "tensorrt_rtx" and "version_compatible" in wanted and "exclude_lean_runtime" not in wanted:
        yield (
            "build.version_compatible",
            "the lean runtime must be left out on TensorRT-RTX, whose package has none (got true). "
            "Set build.exclude_lean_runtime too.",
        )
    if name == "tensorrt_rtx" and "platform" in wanted:
        yield from _rtx_platform(platforms.PLATFORMS[wanted["platform"]], wanted.get("compute_capability", ()))
    if name == "tensorrt_rtx":
        for capability in wanted.get("compute_capability", ()):
            if capability not in RTX_COMPUTE_CAPABILITIES:
                legal = ", ".join(RTX_COMPUTE_CAPABILITIES)
                yield (
                    "build.compute_capability",
                    f"must be among {legal} (got {capability}: {rtx_support(capability).why}). Use build.target "
                    "tensorrt on the device.",
                )
    off = [s for s in wanted.get("tactic_sources") or () if s in EXTERNAL_TACTICS]
    if off and "hardware_compatibility" in wanted:
        yield (
            "build.tactic_sources",
            f"must not name what build.hardware_compatibility {wanted['hardware_compatibility']} turns off "
            f"(got {', '.join(off)}). Leave them out, or use hardware_compatibility none.",
        )
    if "weight_streaming" in wanted and wanted.get("quantization") == "implicit":
        yield (
            "build.weight_streaming",
            "must be built strongly typed (got build.quantization implicit). Use explicit, or leave it out.",
        )
    if wanted.get("quantization") == "implicit" and len(wanted.get("profiles", ())) > 1:
        yield (
            "build.profiles",
            f"at most one profile can be calibrated (got {len(wanted['profiles'])}). Use quantization explicit.",
        )


def _rtx_platform(platform: platforms.Platform, capabilities: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """A TensorRT-RTX engine runs on the compute capabilities it was built for; those it has do not include all."""
    here = platform.compute_capability
    portable = f"a portable engine, which is for {platforms.OLDEST_PORTABLE} and later"
    if here not in RTX_COMPUTE_CAPABILITIES:
        if not rtx_support(here).runs or capabilities:
            yield (
                "build.platform",
                f"{platform.title} must be of a compute capability that TensorRT-RTX builds for, "
                f"{', '.join(RTX_COMPUTE_CAPABILITIES)} (got {here})."
                + ("" if platform.ends else " Use build.target tensorrt on the device."),
            )
    elif here not in capabilities and (capabilities or not platforms.takes_portable(here)):
        yield (
            "build.platform",
            f"build.compute_capability must hold that of {platform.title}, {here} "
            f"(got {', '.join(capabilities) or portable}). Add it.",
        )


def _precision(build: Build, precision: Precision, able: frozenset[str], release: str) -> Iterator[tuple[str, str]]:
    implicit = build.quantization == "implicit"
    if precision.bf16_mode and "bf16" not in able:
        yield "precision.bf16_mode", f"{release} does not support BF16 (got true). Use precision.fp16_mode."
    if precision.bf16_mode and build.target == "tensorrt_rtx":
        yield from formats.not_on_all(build, "precision.bf16_mode", "BF16", "bf16", "precision.fp16_mode")
    if implicit and not precision.int8_mode:
        yield (
            "build.quantization",
            "precision.int8_mode must be on for implicit (got off). Turn it on, or use explicit.",
        )
    if implicit and precision.bf16_mode:
        yield "build.quantization", "implicit must go with FP16 or FP32 (got precision.bf16_mode). Use explicit."
    if implicit and (precision.keep.fp32 or precision.keep.fp16):
        kept = ", ".join((*precision.keep.fp32, *precision.keep.fp16))
        yield (
            "precision.keep",
            f"must be empty with build.quantization implicit (got {kept}). Use explicit, or keep nothing.",
        )
    if implicit and precision.placement != "auto":
        yield (
            "precision.placement",
            f"must be auto with build.quantization implicit, where TensorRT places INT8 (got {precision.placement}). "
            "Use explicit, or leave it out.",
        )
    if build.uses_dla and "dla" in able:
        if not (precision.fp16_mode or precision.int8_mode):
            yield (
                "build.default_device_type",
                f"DLA must compute in FP16 or INT8 (got {'BF16' if precision.bf16_mode else 'FP32'}). "
                "Turn on precision.fp16_mode.",
            )
        if precision.int8_mode and not implicit and "implicit_quantization" in able:
            yield (
                "build.quantization",
                f"DLA must get INT8 by implicit quantization on {release} (got explicit). Use implicit, and build on "
                "the device: a kit holds no calibration samples.",
            )


def in_words(value: object) -> str:
    """An option's value in a sentence: true and false as in YAML, lists without brackets, text without quotes."""
    if isinstance(value, tuple):
        return ", ".join(map(in_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{k}: {in_words(v)}" for k, v in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)

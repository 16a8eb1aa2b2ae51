"""Which TensorRT is installed and what it can do, by its attributes rather than by its version.

`CAPABILITIES` is the one table of what divides the releases. A capability is present in an imported module when each of
its `look` paths exists there; its `spans` say the same for a module that is not at hand, so that `validate` can judge a
job for another machine. The contract tests hold the two against each other on every supported release.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Literal

from trtpipe import packages
from trtpipe.errors import InputError, MissingError
from trtpipe.import_errors import broken
from trtpipe.packages import install_command, not_installed
from trtpipe.values import Target
from trtpipe.version_numbers import parse_version

FlavourName = Literal["tensorrt", "tensorrt_rtx"]
#: Targets as messages name them.
TARGET_TITLES: Mapping[Target, str] = {
    "tensorrt": "TensorRT",
    "tensorrt_rtx": "TensorRT-RTX",
    "onnxruntime": "ONNX Runtime",
}

_OLDEST: Mapping[FlavourName, tuple[int, ...]] = {"tensorrt": (8, 6), "tensorrt_rtx": (1, 7, 1)}
#: Releases that are installed by the commands that trtpipe gives, the newest first: [since, until).
INSTALLED_SPANS: Mapping[str, Sequence[tuple[str, str]]] = {
    "tensorrt": (("11.0", "12"), ("10.3", "11")),
    "tensorrt_rtx": (("1.7.1", "1.8"),),
}
#: Releases of a later major version may have other options, of which there is no record.
NEWEST_MAJOR: Mapping[str, int] = {name: parse_version(spans[0][0])[0] for name, spans in INSTALLED_SPANS.items()}


@dataclass(frozen=True)
class Capability:
    """Something that not every release can do.

    `look` are attribute paths below the module, all of which exist where the capability does. `tensorrt` and `rtx` are
    spans of versions [since, until); an empty bound is open. With no `look` the spans decide, and a flavour without
    spans never has the capability: TensorRT-RTX keeps names of TensorRT that do nothing there.
    """

    name: str
    title: str
    look: tuple[str, ...]
    tensorrt: tuple[tuple[str, str], ...] = ()
    rtx: tuple[tuple[str, str], ...] = ()

    def spans(self, name: str) -> tuple[tuple[str, str], ...]:
        """The spans of this flavour."""
        return self.rtx if name == "tensorrt_rtx" else self.tensorrt


_ALL, _NONE = (("", ""),), ()
_WEAK, _TEN = (("", "11"),), (("10.0", ""),)

CAPABILITIES: tuple[Capability, ...] = (
    Capability("weak_typing", "weak typing: FP16 and INT8 flags, per-layer precision",
               ("BuilderFlag.FP16", "BuilderFlag.INT8", "BuilderFlag.OBEY_PRECISION_CONSTRAINTS"), _WEAK),
    Capability("bf16_flag", "BF16 flag", ("BuilderFlag.BF16",), (("10.0", "11"),)),
    Capability("bf16", "BF16", ("DataType.BF16",), _TEN, _ALL),
    Capability("fp8", "FP8 Q/DQ", ("DataType.FP8", "NetworkDefinitionCreationFlag.STRONGLY_TYPED"), _TEN, _ALL),
    Capability("int4", "INT4 weights", ("DataType.INT4",), _TEN, _ALL),
    Capability("fp4", "FP4", ("DataType.FP4",), (("10.8", ""),), _ALL),
    Capability("explicit_batch", "EXPLICIT_BATCH network flag", ("NetworkDefinitionCreationFlag.EXPLICIT_BATCH",),
               _WEAK),
    Capability("strong_typing", "strong typing", ("NetworkDefinitionCreationFlag.STRONGLY_TYPED",), _TEN, _ALL),
    Capability("implicit_quantization", "calibrators and implicit quantization",
               ("IBuilderConfig.int8_calibrator", "IBuilderConfig.set_calibration_profile", "CalibrationAlgoType"),
               _WEAK),
    Capability("dynamic_range", "dynamic range of a tensor", ("ITensor.set_dynamic_range",), _WEAK),
    Capability("platform_query", "platform_has_fast_fp16 and _int8",
               ("Builder.platform_has_fast_fp16", "Builder.platform_has_fast_int8"), _WEAK),
    Capability("int64", "INT64 tensors", ("DataType.INT64",), _TEN, _ALL),
    Capability("strip_plan", "STRIP_PLAN", ("BuilderFlag.STRIP_PLAN",), _TEN, _ALL),
    Capability("refit_identical", "REFIT_IDENTICAL", ("BuilderFlag.REFIT_IDENTICAL",), _TEN, _ALL),
    Capability("refit_individual", "REFIT_INDIVIDUAL", ("BuilderFlag.REFIT_INDIVIDUAL",), _TEN, _ALL),
    Capability("weight_streaming", "WEIGHT_STREAMING", ("BuilderFlag.WEIGHT_STREAMING",), _TEN, _ALL),
    Capability("timing_cache", "timing cache", ("IBuilderConfig.create_timing_cache",), _ALL, _NONE),
    Capability("editable_timing_cache", "editable timing cache",
               ("BuilderFlag.EDITABLE_TIMING_CACHE", "ITimingCache.update"), (("10.8", ""),), _NONE),
    Capability("error_on_timing_cache_miss", "ERROR_ON_TIMING_CACHE_MISS",
               ("BuilderFlag.ERROR_ON_TIMING_CACHE_MISS",), _TEN, _NONE),
    Capability("tactic_search", "a search for tactics while it builds",
               ("IBuilderConfig.builder_optimization_level", "IBuilderConfig.avg_timing_iterations"), _ALL, _NONE),
    Capability("tiling", "tiling optimization level", ("TilingOptimizationLevel",), (("10.8", ""),), _NONE),
    Capability("max_num_tactics", "limit on the number of tactics", ("IBuilderConfig.max_num_tactics",),
               (("10.8", ""),), _NONE),
    Capability("aux_streams", "auxiliary streams", ("IBuilderConfig.max_aux_streams",), _ALL, _NONE),
    Capability("sparse_weights", "2:4 sparse kernels", ("BuilderFlag.SPARSE_WEIGHTS",), _ALL, _NONE),
    Capability("strict_nans", "STRICT_NANS", ("BuilderFlag.STRICT_NANS",), (("10.4", ""),), _NONE),
    Capability("direct_io", "DIRECT_IO", ("BuilderFlag.DIRECT_IO",), _ALL, _NONE),
    Capability("hardware_compatibility", "hardware compatibility", ("IBuilderConfig.hardware_compatibility_level",),
               _ALL, _NONE),
    Capability("hardware_same_cc", "hardware compatibility SAME_COMPUTE_CAPABILITY",
               ("HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY",), (("10.9", ""),), _NONE),
    Capability("progress_monitor", "progress monitor and cancelling", ("IProgressMonitor",), _TEN, _ALL),
    Capability("runtime_platform", "runtime platform",
               ("RuntimePlatform", "IBuilderConfig.runtime_platform"), _TEN, _NONE),
    Capability("serialization_config", "serialization config",
               ("ICudaEngine.create_serialization_config",), _TEN, _ALL),
    Capability("tactic_sources", "tactic sources", ("IBuilderConfig.set_tactic_sources",), _ALL, _NONE),
    Capability("cublas_tactics", "tactic sources CUBLAS, CUBLAS_LT, CUDNN", ("TacticSource.CUDNN",), _WEAK),
    Capability("tactic_dram", "memory pool TACTIC_DRAM", ("MemoryPoolType.TACTIC_DRAM",), _ALL, _NONE),
    Capability("tactic_shared_memory", "memory pool TACTIC_SHARED_MEMORY", ("MemoryPoolType.TACTIC_SHARED_MEMORY",),
               _TEN, _ALL),
    Capability("plugins", "plugins", (), _TEN, _NONE),  # TensorRT-RTX 1.7.1 loads libraries; its parser then aborts
    Capability("lean_runtime", "a lean runtime inside the plan", (), _ALL, _NONE),
    Capability("dla", "DLA", (), (("", "11"), ("11.4", "")), _NONE),
    Capability("bindings_api", "bindings API (num_bindings, execute_async_v2)",
               ("ICudaEngine.num_bindings", "IExecutionContext.execute_async_v2"), (("", "10"),)),
    Capability("tensor_api", "tensor API (set_tensor_address, execute_async_v3)",
               ("ICudaEngine.num_io_tensors", "IExecutionContext.execute_async_v3"), _ALL, _ALL),
    Capability("device_memory_size_v2", "device_memory_size_v2", ("ICudaEngine.device_memory_size_v2",), _TEN, _ALL),
    Capability("parser_node_names", "node name and operator of parser errors", ("ParserError.node_name",), _TEN, _ALL),
    Capability("compute_capability", "a choice of compute capabilities", ("IBuilderConfig.set_compute_capability",),
               _NONE, _ALL),
    Capability("runtime_cache", "cache of kernels compiled for the GPU",
               ("ICudaEngine.create_runtime_config", "IRuntimeConfig.create_runtime_cache"), _NONE, _ALL),
    Capability("shape_specialization", "kernels compiled for a call's shapes",
               ("IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",), _NONE, _ALL),
    Capability("engine_validity", "engine validity query", ("Runtime.get_engine_validity",), _NONE, _ALL),
)  # fmt: skip


@dataclass(frozen=True)
class Flavour:
    """An imported TensorRT: its module, its version and the names of the capabilities found in it."""

    name: FlavourName
    module: ModuleType
    version: str
    capabilities: frozenset[str]

    def has(self, capability: str) -> bool:
        """Whether this release can do it. KeyError for a name that is not in `CAPABILITIES`."""
        return known(capability) in self.capabilities

    @property
    def title(self) -> str:
        """Like "TensorRT 10.16.1.11", for messages."""
        return title(self.name, self.version)


def title(name: str, version: str) -> str:
    """Like "TensorRT-RTX 1.7.1.116"."""
    return f"{'TensorRT-RTX' if name == 'tensorrt_rtx' else 'TensorRT'} {version}"


def where(capability: Capability) -> str:
    """Where a capability is: "TensorRT 10.0 or later or TensorRT-RTX"."""
    places = [f"TensorRT {_span(since, until)}".strip() for since, until in capability.tensorrt]
    places += [f"TensorRT-RTX {_span(since, until)}".strip() for since, until in capability.rtx]
    return " or ".join(places)


def _span(since: str, until: str) -> str:
    if since and until:
        return f"{since} to before {until}"
    return f"{since} or later" if since else f"before {until}" if until else ""


def known(capability: str) -> str:
    """`capability` itself; KeyError when `CAPABILITIES` does not list it."""
    if capability not in _NAMES:
        raise KeyError(capability)
    return capability


_NAMES = frozenset(c.name for c in CAPABILITIES)


def require_version(text: str) -> None:
    """Hold `text`, the value of `--for`, to be a version of numbers and dots.

    Raises:
        InputError: it is not.
    """
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise InputError(f"--for: must be a version like 10.3.0 (got {text!r}).")


def without_effect(what: str, target: str, release: str | None) -> str:
    """A note where a release of TensorRT is given for `what` and its target is none; empty otherwise."""
    if release is None or target in _OLDEST:
        return ""
    return f"{what} for {target} is for no TensorRT: its release {release} has no effect"


def same_release(one: str, other: str) -> bool:
    """Whether two versions are of one release, 10.16.1 and 10.16.1.11: TensorRT itself loads what another build of its
    release wrote."""
    return parse_version(one)[:3] == parse_version(other)[:3]


def same_build(one: str, other: str) -> bool:
    """Whether versions agree in all numbers that both give: a manifest names the build, `__version__` of some does not.

    A bundle is proven for the build that made it alone, whatever TensorRT itself would load.
    """
    a, b = parse_version(one), parse_version(other)
    common = min(len(a), len(b))
    return common >= 3 and a[:common] == b[:common]


#: Flavour to (distribution, version).
Installed = Mapping[FlavourName, tuple[str, str]]


def installed() -> Installed:
    """(distribution, version) of each TensorRT on this machine, by package metadata alone: nothing is imported."""
    by_module = {name: packages.package(name) for name in _OLDEST}
    return {name: (p.distribution, p.version) for name, p in by_module.items() if p is not None}


def oldest(name: FlavourName) -> str:
    """The oldest release that trtpipe builds for, like "8.6"."""
    return ".".join(map(str, _OLDEST[name]))


def unsupported(name: str, version: str) -> str | None:
    """Why a version cannot be that of a release of this TensorRT which trtpipe builds for and runs, at hand or not, as
    "must ... (got ...)"; None for a name that is no TensorRT's."""
    flavour = next((known for known in _OLDEST if known == name), None)
    if flavour is None:
        return None
    number, first, newest = parse_version(version), oldest(flavour), NEWEST_MAJOR[flavour]
    if number < parse_version(first):
        return f"must be {title(name, first)} or later (got {version})"
    if flavour == "tensorrt_rtx" and number >= _OLDEST["tensorrt"]:
        return f"must be a release of TensorRT-RTX, like {first} (got {version}, which is TensorRT's)"
    if number[0] > newest:
        return f"must be {title(name, str(newest))} at most, the newest whose options are known (got {version})"
    return None


def look(module: object, name: FlavourName, version: str) -> frozenset[str]:
    """Names of the capabilities that `module` has: by its attributes, and by version where nothing can be looked at."""
    by_version = expected(name, version)
    return frozenset(
        c.name
        for c in CAPABILITIES
        if c.spans(name) and (all(_exists(module, p) for p in c.look) if c.look else c.name in by_version)
    )


def expected(name: str, version: str) -> frozenset[str]:
    """Names of the capabilities that this release has by the record, for a module that is not at hand."""
    number = parse_version(version)
    return frozenset(c.name for c in CAPABILITIES if any(is_within(number, *span) for span in c.spans(name)))


def load(target: str) -> Flavour:
    """The TensorRT of this target, imported.

    Raises:
        InputError: for a target that is no TensorRT, or a release that is `unsupported`.
        MissingError: when it is not installed or cannot be loaded.
    """
    if target not in _OLDEST:
        raise InputError(f"build.target: a TensorRT target must be tensorrt or tensorrt_rtx (got {target}).")
    name: FlavourName = "tensorrt_rtx" if target == "tensorrt_rtx" else "tensorrt"
    try:
        module = importlib.import_module(name)
        if not hasattr(module, "__version__"):  # what an interrupted `pip uninstall` leaves can be imported
            raise ImportError("it has no __version__")
    except (ImportError, OSError, RuntimeError) as error:  # its own loading of libraries raises the last two
        absent = isinstance(error, ModuleNotFoundError) and error.name == name
        raise MissingError(f"build.target: {not_installed(name) if absent else broken(name, error)}") from error
    version = str(module.__version__)
    if why := unsupported(name, version):
        raise InputError(f"build.target: {why}. Run: {install_command(name)}")
    return Flavour(name, module, version, look(module, name, version))


def _exists(module: object, path: str) -> bool:
    missing = object()
    value = reduce(lambda owner, part: getattr(owner, part, missing), path.split("."), module)
    return value is not missing


def is_within(number: tuple[int, ...], since: str, until: str) -> bool:
    """Whether a release, as `parse_version` gives it, is `since` or later and before `until`; "" is no bound."""
    return (not since or number >= parse_version(since)) and (not until or number < parse_version(until))

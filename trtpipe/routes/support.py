"""How torch_tensorrt and torch2trt take each builder option, or why they refuse it; nothing heavy is imported.

`ROUTE_OPTIONS` has one row for each field of `BuildOptions`, and a row that takes its option says what of it the
frontend is given: `keywords` passes on what the rows say, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from calib.types import JsonObject
from trtpipe.job.sections import Build
from trtpipe.trt import driver, timing_cache
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.options import asked
from trtpipe.values import Route

POOL_KEYWORDS: Mapping[str, str] = {
    "dla_managed_sram": "dla_sram_size",
    "dla_local_dram": "dla_local_dram_size",
    "dla_global_dram": "dla_global_dram_size",
}

#: A refusal: (what must hold, next step), or None where the value can be honoured.
Rule = Callable[[Any, JsonObject], tuple[str, str] | None]
#: Keyword arguments of a frontend's conversion, of a whole section, the frontend and the TensorRT below it.
Way = Callable[[Build, ModuleType, Flavour], JsonObject]


def _any(_value: Any, _asked: JsonObject) -> None:
    return None


@dataclass(frozen=True)
class Taken:
    """An option that a route honours.

    `by` is the keyword of the frontend's conversion that gets its value, or makes such keywords: it is asked of every
    job. `rule` refuses some values, or some beside others.
    """

    by: str | Way
    rule: Rule = _any


@dataclass(frozen=True)
class Refused:
    """An option that a route does not have, and the next step."""

    step: str = "Leave it out, or use build.route onnx."

    def rule(self, _value: Any, _asked: JsonObject) -> tuple[str, str]:
        """The refusal, whatever the value."""
        return "must not be set", self.step


@dataclass(frozen=True)
class Support:
    """How each route but onnx takes one field of `BuildOptions`; a rule sees its value and all that was asked for."""

    field: str
    torch_tensorrt: Taken | Refused
    torch2trt: Taken | Refused


def _elsewhere(_build: Build, _frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    """No keyword: what the row says is made of it."""
    return {}


def _only(*legal: str, step: str = "") -> Rule:
    """Values among `legal` are taken."""
    text = f"must be {' or '.join(legal)}"
    return lambda value, _asked: None if value in legal else (text, step or f"Use {legal[-1]}, or build.route onnx.")


def _pools(value: Any, wanted: JsonObject) -> tuple[str, str] | None:
    legal = ", ".join(POOL_KEYWORDS)
    if other := [p for p in value if p not in POOL_KEYWORDS]:
        return f"must name pools among {legal}", f"Leave {', '.join(other)} out, or use build.route onnx."
    return _dla_only(value, wanted)


def _pool_sizes(build: Build, _frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    return {POOL_KEYWORDS[pool]: size for pool, size in build.memory_pools.items()}


def _no_lean_runtime(_value: Any, wanted: JsonObject) -> tuple[str, str] | None:
    if "exclude_lean_runtime" in wanted:
        return None
    return (
        "must go with build.exclude_lean_runtime, which Torch-TensorRT always sets",
        "Set both, or use build.route onnx.",
    )


def _refitted(_value: Any, wanted: JsonObject) -> tuple[str, str] | None:
    if wanted.get("refit") in ("all", "identical"):
        return None
    return "must go with build.refit all or identical", "Set build.refit, or use build.route onnx."


def _refit(build: Build, _frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    if build.refit == "none":
        return {}
    return {"immutable_weights": False, "refit_identical_engine_weights": build.refit == "identical"}


def _dla_only(_value: Any, wanted: JsonObject) -> tuple[str, str] | None:
    if wanted.get("default_device_type") == "dla":
        return None
    return "must go with build.default_device_type dla", "Set it, or leave this out."


def _device(build: Build, frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    if build.default_device_type != "dla":
        return {}
    return {"device": frontend.Device(dla_core=build.dla_core or 0, allow_gpu_fallback=build.gpu_fallback)}


def _timing_cache(build: Build, _frontend: ModuleType, tensorrt: Flavour) -> JsonObject:
    if build.timing_cache is None:
        return {}
    here = driver.probe()
    name = timing_cache.file_name(tensorrt, here, here.devices[0])
    return {"timing_cache_path": str(Path(build.timing_cache) / name)}


def _tf32(build: Build, _frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    return {"disable_tf32": not build.tf32}


def _hardware(build: Build, _frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    return {} if build.hardware_compatibility == "none" else {"hardware_compatible": True}


def _device_type(build: Build, _frontend: ModuleType, tensorrt: Flavour) -> JsonObject:
    return {"default_device_type": getattr(tensorrt.module.DeviceType, build.default_device_type.upper())}


def _dla_core(build: Build, _frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    return {"dla_core": build.dla_core or 0}


def _gpu_fallback(build: Build, _frontend: ModuleType, _tensorrt: Flavour) -> JsonObject:
    return {"gpu_fallback": build.gpu_fallback}


def _log_level(build: Build, _frontend: ModuleType, tensorrt: Flavour) -> JsonObject:
    return {"log_level": getattr(tensorrt.module.Logger, build.log_level.upper())}


_PORTABLE = "Leave it out for a portable engine, or use build.route onnx."
_EXPLICIT = "Torch-TensorRT has had no calibrators since 2.9: use explicit."
_NAMES = _only("layer_names_only", step="Use layer_names_only, or build.route onnx.")

ROUTE_OPTIONS: tuple[Support, ...] = (
    Support("compute_capability", Refused(_PORTABLE), Refused()),
    Support("platform", Taken(_elsewhere), Taken(_elsewhere)),  # the job is held against it
    # torch2trt: its int8_mode and its calibrator
    Support("quantization", Taken(_elsewhere, _only("explicit", step=_EXPLICIT)), Taken(_elsewhere)),
    # the file that the calibrator keeps
    Support("calibration_cache", Refused("Leave it out: Torch-TensorRT has no calibrators."), Taken(_elsewhere)),
    # Torch-TensorRT's `Input`s
    Support("profiles", Taken(_elsewhere), Refused("Give one range under inputs, or use build.route onnx.")),
    Support("workspace", Taken("workspace_size"), Taken("max_workspace_size")),
    Support("memory_pools", Taken(_pool_sizes, _pools), Refused()),
    Support("optimization_level", Taken("optimization_level"), Refused()),
    Support("tiling_optimization_level", Taken("tiling_optimization_level"), Refused()),
    Support("l2_limit_for_tiling", Taken("l2_limit_for_tiling"), Refused()),
    Support("max_num_tactics", Refused(), Refused()),
    Support("avg_timing_iterations", Taken("num_avg_timing_iters"), Taken("avg_timing_iterations")),
    Support("max_aux_streams", Taken("max_aux_streams"), Refused()),
    Support("tactic_sources", Refused(), Refused()),
    Support("timing_cache", Taken(_timing_cache), Refused()),
    Support("editable_timing_cache", Refused(), Refused()),
    Support("error_on_timing_cache_miss", Refused(), Refused()),
    Support("profiling_verbosity", Taken(_elsewhere, _NAMES), Taken(_elsewhere, _NAMES)),  # what both always keep
    Support("log_level", Taken(_elsewhere), Taken(_log_level)),  # Torch-TensorRT: what of its loggers is shown
    Support("tf32", Taken(_tf32), Refused()),
    Support("sparse_weights", Taken("sparse_weights"), Refused()),
    Support("strict_nans", Refused(), Refused()),
    Support("direct_io", Refused(), Refused()),
    Support("tensor_formats", Refused(), Refused()),
    Support("hardware_compatibility", Taken(_hardware, _only("ampere_plus")), Refused()),
    Support("version_compatible", Taken("version_compatible", _no_lean_runtime), Refused()),
    Support("exclude_lean_runtime", Taken(_elsewhere), Refused()),  # which it always does
    Support("runtime_platform", Refused(), Refused()),
    Support("strip_plan", Taken("strip_engine_weights", _refitted), Refused()),
    Support("refit", Taken(_refit, _only("all", "identical")), Refused()),
    Support("weight_streaming", Taken("enable_weight_streaming"), Refused()),
    Support("default_device_type", Taken(_device), Taken(_device_type)),
    Support("dla_core", Taken(_device, _dla_only), Taken(_dla_core, _dla_only)),
    Support("gpu_fallback", Taken(_device, _dla_only), Taken(_gpu_fallback, _dla_only)),
    # torch2trt: the device of each module that a glob fits
    Support("device_types", Refused("Use build.default_device_type, or build.route onnx."), Taken(_elsewhere)),
    Support(
        "plugins", Refused("Torch-TensorRT has converters for plugins in their place: use build.route onnx."), Refused()
    ),
)  # fmt: skip


def keywords(route: Route, build: Build, frontend: ModuleType, tensorrt: Flavour) -> JsonObject:
    """The keyword arguments that a route's frontend gets for the builder options, none of which the route refuses.

    Args:
        route: torch_tensorrt or torch2trt.
        build: the job's.
        frontend: the imported module of that route.
        tensorrt: the TensorRT below it.
    """
    wanted = asked(build)
    made: JsonObject = {}
    for row in ROUTE_OPTIONS:
        cell: Taken | Refused = getattr(row, route)
        if isinstance(cell, Refused):
            continue
        if not isinstance(cell.by, str):
            made |= cell.by(build, frontend, tensorrt)
        elif row.field in wanted:
            made[cell.by] = wanted[row.field]
    return made

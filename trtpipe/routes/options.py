"""What the routes torch_tensorrt and torch2trt can honour of a job, judged at plan time; nothing heavy is imported.

`OPTIONS` has one row for each field of `BuildOptions`, which a test keeps so. `refusals` adds to `trt.options`, which
knows what the TensorRT itself can do: here is what the frontend in front of it can pass on.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtpipe.job import Build, Precision
from trtpipe.trt.options import asked, shown
from trtpipe.values import Route

__all__ = ["asked", "installed_frontend", "refusals"]

#: Distribution of Torch-TensorRT by the target it is made for.
FRONTENDS: Mapping[str, str] = {"tensorrt": "torch-tensorrt", "tensorrt_rtx": "torch-tensorrt-rtx"}
#: The Torch-TensorRT whose arguments the tables below were read from.
TESTED = "2.14"
#: Builder options that are one keyword of Torch-TensorRT's conversion, their values taken as they are.
KEYWORDS: Mapping[str, str] = {
    "workspace": "workspace_size",
    "optimization_level": "optimization_level",
    "tiling_optimization_level": "tiling_optimization_level",
    "l2_limit_for_tiling": "l2_limit_for_tiling",
    "avg_timing_iterations": "num_avg_timing_iters",
    "max_aux_streams": "max_aux_streams",
    "sparse_weights": "sparse_weights",
    "version_compatible": "version_compatible",
    "weight_streaming": "enable_weight_streaming",
}
POOL_KEYWORDS: Mapping[str, str] = {
    "dla_managed_sram": "dla_sram_size",
    "dla_local_dram": "dla_local_dram_size",
    "dla_global_dram": "dla_global_dram_size",
}
#: What torch2trt can give its bindings.
TORCH2TRT_DTYPES = ("float32", "float16")

#: A refusal: (what must hold, next step), or None where the value can be honoured.
Rule = Callable[[Any, dict[str, Any]], tuple[str, str] | None]


@dataclass(frozen=True)
class Support:
    """How the two routes take one field of `BuildOptions`; a rule sees its value and all that was asked for."""

    field: str
    torch_tensorrt: Rule
    torch2trt: Rule


def _taken(_value: Any, _asked: dict[str, Any]) -> None:
    return None


def _none(step: str = "Leave it out, or use build.route onnx.") -> Rule:
    return lambda _value, _asked: ("must not be set", step)


def _only(*legal: str, step: str = "") -> Rule:
    """Values among `legal` are taken."""
    text = f"must be {' or '.join(legal)}"
    return lambda value, _asked: None if value in legal else (text, step or f"Use {legal[-1]}, or build.route onnx.")


def _pools(value: Any, wanted: dict[str, Any]) -> tuple[str, str] | None:
    legal = ", ".join(POOL_KEYWORDS)
    if other := [p for p in value if p not in POOL_KEYWORDS]:
        return f"must name pools among {legal}", f"Leave {', '.join(other)} out, or use build.route onnx."
    if wanted.get("default_device_type") != "dla":
        return "must go with build.default_device_type dla", "Set it, or leave this out."
    return None


def _version_compatible(_value: Any, wanted: dict[str, Any]) -> tuple[str, str] | None:
    if "exclude_lean_runtime" in wanted:
        return None
    return (
        "must go with build.exclude_lean_runtime, which Torch-TensorRT always sets",
        "Set both, or use build.route onnx.",
    )


def _strip(_value: Any, wanted: dict[str, Any]) -> tuple[str, str] | None:
    if wanted.get("refit") in ("all", "identical"):
        return None
    return "must go with build.refit all or identical", "Set build.refit, or use build.route onnx."


def _dla_core(_value: Any, wanted: dict[str, Any]) -> tuple[str, str] | None:
    if wanted.get("default_device_type") == "dla":
        return None
    return "must go with build.default_device_type dla", "Set it, or leave this out."


_PORTABLE = "Leave it out for an engine portable from Ampere on, or use build.route onnx."
_EXPLICIT = "Torch-TensorRT has had no calibrators since 2.9: use explicit."
_VERBOSITY = "Use layer_names_only, or build.route onnx."

OPTIONS: tuple[Support, ...] = (
    Support("compute_capability", _none(_PORTABLE), _none()),
    Support("quantization", _only("explicit", step=_EXPLICIT), _taken),
    Support("profiles", _taken, _none("Give one range under inputs, or use build.route onnx.")),
    Support("workspace", _taken, _taken),
    Support("memory_pools", _pools, _none()),
    Support("optimization_level", _taken, _none()),
    Support("tiling_optimization_level", _taken, _none()),
    Support("l2_limit_for_tiling", _taken, _none()),
    Support("max_num_tactics", _none(), _none()),
    Support("avg_timing_iterations", _taken, _taken),
    Support("max_aux_streams", _taken, _none()),
    Support("tactic_sources", _none(), _none()),
    Support("timing_cache", _taken, _none()),
    Support("editable_timing_cache", _none(), _none()),
    Support("error_on_timing_cache_miss", _none(), _none()),
    Support(
        "profiling_verbosity", _only("layer_names_only", step=_VERBOSITY), _only("layer_names_only", step=_VERBOSITY)
    ),
    Support("log_level", _taken, _taken),
    Support("tf32", _taken, _none()),
    Support("sparse_weights", _taken, _none()),
    Support("strict_nans", _none(), _none()),
    Support("direct_io", _none(), _none()),
    Support("tensor_formats", _none(), _none()),
    Support("hardware_compatibility", _only("ampere_plus"), _none()),
    Support("version_compatible", _version_compatible, _none()),
    Support("exclude_lean_runtime", _taken, _none()),
    Support("runtime_platform", _none(), _none()),
    Support("strip_plan", _strip, _none()),
    Support("refit", _only("all", "identical"), _none()),
    Support("weight_streaming", _taken, _none()),
    Support("default_device_type", _taken, _taken),
    Support("dla_core", _dla_core, _dla_core),
    Support("gpu_fallback", _dla_core, _dla_core),
    Support("device_types", _none("Use build.default_device_type, or build.route onnx."), _taken),
)


@dataclass(frozen=True)
class Frontend:
    """An installed Torch-TensorRT, known by package metadata alone."""

    target: str
    distribution: str
    version: str


def installed_frontend() -> Frontend | None:
    """The Torch-TensorRT on this machine; that for TensorRT-RTX where both are, since it wins the import."""
    for target in ("tensorrt_rtx", "tensorrt"):
        try:
            return Frontend(target, FRONTENDS[target], importlib.metadata.version(FRONTENDS[target]))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def refusals(
    build: Build, precision: Precision | None, route: Route, *, frontend: str | None = None
) -> tuple[tuple[str, str], ...]:
    """(dotted option path, message) of every builder option that `route` cannot honour; empty when all is well.

    Args:
        build: the job's build section.
        precision: the job's precision section.
        route: a route; `onnx` refuses nothing here.
        frontend: version of Torch-TensorRT; None where it is not installed, which is another check's business.
    """
    if route == "onnx":
        return ()
    return tuple((path, f"{path}: {message}") for path, message in _refused(build, precision, route, frontend))


def _refused(
    build: Build, precision: Precision | None, route: Route, frontend: str | None
) -> Iterator[tuple[str, str]]:
    wanted = asked(build)
    for support in OPTIONS:
        if support.field not in wanted:
            continue
        rule = support.torch_tensorrt if route == "torch_tensorrt" else support.torch2trt
        if said := rule(wanted[support.field], wanted):
            must, step = said
            yield f"build.{support.field}", f"{must} on route {route} (got {shown(wanted[support.field])}). {step}"
    if route == "torch_tensorrt" and frontend is not None and not re.match(rf"{re.escape(TESTED)}(\.|$)", frontend):
        yield (
            "build.route",
            f"torch_tensorrt must be version {TESTED}, whose arguments are known (got {frontend}). "
            f"Run: pip install '{FRONTENDS.get(build.target, 'torch-tensorrt')}=={TESTED}.*'",
        )

"""What TensorRT-RTX says of a plan before it is loaded: whether the GPU here runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trtpipe.errors import MissingError
from trtpipe.progress import Silent
from trtpipe.trt import flavour, plan
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch, make_logger
from trtpipe.trt.network import enum_name

if TYPE_CHECKING:
    from trtpipe.trt.types import Runtime

_REBUILD = (
    "Build the engine for this GPU's compute capability, or for target tensorrt where TensorRT-RTX does not name it."
)


def require(tensorrt: Flavour, runtime: Runtime, engine: bytes, reason: Callable[[], str]) -> tuple[str, ...]:
    """What TensorRT-RTX remarks on a plan that the GPU here runs.

    Args:
        tensorrt: TensorRT-RTX.
        runtime: one of its runtimes.
        engine: the plan.
        reason: its last error message.

    Raises:
        MissingError: the GPU does not run it.
    """
    found, diagnostics = runtime.get_engine_validity(engine)
    if why := _invalid(tensorrt, found, diagnostics, reason()):
        raise MissingError(f"engine: {why}. {_REBUILD}")
    slower = f"{tensorrt.title} says that the engine may be slower on this GPU than one built for it"
    return (slower,) if enum_name(found) == "SUBOPTIMAL" else ()


def invalid_here(engine: bytes) -> str:
    """Why TensorRT-RTX says that the GPU here does not run a plan, a clause without a full stop; empty where it does
    not say so, as other TensorRTs never do.

    Raises:
        InputError: this is no plan.
        MissingError: no TensorRT.
    """
    tensorrt = flavour.load(plan.read_header(engine).flavour)
    if not tensorrt.has("engine_validity"):
        return ""
    watch = Watch(Silent(), "error")
    logger = make_logger(tensorrt, watch)
    found, diagnostics = tensorrt.module.Runtime(logger).get_engine_validity(engine)
    return _invalid(tensorrt, found, diagnostics, watch.errors[-1] if watch.errors else "no error message")


def _invalid(tensorrt: Flavour, found: object, diagnostics: object, reason: str) -> str:
    if enum_name(found) != "INVALID":
        return ""
    return f"the plan is not valid for this GPU ({tensorrt.title} says INVALID, {diagnostics}; {reason})"

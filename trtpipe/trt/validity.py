"""What TensorRT-RTX says of a plan before it is loaded: whether the GPU here runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.errors import MissingError
from trtpipe.progress import Silent
from trtpipe.trt import flavour, plan
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch, create, make_logger
from trtpipe.trt.network import enum_name

if TYPE_CHECKING:
    from trtpipe.trt.types import Runtime

_REBUILD = (
    "Build the engine for this GPU's compute capability, or for target tensorrt where TensorRT-RTX does not name it."
)


def require(tensorrt: Flavour, runtime: Runtime, engine: bytes, watch: Watch) -> tuple[str, ...]:
    """What TensorRT-RTX remarks on a plan that the GPU here runs.

    Args:
        tensorrt: TensorRT-RTX.
        runtime: one of its runtimes.
        engine: the plan.
        watch: of its logger.

    Raises:
        MissingError: the GPU does not run it.
    """
    found, why = _asked(tensorrt, runtime, engine, watch)
    if why:
        raise MissingError(f"engine: {why}. {_REBUILD}")
    slower = f"{tensorrt.title} says that the engine may be slower on this GPU than one built for it"
    return (slower,) if found == "SUBOPTIMAL" else ()


def invalid_here(engine: bytes) -> str:
    """Why TensorRT-RTX says that the GPU here does not run a plan, a clause without a full stop; empty where it does
    not say so, as other TensorRTs never do.

    Raises:
        InputError: this is no plan.
        MissingError: no TensorRT, or CUDA does not start.
    """
    tensorrt = flavour.load(plan.read_header(engine).flavour)
    if not tensorrt.has("engine_validity"):
        return ""
    watch = Watch(Silent(), "error")
    logger = make_logger(tensorrt, watch)
    return _asked(tensorrt, create(tensorrt, "Runtime", watch, logger), engine, watch)[1]


def _asked(tensorrt: Flavour, runtime: Runtime, engine: bytes, watch: Watch) -> tuple[str, str]:
    """The EngineValidity by name, and why the GPU does not run the plan where that is INVALID, else ""."""
    since = watch.mark()
    validity, diagnostics = runtime.get_engine_validity(engine)
    if (found := enum_name(validity)) != "INVALID":
        return found, ""
    flags = getattr(tensorrt.module, "EngineInvalidityDiagnostics", None)
    known = {} if flags is None else flags.__members__
    named = [name for name, flag in known.items() if int(flag) & int(diagnostics)]
    said = f"{tensorrt.title} says INVALID, {' and '.join(named) or diagnostics}; {watch.reason(since)}"
    return found, f"the plan is not valid for this GPU ({said})"

"""TensorRT's tensor API of an execution context, which every supported release has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtpipe.errors import InputError
from trtpipe.trt.network import DTYPES, enum_name
from trtpipe.values import DimRange, TensorSpec

if TYPE_CHECKING:
    from trtpipe.trt.flavour import Flavour
    from trtpipe.trt.monitor import Watch
    from trtpipe.trt.types import ICudaEngine, IExecutionContext, IOutputAllocator, IProfiler, Runtime

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """One input or output of an engine. `ranges` are (min, opt, max) shapes, one for each profile; () for an output."""

    name: str
    dtype: str
    shape: Shape
    is_input: bool
    ranges: tuple[tuple[Shape, Shape, Shape], ...]


def load_engine(tensorrt: Flavour, runtime: Runtime, plan: bytes, device: str, watch: Watch) -> ICudaEngine:
    """The engine of a plan.

    Args:
        tensorrt: whose runtime it is.
        runtime: loads it.
        plan: its bytes.
        device: the GPU's name.
        watch: of its logger.

    Raises:
        InputError: TensorRT cannot load it.
    """
    since = watch.mark()
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise InputError(
            f"engine: {tensorrt.title} cannot load the plan on {device} ({watch.reason(since)}). "
            "Build the engine on this device."
        )
    return engine


class Tensors:
    """An execution context, given back by `close`: frames of a traceback may hold this object, and not TensorRT's then.

    Args:
        watch: of TensorRT's logger.
    """

    def __init__(self, engine: ICudaEngine, context: IExecutionContext, watch: Watch) -> None:
        self._engine, self._context, self._watch = engine, context, watch
        self._profile, self._shapes = 0, dict[str, Shape]()

    def close(self) -> None:
        """Destroy the context, which must not be executing; nothing else may be called then."""
        self.__dict__.pop("_context", None)
        self.__dict__.pop("_engine", None)

    def set_profiler(self, profiler: IProfiler | None) -> None:
        """Have each layer's time reported to an IProfiler, or to nobody."""
        self._context.profiler = profiler

    def _ask(self, where: str, what: str, function: Callable[..., object], *arguments: object) -> None:
        """Call a function of TensorRT's, and refuse to go on where it refuses: most say so by False alone."""
        since = self._watch.mark()
        if not function(*arguments):
            raise InputError(f"{where}: TensorRT refuses {what} ({self._watch.reason(since)}).")

    def list(self) -> tuple[Binding, ...]:
        """Every binding, in the engine's order."""
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        return tuple(
            Binding(
                name,
                _dtype(engine.get_tensor_dtype(name)),
                tuple(engine.get_tensor_shape(name)),
                is_input := enum_name(engine.get_tensor_mode(name)) == "INPUT",
                tuple(
                    _ranges(engine.get_tensor_profile_shape(name, p)) for p in range(engine.num_optimization_profiles)
                )
                if is_input
                else (),
            )
            for name in names
        )

    def choose(self, profile: int, shapes: Mapping[str, Shape], stream: int) -> bool:
        """Take this profile and these input shapes; whether anything changed.

        Raises:
            InputError: the engine does not take a shape.
        """
        if profile == self._profile and shapes == self._shapes:
            return False
        if profile != self._profile:
            what = f"optimization profile {profile}"
            self._ask("engine", what, self._context.set_optimization_profile_async, profile, stream)
        for name, shape in shapes.items():
            self._ask(f"inputs.{name}", f"the shape {shape}", self._context.set_input_shape, name, shape)
        self._profile, self._shapes = profile, dict(shapes)
        return True

    def shape_of(self, name: str) -> Shape:
        """The shape of an output for the chosen inputs; -1 where only the execution decides it."""
        return tuple(self._context.get_tensor_shape(name))

    def set_output_allocator(self, name: str, allocator: IOutputAllocator, shape: Shape) -> None:
        """Let an IOutputAllocator have the memory of an output of a shape that only the execution decides.

        Raises:
            InputError: TensorRT does not take it.
        """
        what = f"an output allocator for its shape {shape}"
        self._ask(f"outputs.{name}", what, self._context.set_output_allocator, name, allocator)

    def set_address(self, name: str, address: int) -> None:
        """Where a binding is in device memory."""
        self._ask("engine", f"the address of binding {name}", self._context.set_tensor_address, name, address)

    def execute(self, stream: int) -> bool:
        """Enqueue one execution."""
        return bool(self._context.execute_async_v3(stream))


def _dtype(value: object) -> str:
    return DTYPES[enum_name(value)]


def _ranges(shapes: Iterable[Shape]) -> tuple[Shape, Shape, Shape]:
    low, best, high = (tuple(s) for s in shapes)
    return low, best, high


def spec_of(binding: Binding) -> TensorSpec:
    """The binding as a spec: a dynamic dimension is named after binding and axis, and ranges over all profiles."""
    names = [d if d >= 0 else f"{binding.name}_{axis}" for axis, d in enumerate(binding.shape)]
    dims = {}
    for axis, name in enumerate(names):
        if isinstance(name, str) and binding.ranges:
            low, best, high = zip(*binding.ranges, strict=True)
            dims[name] = DimRange(min(s[axis] for s in low), best[0][axis], max(s[axis] for s in high))
    return TensorSpec(binding.name, binding.dtype, tuple(names), dims)

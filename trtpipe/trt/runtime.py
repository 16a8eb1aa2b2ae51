"""A serialized engine executed: named arrays in, named arrays out."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np

from calib.types import Array
from trtpipe.errors import InputError, MissingError
from trtpipe.progress import Silent
from trtpipe.trt import driver, flavour, plan
from trtpipe.trt.calls import Binding, Bindings, Shape, Tensors, spec_of
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.memory import Buffer, Memory, Provider, open_memory
from trtpipe.trt.monitor import Watch, make_logger
from trtpipe.trt.network import enum_name
from trtpipe.values import TensorSpec

if TYPE_CHECKING:
    from trtpipe.trt.types import ICudaEngine, Runtime


class EngineRunner:
    """Runs one engine; a context manager, since the engine, its context and its memory live on the GPU.

    Args:
        engine: the plan's bytes, or its path.
        memory: where device memory comes from; torch, cuda-python or pycuda, whichever works first, when None.
        version_compatible: the plan was built with build.version_compatible, so another release may load it; it then
            brings host code of its own, which is run.
        cuda_graph: capture an execution when shapes change and launch the graph from then on.
        refit: the ONNX file that the engine was built from, whose weights a stripped plan is given.
        api: "tensors" or 8.6's "bindings"; tensors wherever the release has them, when None.

    Raises (on entering):
        InputError: this is no plan, or one that this TensorRT or GPU cannot load.
        MissingError: no GPU, no TensorRT or no provider of device memory.
    """

    def __init__(
        self,
        engine: bytes | Path | str,
        *,
        memory: Provider | Memory | None = None,
        version_compatible: bool = False,
        cuda_graph: bool = False,
        refit: bytes | None = None,
        api: Literal["tensors", "bindings"] | None = None,
    ) -> None:
        self._plan = engine if isinstance(engine, bytes) else Path(engine).read_bytes()
        self._wanted_memory = memory
        self._version_compatible = version_compatible
        self._cuda_graph = cuda_graph
        self._refit = refit
        self._api = api
        self._engine: ICudaEngine | None = None
        self.name = "engine"
        self.bindings: tuple[Binding, ...] = ()
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> EngineRunner:
        try:
            self._open()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # TensorRT's objects must not live on in a traceback
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs; dynamic dimensions are named after input and axis, and range over all profiles."""
        return tuple(spec_of(b) for b in self.bindings if b.is_input)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs; a dynamic dimension has a name and no range."""
        return tuple(spec_of(b) for b in self.bindings if not b.is_input)

    @property
    def device_memory_bytes(self) -> int:
        """Device memory that one execution needs beside the weights and the bindings."""
        engine = self._opened()
        return int(
            engine.device_memory_size_v2 if self._flavour.has("device_memory_size_v2") else engine.device_memory_size
        )

    @property
    def bindings_bytes(self) -> int:
        """Device memory that inputs and outputs of the largest batch so far take."""
        self._opened()
        return sum(buffer.size for buffer in self._buffers.values())

    def layers(self) -> tuple[str, ...]:
        """The layers of the engine by the names that TensorRT gave them after fusion; they begin with module paths.

        Empty when the engine was built with profiling_verbosity none.
        """
        engine = self._opened()
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(self._flavour.module.LayerInformationFormat.JSON)
        entries = json.loads(text).get("Layers", []) if text else []
        return tuple(layer if isinstance(layer, str) else str(layer.get("Name", "")) for layer in entries)

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """The outputs by name in their binding dtypes, copied: a later run does not change them.

        Raises:
            InputError: names, dtypes or shapes are not those of the engine; or an execution failed.
        """
        self._opened()
        arrays = self._checked(inputs)
        shapes = {n: tuple(a.shape) for n, a in arrays.items()}
        calls, memory = self._calls, self._memory
        changed = calls.choose(self._profile_for(shapes), shapes, memory.stream)
        results = {b.name: np.empty(calls.shape_of(b.name), np.dtype(b.dtype)) for b in self.bindings if not b.is_input}
        for name, array in (arrays | results).items():
            changed |= self._reserve(name, array.nbytes)
        for name, array in arrays.items():
            memory.upload(self._buffers[name], array)
        self._execute(changed)
        for name, array in results.items():
            memory.download(self._buffers[name], array)
        memory.synchronize()
        return results

    def _opened(self) -> ICudaEngine:
        """The engine; InputError when the runner is closed."""
        if self._engine is None:
            raise InputError("engine: the runner is not open. Use it as a context manager.")
        return self._engine

    def _open(self) -> None:
        header = plan.read_header(self._plan)
        gpu = driver.require("engine")
        tensorrt = flavour.load(header.flavour)
        device = gpu.devices[0]
        if self._version_compatible and header.flavour == "tensorrt":
            header = plan.PlanHeader(header.flavour, "", header.compute_capabilities, header.length, header.portable)
        if problems := plan.misfits(header, tensorrt.name, tensorrt.version, device.compute_capability):
            raise InputError("\n".join(f"engine: {p}" for p in problems))
        wanted = self._wanted_memory
        self._memory = open_memory(wanted) if wanted is None or isinstance(wanted, str) else wanted
        self._watch = Watch(Silent(), "error")
        self._logger = make_logger(tensorrt, self._watch)
        runtime = tensorrt.module.Runtime(self._logger)
        if self._version_compatible:
            runtime.engine_host_code_allowed = True
        if tensorrt.has("engine_validity"):
            self._ask_validity(tensorrt, runtime)
        engine = runtime.deserialize_cuda_engine(self._plan)
        if engine is None:
            raise InputError(
                f"engine: {tensorrt.title} must load the plan on {device.name} (got {self._reason()}). "
                "Build the engine on this device."
            )
        if self._refit is not None:
            self._give_weights(tensorrt, engine, self._refit)
        if tensorrt.has("weight_streaming") and engine.streamable_weights_size > 0:
            engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        context = engine.create_execution_context()
        if context is None:
            raise MissingError(
                f"engine: an execution context must fit into the GPU's memory (got {self._reason()}). "
                "Stop other programs, or build for a smaller batch."
            )
        self._flavour, self._runtime, self._engine = tensorrt, runtime, engine
        bindings = self._api == "bindings" or not tensorrt.has("tensor_api")
        self._calls: Tensors | Bindings = (Bindings if bindings else Tensors)(engine, context)
        self.bindings = self._calls.list()
        self.profiles = int(engine.num_optimization_profiles)
        self.name = f"{tensorrt.title} on {device.name}"
        self._buffers: dict[str, Buffer] = {}
        self._graph: Callable[[], None] | None = None

    def _ask_validity(self, tensorrt: Flavour, runtime: Runtime) -> None:
        """TensorRT-RTX can say of a plan whether this GPU runs it, before it is loaded."""
        validity, diagnostics = runtime.get_engine_validity(self._plan)
        if enum_name(validity) == "INVALID":
            raise InputError(
                f"engine: {tensorrt.title} must find the plan valid for this GPU (got INVALID, {diagnostics}; "
                f"{self._reason()}). Build the engine for this GPU's compute capability."
            )
        if enum_name(validity) == "SUBOPTIMAL":
            self.notes += (f"{tensorrt.title} says that the engine may be slower on this GPU than one built for it",)

    def _give_weights(self, tensorrt: Flavour, engine: ICudaEngine, onnx: bytes) -> None:
        """Refit every weight of the engine from the ONNX file."""
        refitter = tensorrt.module.Refitter(engine, self._logger)
        parser = tensorrt.module.OnnxParserRefitter(refitter, self._logger)
        if not parser.refit_from_bytes(onnx) or not refitter.refit_cuda_engine():
            raise InputError(
                f"engine: the weights must be those of the graph it was built from (got {self._reason()}). "
                "Give the bundle's own model.onnx."
            )

    def _close(self) -> None:
        """Release in the order that TensorRT requires: context, engine, runtime, logger."""
        for part in ("_graph", "_calls"):
            self.__dict__.pop(part, None)
        self._engine = None
        for part in ("_runtime", "_buffers", "_memory", "_logger"):
            self.__dict__.pop(part, None)

    def _reason(self) -> str:
        return self._watch.errors[-1] if self._watch.errors else "no error message"

    def _checked(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        wanted = {b.name: b for b in self.bindings if b.is_input}
        if set(inputs) != set(wanted):
            raise InputError(f"inputs: must be {', '.join(wanted)} (got {', '.join(inputs)}). Name each one.")
        for name, binding in wanted.items():
            if inputs[name].dtype != np.dtype(binding.dtype):
                raise InputError(f"inputs.{name}: must be {binding.dtype} (got {inputs[name].dtype}). Convert it.")
        return {n: np.ascontiguousarray(a) for n, a in inputs.items()}

    def _profile_for(self, shapes: Mapping[str, Shape]) -> int:
        """The first profile whose ranges hold every shape."""
        wanted = [b for b in self.bindings if b.is_input]
        for number in range(self.profiles):
            if all(_within(shapes[b.name], *b.ranges[number][::2]) for b in wanted):
                return number
        legal = "; ".join(f"{b.name} {' or '.join(f'{r[0]} to {r[2]}' for r in b.ranges)}" for b in wanted)
        got = ", ".join(f"{n} {s}" for n, s in shapes.items())
        raise InputError(
            f"inputs: shapes must be within a profile, {legal} (got {got}). Change the batch or the shape."
        )

    def _reserve(self, name: str, size: int) -> bool:
        """Have `size` bytes for a binding; whether its address changed."""
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.size >= size:
            return False
        self._memory.synchronize()
        self._buffers[name] = self._memory.allocate(size)
        self._calls.set_address(name, self._buffers[name].address)
        return True

    def _execute(self, changed: bool) -> None:
        """Enqueue one execution; `changed` says that a shape or an address is not what a captured graph holds."""
        memory, calls = self._memory, self._calls

        def enqueue() -> None:
            if not calls.execute(memory.stream):
                raise InputError(f"engine: execution must succeed (got {self._reason()}). Check the inputs' values.")

        if changed:
            self._graph = None
        if not self._cuda_graph:
            enqueue()
            return
        if self._graph is None:
            enqueue()  # once outside a capture: TensorRT may still allocate or load kernels
            memory.synchronize()
            self._graph = memory.capture(enqueue)
        self._graph()


def _within(shape: Shape, low: Shape, high: Shape) -> bool:
    return len(shape) == len(low) and all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True))

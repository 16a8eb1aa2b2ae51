"""A serialized engine executed: named arrays in, named arrays out."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np

from calib.files import read_regular
from calib.types import Array
from trtpipe.batching import require_names
from trtpipe.errors import InputError, MissingError
from trtpipe.packages import install_command, pip_install
from trtpipe.progress import Silent
from trtpipe.trt import driver, flavour, plan, validity
from trtpipe.trt.calls import Binding, Shape, Tensors, load_engine, spec_of
from trtpipe.trt.execution import Execution, make_output_allocator
from trtpipe.trt.kernel_cache import KernelCache, kernel_file
from trtpipe.trt.memory import DeviceMemory, Provider, open_memory
from trtpipe.trt.monitor import Watch, create, make_logger
from trtpipe.trt.plugins import load as load_plugins
from trtpipe.trt.refit import give_weights
from trtpipe.values import TensorSpec
from trtpipe.version_numbers import parse_version

#: What a runner says that is used before it is opened, or after it was closed.
NOT_OPEN = "engine: the runner is not open. Use it as a context manager."

if TYPE_CHECKING:
    from trtpipe.trt.types import ICudaEngine, IExecutionContext, Runtime

#: TensorRT-RTX's DynamicShapesKernelSpecializationStrategy.
Specialization = Literal["lazy", "eager", "none"]
#: Execution contexts of one engine.
_UNLIMITED = sys.maxsize


class EngineRunner:
    """Runs one engine; a context manager, since the engine, its contexts and their memory live on the GPU.

    Any number of threads may call `run`: each call has an execution context, a stream and buffers to itself, which the
    next one takes over. There are as many as ever ran at once. TensorRT 8.6 lets one context have a profile: there the
    calls wait for each other. With pycuda only the thread that opened the runner may call it.

    Args:
        engine: the plan's bytes, or its path.
        memory: where device memory comes from: a provider, or what opens one for each context; torch, cuda-python or
            pycuda, whichever works first, when None.
        version_compatible: the plan was built with build.version_compatible, so another release may load it; it then
            brings host code of its own, which is run.
        cuda_graph: capture an execution when shapes change and launch the graph from then on.
        refit: the ONNX file that the engine was built from, whose weights a stripped plan is given.
        without_lean_runtime: the plan was built with build.exclude_lean_runtime: a release other than its own runs it
            with that release's libnvinfer_lean.so, which the loader of libraries has to find.
        specialization: when TensorRT-RTX compiles kernels for the very shapes of a call: "lazy", beside the calls,
            which run general kernels until then; "eager", in the first call; "none". When None, its own choice: lazy.
        plugins: libraries of the engine's plugins, content by name. Their code runs: whose it is must be known before.

    Raises (on entering):
        InputError: this is no plan, or one that this TensorRT or GPU cannot load.
        MissingError: no GPU, no TensorRT or no provider of device memory.
    """

    def __init__(
        self,
        engine: bytes | Path | str,
        *,
        memory: Provider | Callable[[], DeviceMemory] | None = None,
        version_compatible: bool = False,
        cuda_graph: bool = False,
        refit: bytes | None = None,
        without_lean_runtime: bool = False,
        specialization: Specialization | None = None,
        plugins: Mapping[str, bytes] | None = None,
    ) -> None:
        self._plugins = plugins or {}
        self._plan = engine if isinstance(engine, bytes) else read_regular(Path(engine))
        self._open_memory = memory if callable(memory) else lambda: open_memory(memory)
        self._without_lean_runtime = without_lean_runtime
        self._cache: KernelCache | None = None
        self._specialization = specialization
        self._version_compatible = version_compatible
        self._cuda_graph = cuda_graph
        self._refit = refit
        self._engine: ICudaEngine | None = None
        self._turn = threading.Condition()
        self._idle: list[Execution] = []
        self._made, self._most = 0, 1
        self._only_thread: int | None = None
        self._notes: dict[str, None] = {}
        self.name = "engine"
        self.bindings: tuple[Binding, ...] = ()

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
    def notes(self) -> tuple[str, ...]:
        """What users of the outputs should know; there may be more of it after a call."""
        return tuple(self._notes)

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
        """Device memory of inputs and outputs, of the largest batches so far, in the contexts that are not at work."""
        self._opened()
        return sum(execution.device_bytes for execution in self._idle)

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
            InputError: names, dtypes or shapes are not those of the engine; an execution failed; or this is another
                thread than the one that pycuda lets use the GPU.
        """
        self._opened()
        arrays = self._checked(inputs)
        profile = self._profile_for({n: tuple(a.shape) for n, a in arrays.items()})
        with self._execution() as execution:
            return execution.run(profile, arrays)

    @contextlib.contextmanager
    def _execution(self) -> Iterator[Execution]:
        """A context that no other thread has, for the block. One that raised in it is closed and not used again."""
        if self._only_thread not in (None, threading.get_ident()):
            raise InputError(
                "engine: must be run by the thread that opened it, as pycuda is in use (got another thread). Install "
                f"cuda-python: {install_command('cuda')}."
            )
        with self._turn:
            self._turn.wait_for(lambda: self._engine is None or self._idle or self._made < self._most)
            self._opened()
            execution = self._idle.pop() if self._idle else None
            self._made += execution is None
        fresh = execution is None
        try:
            if execution is None:
                execution = self._new_execution()
            yield execution
            if fresh:
                self._keep_compiled()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # TensorRT's objects must not live on in a traceback
            self._give_up(execution)
            raise
        with self._turn:
            if self._engine is not None:
                self._idle.append(execution)
                self._turn.notify()
                return
        self._give_up(execution)

    def _give_up(self, execution: Execution | None) -> None:
        if execution is not None:
            execution.close()
        with self._turn:
            self._made -= 1
            self._turn.notify()

    def _opened(self) -> ICudaEngine:
        """The engine; InputError when the runner is closed."""
        if self._engine is None:
            raise InputError(NOT_OPEN)
        return self._engine

    def _open(self) -> None:
        header = plan.read_header(self._plan)
        gpu = driver.require("engine")
        tensorrt = flavour.load(header.flavour)
        device = gpu.devices[0]
        built_by = header.version
        plan.require_fit(
            header,
            tensorrt.name,
            tensorrt.version,
            device.compute_capability,
            version_compatible=self._version_compatible,
        )
        self._watch = Watch(Silent(), "error")
        self._logger = make_logger(tensorrt, self._watch)
        runtime = create(tensorrt, "Runtime", self._watch, self._logger)
        load_plugins(tensorrt, self._plugins, self._watch)
        if self._version_compatible:
            runtime.engine_host_code_allowed = True
        another = built_by and not flavour.same_release(built_by, tensorrt.version)
        if self._without_lean_runtime and tensorrt.name == "tensorrt" and another:
            runtime = self._load_lean(runtime, built_by)
        if tensorrt.has("engine_validity"):
            self._note(*validity.require(tensorrt, runtime, self._plan, self._watch))
        engine = load_engine(tensorrt, runtime, self._plan, device.name, self._watch)
        self._note(*self._watch.notes)
        if self._refit is not None:
            give_weights(tensorrt, engine, self._logger, self._refit, self._watch, "Give the bundle's own model.onnx.")
        if tensorrt.has("weight_streaming") and engine.streamable_weights_size > 0:
            engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        self._flavour, self._runtime, self._engine = tensorrt, runtime, engine
        if tensorrt.has("runtime_cache"):
            try:
                self._cache = KernelCache(kernel_file(self._plan, device))
            except InputError as error:  # the user has no folder for it
                self._note(f"kernels compiled for this GPU are not kept: {error}")
        self.profiles = int(engine.num_optimization_profiles)
        self.name = f"{tensorrt.title} on {device.name}"
        began = time.monotonic()
        first = self._new_execution()
        self._idle, self._made = [first], 1
        seconds, new = time.monotonic() - began, self._cache is not None and self._cache.new
        self._keep_compiled()
        if self._cache is not None and new and not self._cache.new:
            self._note(
                f"{tensorrt.title} compiled the engine for this GPU in {seconds:.1f} s; the next load takes what was "
                f"compiled from {self._cache.path}"
            )
        self.bindings = first.calls.list()
        self._most = 1 if tensorrt.has("bindings_api") else _UNLIMITED
        self._only_thread = threading.get_ident() if first.memory.provider == "pycuda" else None

    def _new_execution(self) -> Execution:
        """A context of its own, with a stream and buffers."""
        tensorrt, engine = self._flavour, self._opened()
        memory = self._open_memory()
        try:
            calls = Tensors(engine, self._new_context(), self._watch)
            return Execution(
                calls,
                memory,
                cuda_graph=self._cuda_graph,
                allocator=lambda outputs: make_output_allocator(tensorrt, outputs),
                watch=self._watch,
            )
        except BaseException:
            memory.close()
            raise

    def _new_context(self) -> IExecutionContext:
        """An execution context; MissingError where there is no memory for it."""
        engine = self._opened()
        specialization = self._specialization if self._flavour.has("shape_specialization") else None
        configured = self._cache is not None or specialization is not None
        config = engine.create_runtime_config() if configured else None
        if self._cache is not None:
            self._note(*self._cache.attach(config))
        if specialization is not None and config is not None:
            strategies = self._flavour.module.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = getattr(strategies, specialization.upper())
        since = self._watch.mark()
        context = engine.create_execution_context(*(() if config is None else (config,)))
        if context is None:
            raise MissingError(
                f"engine: an execution context does not fit into the GPU's memory ({self._watch.reason(since)}). "
                "Stop other programs, or build for a smaller batch."
            )
        return context

    def _load_lean(self, runtime: Runtime, version: str) -> Runtime:
        """The runtime of a release's lean runtime, for plans that were built without one."""
        since = self._watch.mark()
        library = f"libnvinfer_lean.so.{version.partition('.')[0]}"
        spec = importlib.util.find_spec("tensorrt_lean_libs")  # pip's, where the loader of libraries does not look
        for folder in ("", *(spec.submodule_search_locations or () if spec else ())):
            if (loaded := runtime.load_runtime(os.path.join(folder, library))) is not None:
                return loaded
        release = ".".join(map(str, parse_version(version)[:3]))
        raise InputError(
            f"engine: the plan was built without a lean runtime, and {library} of TensorRT {version} cannot be "
            f"loaded ({self._watch.reason(since)}). Install it: {pip_install(f'tensorrt-lean=={release}.*')}."
        )

    def _close(self) -> None:
        """Release in the order of TensorRT: contexts, engine, runtime, logger. Running contexts are closed later."""
        with self._turn:
            idle, self._idle = self._idle, []
            self._made -= len(idle)
            engine, self._engine = self._engine, None
            self._turn.notify_all()
        for execution in idle:
            execution.close()
        del engine
        try:
            self._keep_compiled()
        finally:
            self._cache = None
            for part in ("_runtime", "_logger"):
                self.__dict__.pop(part, None)

    def _keep_compiled(self) -> None:
        """Write what was compiled for this GPU: after a load, and after the first call in each context."""
        if self._cache is not None:
            self._note(*self._cache.save())

    def _note(self, *notes: str) -> None:
        self._notes |= dict.fromkeys(notes)

    def _checked(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        wanted = {b.name: b for b in self.bindings if b.is_input}
        require_names(inputs, wanted)
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


def _within(shape: Shape, low: Shape, high: Shape) -> bool:
    return len(shape) == len(low) and all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True))

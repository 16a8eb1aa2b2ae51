"""An engine timed by the GPU itself, with CUDA events of the driver API, whatever the device memory comes from."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from calib.types import Array
from trtpipe.errors import MissingError
from trtpipe.trt.driver import LIBRARY, error_name
from trtpipe.trt.owned import Owned, Owner
from trtpipe.trt.runtime import EngineRunner


class TimedEngine(EngineRunner):
    """An `EngineRunner` that can say how long the GPU took over one execution."""

    def __init__(
        self,
        engine: bytes,
        *,
        cuda_graph: bool = False,
        version_compatible: bool = False,
        without_lean_runtime: bool = False,
        refit: bytes | None = None,
        plugins: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__(
            engine,
            cuda_graph=cuda_graph,
            version_compatible=version_compatible,
            without_lean_runtime=without_lean_runtime,
            refit=refit,
            plugins=plugins,
            specialization="eager",  # else the first runs time general kernels, and who knows when they end
        )

    def __enter__(self) -> TimedEngine:
        super().__enter__()
        return self

    def milliseconds(self, inputs: Mapping[str, Array], *, transfers: bool) -> float:
        """Time between two CUDA events around one execution.

        Args:
            inputs: [B, ...] as for `run`, which must have been called with these shapes before.
            transfers: whether the copies of inputs to the GPU and of outputs from it lie between the events.

        Raises:
            InputError: as `run` does.
            MissingError: the driver refuses an event.
        """
        arrays = self._checked(inputs)
        profile = self._profile_for({n: tuple(a.shape) for n, a in arrays.items()})
        with self._execution() as execution, _Events() as events:
            stream, changed = execution.memory.stream, execution.prepare(profile, arrays)
            if not transfers:
                execution.upload()
            events.record(0, stream)
            if transfers:
                execution.upload()
            execution.enqueue(changed)
            if transfers:
                execution.download()
            events.record(1, stream)
            return events.milliseconds()

    def layer_ms(self, inputs: Mapping[str, Array]) -> tuple[tuple[str, float], ...]:
        """Milliseconds of each layer of one execution, in order, as TensorRT's profiler (IProfiler) reports them.

        Args:
            inputs: [B, ...] as for `run`.
        """
        times: list[tuple[str, float]] = []
        trt = self._flavour.module

        class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.IProfiler.__init__(self)  # pybind11 wants the base called by name

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                times.append((layer_name, float(ms)))

        arrays = self._checked(inputs)
        profile = self._profile_for({n: tuple(a.shape) for n, a in arrays.items()})
        with self._execution() as execution:
            execution.calls.set_profiler(Profiler())
            try:
                execution.run(profile, arrays)
            finally:
                execution.calls.set_profiler(None)
        return tuple(times)


class _Events:
    """Two CUDA events of the driver API."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        self._owner = Owner()
        self._events: list[Owned] = []

    def __enter__(self) -> _Events:
        try:
            for _ in range(2):
                event = ctypes.c_void_p()
                self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
                self._events.append(self._owner.own(event, lambda made: self._call("cuEventDestroy_v2", made)))
        except BaseException:
            self._owner.free_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.free_all()

    def record(self, which: int, stream: int) -> None:
        """Put event 0 or 1 on the stream."""
        self._call("cuEventRecord", self._events[which].value, ctypes.c_void_p(stream))

    def milliseconds(self) -> float:
        """Wait for the second event; the time since the first."""
        self._call("cuEventSynchronize", self._events[1].value)
        elapsed = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(elapsed), *(event.value for event in self._events))
        return float(elapsed.value)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise MissingError(f"bench: {name}: {error_name(self._cuda, status)}. Stop other programs on the GPU.")

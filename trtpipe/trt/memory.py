"""Device memory and a stream from whatever is installed: torch, else cuda-python, else pycuda.

Each provider gives the same few things to `execution` and to the calibrators: a stream's handle, device and page-locked
host memory, copies ordered on the stream, CUDA graphs. `close` gives all of it back; each part goes earlier where it is
freed or dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from calib.types import Array
from trtpipe.errors import MissingError, first_line
from trtpipe.packages import present, version
from trtpipe.trt.driver import INSTALL_ONE, memory_command, probe
from trtpipe.trt.owned import Owned, Owner

if TYPE_CHECKING:
    import torch

Provider = Literal["torch", "cuda-python", "pycuda"]


@dataclass(frozen=True)
class Buffer:
    """`size` bytes of device memory at `address`; `owner` keeps them allocated."""

    address: int
    size: int
    owner: Owned

    def free(self) -> None:
        """Give the memory back; nothing on the stream may still use it."""
        self.owner.free()


@dataclass(frozen=True)
class HostBuffer:
    """Page-locked host memory, which the GPU copies from and to by itself. `array` is uint8 [size]."""

    array: Array
    owner: Owned

    def free(self) -> None:
        """Give the memory back; `array` must not be used any more."""
        self.owner.free()


@dataclass(frozen=True)
class Graph:
    """A captured CUDA graph; `launch` puts it on the stream."""

    launch: Callable[[], None]
    owner: Owned

    def free(self) -> None:
        """Destroy it; it must not be running."""
        self.owner.free()


class DeviceMemory(Protocol):
    """A stream on one GPU, and memory of that GPU."""

    provider: Provider
    stream: int

    def allocate(self, size: int) -> Buffer:
        """At least `size` bytes, at least one."""

    def allocate_host(self, size: int) -> HostBuffer:
        """`size` bytes of page-locked host memory, at least one."""

    def upload(self, buffer: Buffer, array: Array) -> None:
        """Copy an array, contiguous and of any dtype, in, ordered on the stream; leave it alone until `synchronize`."""

    def download(self, buffer: Buffer, array: Array) -> None:
        """Copy it to an array, contiguous and of any dtype, ordered on the stream; read that after `synchronize`."""

    def synchronize(self) -> None:
        """Wait for everything on the stream."""

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Record what `enqueue` puts on the stream as a CUDA graph; MissingError where the provider has none."""

    def place(self, array: Array) -> tuple[int, object]:
        """The address of a copy of the array, of any dtype, on the device, and what keeps it there; synchronous."""

    def close(self) -> None:
        """Give back everything: graphs, buffers, the stream."""


def open_memory(
    provider: Provider | None = None, *, asking: Callable[[Provider], object] = lambda provider: None
) -> DeviceMemory:
    """Memory of the current GPU by the first provider that works, or by the one named.

    Args:
        provider: asked alone.
        asking: called with each provider before it is asked, as one may end the process.

    Raises:
        MissingError: when none works; the message says why each did not.
    """
    reasons, refused = [], False
    for name in (provider,) if provider else tuple(_PROVIDERS):
        asking(name)
        try:
            return _PROVIDERS[name]()
        except _Unusable as error:
            reasons.append(f"{name}: {error}")
            refused |= isinstance(error.__cause__, _CudaError)
    cuda, installed = probe().cuda, version("cuda")
    if refused and installed and installed.partition(".")[0] == cuda.partition(".")[0]:
        step = "cuda-python is of the driver's own CUDA: see what `nvidia-smi` says, or install a newer driver."
    else:
        step = f"{INSTALL_ONE}{memory_command(cuda)}."
    raise MissingError(
        f"device memory: none of torch with CUDA, cuda-python and pycuda works ({'; '.join(reasons)}). {step}"
    )


class _Unusable(Exception):
    """Why a provider cannot be used here."""


class TorchMemory:
    """Memory from torch's caching allocators, on a stream of its own."""

    provider: Provider = "torch"

    def __init__(self) -> None:
        if not present("torch"):
            raise _Unusable("not installed")
        torch: ModuleType = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise _Unusable("built without CUDA, or sees no GPU")
        self._torch, self._owner = torch, Owner()
        with _said(RuntimeError):
            self._stream = torch.cuda.Stream()
        self.stream = int(self._stream.cuda_stream)

    def allocate(self, size: int) -> Buffer:
        """See `DeviceMemory`."""
        with self._on_stream():
            tensor = self._torch.empty(max(size, 1), dtype=self._torch.uint8, device="cuda")
        return Buffer(tensor.data_ptr(), size, self._owner.own(tensor))

    def allocate_host(self, size: int) -> HostBuffer:
        """See `DeviceMemory`."""
        with _said(RuntimeError):
            tensor = self._torch.empty(max(size, 1), dtype=self._torch.uint8, pin_memory=True)
        return HostBuffer(tensor.numpy()[:size], self._owner.own(tensor))

    def upload(self, buffer: Buffer, array: Array) -> None:
        """See `DeviceMemory`."""
        with self._on_stream():
            self._device(buffer, array).copy_(self._host(array), non_blocking=True)

    def download(self, buffer: Buffer, array: Array) -> None:
        """See `DeviceMemory`."""
        with self._on_stream():
            self._host(array).copy_(self._device(buffer, array), non_blocking=True)

    def synchronize(self) -> None:
        """See `DeviceMemory`."""
        with _said(RuntimeError):
            self._stream.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """See `DeviceMemory`."""
        graph = self._torch.cuda.CUDAGraph()
        with (
            _said(RuntimeError),
            self._torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            enqueue()

        def launch() -> None:
            with self._on_stream():
                graph.replay()

        return Graph(launch, self._owner.own(graph, lambda captured: captured.reset()))

    def place(self, array: Array) -> tuple[int, object]:
        """See `DeviceMemory`."""
        return _placed(self, array)

    def close(self) -> None:
        """See `DeviceMemory`."""
        self._owner.free_all()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with _said(RuntimeError), self._torch.cuda.stream(self._stream):
            yield

    def _host(self, array: Array) -> torch.Tensor:
        if not array.flags.writeable:
            array = array.copy()  # torch warns of tensors over memory that it must not write to
        host: torch.Tensor = self._torch.from_numpy(array.reshape(-1).view(np.uint8))
        return host

    def _device(self, buffer: Buffer, array: Array) -> torch.Tensor:
        used: torch.Tensor = buffer.owner.value[: array.nbytes]
        return used


class CudaPythonMemory:
    """Memory by NVIDIA's cuda-python, from its runtime API."""

    provider: Provider = "cuda-python"

    def __init__(self) -> None:
        self._cuda, self._owner = _cuda_runtime(), Owner()
        try:
            if not self._call("cudaGetDeviceCount"):
                raise _Unusable("sees no GPU")
        except _CudaError as error:
            raise _Unusable(str(error)) from error
        self._stream = self._own("cudaStreamCreate", "cudaStreamDestroy")  # a full GPU says so here
        self.stream = int(self._stream.value)

    def allocate(self, size: int) -> Buffer:
        """See `DeviceMemory`."""
        owned = self._own("cudaMalloc", "cudaFree", max(size, 1))
        return Buffer(int(owned.value), size, owned)

    def allocate_host(self, size: int) -> HostBuffer:
        """See `DeviceMemory`."""
        owned = self._own("cudaMallocHost", "cudaFreeHost", max(size, 1))
        block = (ctypes.c_uint8 * max(size, 1)).from_address(int(owned.value))
        return HostBuffer(np.frombuffer(memoryview(block), np.uint8)[:size], owned)

    def upload(self, buffer: Buffer, array: Array) -> None:
        """See `DeviceMemory`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", buffer.address, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, buffer: Buffer, array: Array) -> None:
        """See `DeviceMemory`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, buffer.address, array.nbytes, kind, self.stream)

    def synchronize(self) -> None:
        """See `DeviceMemory`."""
        self._call("cudaStreamSynchronize", self.stream)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """See `DeviceMemory`."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(_CudaError):  # until the capture ends, the stream takes no other work
                self._own("cudaStreamEndCapture", "cudaGraphDestroy", self.stream).free()
            raise
        graph = self._own("cudaStreamEndCapture", "cudaGraphDestroy", self.stream)
        try:
            executable = self._own("cudaGraphInstantiate", "cudaGraphExecDestroy", graph.value, 0)
        finally:
            graph.free()
        return Graph(lambda: self._call("cudaGraphLaunch", executable.value, self.stream), executable)

    def place(self, array: Array) -> tuple[int, object]:
        """See `DeviceMemory`."""
        return _placed(self, array)

    def close(self) -> None:
        """See `DeviceMemory`."""
        self._owner.free_all()

    def _own(self, make: str, give_back: str, *arguments: object) -> Owned:
        """What a function makes, to be given back by another."""
        return self._owner.own(self._call(make, *arguments), lambda value: self._call(give_back, value))

    def _call(self, name: str, *arguments: object) -> Any:
        """The result of a CUDA function. cuda-python returns (error code, results...); a broken driver may raise."""
        try:
            status, *results = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:
            raise _CudaError(f"{name}: {error}") from error
        if int(status) != 0:
            raise _CudaError(f"{name}: {getattr(status, 'name', status)}")
        return results[0] if results else None


def _placed(memory: DeviceMemory, array: Array) -> tuple[int, object]:
    """The address of a copy of the array in device memory, and its owner."""
    buffer = memory.allocate(array.nbytes)
    memory.upload(buffer, np.ascontiguousarray(array))
    memory.synchronize()
    return buffer.address, buffer.owner


class _CudaError(MissingError):
    """A CUDA call failed."""


@contextlib.contextmanager
def _said(*kinds: type[BaseException]) -> Iterator[None]:
    """What a provider raises where a CUDA call fails, as the user's to see: a full GPU is no bug."""
    try:
        yield
    except kinds as error:
        raise _CudaError(f"device memory: {first_line(error)}") from error


def _cuda_runtime() -> ModuleType:
    for module in ("cuda.bindings.runtime", "cuda.cudart"):
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise _Unusable("not installed")


class PycudaMemory:
    """Memory by pycuda, which is what older Jetsons have; only the thread that makes it may use it."""

    provider: Provider = "pycuda"

    def __init__(self) -> None:
        try:
            import pycuda.autoinit
            import pycuda.driver
        except ImportError as error:
            raise _Unusable("not installed") from error
        except Exception as error:
            raise _Unusable(str(error)) from error
        self._cuda: ModuleType = pycuda.driver
        self._context, self._owner = pycuda.autoinit.context, Owner()
        self._stream = pycuda.driver.Stream()
        self.stream = int(self._stream.handle)

    def allocate(self, size: int) -> Buffer:
        """See `DeviceMemory`."""
        with _said(self._cuda.Error):
            allocation = self._cuda.mem_alloc(max(size, 1))
        return Buffer(int(allocation), size, self._owner.own(allocation, lambda made: made.free()))

    def allocate_host(self, size: int) -> HostBuffer:
        """See `DeviceMemory`."""
        with _said(self._cuda.Error):
            array = self._cuda.pagelocked_empty(max(size, 1), np.uint8)
        return HostBuffer(array[:size], self._owner.own(array))

    def upload(self, buffer: Buffer, array: Array) -> None:
        """See `DeviceMemory`."""
        with _said(self._cuda.Error):
            self._cuda.memcpy_htod_async(buffer.address, array, self._stream)

    def download(self, buffer: Buffer, array: Array) -> None:
        """See `DeviceMemory`."""
        with _said(self._cuda.Error):
            self._cuda.memcpy_dtoh_async(array, buffer.address, self._stream)

    def synchronize(self) -> None:
        """See `DeviceMemory`."""
        with _said(self._cuda.Error):
            self._stream.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """See `DeviceMemory`; refused, as pycuda has no stable CUDA graphs."""
        raise MissingError("engine: CUDA graphs need torch or cuda-python, and pycuda is in use. Install cuda-python.")

    def place(self, array: Array) -> tuple[int, object]:
        """See `DeviceMemory`."""
        return _placed(self, array)

    def close(self) -> None:
        """See `DeviceMemory`."""
        self._owner.free_all()


_PROVIDERS: dict[Provider, Callable[[], DeviceMemory]] = {
    "torch": TorchMemory,
    "cuda-python": CudaPythonMemory,
    "pycuda": PycudaMemory,
}

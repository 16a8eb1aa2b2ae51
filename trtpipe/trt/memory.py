"""Device memory and a stream from whatever is installed: torch, else cuda-python, else pycuda.

Each provider gives the same few things to `runtime` and to the calibrators: a stream's handle, buffers with an address,
copies ordered on the stream. What owns the memory is held by the `Buffer`; dropping it frees the memory.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from calib.types import Array
from trtpipe.errors import MissingError
from trtpipe.packages import install_command

if TYPE_CHECKING:
    import torch

Provider = Literal["torch", "cuda-python", "pycuda"]


@dataclass(frozen=True)
class Buffer:
    """`size` bytes of device memory at `address`; `owner` keeps them allocated."""

    address: int
    size: int
    owner: object


class Memory(Protocol):
    """A stream on one GPU, and memory of that GPU."""

    provider: Provider
    stream: int

    def allocate(self, size: int) -> Buffer:
        """At least `size` bytes, at least one."""

    def upload(self, buffer: Buffer, array: Array) -> None:
        """Copy a contiguous array into the buffer, ordered on the stream."""

    def download(self, buffer: Buffer, array: Array) -> None:
        """Copy the buffer into a contiguous array, ordered on the stream; read it after `synchronize`."""

    def synchronize(self) -> None:
        """Wait for everything on the stream."""

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Record what `enqueue` puts on the stream as a CUDA graph; calling the result launches it."""

    def place(self, array: Array) -> tuple[int, object]:
        """The address of a copy of the array on the device, and what keeps it there; synchronous."""


def open_memory(provider: Provider | None = None) -> Memory:
    """Memory of the current GPU by the first provider that works, or by the one named.

    Raises:
        MissingError: when none works; the message says why each did not.
    """
    reasons = []
    for name in (provider,) if provider else tuple(_PROVIDERS):
        try:
            return _PROVIDERS[name]()
        except _Unusable as error:
            reasons.append(f"{name}: {error}")
    raise MissingError(
        f"device memory: torch with CUDA, cuda-python or pycuda must work (got {'; '.join(reasons)}). "
        f"Install one: {install_command('cuda')}."
    )


class _Unusable(Exception):
    """Why a provider cannot be used here."""


class TorchMemory:
    """Memory from torch's caching allocator, on a stream of its own."""

    provider: Provider = "torch"

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise _Unusable("not installed")
        torch: ModuleType = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise _Unusable("built without CUDA, or sees no GPU")
        self._torch = torch
        self._stream = torch.cuda.Stream()
        self.stream = int(self._stream.cuda_stream)

    def allocate(self, size: int) -> Buffer:
        """See `Memory`."""
        with self._torch.cuda.stream(self._stream):
            owner = self._torch.empty(max(size, 1), dtype=self._torch.uint8, device="cuda")
        return Buffer(owner.data_ptr(), size, owner)

    def upload(self, buffer: Buffer, array: Array) -> None:
        """See `Memory`."""
        with self._torch.cuda.stream(self._stream):
            self._bytes(buffer, array).copy_(self._host(array), non_blocking=True)

    def download(self, buffer: Buffer, array: Array) -> None:
        """See `Memory`."""
        with self._torch.cuda.stream(self._stream):
            self._host(array).copy_(self._bytes(buffer, array), non_blocking=True)

    def synchronize(self) -> None:
        """See `Memory`."""
        self._stream.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """See `Memory`."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            enqueue()

        def launch() -> None:
            with self._torch.cuda.stream(self._stream):
                graph.replay()

        return launch

    def place(self, array: Array) -> tuple[int, object]:
        """See `Memory`."""
        buffer = self.allocate(array.nbytes)
        self.upload(buffer, np.ascontiguousarray(array))
        self.synchronize()
        return buffer.address, buffer

    def _host(self, array: Array) -> torch.Tensor:
        if not array.flags.writeable:
            array = array.copy()  # torch warns of tensors over memory that it must not write to
        host: torch.Tensor = self._torch.from_numpy(array.reshape(-1).view(np.uint8))
        return host

    def _bytes(self, buffer: Buffer, array: Array) -> torch.Tensor:
        used: torch.Tensor = cast("torch.Tensor", buffer.owner)[: array.nbytes]
        return used


class _Freed:
    """Calls `free` on the address when it is dropped."""

    def __init__(self, address: int, free: Callable[[int], object]) -> None:
        self._address, self._free = address, free

    def __del__(self) -> None:
        self._free(self._address)


class CudaPythonMemory:
    """Memory by NVIDIA's cuda-python, from its runtime API."""

    provider: Provider = "cuda-python"

    def __init__(self) -> None:
        self._cuda = _cuda_runtime()
        try:
            count = self._call("cudaGetDeviceCount")
            if not count:
                raise _Unusable("sees no GPU")
            self.stream = int(self._call("cudaStreamCreate"))
        except _CudaError as error:
            raise _Unusable(str(error)) from error

    def __del__(self) -> None:
        if hasattr(self, "stream"):
            self._cuda.cudaStreamDestroy(self.stream)

    def allocate(self, size: int) -> Buffer:
        """See `Memory`."""
        address = int(self._call("cudaMalloc", max(size, 1)))
        return Buffer(address, size, _Freed(address, self._cuda.cudaFree))

    def upload(self, buffer: Buffer, array: Array) -> None:
        """See `Memory`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", buffer.address, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, buffer: Buffer, array: Array) -> None:
        """See `Memory`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, buffer.address, array.nbytes, kind, self.stream)

    def synchronize(self) -> None:
        """See `Memory`."""
        self._call("cudaStreamSynchronize", self.stream)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """See `Memory`."""
        self._call(
            "cudaStreamBeginCapture", self.stream, self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        )
        try:
            enqueue()
        finally:
            graph = self._call("cudaStreamEndCapture", self.stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        return lambda: self._call("cudaGraphLaunch", executable, self.stream)

    def place(self, array: Array) -> tuple[int, object]:
        """See `Memory`."""
        buffer = self.allocate(array.nbytes)
        self.upload(buffer, np.ascontiguousarray(array))
        self.synchronize()
        return buffer.address, buffer

    def _call(self, name: str, *arguments: object) -> Any:
        """The result of a CUDA function. cuda-python returns (error code, results...); a broken driver may raise."""
        try:
            status, *results = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:
            raise _CudaError(f"{name}: {error}") from error
        if int(status) != 0:
            raise _CudaError(f"{name}: {getattr(status, 'name', status)}")
        return results[0] if results else None


class _CudaError(MissingError):
    """A CUDA call failed."""


def _cuda_runtime() -> ModuleType:
    for module in ("cuda.bindings.runtime", "cuda.cudart"):
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise _Unusable("not installed")


class PycudaMemory:
    """Memory by pycuda, which is what older Jetsons have."""

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
        self._context = pycuda.autoinit.context
        self._stream = pycuda.driver.Stream()
        self.stream = int(self._stream.handle)

    def allocate(self, size: int) -> Buffer:
        """See `Memory`."""
        owner = self._cuda.mem_alloc(max(size, 1))
        return Buffer(int(owner), size, owner)

    def upload(self, buffer: Buffer, array: Array) -> None:
        """See `Memory`."""
        self._cuda.memcpy_htod_async(buffer.address, array, self._stream)

    def download(self, buffer: Buffer, array: Array) -> None:
        """See `Memory`."""
        self._cuda.memcpy_dtoh_async(array, buffer.address, self._stream)

    def synchronize(self) -> None:
        """See `Memory`."""
        self._stream.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Refused: pycuda has no stable CUDA graphs."""
        raise MissingError("CUDA graphs: torch or cuda-python must be installed (got pycuda). Install cuda-python.")

    def place(self, array: Array) -> tuple[int, object]:
        """See `Memory`."""
        buffer = self.allocate(array.nbytes)
        self._cuda.memcpy_htod(buffer.address, np.ascontiguousarray(array))
        return buffer.address, buffer


_PROVIDERS: dict[Provider, Callable[[], Memory]] = {
    "torch": TorchMemory,
    "cuda-python": CudaPythonMemory,
    "pycuda": PycudaMemory,
}

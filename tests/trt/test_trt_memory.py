from __future__ import annotations

import ctypes
import gc
import importlib.util
import sys
import types

import numpy as np
import pytest

from trtpipe.errors import MissingError
from trtpipe.trt import memory
from trtpipe.trt.memory import CudaPythonMemory, PycudaMemory, open_memory


class Status(int):
    name = "cudaErrorMemoryAllocation"


class Runtime:
    """cuda-python's runtime module over host memory: each function returns (error code, results...)."""

    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=3)

    def __init__(self, **failing):
        self.failing, self.calls, self.live = failing, [], {}

    def __getattr__(self, name):
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name in self.failing:
                failure = self.failing[name]
                if isinstance(failure, Exception):
                    raise failure
                return (failure,)
            result = getattr(self, f"do_{name}", lambda *_: None)(*arguments)
            return (Status(0),) if result is None else (Status(0), result)

        return call

    def do_cudaGetDeviceCount(self):
        return 1

    def do_cudaStreamCreate(self):
        return 0x57AE

    def do_cudaMalloc(self, size):
        block = ctypes.create_string_buffer(size)
        self.live[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def do_cudaFree(self, address):
        del self.live[address]

    def do_cudaMemcpyAsync(self, to, source, size, kind, stream):
        ctypes.memmove(to, source, size)

    def do_cudaStreamEndCapture(self, stream):
        return "graph"

    def do_cudaGraphInstantiate(self, graph, flags):
        return f"executable {graph}"


@pytest.fixture
def runtime(monkeypatch):
    def use(**failing):
        made = Runtime(**failing)
        monkeypatch.setattr(memory, "_cuda_runtime", lambda: made)
        return made

    return use


def test_cuda_python_round_trip_and_free(runtime):
    cuda = runtime()
    device = CudaPythonMemory()
    assert device.stream == 0x57AE
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = device.allocate(array.nbytes)
    device.upload(buffer, array)
    back = np.zeros_like(array)
    device.download(buffer, back)
    device.synchronize()
    assert np.array_equal(back, array)
    assert len(cuda.live) == 1
    del buffer
    gc.collect()
    assert cuda.live == {}


def test_cuda_python_places_a_batch_that_lives_as_long_as_its_owner(runtime):
    cuda = runtime()
    device = CudaPythonMemory()
    array = np.arange(6, dtype=np.float32)[::2]  # not contiguous
    address, owner = device.place(array)
    assert np.array_equal(np.frombuffer(cuda.live[address].raw, np.float32), [0, 2, 4])
    assert "cudaStreamSynchronize" in cuda.calls
    del owner
    gc.collect()
    assert cuda.live == {}


def test_cuda_python_captures_a_graph(runtime):
    cuda = runtime()
    device, seen = CudaPythonMemory(), []
    launch = device.capture(lambda: seen.append("enqueued"))
    assert seen == ["enqueued"]
    launch()
    launch()
    assert cuda.calls[-5:] == [
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        *["cudaGraphLaunch"] * 2,
    ]


@pytest.mark.parametrize("failure", [Status(2), RuntimeError("driver is too old")])
def test_cuda_python_errors_are_codes_or_exceptions(runtime, failure):
    runtime(cudaMalloc=failure)
    device = CudaPythonMemory()
    with pytest.raises(MissingError, match=r"cudaMalloc: (cudaErrorMemoryAllocation|driver is too old)"):
        device.allocate(4)


def test_the_real_cuda_python_has_what_is_called():
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-python is not installed")
    real = memory._cuda_runtime()
    for name in (
        "cudaGetDeviceCount", "cudaStreamCreate", "cudaStreamDestroy", "cudaMalloc", "cudaFree", "cudaMemcpyAsync",
        "cudaStreamSynchronize", "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate",
        "cudaGraphLaunch",
    ):  # fmt: skip
        assert callable(getattr(real, name))
    assert real.cudaMemcpyKind.cudaMemcpyHostToDevice
    assert real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal


def test_without_any_provider_each_reason_is_told(monkeypatch, runtime):
    runtime(cudaGetDeviceCount=Status(100))
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(MissingError) as raised:
        open_memory()
    assert str(raised.value) == (
        "device memory: torch with CUDA, cuda-python or pycuda must work (got torch: not installed; cuda-python: "
        "cudaGetDeviceCount: cudaErrorMemoryAllocation; pycuda: not installed). Install one: pip install "
        "'trtpipe[edge]'."
    )


def test_a_named_provider_is_the_only_one_tried(runtime):
    cuda = runtime()
    device = open_memory("cuda-python")
    assert device.provider == "cuda-python"
    assert cuda.calls == ["cudaGetDeviceCount", "cudaStreamCreate"]


class Allocation:
    def __init__(self, size):
        self.block = ctypes.create_string_buffer(size)

    def __int__(self):
        return ctypes.addressof(self.block)


@pytest.fixture
def pycuda(monkeypatch):
    def copy_in(address, array, stream=None):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def copy_out(array, address, stream):
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    stream = types.SimpleNamespace(handle=7, synchronize=lambda: None)
    driver = types.SimpleNamespace(
        Stream=lambda: stream, mem_alloc=Allocation, memcpy_htod_async=copy_in, memcpy_dtoh_async=copy_out,
        memcpy_htod=copy_in,
    )  # fmt: skip
    package = types.SimpleNamespace(driver=driver, autoinit=types.SimpleNamespace(context="context"), __path__=[])
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    monkeypatch.setitem(sys.modules, "pycuda.autoinit", package.autoinit)


def test_pycuda_round_trip(pycuda):
    device = PycudaMemory()
    assert device.stream == 7
    array = np.arange(4, dtype=np.int64)
    buffer, back = device.allocate(array.nbytes), np.zeros(4, np.int64)
    device.upload(buffer, array)
    device.download(buffer, back)
    device.synchronize()
    assert np.array_equal(back, array)
    address, _owner = device.place(array)
    assert np.array_equal(np.frombuffer(ctypes.string_at(address, 32), np.int64), array)
    with pytest.raises(MissingError, match=r"CUDA graphs: torch or cuda-python must be installed \(got pycuda\)"):
        device.capture(lambda: None)


def test_torch_without_cuda_is_not_used():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(MissingError, match="torch: built without CUDA, or sees no GPU"):
        open_memory("torch")

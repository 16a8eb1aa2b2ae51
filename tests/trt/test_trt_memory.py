from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import types

import numpy as np
import pytest
from cuda_double import Runtime

from trtpipe.errors import MissingError
from trtpipe.trt import memory
from trtpipe.trt.driver import Driver
from trtpipe.trt.memory import CudaPythonMemory, PycudaMemory, open_memory


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
    assert device.stream in cuda.live
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = device.allocate(array.nbytes)
    device.upload(buffer, array)
    back = np.zeros_like(array)
    device.download(buffer, back)
    device.synchronize()
    assert np.array_equal(back, array)
    assert cuda.kinds() == ["memory", "stream"]
    del buffer
    gc.collect()
    assert cuda.kinds() == ["stream"]
    device.close()
    assert cuda.live == {}


def test_everything_is_given_back_once_the_newest_first(runtime):
    cuda = runtime()
    device = CudaPythonMemory()
    kept = [device.allocate(8), device.allocate_host(8), device.capture(lambda: None)]
    kept[0].free()
    kept[0].free()
    device.close()
    device.close()
    del kept, device
    gc.collect()
    assert cuda.live == {}
    assert [n for n in cuda.names() if "Free" in n or "Destroy" in n] == [
        "cudaGraphDestroy", "cudaFree", "cudaGraphExecDestroy", "cudaFreeHost", "cudaStreamDestroy"
    ]  # fmt: skip


def test_what_cannot_be_given_back_is_logged_and_the_rest_is_given_back(runtime, caplog):
    cuda = runtime()
    device = CudaPythonMemory()
    kept = [device.allocate(8), device.allocate(8)]
    cuda.fail_at(len(cuda.calls))
    device.close()
    assert caplog.messages == ["cudaFree: cudaErrorUnknown"]
    assert cuda.kinds() == ["memory"]
    del kept


def test_page_locked_memory_is_an_array(runtime):
    cuda = runtime()
    device = CudaPythonMemory()
    host = device.allocate_host(16)
    host.array.view(np.float32)[:] = [1, 2, 3, 4]
    assert cuda.kinds() == ["host", "stream"]
    assert device.allocate_host(0).array.nbytes == 0


def test_cuda_python_places_a_batch_that_lives_as_long_as_its_owner(runtime):
    cuda = runtime()
    device = CudaPythonMemory()
    array = np.arange(6, dtype=np.float32)[::2]  # not contiguous
    address, owner = device.place(array)
    assert np.array_equal(np.frombuffer(ctypes.string_at(address, 12), np.float32), [0, 2, 4])
    assert "cudaStreamSynchronize" in cuda.names()
    del owner
    gc.collect()
    assert cuda.kinds() == ["stream"]


def test_cuda_python_captures_a_graph_and_destroys_it(runtime):
    cuda = runtime()
    device, seen = CudaPythonMemory(), []
    graph = device.capture(lambda: seen.append("enqueued"))
    assert seen == ["enqueued"]
    graph.launch()
    graph.launch()
    assert cuda.names()[-6:] == [
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphDestroy",
        *["cudaGraphLaunch"] * 2,
    ]
    graph.free()
    assert cuda.kinds() == ["stream"]


def test_a_capture_that_fails_is_ended(runtime):
    cuda = runtime()
    device = CudaPythonMemory()
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 / 0)
    assert cuda.names()[-2:] == ["cudaStreamEndCapture", "cudaGraphDestroy"]
    assert not cuda.capturing
    assert cuda.kinds() == ["stream"]


@pytest.mark.parametrize("failure", [2, RuntimeError("driver is too old")])
def test_cuda_python_errors_are_codes_or_exceptions(runtime, failure):
    runtime(cudaMalloc=failure)
    device = CudaPythonMemory()
    with pytest.raises(MissingError, match=r"cudaMalloc: (cudaErrorMemoryAllocation|driver is too old)"):
        device.allocate(4)


def test_the_double_has_the_signatures_of_the_real_cuda_python():
    real = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")
    for name in Runtime.FUNCTIONS:
        wanted = list(inspect.signature(getattr(real, name)).parameters)
        assert list(inspect.signature(getattr(Runtime, f"do_{name}")).parameters)[1:] == wanted, name
    for name in ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"):
        assert int(getattr(real.cudaMemcpyKind, name)) == getattr(Runtime.cudaMemcpyKind, name)
    assert real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal


@pytest.mark.parametrize(
    ("cuda", "step"),
    [("", "'trtpipe[edge]'"), ("11.4", "'cuda-python<12'"), ("12.6", "'cuda-python<13'"), ("13.0", "'cuda-python<14'")],
)
def test_without_any_provider_each_reason_is_told(monkeypatch, runtime, cuda, step):
    runtime(cudaGetDeviceCount=100)
    monkeypatch.setattr(memory, "probe", lambda: Driver(cuda))
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(MissingError) as raised:
        open_memory()
    assert str(raised.value) == (
        "device memory: none of torch with CUDA, cuda-python and pycuda works (torch: not installed; cuda-python: "
        "cudaGetDeviceCount: cudaErrorNoDevice; pycuda: not installed). Install one: pip install "
        f"{step}."
    )


def test_a_named_provider_is_the_only_one_tried(runtime):
    cuda = runtime()
    device = open_memory("cuda-python")
    assert device.provider == "cuda-python"
    assert cuda.names() == ["cudaGetDeviceCount", "cudaStreamCreate"]


class Allocation:
    def __init__(self, size):
        self.block = ctypes.create_string_buffer(size)

    def free(self):
        self.block = None

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
        pagelocked_empty=np.empty,
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
    assert device.allocate_host(6).array.nbytes == 6
    with pytest.raises(MissingError, match=r"^engine: CUDA graphs need torch or cuda-python, and pycuda is in use\."):
        device.capture(lambda: None)


def test_torch_without_cuda_is_not_used():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(MissingError, match="torch: built without CUDA, or sees no GPU"):
        open_memory("torch")

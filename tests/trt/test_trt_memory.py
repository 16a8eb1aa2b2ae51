from __future__ import annotations

import contextlib
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
    ("cuda", "installed", "step"),
    [
        ("", None, "Install one: pip install 'trtpipe[edge]'."),
        ("11.4", "13.0.1", "Install one: pip install 'cuda-python<12'."),
        ("12.6", "13.0.1", "Install one: pip install 'cuda-python<13'."),
        ("13.0", "12.8.0", "Install one: pip install 'cuda-python<14'."),
        # what is installed already is not to be installed
        ("13.0", "13.4.4", "cuda-python is of the driver's own CUDA: see what `nvidia-smi` says, or install a newer "
                           "driver."),
    ],
)  # fmt: skip
def test_without_any_provider_each_reason_is_told(monkeypatch, runtime, cuda, installed, step):
    runtime(cudaGetDeviceCount=100)
    monkeypatch.setattr(memory, "version", lambda module: installed)
    monkeypatch.setattr(memory, "probe", lambda: Driver(cuda))
    monkeypatch.setattr(memory, "present", lambda name: False)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(MissingError) as raised:
        open_memory()
    assert str(raised.value) == (
        "device memory: none of torch with CUDA, cuda-python and pycuda works (torch: not installed; cuda-python: "
        "cudaGetDeviceCount: cudaErrorNoDevice; pycuda: not installed). "
        f"{step}"
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


class PycudaError(Exception):
    """pycuda.driver.Error, which its MemoryError and all others are."""


@pytest.fixture
def pycuda(monkeypatch):
    def copy_in(address, array, stream=None):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def copy_out(array, address, stream):
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    stream = types.SimpleNamespace(handle=7, synchronize=lambda: None)
    driver = types.SimpleNamespace(
        Stream=lambda: stream, mem_alloc=Allocation, memcpy_htod_async=copy_in, memcpy_dtoh_async=copy_out,
        pagelocked_empty=np.empty, Error=PycudaError,
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


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize("call", ["mem_alloc", "pagelocked_empty", "memcpy_htod_async", "memcpy_dtoh_async"])
def test_what_pycuda_refuses_is_an_error_of_the_machine(pycuda, monkeypatch, call):
    device, array = PycudaMemory(), np.arange(4)
    buffer = device.allocate(32)
    monkeypatch.setattr(sys.modules["pycuda.driver"], call, raising(PycudaError("cuMemAlloc failed: out of memory")))
    doing = {
        "mem_alloc": lambda: device.allocate(8), "pagelocked_empty": lambda: device.allocate_host(8),
        "memcpy_htod_async": lambda: device.upload(buffer, array),
        "memcpy_dtoh_async": lambda: device.download(buffer, array),
    }  # fmt: skip
    with pytest.raises(MissingError, match=r"^device memory: cuMemAlloc failed: out of memory$"):
        doing[call]()


class Torch:
    """torch's functions for CUDA, on the host; the call whose number is `fails` raises what torch raises."""

    def __init__(self, fails):
        import torch

        self.real, self.fails, self.calls = torch, fails, 0
        self.__spec__ = torch.__spec__
        stream = types.SimpleNamespace(cuda_stream=7, synchronize=lambda: self.called(None))
        graph = types.SimpleNamespace(reset=lambda: None, replay=lambda: self.called(None))
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True, Stream=lambda: self.called(stream), CUDAGraph=lambda: graph,
            stream=lambda stream: self.called(contextlib.nullcontext()),
            graph=self.graph,
        )  # fmt: skip

    def __getattr__(self, name):
        return getattr(self.real, name)

    def called(self, answer):
        self.calls += 1
        if self.calls == self.fails:
            raise self.real.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")
        return answer

    def graph(self, graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local", "other threads allocate meanwhile, which global makes an error"
        return self.called(contextlib.nullcontext())

    def empty(self, size, dtype, device="cpu", pin_memory=False):
        return self.called(self.real.empty(size, dtype=dtype))


def with_torch(monkeypatch, fails):
    """What a runner does with device memory, torch's n-th call failing; how many calls there were."""
    torch = Torch(fails)
    monkeypatch.setitem(sys.modules, "torch", torch)
    device, array, back = open_memory("torch"), np.arange(4), np.zeros(4, np.int64)
    buffer, _ = device.allocate(32), device.allocate_host(32)
    device.upload(buffer, array)
    device.download(buffer, back)
    device.synchronize()
    device.capture(lambda: None).launch()
    device.place(array)
    device.close()
    assert np.array_equal(back, array)
    return torch.calls


def test_whichever_call_of_torch_fails_it_is_an_error_of_the_machine(monkeypatch):
    pytest.importorskip("torch")
    calls = with_torch(monkeypatch, fails=None)
    assert calls > 8
    for number in range(1, calls + 1):
        with pytest.raises(MissingError, match=r"^device memory: CUDA out of memory\. Tried to allocate 2\.00 GiB\.$"):
            with_torch(monkeypatch, fails=number)


def test_a_gpu_without_room_for_a_stream_is_not_told_to_install_anything(runtime):
    runtime(cudaStreamCreate=2)
    with pytest.raises(MissingError, match=r"^cudaStreamCreate: cudaErrorMemoryAllocation$"):
        open_memory()


def test_torch_without_cuda_is_not_used():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(MissingError, match="torch: built without CUDA, or sees no GPU"):
        open_memory("torch")

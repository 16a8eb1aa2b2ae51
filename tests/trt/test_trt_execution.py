"""The CUDA calls of an execution in order, and none that loses anything. CUDA and TensorRT are stand-ins."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_double import Runtime

from trtpipe.errors import InputError, MissingError
from trtpipe.trt import memory
from trtpipe.trt.calls import Binding, Tensors
from trtpipe.trt.execution import Execution, OutputMemory, make_output_allocator
from trtpipe.trt.memory import CudaPythonMemory

X = Binding("x", "float32", (-1, 3), True, (((1, 3), (2, 3), (8, 3)),))
Y = Binding("y", "float16", (-1, 2), False, ())
FLAVOUR = SimpleNamespace(module=SimpleNamespace(IOutputAllocator=type("IOutputAllocator", (), {})))


class Calls:
    """A context that answers y = 2 * (x's first two columns); its last `dropped` rows are left out of y."""

    def __init__(self, cuda, *, decides=False):
        self.cuda, self.decides, self.addresses, self.allocator = cuda, decides, {}, None
        self.shapes, self.accepts, self.dropped = {}, True, 1

    def list(self):
        return (X, Y)

    def choose(self, profile, shapes, stream):
        changed, self.shapes = shapes != self.shapes, dict(shapes)
        return changed

    def shape_of(self, name):
        return (-1, 2) if self.decides else (self.shapes["x"][0], 2)

    def set_address(self, name, address):
        assert self.cuda.live[address] == "memory"
        self.addresses[name] = address

    def set_output_allocator(self, name, allocator, shape):
        self.allocator = allocator

    def execute(self, stream):
        self.cuda.calls.append(("execute", ()))
        if not self.accepts:
            return False
        if self.cuda.capturing:
            return True
        x = np.frombuffer(ctypes.string_at(self.addresses["x"], 4 * int(np.prod(self.shapes["x"]))), np.float32)
        y = (2 * x.reshape(self.shapes["x"])[:, :2]).astype(np.float16)
        if self.decides:
            y = y[: len(y) - self.dropped]
            self.addresses["y"] = self.allocator.reallocate_output_async("y", 0, y.nbytes, 256, stream)
            if not self.addresses["y"]:
                return False
            self.allocator.notify_shape("y", y.shape)
        ctypes.memmove(self.addresses["y"], y.tobytes(), y.nbytes)
        return True


@pytest.fixture
def make(monkeypatch):
    """A function that makes an execution: (execution, cuda, calls)."""

    def made(*, decides=False, cuda_graph=False, cuda=None):
        cuda = cuda or Runtime()
        monkeypatch.setattr(memory, "_cuda_runtime", lambda: cuda)
        calls = Calls(cuda, decides=decides)
        execution = Execution(
            calls, CudaPythonMemory(), cuda_graph=cuda_graph, reason=lambda: "no error message",
            allocator=lambda outputs: make_output_allocator(FLAVOUR, outputs),
        )  # fmt: skip
        return execution, cuda, calls

    return made


def batch(n):
    return {"x": np.arange(3 * n, dtype=np.float32).reshape(n, 3)}


def run(execution, n, rows=None):
    (y,) = execution.run(0, batch(n)).values()
    assert np.array_equal(y, (2 * batch(n)["x"][: n if rows is None else rows, :2]).astype(np.float16))


def test_an_output_whose_allocator_tensorrt_refuses_is_named():
    context = SimpleNamespace(set_output_allocator=lambda name, allocator: False)
    with pytest.raises(
        InputError, match=r"^outputs\.y: TensorRT refuses an output allocator for its shape \(-1, 2\)\.$"
    ):
        Tensors(None, context).set_output_allocator("y", None, (-1, 2))


def test_allocation_upload_execution_download(make):
    execution, cuda, _ = make()
    run(execution, 4)
    done = [name for name in cuda.names() if name != "cudaStreamSynchronize"]
    assert done == [
        "cudaGetDeviceCount", "cudaStreamCreate", "cudaMallocHost", "cudaMalloc", "cudaMallocHost", "cudaMalloc",
        "cudaMemcpyAsync", "execute", "cudaMemcpyAsync",
    ]  # fmt: skip
    assert cuda.names()[-1] == "cudaStreamSynchronize"  # before anything is read
    copied = [arguments for name, arguments in cuda.calls if name == "cudaMemcpyAsync"]
    assert [cuda.live[dst] for dst, *_ in copied] == ["memory", "host"]
    assert [cuda.live[src] for _, src, *_ in copied] == ["host", "memory"]


def test_a_smaller_batch_allocates_nothing_and_a_larger_one_frees_what_it_replaces(make):
    execution, cuda, _ = make()
    run(execution, 4)
    before = len(cuda.calls)
    run(execution, 2)
    run(execution, 4)
    assert set(cuda.names()[before:]) == {"cudaMemcpyAsync", "execute", "cudaStreamSynchronize"}
    held = cuda.kinds()
    run(execution, 8)
    assert cuda.kinds() == held
    assert execution.device_bytes == 8 * 3 * 4 + 8 * 2 * 2


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_nothing_is_lost_over_a_thousand_runs(make, decides, cuda_graph):
    execution, cuda, calls = make(decides=decides, cuda_graph=cuda_graph)
    calls.dropped = 0
    for number in range(1000):
        execution.run(0, batch(1 + number * number % 8))
    held = {kind: cuda.kinds().count(kind) for kind in cuda.kinds()}
    wanted = {"host": 2, "memory": 2, "stream": 1} | ({"executable graph": 1} if cuda_graph and not decides else {})
    assert held == wanted
    execution.close()
    execution.close()
    assert cuda.live == {}


def test_a_shape_that_the_execution_decides(make):
    execution, cuda, _ = make(decides=True)
    run(execution, 4, rows=3)
    run(execution, 1, rows=0)
    run(execution, 8, rows=7)
    assert execution.device_bytes == 8 * 3 * 4 + 7 * 2 * 2
    execution.close()
    assert cuda.live == {}


def test_an_engine_that_gives_no_shape_is_an_error(make):
    execution, _, calls = make(decides=True)
    calls.execute = lambda stream: True
    with pytest.raises(InputError, match=r"^outputs\.y: TensorRT gave no shape for it \(no error message\)\.$"):
        execution.run(0, batch(2))


def test_memory_that_is_not_aligned_is_an_error(make):
    execution, _, _ = make()
    outputs = OutputMemory(execution.memory)
    assert outputs.reallocate("y", 8, 256)
    assert outputs.reallocate("y", 8, 1 << 40) == 0
    with pytest.raises(InputError, match=r"^outputs\.y: device memory is not aligned to 1099511627776 bytes\.$"):
        outputs.check()
    outputs.check()


def test_a_graph_is_launched_and_destroyed_when_shapes_change(make):
    execution, cuda, _ = make(cuda_graph=True)
    run(execution, 4)
    execution.run(0, batch(4))
    assert cuda.names().count("execute") == 2  # once outside the capture, once in it
    assert cuda.names().count("cudaGraphLaunch") == 2
    execution.run(0, batch(3))
    assert cuda.kinds().count("executable graph") == 1
    assert "graph" not in cuda.kinds()


#: What gives something back, by name: when it fails, nobody can do anything about it.
GIVES_BACK = {
    "cudaFree": "memory", "cudaFreeHost": "host", "cudaGraphDestroy": "graph",
    "cudaGraphExecDestroy": "executable graph",
}  # fmt: skip


def two_runs(execution):
    execution.run(0, batch(2))
    execution.run(0, batch(4))


@pytest.mark.parametrize("failure", [2, RuntimeError("driver is too old")], ids=["code", "exception"])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("decides", [False, True])
def test_nothing_is_lost_whichever_call_fails(make, decides, cuda_graph, failure):
    """Each CUDA call of two runs fails in turn: the caller hears of it, and all that was made is given back."""
    execution, cuda, _ = make(decides=decides, cuda_graph=cuda_graph)
    two_runs(execution)
    for number, name in enumerate(cuda.names()):
        if name == "execute":
            continue
        broken, execution, heard = Runtime(), None, ""
        broken.fail_at(number, failure)
        try:
            execution, _, _ = make(decides=decides, cuda_graph=cuda_graph, cuda=broken)
            two_runs(execution)
        except (MissingError, InputError, memory._Unusable) as error:
            heard = str(error)
        if execution is not None:
            execution.close()
        execution = None
        if broken.live:
            gc.collect()
        assert (name in heard) == (name not in GIVES_BACK), f"{name} (call {number}) failed: {heard}"
        assert broken.kinds() == [kind for n, kind in GIVES_BACK.items() if n == name], f"{name} (call {number}) failed"


def test_a_refused_execution_says_why(make):
    execution, cuda, calls = make()
    calls.accepts = False
    with pytest.raises(
        InputError, match=r"^engine: the execution failed \(no error message\)\. Check the inputs' values"
    ):
        execution.run(0, batch(2))
    execution.close()
    assert cuda.live == {}

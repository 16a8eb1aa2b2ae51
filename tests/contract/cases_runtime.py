"""The project's runner on real bindings over stub libraries."""

from __future__ import annotations

import concurrent.futures
import ctypes
import threading

import numpy as np
import pytest
import tensorrt as trt
import tensorrt_libs as stub
from runtime_world import PROFILES, HostMemory, World
from world import GPU, PLAN, VERSION

from trtpipe import errors
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver
from trtpipe.trt.runtime import EngineRunner
from trtpipe.values import DimRange


@pytest.fixture
def opened(monkeypatch, request):
    """A function that opens a runner on a stubbed engine: (world, memory, runner)."""
    monkeypatch.setattr(driver, "probe", lambda: GPU)
    # pybind11 asks for the ranges as a list of Dims, which the stub cannot make: they come from here.
    monkeypatch.setattr("trtpipe.trt.calls._ranges", lambda shapes: shapes)
    monkeypatch.setattr(trt.ICudaEngine, "get_tensor_profile_shape", lambda self, tensor, p: PROFILES[p])

    def make(**options):
        world, memory = World(), HostMemory()
        runner = EngineRunner(PLAN, memory=lambda: memory, **options)
        runner.__enter__()
        request.addfinalizer(lambda: runner.__exit__(None, None, None))
        world.seen.clear()
        return world, memory, runner

    yield make
    failed, stub.failures[:] = list(stub.failures), []
    assert not failed


def test_bindings_are_described(opened):
    _, _, runner = opened()
    (x,), (y,) = runner.inputs, runner.outputs
    assert (x.name, x.dtype, x.shape, x.dims) == ("x", "float32", ("x_0", 4), {"x_0": DimRange(1, 1, 8)})
    assert (y.name, y.dtype, y.shape) == ("y", "float16", ("y_0", 2))
    assert runner.name == f"TensorRT {stub.VERSION} on NVIDIA L4"


def test_a_run_takes_the_profile_that_fits(opened):
    world, memory, runner = opened()
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    outputs = runner.run({"x": x})
    assert outputs["y"].shape == (3, 2)
    assert outputs["y"].dtype == np.float16
    assert np.array_equal(memory.uploads[0], x)
    assert world.asked("set_profile") == [(1, HostMemory.stream)]
    names = [name for name, _ in world.seen]
    assert names.index("set_profile") < names.index("set_shape") < names.index("execute")
    assert world.asked("set_shape") == [("x", (3, 4))]
    assert [name for name, _ in world.asked("set_address")] == ["x", "y"]
    assert world.asked("execute") == [(HostMemory.stream,)]


def test_what_does_not_change_is_not_said_again(opened):
    world, _, runner = opened()
    x = np.zeros((3, 4), np.float32)
    first = runner.run({"x": x})
    world.seen.clear()
    second = runner.run({"x": x})
    assert {name for name, _ in world.seen} == {"execute"}
    assert first["y"] is not second["y"]


def test_a_cuda_graph_is_captured_once_a_shape(opened):
    _, memory, runner = opened(cuda_graph=True)
    for _ in range(3):
        runner.run({"x": np.zeros((3, 4), np.float32)})
    assert (memory.captured, memory.launched) == (1, 3)
    runner.run({"x": np.zeros((4, 4), np.float32)})
    assert (memory.captured, memory.launched, memory.destroyed) == (2, 4, 1)


def test_bad_inputs_are_errors(opened):
    _, _, runner = opened()
    with pytest.raises(errors.InputError, match=r"inputs: must be x \(got z\)\. Name each one"):
        runner.run({"z": np.zeros((3, 4), np.float32)})
    with pytest.raises(errors.InputError, match=r"inputs\.x: must be float32 \(got float64\)"):
        runner.run({"x": np.zeros((3, 4))})
    with pytest.raises(
        errors.InputError, match=r"within a profile, x \(1, 4\) to \(1, 4\) or \(2, 4\) to \(8, 4\) \(got"
    ):
        runner.run({"x": np.zeros((9, 4), np.float32)})


def test_an_execution_that_fails_is_an_error(opened):
    world, _, runner = opened()
    stub.answer(lambda: world.context.execute_async_v3(1), 0)
    with pytest.raises(errors.InputError, match=r"engine: the execution failed \(no error message\)"):
        runner.run({"x": np.zeros((3, 4), np.float32)})


#: Slots of IOutputAllocator's methods: from 10 on it is a versioned interface, which has four of its own.
REALLOCATE, NOTIFY = (4, 6) if VERSION >= (10,) else (1, 2)


def decide(world, *shapes, size=None):
    """Let the executions decide the shapes of y, as TensorRT does it: ask for memory, write ones, say the shape."""
    context, name = world.context, ctypes.create_string_buffer(b"y")
    stub.answer(lambda: context.get_tensor_shape("y"), stub.dims(-1, 2))
    allocators, addresses, left = [], [], list(shapes)
    probe = type("Probe", (trt.IOutputAllocator,), {"__init__": lambda self: trt.IOutputAllocator.__init__(self)})()
    stub.hook(lambda: context.set_output_allocator("y", probe), lambda a, b, c, s: allocators.append(b))
    allocators.clear()

    def execute(*_):
        if not allocators:
            return  # the call that finds the method to hook
        shape = left.pop(0)
        wanted = 2 * int(np.prod(shape)) if size is None else size
        address = stub.invoke(allocators[-1], REALLOCATE, ctypes.addressof(name), 0, wanted, 16, HostMemory.stream)
        addresses.append(address)
        if address:
            ctypes.memmove(address, np.ones(shape, np.float16).tobytes(), 2 * int(np.prod(shape)))
        dims = ctypes.create_string_buffer(stub.dims(*shape))
        stub.invoke(allocators[-1], NOTIFY, ctypes.addressof(name), ctypes.addressof(dims))

    stub.hook(lambda: context.execute_async_v3(1), execute)
    return addresses


def test_an_output_of_a_shape_that_the_execution_decides(opened):
    world, _, runner = opened()
    x = {"x": np.zeros((3, 4), np.float32)}
    addresses = decide(world, (5, 2), (2, 2), (0, 2))
    first = runner.run(x)["y"]
    assert first.tolist() == [[1, 1]] * 5
    assert first.dtype == np.float16
    assert runner.run(x)["y"].shape == (2, 2)
    assert runner.run(x)["y"].shape == (0, 2)
    assert len(set(addresses)) == 1  # what was there is large enough
    assert first.tolist() == [[1, 1]] * 5


def test_without_memory_for_such_an_output_the_reason_is_raised(opened, monkeypatch):
    world, memory, runner = opened()
    decide(world, (5, 2), size=1 << 40)

    def allocate(size):
        if size > 1 << 30:
            raise errors.MissingError("cudaMalloc: cudaErrorMemoryAllocation")
        return HostMemory.allocate(memory, size)

    monkeypatch.setattr(memory, "allocate", allocate)
    with pytest.raises(errors.MissingError, match="cudaMalloc: cudaErrorMemoryAllocation"):
        runner.run({"x": np.zeros((3, 4), np.float32)})


def test_a_cuda_graph_is_not_captured_where_the_execution_decides(opened):
    world, memory, runner = opened(cuda_graph=True)
    decide(world, (5, 2))
    assert runner.run({"x": np.zeros((3, 4), np.float32)})["y"].shape == (5, 2)
    assert memory.captured == 0


def test_threads_run_in_contexts_of_their_own(opened):
    world, memory, runner = opened()
    made, running, most, lock = [], [0], [0], threading.Lock()
    stub.hook(lambda: world.engine.create_execution_context(), lambda *_: made.append(1))
    made.clear()
    both = threading.Barrier(2 if VERSION >= (10,) else 1)

    def download(buffer, array):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        both.wait(timeout=60)
        HostMemory.download(memory, buffer, array)
        with lock:
            running[0] -= 1

    memory.download = download
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: runner.run({"x": np.zeros((3, 4), np.float32)}), range(8)))
    assert all(r["y"].shape == (3, 2) for r in results)
    if VERSION >= (10,):
        assert len(made) == 1  # and the one that was made at first
    else:  # a profile belongs to one context there
        assert (made, most) == ([], [1])


def test_pycuda_belongs_to_the_thread_that_opened_the_runner(opened, monkeypatch):
    monkeypatch.setattr(HostMemory, "provider", "pycuda")
    _, _, runner = opened()
    x = {"x": np.zeros((3, 4), np.float32)}
    assert runner.run(x)["y"].shape == (3, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(errors.InputError) as raised:
        pool.submit(runner.run, x).result()
    assert str(raised.value) == (
        "engine: must be run by the thread that opened it, as pycuda is in use (got another thread). Install "
        "cuda-python: pip install 'trtpipe[edge]'."
    )


def test_what_a_context_compiles_is_kept_when_its_first_call_is_done(opened, monkeypatch):
    class Kept:
        path, new, saved = "the file", True, 0

        def attach(self, config):
            return ("a note",)

        def save(self):
            self.saved += 1
            return (f"save {self.saved}",)

    world, _, runner = opened()
    kept = runner._cache = Kept()
    config = object()
    monkeypatch.setattr(trt.ICudaEngine, "create_runtime_config", lambda self: config, raising=False)
    real = trt.ICudaEngine.create_execution_context
    monkeypatch.setattr(trt.ICudaEngine, "create_execution_context", lambda self, config=None: real(self))
    x = {"x": np.zeros((3, 4), np.float32)}
    runner.run(x)
    assert (kept.saved, runner.notes) == (0, ())  # the context that was made at first
    stub.answer(lambda: world.context.execute_async_v3(1), 0)
    with pytest.raises(errors.InputError, match="engine: the execution failed"):
        runner.run(x)
    stub.answer(lambda: world.context.execute_async_v3(1), 1)
    runner.run(x)
    assert (kept.saved, runner.notes) == (1, ("a note", "save 1"))
    runner.run(x)
    assert kept.saved == 1
    runner.__exit__(None, None, None)
    assert runner.notes == ("a note", "save 1", "save 2")


def test_a_context_that_failed_is_not_used_again(opened):
    world, memory, runner = opened()
    x = {"x": np.zeros((3, 4), np.float32)}
    runner.run(x)
    stub.answer(lambda: world.context.execute_async_v3(1), 0)
    with pytest.raises(errors.InputError, match="engine: the execution failed"):
        runner.run(x)
    assert memory.closed == 1
    stub.answer(lambda: world.context.execute_async_v3(1), 1)
    assert runner.run(x)["y"].shape == (3, 2)


def test_a_plan_of_another_release_is_refused_before_it_is_loaded(opened):
    other = PLAN[:24] + bytes((10, 99, 1, 0)) + PLAN[28:]
    before = stub.count()
    with pytest.raises(errors.InputError, match=rf"engine: tensorrt must be 10\.99\.1\.0, .* \(got {stub.VERSION}\)"):
        EngineRunner(other, memory=HostMemory).__enter__()
    assert stub.count() == before


def test_a_version_compatible_plan_may_run_its_own_code(opened):
    world, _, _ = opened()
    asked = []
    stub.hook(lambda: setattr(world.runtime, "engine_host_code_allowed", True), lambda a, b, c, s: asked.append(a & 1))
    asked.clear()
    other = PLAN[:24] + bytes((VERSION[0], 99, 1, 0)) + PLAN[28:]
    with EngineRunner(other, memory=HostMemory, version_compatible=True) as runner:
        assert runner.name.startswith("TensorRT")
    assert asked == [1]


def test_a_plan_without_a_lean_runtime_asks_for_that_of_its_release(opened):
    world, _, _ = opened()
    stub.answer(lambda: world.runtime.load_runtime("libnvinfer_lean.so"), 0)
    own = PLAN[:24] + bytes((*VERSION[:3], 77)) + PLAN[28:]  # __version__ of some releases has no build
    with EngineRunner(own, memory=HostMemory, version_compatible=True, without_lean_runtime=True) as opened_by_own:
        assert opened_by_own.name.startswith("TensorRT")
    other = PLAN[:24] + bytes((VERSION[0], 99, 1, 0)) + PLAN[28:]
    runner = EngineRunner(other, memory=HostMemory, version_compatible=True, without_lean_runtime=True)
    with pytest.raises(errors.InputError) as caught:
        runner.__enter__()
    assert str(caught.value) == (
        "engine: the plan was built without a lean runtime, and libnvinfer_lean.so."
        f"{VERSION[0]} of TensorRT {VERSION[0]}.99.1.0 cannot be loaded (no error message). Install it: pip install "
        f"'tensorrt-lean=={VERSION[0]}.99.1.*'."
    )


def test_a_plan_that_cannot_be_loaded_says_why(opened):
    world, _, _ = opened()
    stub.answer(lambda: world.runtime.deserialize_cuda_engine(b"x" * 64), 0)
    with pytest.raises(errors.InputError, match=r"cannot load the plan on NVIDIA L4 \(no error message\)"):
        EngineRunner(PLAN, memory=HostMemory).__enter__()


def test_no_gpu_is_an_error_before_anything_is_asked(monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: Driver(problem="no library"))
    before = stub.count()
    with pytest.raises(errors.MissingError, match="engine: there is no usable NVIDIA GPU here"):
        EngineRunner(PLAN).__enter__()
    assert stub.count() == before


def test_layers_and_memory(opened):
    world, _, runner = opened()
    inspector = world.engine.create_engine_inspector()
    json = trt.LayerInformationFormat.JSON
    stub.answer(
        lambda: inspector.get_engine_information(json), '{"Layers": ["layer1.conv + relu", {"Name": "head.fc"}]}'
    )
    assert runner.layers() == ("layer1.conv + relu", "head.fc")
    size = "device_memory_size_v2" if VERSION >= (10,) else "device_memory_size"
    stub.answer(lambda: getattr(world.engine, size), 4096)
    assert runner.device_memory_bytes == 4096


@pytest.mark.skipif(VERSION < (10,), reason="8.6 has no stripped plans")
def test_a_stripped_plan_is_given_its_weights_before_its_context(opened):
    world, _, _ = opened()
    refitter = trt.Refitter(world.engine, trt.Logger())
    parser = trt.OnnxParserRefitter(refitter, trt.Logger())
    world.note("weights", lambda: parser.refit_from_bytes(b"x"), lambda a, b, c, s: (ctypes.string_at(a, b),))
    world.note("refit", lambda: refitter.refit_cuda_engine(), lambda a, b, c, s: ())
    world.note("context", lambda: world.engine.create_execution_context(), lambda a, b, c, s: ())
    world.seen.clear()
    with EngineRunner(PLAN, memory=HostMemory, refit=b"onnx file"):
        pass
    assert world.asked("weights") == [(b"onnx file",)]
    order = [name for name, _ in world.seen if name in ("deserialize", "weights", "refit", "context")]
    assert order == ["deserialize", "weights", "refit", "context"]
    stub.answer(lambda: refitter.refit_cuda_engine(), 0)
    with pytest.raises(
        errors.InputError, match=r"engine: the weights are not those of the graph that the engine was built from"
    ):
        EngineRunner(PLAN, memory=HostMemory, refit=b"onnx file").__enter__()


def test_a_closed_runner_says_so(opened):
    _, _, runner = opened()
    runner.__exit__(None, None, None)
    with pytest.raises(errors.InputError, match="engine: the runner is not open"):
        runner.run({})

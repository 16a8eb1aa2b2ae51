"""The calls of a runner in order, and none that loses anything. CUDA and TensorRT are recording stand-ins."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import trt_double
from cuda_double import Runtime

from trtpipe.errors import InputError, MissingError, TrtpipeError
from trtpipe.trt import driver, memory, runtime
from trtpipe.trt import validity as validity_of
from trtpipe.trt.execution import OutputMemory
from trtpipe.trt.memory import CudaPythonMemory
from trtpipe.trt.runtime import EngineRunner

#: What the GPU does not hear of.
ASKING = {"get_engine_validity", "deserialize_cuda_engine", "cudaGetDeviceCount", "Runtime"}


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A function that makes a runner, not yet open: (runner, cuda, world)."""
    monkeypatch.setattr(driver, "probe", lambda: trt_double.GPU)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = (tmp_path / f"kernels-{number}" for number in itertools.count())

    def made(*, name="tensorrt", cuda=None, cuda_graph=False, specialization=None, **world):
        cuda = cuda or Runtime()
        flavour = trt_double.flavour(cuda, name, **world)
        monkeypatch.setattr(memory, "_cuda_runtime", lambda: cuda)
        monkeypatch.setattr(runtime.flavour, "load", lambda target: flavour)
        kernels = next(files)
        monkeypatch.setattr(runtime, "kernel_file", lambda plan, gpu: kernels)
        runner = EngineRunner(
            trt_double.plan(name), memory="cuda-python", cuda_graph=cuda_graph, specialization=specialization
        )
        return runner, cuda, flavour.module.world

    return made


def batch(n):
    return {"x": np.arange(3 * n, dtype=np.float32).reshape(n, 3)}


def run(runner, n, rows=None):
    (y,) = runner.run(batch(n)).values()
    assert np.array_equal(y, (2 * batch(n)["x"][: n if rows is None else rows, :2]).astype(np.float16))


def device_calls(cuda):
    return [name for name in cuda.names() if name not in ASKING and name != "cudaStreamSynchronize"]


#: Order of calls of a runner that is opened, runs one batch and is closed.
OPENED = ["cudaStreamCreate", "create_execution_context"]
SHAPED = ["set_optimization_profile_async", "set_input_shape"]
INPUT = ["cudaMallocHost", "cudaMalloc", "set_tensor_address"]


def test_allocation_pinned_copy_execution_copy_and_free_in_order(make):
    runner, cuda, _ = make()
    with runner:
        run(runner, 4)
    assert device_calls(cuda) == [
        *OPENED, *SHAPED, *INPUT, "get_tensor_shape", *INPUT, "cudaMemcpyAsync", "execute_async_v3", "cudaMemcpyAsync",
        "~context", "cudaFree", "cudaFree", "cudaFreeHost", "cudaFreeHost", "cudaStreamDestroy", "~engine", "~runtime",
    ]  # fmt: skip
    freed = cuda.names().index("~context")
    assert cuda.names()[freed - 1] == "cudaStreamSynchronize"  # nothing is given back that the GPU may still use
    assert cuda.live == {}


def test_copies_are_between_page_locked_memory_and_the_device_and_on_the_stream(make):
    runner, cuda, _ = make()
    with runner:
        run(runner, 4)
        copied = [arguments for name, arguments in cuda.calls if name == "cudaMemcpyAsync"]
        assert [cuda.live[dst] for dst, *_ in copied] == ["memory", "host"]
        assert [cuda.live[src] for _, src, *_ in copied] == ["host", "memory"]
        assert [cuda.live[stream] for *_, stream in copied] == ["stream", "stream"]
        assert cuda.names()[-1] == "cudaStreamSynchronize"  # before anything is read


def test_a_graph_goes_before_its_context_and_that_before_the_buffers(make):
    runner, cuda, _ = make(cuda_graph=True)
    with runner:
        run(runner, 4)
    done = device_calls(cuda)
    captured = ["cudaMemcpyAsync", "execute_async_v3", "cudaStreamBeginCapture", "execute_async_v3",
                "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphDestroy", "cudaGraphLaunch",
                "cudaMemcpyAsync"]  # fmt: skip
    start = done.index("cudaMemcpyAsync")
    assert done[start : start + len(captured)] == captured
    assert done[start + len(captured) :][:3] == ["cudaGraphExecDestroy", "~context", "cudaFree"]


def test_an_output_that_the_execution_decides_is_allocated_while_it_executes(make):
    runner, cuda, _ = make(decides=True, dropped=1)
    with runner:
        run(runner, 4, rows=3)
        done = device_calls(cuda)
    assert done == [
        *OPENED, *SHAPED, *INPUT, "get_tensor_shape", "set_output_allocator", "cudaMemcpyAsync", "execute_async_v3",
        "cudaMalloc", "cudaMallocHost", "cudaMemcpyAsync",
    ]  # fmt: skip
    assert cuda.live == {}


def test_tensorrt_rtx_has_its_kernels_kept(make):
    runner, cuda, _ = make(name="tensorrt_rtx")
    with runner:
        run(runner, 2)
    assert [n for n in device_calls(cuda) if n in ("serialize", "create_runtime_config", "set_runtime_cache")] == [
        "create_runtime_config", "set_runtime_cache", "serialize", "serialize"
    ]  # fmt: skip
    assert cuda.live == {}


@pytest.mark.parametrize(("specialization", "strategy"), [(None, None), ("eager", "EAGER"), ("none", "NONE")])
def test_tensorrt_rtx_specializes_kernels_for_shapes_as_it_is_told(make, specialization, strategy):
    runner, cuda, world = make(name="tensorrt_rtx", specialization=specialization)
    with runner:
        assert getattr(world.strategy, "name", None) == strategy
    assert cuda.live == {}


def test_tensorrt_proper_has_no_such_kernels(make):
    runner, _, world = make(specialization="eager")
    with runner:
        run(runner, 2)
        assert world.strategy is None


def test_a_smaller_batch_allocates_nothing_and_a_larger_one_frees_what_it_replaces(make):
    runner, cuda, _ = make()
    with runner:
        run(runner, 6)
        before = len(cuda.calls)
        run(runner, 5)
        run(runner, 6)
        assert {n for n in cuda.names()[before:] if n.startswith("cuda")} == {
            "cudaMemcpyAsync", "cudaStreamSynchronize"
        }  # fmt: skip
        held = cuda.kinds()
        run(runner, 8)
        assert cuda.kinds() == held
        assert runner.bindings_bytes == 8 * 3 * 4 + 8 * 2 * 2


@pytest.mark.parametrize("name", trt_double.VERSIONS)
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_nothing_is_lost_over_a_thousand_runs(make, decides, cuda_graph, name):
    runner, cuda, _ = make(name=name, decides=decides, cuda_graph=cuda_graph)
    with runner:
        for number in range(1000):
            runner.run(batch(1 + number * number % 8))
        held = {kind: cuda.kinds().count(kind) for kind in cuda.kinds()}
    wanted = {"context": 1, "engine": 1, "runtime": 1, "host": 2, "memory": 2, "stream": 1}
    wanted |= {"executable graph": 1} if cuda_graph and not decides else {}
    wanted |= {"cache": 1} if name == "tensorrt_rtx" else {}
    assert held == wanted
    assert cuda.live == {}


def test_a_shape_that_the_execution_decides(make):
    runner, cuda, _ = make(decides=True, dropped=1)
    with runner:
        run(runner, 4, rows=3)
        run(runner, 1, rows=0)
        run(runner, 8, rows=7)
        assert runner.bindings_bytes == 8 * 3 * 4 + 7 * 2 * 2
    assert cuda.live == {}


def test_an_engine_that_gives_no_shape_is_an_error(make):
    runner, cuda, world = make(decides=True)
    with runner:
        world.says_shapes = False
        with pytest.raises(
            InputError, match=r"^outputs\.y: TensorRT gave no shape for it \(execute_async_v3 went well in the end\)\.$"
        ):
            runner.run(batch(2))
    assert cuda.live == {}


def test_memory_that_is_not_aligned_is_an_error(make):
    make()
    outputs = OutputMemory(CudaPythonMemory())
    assert outputs.reallocate("y", 8, 256)
    assert outputs.reallocate("y", 8, 1 << 40) == 0
    with pytest.raises(InputError, match=r"^outputs\.y: device memory is not aligned to 1099511627776 bytes\.$"):
        outputs.check()
    outputs.check()


def test_a_graph_is_launched_and_destroyed_when_shapes_change(make):
    runner, cuda, _ = make(cuda_graph=True)
    with runner:
        run(runner, 6)
        runner.run(batch(6))
        assert cuda.names().count("execute_async_v3") == 2  # once outside the capture, once in it
        assert cuda.names().count("cudaGraphLaunch") == 2
        runner.run(batch(5))
        assert cuda.kinds().count("executable graph") == 1
        assert "graph" not in cuda.kinds()


#: What gives something back, by name: when it fails, nobody can do anything about it but log it.
GIVES_BACK = {
    "cudaFree": "memory", "cudaFreeHost": "host", "cudaGraphDestroy": "graph",
    "cudaGraphExecDestroy": "executable graph", "cudaStreamDestroy": "stream",
}  # fmt: skip
#: What the user reads when TensorRT answers a call with False or None, without a word: errors of earlier calls, which
#: the stand-in logs, are not of this one.
SAID = {
    "deserialize_cuda_engine": r"^engine: .* cannot load the plan on NVIDIA L4 \(no error message\)",
    "create_execution_context": r"^engine: an execution context does not fit into the GPU's memory \(no error",
    "set_optimization_profile_async": r"^engine: TensorRT refuses optimization profile [01] \(no error message\)\.$",
    "set_input_shape": r"^inputs\.x: TensorRT refuses the shape \(\d, 3\) \(no error message\)\.$",
    "set_tensor_address": r"^engine: TensorRT refuses the address of binding [xy] \(no error message\)\.$",
    "set_output_allocator": r"^outputs\.y: TensorRT refuses an output allocator for its shape \(-1, 2\) \(no error",
    "execute_async_v3": r"^engine: the execution failed \(no error message\)\. Check the inputs' values\.$",
}
#: Without what it keeps of kernels an engine runs all the same; the notes say that it will be compiled again.
KERNELS = {"create_runtime_config", "create_runtime_cache", "set_runtime_cache", "serialize", "deserialize"}


def work(runner):
    """Open a runner, run both profiles and, after whatever failed, once more; (is the user's error, text) of each."""
    heard = []
    with runner:
        for n in (2, 4, 2, 5):
            try:
                run(runner, n)
            except Exception as error:  # noqa: BLE001 - whatever was injected
                heard.append((isinstance(error, TrtpipeError), str(error)))
        if heard:
            run(runner, 3)  # the runner serves the next call
    return heard


FAILURES = {"answer": lambda: 999, "exception": lambda: RuntimeError("driver is too old")}
VARIANTS = [
    pytest.param(name, decides, graph, id=f"{name}-{'decided' if decides else 'known'}-{'graph' if graph else 'plain'}")
    for name in trt_double.VERSIONS
    for decides, graph in ((False, False), (False, True), (True, False))
]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("name", "decides", "cuda_graph"), VARIANTS)
def test_nothing_is_lost_whichever_call_fails(make, name, decides, cuda_graph, failure, caplog):
    """Each call of CUDA and of TensorRT fails in turn, from opening to closing: it is said, and all is given back."""
    runner, cuda, _ = make(name=name, decides=decides, cuda_graph=cuda_graph)
    assert work(runner) == []
    calls = list(cuda.names())
    assert cuda.live == {}
    assert {*KERNELS} - {"deserialize"} <= set(calls) or name == "tensorrt"
    for number, called in enumerate(calls):
        if called.startswith("~") or (failure == "answer" and called in UNREFUSABLE):
            continue
        caplog.clear()
        broken = Runtime()
        broken.fail_at(number, FAILURES[failure]())
        runner, _, _ = make(name=name, decides=decides, cuda_graph=cuda_graph, cuda=broken)
        try:
            heard = work(runner)
        except Exception as error:  # noqa: BLE001 - whatever was injected
            heard = [(isinstance(error, TrtpipeError), str(error))]
        said = "\n".join([*runner.notes, *caplog.messages])
        where = f"{called} (call {number})"
        if called in GIVES_BACK or (called == "cudaStreamSynchronize" and not heard):
            assert heard == []
            assert called in said, where
        elif called in KERNELS and failure == "answer":
            assert heard == []
            assert called == "deserialize" or "the next load compiles the engine again" in said, where
        else:
            ((users, text),) = heard
            assert failure == "exception" or users, where
            wanted = SAID.get(called, called) if failure == "answer" else "driver is too old"
            assert re.search(wanted, text), f"{where}: {text}"
        broken.fail_at(-1)  # the exception there, and what is logged, hold frames
        caplog.clear()
        lost = [GIVES_BACK[called]] if called in GIVES_BACK else []
        assert broken.kinds() == lost, f"{where} lost {broken.live}"


#: What has no way to say that it failed but to raise.
UNREFUSABLE = {"Runtime", "get_engine_validity", "get_tensor_shape"}


def test_what_tensorrt_warns_of_when_it_loads_an_engine_is_a_note(make, monkeypatch):
    runner, _, _ = make()
    real, other = runtime.load_engine, "Using an engine plan file across different models of devices is not recommended"

    def loading(*arguments):
        for text in (other, "CUDA lazy loading is not enabled", other):
            runner._watch.message("warning", text)
        return real(*arguments)

    monkeypatch.setattr(runtime, "load_engine", loading)
    with runner:
        assert runner.notes == (f"TensorRT: {other}",)


@pytest.mark.parametrize("validity", trt_double.EngineValidity)
def test_tensorrt_rtx_says_whether_a_gpu_runs_a_plan(make, validity):
    runner, _, _ = make(name="tensorrt_rtx", validity=validity)
    why = validity_of.invalid_here(trt_double.plan("tensorrt_rtx"))
    if validity.name == "INVALID":
        assert re.fullmatch(r"the plan is not valid for this GPU \(TensorRT-RTX 1\.7\.1 says INVALID, 0; .*\)", why)
        with pytest.raises(
            MissingError, match=rf"^engine: {re.escape(why)}\. Build the engine for this GPU's compute capab"
        ):
            runner.__enter__()
        return
    assert why == ""
    with runner:
        said = [note for note in runner.notes if "may be slower on this GPU than one built for it" in note]
        assert bool(said) == (validity.name == "SUBOPTIMAL")


def test_an_error_that_is_kept_keeps_no_context(make):
    runner, cuda, _ = make()
    cuda.failing["execute_async_v3"] = 999
    with runner:
        with pytest.raises(InputError, match=SAID["execute_async_v3"]) as raised:
            runner.run(batch(2))
        assert cuda.kinds() == ["engine", "runtime"]
    assert raised.value.__traceback__ is not None
    assert cuda.live == {}


def test_without_device_memory_the_call_that_failed_is_said(make):
    runner, cuda, _ = make()
    cuda.failing["cudaMalloc"] = 2
    with runner, pytest.raises(MissingError, match=r"^cudaMalloc: cudaErrorMemoryAllocation$"):
        runner.run(batch(2))
    assert cuda.live == {}


def test_the_double_has_the_signatures_of_the_real_tensorrt():
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    pairs = (
        (trt_double.Context, trt.IExecutionContext), (trt_double.Engine, trt.ICudaEngine),
        (trt_double.Runtime, trt.Runtime), (trt_double.Config, trt.IRuntimeConfig),
        (trt_double.Cache, trt.IRuntimeCache),
    )  # fmt: skip
    for ours, real in pairs:
        for name, method in vars(ours).items():
            if name.startswith("_"):
                continue
            assert hasattr(real, name), f"{real.__name__}.{name}"
            if callable(method):
                wanted = method.__code__.co_varnames[: method.__code__.co_argcount]
                # pybind11 writes the names of the arguments into the first lines of the docstring.
                overloads = re.findall(rf"{name}\(([^)]*self: .*?)\) ->", getattr(real, name).__doc__)
                named = [tuple(re.findall(r"(?:^|, )(\w+):", overload)) for overload in overloads]
                assert wanted in named, f"{real.__name__}.{name}: {wanted}, not in {named}"

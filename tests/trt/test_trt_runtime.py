"""What the runner does on a machine without a GPU, with the real TensorRT-RTX; executing is for tests/gpu."""

from __future__ import annotations

import pytest
from trt_graphs import conv_model

from trtpipe import errors
from trtpipe.job.sections import Build
from trtpipe.progress import Silent
from trtpipe.trt import driver
from trtpipe.trt.builder import build_engine
from trtpipe.trt.driver import Driver, Gpu
from trtpipe.trt.runtime import EngineRunner

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")


@pytest.fixture(scope="module")
def plan():
    return build_engine(conv_model(), Build(compute_capability=("8.9",)), progress=Silent()).data


def on(monkeypatch, name, capability):
    monkeypatch.setattr(driver, "probe", lambda: Driver("12.6", (Gpu(0, name, capability, 1 << 33),)))


class NoMemory:
    """Nothing may be allocated before the plan is loaded."""

    provider = "torch"
    stream = 0


def test_no_gpu(plan, monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: Driver(problem="no library"))
    with pytest.raises(errors.MissingError, match=r"engine: there is no usable NVIDIA GPU here \(no library"):
        EngineRunner(plan).__enter__()


def test_a_plan_for_another_gpu_is_refused_by_its_header(plan, monkeypatch):
    on(monkeypatch, "NVIDIA A10", "8.6")
    with pytest.raises(errors.InputError) as raised:
        EngineRunner(plan, memory=NoMemory()).__enter__()
    assert str(raised.value) == (
        "engine: the GPU must be of compute capability 8.9 (got 8.6). Build the engine for this GPU."
    )


def test_tensorrt_rtx_judges_a_plan_before_it_is_loaded(plan, monkeypatch, capfd):
    if not driver.probe().problem:
        pytest.skip("a GPU is here")
    on(monkeypatch, "NVIDIA L4", "8.9")  # a driver that lies: TensorRT-RTX itself finds none
    with pytest.raises(errors.MissingError) as raised:
        EngineRunner(plan, memory=NoMemory()).__enter__()
    message = str(raised.value)
    assert message.startswith("engine: the plan is not valid for this GPU (TensorRT-RTX 1.7.1")
    assert " says INVALID, 0; Error reading CUDA GPU properties" in message
    assert capfd.readouterr().out == ""


def test_what_is_no_plan(tmp_path):
    file = tmp_path / "model.engine"
    file.write_bytes(b"\x08\x08onnx")
    with pytest.raises(errors.InputError, match="engine: a plan must begin with ftrt, vtrt or ptrt"):
        EngineRunner(file).__enter__()


def test_a_runner_that_was_never_opened(plan):
    with pytest.raises(errors.InputError, match="engine: the runner is not open"):
        EngineRunner(plan).run({})

"""Which machine executes which engine, and which its graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import shipping

import trtpipe
from trtpipe.runtime import executor
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt import driver
from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES, rtx_support
from trtpipe.values import Engine, OnnxModel


def gpu(capability: str | None) -> driver.Driver:
    if capability is None:
        return driver.Driver(problem="no driver", installed=False)
    return driver.Driver("13.0", (driver.Gpu(0, f"GPU {capability}", capability, 80 << 30),))


def built(target: str, capabilities: tuple[str, ...], **options: Any) -> Engine:
    graph = OnnxModel(shipping.graph(), 18, (shipping.INPUT,), (shipping.OUTPUT,))
    return Engine(b"plan", target, "1.7.1", capabilities, (shipping.INPUT,), (shipping.OUTPUT,), graph, options)  # type: ignore[arg-type]


GPUS = (None, "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "12.0", "12.1")


@pytest.mark.parametrize("capabilities", [("8.6",), ("8.6", "8.9"), ("7.5", "12.0"), ("9.0",)])
@pytest.mark.parametrize("here", GPUS)
def test_an_engine_runs_on_the_gpus_it_is_for_and_its_graph_elsewhere(
    here: str | None, capabilities: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every GPU with every choice of targets: an H100 that builds for 8.6 and 8.9 is one of them."""
    monkeypatch.setattr(driver, "probe", lambda: gpu(here))
    engine = built("tensorrt_rtx", capabilities)
    runner, executed = executor.open_engine(engine)
    assert executed == ("engine" if here in capabilities else "graph")
    assert isinstance(runner, OrtRunner) == (executed == "graph")
    notes = executor.graph_notes(engine, executed)
    if here is None or executed == "engine":
        assert notes == ()
    else:
        named = here in RTX_COMPUTE_CAPABILITIES
        advice = f"Build the bundle with {here} in build.compute_capability."
        advice = advice if named else "Build the bundle for target tensorrt on this device."
        assert notes == (
            "the graph was executed, as the engine does not run on this machine: compute capability: the engine must "
            f"run on {', '.join(capabilities)} (got {here}, GPU {here}). {advice}",
        )


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The plans of which TensorRT-RTX is asked whether the GPU here runs them; it does."""
    return asking(monkeypatch, "")


def asking(monkeypatch: pytest.MonkeyPatch, answer: str) -> list[bytes]:
    plans: list[bytes] = []

    def invalid_here(plan: bytes) -> str:
        plans.append(plan)
        return answer

    monkeypatch.setattr(executor, "invalid_here", invalid_here)
    return plans


@pytest.mark.parametrize("why", ["", "the plan is not valid for this GPU"])
@pytest.mark.parametrize("here", ["8.9", "10.0", "10.3"])
def test_of_a_gpu_that_nobody_knows_tensorrt_rtx_is_asked(here: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a portable engine runs on a B200 is not written anywhere; where it does not, its graph is executed."""
    monkeypatch.setattr(driver, "probe", lambda: gpu(here))
    plans, engine = asking(monkeypatch, why), built("tensorrt_rtx", ())
    _, executed = executor.open_engine(engine)
    unknown = here not in RTX_COMPUTE_CAPABILITIES
    assert plans == ([engine.data] if unknown else [])
    assert executed == ("graph" if why and unknown else "engine")
    said = "the graph was executed, as the engine does not run on this machine: the plan is not valid for this GPU"
    assert executor.graph_notes(engine, executed) == ((said,) if executed == "graph" else ())


@pytest.mark.parametrize("least", [None, "8.9", "12.0"])
@pytest.mark.parametrize("here", GPUS)
def test_a_portable_engine_runs_on_the_gpus_that_have_its_number_formats(
    here: str | None, least: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "probe", lambda: gpu(here))
    engine = replace(built("tensorrt_rtx", ()), minimum_compute_capability=least)
    _, executed = executor.open_engine(engine)
    able = here is not None and tuple(map(int, here.split("."))) >= tuple(map(int, (least or "8.0").split(".")))
    runs = here is not None and rtx_support(here).runs is not False
    assert executed == ("engine" if able and runs else "graph")
    if able and not runs:
        assert "TensorRT-RTX does not run its engines on this GPU" in executor.graph_notes(engine, executed)[0]
    if not able and here is not None:
        what = "8.0 (Ampere)" if least is None else f"{least}, whose number formats it needs,"
        assert executor.graph_notes(engine, executed)[0].startswith(
            "the graph was executed, as the engine does not run on this machine: compute capability: the engine runs "
            f"on {what} and later (got {here}"
        )


def test_a_driver_whose_gpus_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "probe", lambda: driver.Driver(problem="CUDA_VISIBLE_DEVICES=9 leaves no GPU"))
    said = "the graph was executed, as no GPU can be used: CUDA_VISIBLE_DEVICES=9 leaves no GPU"
    assert executor.graph_notes(built("tensorrt_rtx", ("8.6",)), "graph") == (said,)
    assert executor.graph_notes(built("onnxruntime", ()), "graph") == ()


def test_where_another_gpu_of_the_machine_fits_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES may list the GPUs already: the name that it has there is the one to set."""
    kinds = (("H100", "9.0"), ("T4", "7.5"), ("L4", "8.9"))
    gpus = tuple(driver.Gpu(i, name, capability, 8 << 30) for i, (name, capability) in enumerate(kinds))
    monkeypatch.setenv(driver.VISIBLE, "5,7, GPU-3f")
    for count, said in ((3, " Or use L4, which is here too: set CUDA_VISIBLE_DEVICES=GPU-3f."), (2, "")):
        monkeypatch.setattr(driver, "probe", lambda count=count: driver.Driver("13.0", gpus[:count]))
        (note,) = executor.graph_notes(built("tensorrt_rtx", ("8.6", "8.9")), "graph")
        assert note.endswith(f"Build the bundle for target tensorrt on this device.{said}")


def test_an_engine_for_windows_is_not_executed_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "probe", lambda: gpu("8.9"))
    engine = built("tensorrt", ("8.9",), runtime_platform="windows_amd64")
    _, executed = executor.open_engine(engine)
    assert executed == "graph"
    assert "the engine must run on win32" in executor.graph_notes(engine, executed)[0]


def test_an_engine_without_a_graph_says_why_neither_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "probe", lambda: gpu("9.0"))
    engine = replace(built("tensorrt_rtx", ("8.9",)), graph=None)
    with pytest.raises(trtpipe.errors.InputError) as caught:
        executor.open_engine(engine)
    said = str(caught.value)
    assert said.startswith(
        "check: a tensorrt_rtx engine of this route has no graph to execute in its place (got no engine either: "
        "compute capability: the engine must run on 8.9 (got 9.0, GPU 9.0)."
    )
    assert said.endswith("Build where its GPU is, or take build.route: onnx.")

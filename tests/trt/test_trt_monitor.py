"""What TensorRT gives nothing for, as where CUDA does not start: pybind11 makes a TypeError of a null."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trt_double

from trtpipe.errors import Cancelled, MissingError
from trtpipe.job.sections import Build
from trtpipe.progress import Silent
from trtpipe.trt import builder, driver, plan, refit, validity
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch, create
from trtpipe.trt.runtime import EngineRunner
from trtpipe.values import OnnxModel

PACKAGE = Path(builder.__file__).parents[1]
CLASSES = ("Builder", "Runtime", "Refitter")
SAID = "CUDA initialization failure with error: 35"


def without_cuda(*named: str, say: str = SAID, raised: str = "") -> Flavour:
    """TensorRT 8.6.0 on a machine where CUDA does not start: each class says so to its logger and gives a null."""

    def null(*arguments: Any) -> None:
        if say:
            arguments[-1].log("Severity.ERROR", say)
        raise TypeError(raised or "pybind11::init(): factory function returned nullptr")

    module = SimpleNamespace(ILogger=type("Base", (), {}), **dict.fromkeys(named or CLASSES, null))
    return Flavour("tensorrt_rtx", module, "1.7.1.116", frozenset({"engine_validity"}))


def refusal(where: str, name: str, said: str = SAID) -> str:
    return (
        f"{where}: TensorRT-RTX 1.7.1.116 gives no {name} ({said}). See whether this process may use the GPU, and "
        "whether the driver is new enough for this TensorRT: trtpipe doctor."
    )


def logger_of(watch: Watch, level: str = "error") -> Any:
    return SimpleNamespace(log=lambda severity, message: watch.message(level, message))


@pytest.mark.parametrize(("name", "where"), [("Builder", "build"), ("Runtime", "engine"), ("Refitter", "engine")])
@pytest.mark.parametrize(("said", "level"), [(SAID, "error"), (SAID, "warning"), ("", "error")])
def test_a_null_is_a_refusal_in_words(name: str, where: str, said: str, level: str) -> None:
    """TensorRT 8.6.0 itself warns of it, and says no error."""
    watch = Watch(Silent(), "error")
    watch.message("error", "of an earlier operation")
    with pytest.raises(MissingError) as caught:
        create(without_cuda(say=said), name, watch, logger_of(watch, level))
    assert str(caught.value) == refusal(where, name, said or "no message")


def test_another_type_error_is_a_bug() -> None:
    watch = Watch(Silent(), "error")
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        create(
            without_cuda(raised="__init__(): incompatible constructor arguments"), "Builder", watch, logger_of(watch)
        )


def test_a_ctrl_c_inside_the_logger_is_one() -> None:
    class Interrupted(Silent):
        def note(self, message: str) -> None:
            raise KeyboardInterrupt

    watch = Watch(Interrupted(), "error")
    with pytest.raises(Cancelled, match="build: cancelled while TensorRT was building"):
        create(without_cuda(), "Builder", watch, logger_of(watch))


def test_a_reason_is_that_of_its_own_thread() -> None:
    watch = Watch(Silent(), "error")
    since = watch.mark()
    with ThreadPoolExecutor(1) as other:
        other.submit(watch.message, "error", "theirs").result()
        assert watch.reason(since) == "theirs"  # the only one there is
        watch.message("error", "mine")
        other.submit(watch.message, "error", "theirs again").result()
        assert watch.reason(since) == "mine"
        assert other.submit(watch.reason, since).result() == "theirs again"
    assert watch.reasons(since) == "theirs; mine; theirs again"


def test_what_builds_loads_and_judges_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = without_cuda()
    monkeypatch.setattr("trtpipe.trt.flavour.load", lambda target: found)
    monkeypatch.setattr(driver, "probe", lambda: trt_double.GPU)
    header = plan.PlanHeader("tensorrt_rtx", "1.7.1.116", (), 0, True)
    monkeypatch.setattr(plan, "read_header", lambda data: header)
    monkeypatch.setattr(plan, "misfits", lambda *_, **__: ())
    model = OnnxModel(b"", 17, (), ())
    for name, where, act in (
        ("Builder", "build", lambda: builder.build_engine(model, Build(), progress=Silent())),
        ("Runtime", "engine", lambda: refit.refitted(b"", b"")),
        ("Runtime", "engine", lambda: validity.invalid_here(b"")),
        ("Runtime", "engine", lambda: EngineRunner(b"").__enter__()),
    ):
        with pytest.raises(MissingError) as caught:
            act()
        assert str(caught.value) == refusal(where, name)


def test_they_are_made_in_one_place() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in CLASSES, f"{file}:{node.lineno} calls it; `monitor.create` has the words"

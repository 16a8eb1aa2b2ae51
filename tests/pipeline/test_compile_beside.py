"""TensorRT-RTX compiles in its own process while the graph, which a machine without a GPU checks, is checked here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nights
import pytest

from trtpipe.cli.console import Console
from trtpipe.errors import BuildError, Cancelled, TrtpipeError
from trtpipe.job.job import Job
from trtpipe.job.load import read_job
from trtpipe.pipeline import judged, stages
from trtpipe.pipeline.build import build
from trtpipe.progress import Silent
from trtpipe.routes import onnx as route
from trtpipe.runtime.device import Device
from trtpipe.trt.isolated import Isolated

PRECISION = "precision: {fp16_mode: true}\nbuild: {target: tensorrt_rtx}\n"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    nights.make_world(tmp_path / "jobs")
    return read_job(nights.write_job(tmp_path / "jobs", "m", PRECISION))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the builder's process was asked for, and the stages, in order."""
    happened: list[str] = []

    class Traced(Isolated):
        def start(self, *args: Any, **given: Any) -> None:
            happened.append("start")
            super().start(*args, **given)

        def finish(self, progress: Any) -> Any:
            happened.append("finish")
            return super().finish(progress)

        def __exit__(self, *args: object) -> None:
            happened.append("end")
            super().__exit__(*args)
            assert self._child.returncode is not None

    monkeypatch.setattr(route, "Isolated", Traced)
    return happened


class Stages(Silent):
    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def stage(self, name: str) -> Any:
        self.happened.append(name)
        return super().stage(name)


def test_the_graph_is_checked_while_its_engine_is_compiled(job: Job, tmp_path: Path, events: list[str]) -> None:
    built = build(job, tmp_path / "out", Stages(events))
    assert built.report.passed, built.report.problems
    assert events[-8:] == ["quantize", "export", "start", "check", "compile", "finish", "end", "bundle"]


def test_where_a_gpu_could_execute_it_the_engine_comes_first(
    job: Job, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "this_device", lambda: Device("linux", "x86_64", compute_capability="8.6"))
    report = build(job, tmp_path / "out", Stages(events)).report
    assert events[-7:] == ["export", "start", "compile", "finish", "end", "check", "bundle"]
    monkeypatch.undo()
    assert report == build(job, tmp_path / "again", Silent()).report


def test_what_keeps_the_compiler_from_it_ends_the_check(
    job: Job, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which has not failed: what is said to have is compiling."""

    def refuse(self: Isolated, progress: Any) -> None:
        raise BuildError("build: TensorRT-RTX cannot compile the graph (no).")

    monkeypatch.setattr(Isolated, "look", refuse)
    with pytest.raises(BuildError, match=r"TensorRT-RTX cannot compile the graph \(no\)"):
        build(job, tmp_path / "out", Stages(events))
    assert events[-4:] == ["start", "check", "compile", "end"]
    assert not (tmp_path / "out").exists()
    with pytest.raises(BuildError, match="cannot compile the graph"), Console().watching() as console:
        build(job, tmp_path / "out", console)
    check, compiling = capsys.readouterr().err.splitlines()[-2:]
    assert re.fullmatch(r"check +ended early after .*", check)
    assert re.fullmatch(r"compile +failed after .*", compiling)


@pytest.mark.parametrize("error", [Cancelled("interrupted"), KeyboardInterrupt()])
def test_what_ends_the_check_ends_the_compiler(
    job: Job, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(judged, "check_engine", stop)
    with pytest.raises((TrtpipeError, KeyboardInterrupt)):
        build(job, tmp_path / "out", Stages(events))
    assert events[-3:] == ["start", "check", "end"]
    assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path) == ["jobs"]

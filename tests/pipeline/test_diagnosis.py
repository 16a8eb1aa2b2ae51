"""After a failed check: the bundle first, then the modules to blame, for as long as the user has said."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import nights
import pytest

from trtpipe.bundle.format import read_bundle
from trtpipe.cli.commands.build import command as build_command
from trtpipe.cli.commands.nightly import command as nightly_command
from trtpipe.cli.commands.prepare import command as prepare_command
from trtpipe.cli.main import main
from trtpipe.errors import Cancelled
from trtpipe.pipeline import measure
from trtpipe.quantization.diagnose import diagnose

INT8 = "precision: {int8_mode: true}\nbuild: {target: onnxruntime}\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job in INT8 that cannot meet its limits."""
    monkeypatch.chdir(tmp_path)
    path = nights.write_job(nights.make_world(tmp_path / "jobs"), "m", INT8)
    path.write_text(path.read_text().replace("cosine_min: 0.9,", "max_abs_max: 0.0,"))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The seconds that each diagnosis was given; `job` runs it."""
    found: list[float | None] = []

    def recorded(*args: Any) -> Any:
        found.append(inspect.signature(diagnose).bind(*args).arguments["seconds"])
        return diagnose(*args)

    monkeypatch.setattr(measure, "diagnose", recorded)
    return found


LINES = (("build",), ("prepare",), ("nightly", "--workers", "0", "--cache", "cache"))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
@pytest.mark.parametrize(("given", "most"), [((), 60.0), (("--diagnose", "7"), 7.0), (("--diagnose", "0"), None)])
def test_every_line_diagnoses_for_a_minute_or_as_long_as_asked(
    job: Path, asked: list[float | None], line: tuple[str, ...], given: tuple[str, ...], most: float | None
) -> None:
    assert main([line[0], str(job), *line[1:], "-o", "out", "-q", *given]) == 1
    if most is None:
        assert asked == []
        return
    (seconds,) = asked
    assert seconds is not None
    assert 0 < seconds <= most


def test_no_module_is_to_blame_where_samples_are_too_few(
    job: Path, asked: list[float | None], capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(job.read_text().replace("max_abs_max: 0.0,", "confident: true,"))
    limit = "check.limits.top1_agreement_min=0.5"
    assert main(["build", str(job), "-o", "out", "-q", "--set", limit, "--set", "check.samples=2"]) == 1
    shown = capsys.readouterr().out
    assert "problem: logits.top1_agreement: 1 meets the limit 0.5, and 2 samples are too few to be sure of it" in shown
    assert "worst quantized modules" not in shown
    assert asked == []


def test_the_default_is_a_minute_in_every_command() -> None:
    for command in (build_command, prepare_command, nightly_command):
        (option,) = (p for p in command.params if p.name == "diagnose_seconds")
        assert option.default == 60.0


def test_what_comes_before_the_measurement_counts(
    job: Path, asked: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        now = 0.0

        def perf_counter(self) -> float:
            self.now += 25.0
            return self.now

    monkeypatch.setattr(measure, "time", Slow())
    assert main(["build", str(job), "-o", "out", "-q"]) == 1
    assert asked == [35.0]


@pytest.mark.parametrize("line", LINES[:2], ids=lambda line: line[0])
@pytest.mark.parametrize(
    ("stop", "code"), [(KeyboardInterrupt(), 130), (Cancelled("interrupted"), 130), (MemoryError(), 3)], ids=repr
)
def test_whatever_ends_the_diagnosis_leaves_the_bundle_with_its_verdict(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: tuple[str, ...],
    stop: BaseException,
    code: int,
) -> None:
    def stopped(*args: Any) -> Any:
        raise stop

    monkeypatch.setattr(measure, "diagnose", stopped)
    assert main([line[0], str(job), "-o", "out"]) == code
    report = read_bundle(Path("out/m")).manifest.check
    assert not report.passed
    assert not any("worst modules" in p for p in report.problems)
    assert "note: check FAILED: max_abs " in capsys.readouterr().err

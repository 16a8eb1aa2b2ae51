"""The build command around a pipeline that is replaced by a recording one; the pipeline has tests of its own."""

import json
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import shipping
from jobs import GOOD

from trtpipe.cli.commands.build import verdict
from trtpipe.cli.commands.bundles import report_lines, said_lines
from trtpipe.cli.main import main
from trtpipe.errors import BuildError, Cancelled, InputError
from trtpipe.values import CheckReport, Control, Metric

REPORT = shipping.manifest().check


@dataclass
class Bundle:
    path: Path
    signature: bytes | None = None


@dataclass
class Built:
    bundle: Bundle
    report: object


@pytest.fixture
def line(monkeypatch):
    """What `pipeline.build` was called with; `outcomes` says what it does for a job of that name."""
    calls, outcomes = [], {}

    def build(job, out, reporter, *, sign=None, diagnose_seconds=60.0):
        calls.append((job, out))
        with reporter.stage("model"):
            outcome = outcomes.get(job.name, REPORT)
            if isinstance(outcome, BaseException):
                raise outcome
        return Built(Bundle(out / job.name), outcome)

    monkeypatch.setattr("trtpipe.cli.commands.build.build", build)
    return calls, outcomes


@pytest.fixture
def folder(tmp_path):
    for name in ("calib", "val"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"")
    (tmp_path / "w.safetensors").write_bytes(b"")
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(GOOD.replace("name: digits", f"name: {name}"))
    return tmp_path


def test_a_build_that_passes(line, folder, capsys):
    assert main(["build", str(folder / "one.yaml"), "-o", str(folder / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "one: passed, graph executed by onnxruntime 1.20.0 on 4 samples"
    assert printed.out.splitlines()[-1] == f"  bundle: {folder / 'out' / 'one'}"
    assert printed.err.startswith("model    ")
    assert [(job.name, out) for job, out in line[0]] == [("one", folder / "out")]


def test_a_check_that_fails_is_1(line, folder, capsys):
    line[1]["one"] = replace(REPORT, passed=False, metrics=(Metric("cosine", "logits", 0.5, 0.99, False),))
    assert main(["build", str(folder / "one.yaml")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("one: FAILED, ")
    assert lines[1].split() == ["cosine", "0.5", "limit", "0.99", "FAILED"]


def test_a_folder_of_jobs_goes_on_after_a_failure(line, folder, capsys):
    line[1]["one"] = BuildError("onnx: must be possible (got none).")
    assert main(["build", str(folder)]) == 4
    printed = capsys.readouterr()
    assert f"{folder / 'one.yaml'}: onnx: must be possible (got none)." in printed.err
    assert printed.out.startswith("two: passed")


def test_json_is_one_list_of_every_job(line, folder, capsys):
    line[1]["two"] = BuildError("onnx: must be possible (got none).")
    assert main(["build", str(folder), "--json", "-o", "o"]) == 4
    printed = capsys.readouterr()
    one, two = json.loads(printed.out)
    assert (one["job"], one["bundle"], one["exit_code"]) == (str(folder / "one.yaml"), "o/one", 0)
    assert one["check"]["metrics"][0]["name"] == "cosine"
    assert (two["error"], two["exit_code"]) == ("onnx: must be possible (got none).", 4)


def test_an_interrupt_ends_everything(line, folder, capsys):
    line[1]["one"] = Cancelled("build: cancelled.")
    assert main(["build", str(folder)]) == 130
    assert len(line[0]) == 1


def test_every_job_is_read_before_the_first_is_built(line, folder, capsys):
    (folder / "zzz.yaml").write_text("name: x\n")
    assert main(["build", str(folder)]) == 2
    assert line[0] == []
    assert f"{folder / 'zzz.yaml'}:1: model: must be given (got nothing)." in capsys.readouterr().err


def test_two_jobs_of_one_name_are_refused(line, folder, capsys):
    (folder / "three.yaml").write_text((folder / "one.yaml").read_text())
    assert main(["build", str(folder)]) == 2
    other = f"must be another than that of {folder / 'one.yaml'}"
    said = f"{folder / 'three.yaml'}: name: {other} (got 'one'). Rename one job.\n"
    assert capsys.readouterr().err == said
    assert line[0] == []
    assert main(["validate", "--job-only", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err == said
    assert f"{folder / 'one.yaml'}: ok\n" in captured.out
    assert "three" not in captured.out
    assert main(["validate", "--job-only", str(folder / "three.yaml")]) == 0


def test_a_kit_and_another_kit_or_a_job_of_one_name_are_refused(line, folder, tmp_path, capsys, monkeypatch):
    """The second bundle took the place of the first, without a word."""
    kits = [tmp_path / name for name in ("a", "b", "damaged")]
    for kit in kits:
        kit.mkdir()
        (kit / "manifest.json").write_text("{}")

    def read(path, key):
        if path.name == "damaged":
            raise InputError("not a kit")
        return types.SimpleNamespace(manifest=types.SimpleNamespace(name="one")), ""

    monkeypatch.setattr("trtpipe.cli.commands.build.admit", read)
    for first, second in ((kits[0], kits[1]), (folder / "one.yaml", kits[0])):
        assert main(["build", str(first), str(second), str(kits[2])]) == 2
        said = f"{second}: name: must be another than that of {first} (got 'one'). Rename one job.\n"
        assert capsys.readouterr().err == said
    assert line[0] == []


def test_set_and_verbose_reach_the_job(line, folder, capsys):
    assert main(["build", str(folder / "one.yaml"), "--set", "check.samples=1"]) == 0
    assert main(["build", str(folder / "one.yaml"), "-v"]) == 0
    assert main(["build", str(folder / "one.yaml"), "-vv"]) == 0
    jobs = [job for job, _ in line[0]]
    assert [job.check.samples for job in jobs] == [1, None, None]
    assert [job.build.log_level for job in jobs] == ["error", "info", "verbose"]
    assert main(["build", str(folder / "one.yaml"), "-v", "-q"]) == 2


def test_quiet_shows_only_the_verdict(line, folder, capsys):
    assert main(["build", "-q", str(folder / "one.yaml")]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("one: passed")


def test_the_verdict_says_what_matters(tmp_path):
    (tmp_path / "model.engine").write_bytes(bytes(29_600_000))
    report = replace(
        REPORT,
        metrics=(Metric("cosine", "a", 0.999, 0.99, True), Metric("cosine", "b", float("nan"), 0.99, False)),
        problems=("b: must be finite (got NaN).",),
    )
    lines = verdict("job", tmp_path, report)
    assert any(line.split() == ["b.cosine", "nan", "limit", "0.99", "FAILED"] for line in lines)
    assert "  problem: b: must be finite (got NaN)." in lines
    assert "  model.engine: 29.6 MB" in lines
    assert any("The graph was executed, not the engine" in line for line in lines)
    assert not any("not the engine" in line for line in verdict("job", tmp_path, replace(report, executed="engine")))


def test_a_check_says_what_it_warns_of():
    """As `build` does, whose lines are these."""
    control = Control("w", "zeroed", True, 6)
    report = CheckReport("graph", "r", 6, (), control, False, problems=("p",), warnings=("w",), notes=("n",))
    assert report_lines(report) == [
        "FAILED: graph executed by r on 6 golden samples",
        "  problem: p",
        "  warning: w",
        "  note: n",
    ]
    assert [line for line in verdict("a", Path("b"), report) if line in report_lines(report)] == said_lines(report)

"""A search that a build asked for makes each algorithm's table once: the build goes on with the winner's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtpipe.cli.main import main
from trtpipe.job.load import read_job
from trtpipe.pipeline import stages
from trtpipe.pipeline.build import build
from trtpipe.progress import Silent

NET = """
import numpy as np
import torch


def net():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3, padding=1)]
    return torch.nn.Sequential(*layers).eval()


def fitted():
    return np.random.default_rng(0).normal(size=(32, 3, 12, 12)).astype(np.float32)


def checked():
    return np.random.default_rng(1).normal(size=(16, 3, 12, 12)).astype(np.float32)
"""


def job_of(folder: Path, least: float) -> Path:
    (folder / "tuned_tables.py").write_text(NET)
    data = {"factory": "tuned_tables:fitted", "batch_size": 4, "algorithm": "percentile", "percentile": 80.0}
    made = {
        "name": "tables",
        "model": {"factory": "tuned_tables:net"},
        "inputs": {"x": {"shape": ["N", 3, 12, 12], "N": {"min": 1, "opt": 4, "max": 8}}},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True},
        "calibration": {**data, "corrections": ["equalization"]},
        "build": {"target": "onnxruntime"},
        "check": {
            "factory": "tuned_tables:checked",
            "batch_size": 4,
            "limits": {"sqnr_db_min": least},
            "on_fail": "tune",
        },
    }
    (folder / "job.yaml").write_text(json.dumps(made))
    return folder / "job.yaml"


@pytest.mark.parametrize("again", [False, True])
def test_no_algorithm_calibrates_and_corrects_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Where the trials of an earlier run are taken up, the winner's table is made for the build."""
    path = job_of(tmp_path, 25)
    algorithms: list[str] = []
    observe: Any = stages.observe

    def counted(job: Any, calibration: Any, *rest: Any) -> Any:
        algorithms.append(calibration.algorithm)
        return observe(job, calibration, *rest)

    monkeypatch.setattr(stages, "observe", counted)
    for _ in range(1 + again):
        del algorithms[:]
        built = build(read_job(path), tmp_path / "out", Silent())
    assert built.report.passed, built.report.why
    assert built.bundle.manifest.check is not None
    assert algorithms[0] == "percentile"
    assert len(algorithms) == len(set(algorithms)) == 2


@pytest.mark.parametrize("command", ["build", "prepare"])
def test_a_search_that_was_made_in_vain_is_not_advised(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_of(tmp_path, 200)
    assert main([command, str(path), "-o", str(tmp_path / "out"), "-q"]) == 1
    *_, problem = (line for line in capsys.readouterr().out.splitlines() if "worst quantized modules" in line)
    assert "check.on_fail: tune has tried " in problem
    assert "none met the limits, and this is the closest. Set limits that it can meet" in problem
    texts = [problem]
    if command == "build":
        texts.append((tmp_path / "out" / "tables" / "report.html").read_text(encoding="utf-8"))
        assert "Modules that cost the most when quantized" in texts[1]
        assert "check.on_fail: tune has tried " in texts[1]
    assert not any("trtpipe tune" in text or "Keep the first" in text for text in texts)


def test_a_kit_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_of(tmp_path, 1)
    for command, called in (("prepare", "kit"), ("build", "bundle")):
        main([command, str(path), "-o", str(tmp_path / command), "-q"])
        said = capsys.readouterr().out
        assert said.splitlines()[-1] == f"  {called}: {tmp_path / command / 'tables'}"

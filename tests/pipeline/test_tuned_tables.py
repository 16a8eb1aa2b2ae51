"""A search that a build asked for makes each algorithm's table once: the build goes on with the winner's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("again", [False, True])
def test_no_algorithm_calibrates_and_corrects_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Where the trials of an earlier run are taken up, the winner's table is made for the build."""
    (tmp_path / "tuned_tables.py").write_text(NET)
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
            "limits": {"sqnr_db_min": 25},
            "on_fail": "tune",
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(made))
    algorithms: list[str] = []
    observe: Any = stages.observe

    def counted(job: Any, calibration: Any, *rest: Any) -> Any:
        algorithms.append(calibration.algorithm)
        return observe(job, calibration, *rest)

    monkeypatch.setattr(stages, "observe", counted)
    for _ in range(1 + again):
        del algorithms[:]
        built = build(read_job(tmp_path / "job.yaml"), tmp_path / "out", Silent())
    assert built.report.passed, built.report.why
    assert built.bundle.manifest.check is not None
    assert algorithms[0] == "percentile"
    assert len(algorithms) == len(set(algorithms)) == 2

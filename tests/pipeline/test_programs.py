"""A .pt2 program goes down the whole line, whatever its batch: it is its own baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calib.table import CalibrationTable
from trtpipe.job.load import JobErrors, load_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.deep import deep_problems
from trtpipe.progress import Silent


def job(folder: Path, batch: Any, **model: Any) -> Path:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).eval()
    shapes = {0: torch.export.Dim("N", min=1, max=8)} if batch == "N" else None
    program = torch.export.export(network, (torch.zeros(2, 3, 8, 8),), dynamic_shapes=(shapes,))
    torch.export.save(program, folder / "net.pt2")
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((12, 3, 8, 8)).astype(np.float32))
    x: dict[str, Any] = {"shape": [batch, 3, 8, 8]} | ({"N": {"min": 1, "opt": 4, "max": 8}} if batch == "N" else {})
    text = {
        "name": "program",
        "model": {"program": "net.pt2"} | model,
        "inputs": {"x": x},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True},
        "calibration": {"arrays": "x.npy"},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.999}},
    }
    (folder / "job.yaml").write_text(json.dumps(text))
    return folder / "job.yaml"


@pytest.mark.parametrize("batch", ["N", 2])
def test_a_program_is_built(tmp_path: Path, batch: Any) -> None:
    made = load_job(job(tmp_path, batch))
    assert deep_problems(made) == ()
    built = build(made, tmp_path / "out", Silent())
    assert built.report.passed, built.report.problems
    assert built.bundle.manifest.outputs[0].batch_axis == 0
    table = CalibrationTable.load(built.bundle.path / "calibration.json")
    assert set(table.amax) == {"0:input", "4:input"}  # the modules that it was exported from


def test_a_program_has_no_other_baseline(tmp_path: Path) -> None:
    with pytest.raises(JobErrors) as caught:
        load_job(job(tmp_path, "N", baseline="script"))
    assert "model.baseline: must be given only with factory (got baseline with program)" in str(caught.value)

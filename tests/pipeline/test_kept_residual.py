"""A tensor that nothing reads in INT8 has no threshold, whatever else reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.progress import Silent

NET = """
import numpy as np
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, inputs in {"stem": 3, "body": 16, "tail": 16}.items():
            self.add_module(name, torch.nn.Conv2d(inputs, 16, 3, padding=1))

    def forward(self, x):
        y = torch.relu(self.stem(x))
        return self.tail(torch.relu(self.body(y) + y)).mean((2, 3))


def samples():
    return np.random.default_rng(0).normal(size=(8, 3, 12, 12)).astype(np.float32)


def net():
    return Net().eval()
"""


@pytest.mark.parametrize("kept", [[], ["body"]])
def test_a_sum_beside_a_kept_convolution_reads_no_int8(tmp_path: Path, kept: list[str]) -> None:
    """The verdict warned of what clipping costs there, and the sum had an input SQNR in the report."""
    (tmp_path / "residual_kept.py").write_text(NET)
    data = {"factory": "residual_kept:samples", "batch_size": 8}
    made = {
        "name": "residual",
        "model": {"factory": "residual_kept:net"},
        "inputs": {"x": {"shape": [8, 3, 12, 12]}},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True, "fp16_mode": True, "placement": "all", "keep": {"fp16": kept}},
        "calibration": {**data, "corrections": False, "algorithm": "percentile", "percentile": 95.0},
        "build": {"target": "onnxruntime"},
        "check": {**data, "limits": {"cosine_min": 0.2}},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(made))
    built = build(read_job(tmp_path / "job.yaml"), tmp_path / "out", Silent())
    warned = " ".join(built.report.warnings)
    assert ("body:input" in warned) is not bool(kept)
    assert "tail:input" in warned

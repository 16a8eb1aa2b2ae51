"""Samples of several sizes calibrate one at a time, whatever is done with them then."""

from __future__ import annotations

from pathlib import Path

import pytest

from calib.table import CalibrationTable
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.progress import Silent

NET = """
import numpy as np
import torch


def net():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 1)).eval()


def calibration():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(3, 12, 8 + 4 * (k % 3 == 1))).astype(np.float32) for k in range(24)]


def check():
    return np.random.default_rng(1).normal(size=(8, 3, 12, 12)).astype(np.float32)
"""
JOB = """
name: sizes
model: {factory: "sized_net:net"}
inputs:
  x: {shape: [N, 3, H, W], N: {min: 1, opt: 2, max: 4}, H: {min: 8, opt: 12, max: 16}, W: {min: 8, opt: 12, max: 16}}
outputs: {y: {}}
precision: {int8_mode: true, fp16_mode: FP16}
calibration: {factory: "sized_net:calibration", batch_size: 1}
build: {target: onnxruntime}
check: {factory: "sized_net:check", batch_size: 2, sensitivity: true, limits: {cosine_min: 0.9}}
"""


@pytest.mark.parametrize("half", ["false", "true"])
def test_they_are_corrected_and_measured_too(tmp_path: Path, half: str) -> None:
    (tmp_path / "sized_net.py").write_text(NET)
    (tmp_path / "job.yaml").write_text(JOB.replace("FP16", half))
    built = build(read_job(tmp_path / "job.yaml"), tmp_path / "out", Silent())
    assert built.report.passed
    table = CalibrationTable.load(built.bundle.path / "calibration.json")
    assert table.corrections is not None
    assert table.corrections.steps

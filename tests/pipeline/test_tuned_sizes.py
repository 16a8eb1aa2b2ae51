"""A trial of a search is judged at the sizes that the job declares, as a build of its job is."""

from __future__ import annotations

import json
from pathlib import Path

from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.stages import Stages, calibrate, prepare
from trtpipe.pipeline.tune import _Bench, chosen
from trtpipe.progress import Silent
from trtpipe.quantization.search import Candidate

# A sum over the image: its bias fits that of the samples' size, and INT8's error grows with the image.
NET = """
import numpy as np
import torch


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = torch.nn.Conv2d(3, 16, 1, bias=False), torch.nn.Linear(16, 16)
        with torch.no_grad():
            self.conv.weight.copy_(torch.rand(16, 3, 1, 1))
            self.head.weight.copy_(torch.rand(16, 16) + 0.2)
            self.head.bias.copy_(-15 * self.head.weight @ (512 * self.conv.weight.sum((1, 2, 3))))

    def forward(self, x):
        return self.head(self.conv(x).relu().sum((2, 3)))


def fitted():
    return np.random.default_rng(0).random((32, 3, 32, 32), dtype=np.float32)


def checked():
    return np.random.default_rng(1).random((32, 3, 32, 32), dtype=np.float32)
"""


def test_a_trial_fails_at_a_declared_size_where_a_build_of_its_job_does(tmp_path: Path) -> None:
    (tmp_path / "tuned_sizes.py").write_text(NET)
    sizes = {"N": {"min": 1, "opt": 8, "max": 8}, "H": {"min": 32, "opt": 32, "max": 128}}
    made = {
        "name": "sizes",
        "model": {"factory": "tuned_sizes:Sum"},
        "inputs": {"x": {"shape": ["N", 3, "H", "H"], **sizes}},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True},
        "calibration": {"factory": "tuned_sizes:fitted", "corrections": False},
        "build": {"target": "onnxruntime"},
        "check": {"factory": "tuned_sizes:checked", "limits": {"relative_l2_max": 5e-4}},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(made))
    job, stages = read_job(tmp_path / "job.yaml"), Stages(Silent())
    prepared = prepare(job, stages)
    bench = _Bench(job, prepared, calibrate(job, prepared, stages), stages)
    passed = set()
    for candidate in (Candidate("auto"), Candidate("auto", fp32=("head",))):
        trial = bench.evaluate(candidate)
        built = build(chosen(job, candidate), tmp_path / "out", Silent(), diagnose_seconds=0).report
        assert (trial.passed, trial.problems) == (built.passed, built.problems)
        assert [m.value for m in trial.metrics] == [m.value for m in built.metrics]
        assert all(m.passed is not False for m in trial.metrics)
        passed.add(trial.passed)
    assert passed == {True, False}  # else it shows nothing

"""A hybrid engine built by Torch-TensorRT and run, PyTorch between its engines, on this machine's GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

import trtpipe
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.progress import Silent
from trtpipe.routes import options

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3)
        self.body = torch.nn.Conv2d(8, 8, 3)
        self.more = torch.nn.Conv2d(8, 8, 3)
        self.tail = torch.nn.Conv2d(8, 8, 3)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.more(torch.relu(self.body(torch.relu(self.stem(x))))))
        return self.head(torch.relu(self.tail(torch.erfc(x))).mean((2, 3)))


def make():
    torch.manual_seed(0)
    return Net().eval()
"""


@pytest.mark.parametrize("int8", [False, True])
def test_a_hybrid_engine_answers_as_the_baseline_did(tmp_path, target, int8):
    frontend = options.installed_frontend()
    if frontend is None or frontend.target != target:
        pytest.skip(f"no Torch-TensorRT for {target} is installed")
    (tmp_path / "net_for_gpu_hybrid.py").write_text(NET)
    x = np.random.default_rng(0).random((24, 3, 16, 16)) * np.linspace(0.1, 1.0, 24).reshape(-1, 1, 1, 1)
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    job = {
        "name": "odd",
        "model": {"factory": "net_for_gpu_hybrid:make"},
        "inputs": {"image": {"shape": ["N", 3, 16, 16], "N": {"min": 1, "opt": 4, "max": 8}}},
        "outputs": {"logits": {}},
        "build": {"route": "torch_tensorrt", "target": target, "allow_torch_fallback": True},
        "check": {"arrays": "x.npy", "batch_size": 8, "limits": {"relative_l2_max": 0.1 if int8 else 0.01}},
    }
    if int8:
        job |= {"precision": {"int8_mode": True}}
        job |= {"calibration": {"arrays": "x.npy", "batch_size": 8, "algorithm": "minmax"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    built = build(read_job(tmp_path / "job.yaml"), tmp_path / "out", Silent())
    assert built.report.executed == "engine"
    assert built.report.metrics
    assert all(m.passed is not False for m in built.report.metrics), built.report
    with trtpipe.load(tmp_path / "out" / "odd") as model:
        assert model.executed == "engine"
        alone = model(x[:1].astype(np.float32))["logits"]
        together = model(x[:8].astype(np.float32))["logits"]
    np.testing.assert_allclose(alone[0], together[0], atol=1e-2)

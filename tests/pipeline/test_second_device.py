"""Builds where PyTorch computes on a second device, whose tensors are not the CPU's; tests/gpu has a real one."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trtpipe
from calib.observers import _DeviceCounter
from tests.support.second_device import THERE, two_devices
from trtpipe.job.load import read_job
from trtpipe.model import computing
from trtpipe.pipeline.tune import tune
from trtpipe.progress import Silent

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())  # a mode breaks traces of others
        self.last = torch.nn.Linear(16, 4)
        self.shift = torch.randn(4)  # no buffer

    def forward(self, x):
        return self.last(self.first(x)) + self.shift + torch.arange(4)

def net():
    return Net()

class Samples:
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.randn(8, generator=torch.Generator().manual_seed(i))
"""


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose GPU is `THERE`."""

    def wanted() -> str:
        return computing.CPU if os.environ.get(computing.VARIABLE) else THERE

    monkeypatch.delenv(computing.VARIABLE, raising=False)
    for module in ("model.computing", "pipeline.prepared"):
        monkeypatch.setattr(f"trtpipe.{module}.wanted_device", wanted)
    monkeypatch.setattr("calib.observers._CpuCounter", lambda: _DeviceCounter(torch.get_default_device()))
    with two_devices():
        yield


def job(folder: Path, **keys: Any) -> Path:
    """A job of everything that PyTorch computes: baseline, calibration, corrections, ranges, sensitivities."""
    (folder / "second_net.py").write_text(NET)
    data = {"factory": "second_net:Samples", "batch_size": 4}
    content = {
        "name": "second",
        "model": {"factory": "second_net:net"},
        "inputs": {"x": {"shape": ["N", 8], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True, "fp16_mode": True},
        "calibration": {**data, "corrections": True},
        "build": {"target": "onnxruntime"},
        "check": {**data, "limits": {"cosine_min": 0.999, "relative_l2_max": 0.02}, "sensitivity": True},
    }
    (folder / "job.yaml").write_text(json.dumps(content | keys))
    return folder / "job.yaml"


@pytest.mark.parametrize("baseline", ["trace", "script", "file"])
def test_a_build_gives_what_it_gives_on_the_cpu(
    tmp_path: Path, there: None, baseline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is computed there where TorchScript's code, which makes a tensor on the CPU, has no part in it."""
    path = job(tmp_path)
    code: dict[str, Any] = {"__name__": "second_net"}
    exec(compile(NET, tmp_path / "second_net.py", "exec"), code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(code["net"]().eval()).save(tmp_path / "net.ts")
    more = {"torchscript": str(tmp_path / "net.ts")} if baseline == "file" else {"baseline": baseline}
    path = job(tmp_path, model={"factory": "second_net:net"} | more)
    built = trtpipe.build(path, tmp_path / "there").report
    assert built.passed, built.problems
    moved = baseline == "trace"
    assert any(f"computed by PyTorch on {THERE}" in note for note in built.notes) == moved
    monkeypatch.setenv(computing.VARIABLE, "cpu")
    here = trtpipe.build(path, tmp_path / "here").report
    assert [m.name for m in built.metrics] == [m.name for m in here.metrics]
    assert [m.value for m in built.metrics] == pytest.approx([m.value for m in here.metrics], rel=1e-3)
    assert not any(THERE in note for note in here.notes)


def test_tune_gives_what_it_gives_on_the_cpu(tmp_path: Path, there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = {"limits": {"relative_l2_max": 0.0004}, "factory": "second_net:Samples", "batch_size": 4}
    loaded = read_job(job(tmp_path, check=tight))
    found = tune(loaded, tmp_path / "there", Silent(), evaluations=3)
    monkeypatch.setenv(computing.VARIABLE, "cpu")
    here = tune(loaded, tmp_path / "here", Silent(), evaluations=3)
    assert found.job == here.job
    assert len(found.tuned.trials) > 1

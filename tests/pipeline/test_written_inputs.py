"""A model that writes to its inputs is its twin that does not, whoever runs it and how often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calib.table import CalibrationTable
from trtpipe.job.load import read_job
from trtpipe.pipeline import build as line
from trtpipe.pipeline.bench import bench_job
from trtpipe.progress import Silent

NET = """
import numpy as np
import torch


class Net(torch.nn.Module):
    def __init__(self, how, apart):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.apart = how, apart
        self.stem, self.conv = torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.Conv2d(32, 32, 3, padding=1)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        x = x.clone() if self.apart else x
        if self.how == "scale":
            x /= 4
        elif self.how == "normalize":
            x.sub_(0.5).div_(0.7)
        elif self.how == "channel":
            x[:, 0] -= 1.0
        elif self.how == "sign":
            x.flatten(2).neg_()
        elif self.how == "clip":
            torch.relu_(x)
        return self.head(torch.relu(self.conv(torch.relu(self.stem(x)))).mean((2, 3)))


def fitted():
    return np.random.default_rng(0).normal(size=(32, 3, 12, 12)).astype(np.float32)


def checked():
    return np.random.default_rng(1).normal(size=(16, 3, 12, 12)).astype(np.float32)


def net(how, apart):
    return Net(how, apart).eval()
"""


def job_of(folder: Path, how: str, apart: bool) -> Any:
    (folder / "written.py").write_text(NET)
    shape = {"shape": ["N", 3, 12, 12], "N": {"min": 1, "opt": 4, "max": 8}}
    made = {
        "name": "written",
        "model": {"factory": "written:net", "args": {"how": how, "apart": apart}},
        "inputs": {"x": shape},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True},
        "calibration": {"factory": "written:fitted", "batch_size": 4},
        "build": {"target": "onnxruntime"},
        "check": {
            "factory": "written:checked",
            "batch_size": 4,
            "sensitivity": True,
            "limits": {"cosine_min": 0.9},
        },
    }
    (folder / "job.yaml").write_text(json.dumps(made))
    return read_job(folder / "job.yaml")


@pytest.mark.parametrize("how", ["scale", "normalize", "channel", "sign", "clip"])
def test_all_figures_are_those_of_the_twin(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, rankings, explained = [], list[Any](), line.explained

    def kept(*given: Any, **named: Any) -> Any:
        report, ranking = explained(*given, **named)
        rankings.append(ranking.modules)
        return report, ranking

    monkeypatch.setattr(line, "explained", kept)
    for apart in (True, False):
        folder = tmp_path / str(apart)
        folder.mkdir()
        built = line.build(job_of(folder, how, apart), folder / "out", Silent())
        table = CalibrationTable.load(built.bundle.path / "calibration.json")
        assert table.corrections is not None
        metrics = {m.name: m.value for m in built.report.metrics}
        found.append((metrics, [(s.name, s.kept, s.after_db) for s in table.corrections.steps]))
    (right, steps), (metrics, own_steps) = found
    assert metrics == pytest.approx(right)
    assert [s[:2] for s in own_steps] == [s[:2] for s in steps]
    assert [s[2] for s in own_steps] == pytest.approx([s[2] for s in steps])
    ranked, own_ranked = rankings
    assert {m.module: m.sqnr_db for m in own_ranked} == pytest.approx({m.module: m.sqnr_db for m in ranked})


@pytest.mark.parametrize("how", ["scale", "sign"])
def test_every_mode_of_a_bench_sees_the_samples(tmp_path: Path, how: str) -> None:
    def left_out(name: str) -> str:
        return "it takes long" if "compile" in name or "Inductor" in name else ""

    bench = bench_job(job_of(tmp_path, how, False), Silent(), rounds=1, left_out=left_out)
    found = {row.name: row.sqnr_db for row in bench.rows if row.sqnr_db is not None}
    assert len(found) > 3
    assert {name: db for name, db in found.items() if db < (60 if "FP32" in name else 15)} == {}

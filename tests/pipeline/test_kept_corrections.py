"""Corrections make up for the noise of what is in INT8, and of nothing that `precision.keep` keeps out of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib.table import CalibrationTable
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.progress import Silent

#: Pixel coordinates beside the features, which one convolution reads: INT8 loses what is small beside them.
NET = """
import torch
from torch import nn

class Coordinates(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.coord = nn.Conv2d(3, 14, 3, bias=False), nn.Conv2d(16, 16, 1, bias=False)
        self.body, self.head = nn.Conv2d(16, 16, 3, bias=False), nn.Linear(16, 8, bias=False)
        with torch.no_grad():
            self.coord.weight[:, 14:] *= 1e-2
        places = torch.meshgrid(torch.linspace(0, 255, 6), torch.linspace(0, 255, 6), indexing="ij")
        self.register_buffer("places", torch.stack(places)[None])

    def forward(self, x):
        x = torch.cat([self.stem(x).relu(), self.places.expand(x.shape[0], -1, -1, -1)], 1)
        return self.head(self.body(self.coord(x).relu()).relu().mean((2, 3)))

def net():
    torch.manual_seed(0)
    return Coordinates().eval()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "kept_net.py").write_text(NET)
    draws = np.random.default_rng(0)
    for name, count in (("calibration", 64), ("check", 64)):
        np.save(folder / f"{name}.npy", draws.normal(size=(count, 3, 8, 8)).astype(np.float32))
    return folder


def sqnr(folder: Path, name: str, keep: Sequence[str], **calibration: Any) -> float:
    job: Mapping[str, Any] = {
        "name": name,
        "model": {"factory": "kept_net:net"},
        "inputs": {"x": {"shape": ["N", 3, 8, 8], "N": {"min": 1, "opt": 8, "max": 8}}},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True, "keep": {"fp32": [*keep]}},
        "calibration": calibration or {"arrays": "calibration.npy", "batch_size": 8},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "check.npy", "limits": {"cosine_min": 0.1}},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(job))
    built = build(read_job(folder / f"{name}.yaml"), folder / "out", Silent(), diagnose_seconds=0)
    return next(m.value for m in built.report.metrics if m.name == "sqnr_db")


def test_a_kept_module_is_no_noise_for_the_others_to_make_up_for(folder: Path) -> None:
    everything = sqnr(folder, "everything", [])
    kept, plain = (
        sqnr(folder, "kept", ["coord"]),
        sqnr(folder, "plain", ["coord"], arrays="calibration.npy", corrections=False),
    )
    assert everything < plain - 6
    assert kept > plain - 0.5
    table = CalibrationTable.load(folder / "out" / "kept" / "calibration.json")
    assert table.corrections is not None
    assert "stay wide here" not in (folder / "out" / "kept" / "manifest.json").read_text()
    assert not [name for name in table.corrections.arrays if "coord" in name and not name.startswith("scale")]


def test_a_table_that_was_fitted_with_it_is_said_beside_the_checks_figures(folder: Path) -> None:
    sqnr(folder, "fitted", [])
    sqnr(folder, "given", ["coord"], table="out/fitted/calibration.json")
    notes = json.loads((folder / "out" / "given" / "manifest.json").read_text())["check"]["notes"]
    assert [n for n in notes if "corrections were fitted with 1 operations in INT8 that stay wide here" in n]

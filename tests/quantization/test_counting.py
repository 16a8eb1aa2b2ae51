"""What a calibration counts of tensors that share a scale: what operations read in INT8, each value once."""

from __future__ import annotations

from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from calib.table import CalibrationTable
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate


class Shared(nn.Module):
    """Convolutions around a padded max-pool and a concat, in the ways in which scales are shared."""

    def __init__(self, way: str, fill: float = -1e4) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 3, 1), nn.Conv2d(10, 4, 1)
        self.way, self.fill = way, fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        z = nn.functional.max_pool2d(nn.functional.pad(y, (0, 1, 0, 1), value=self.fill), 3, 2)
        if self.way == "pool":
            out: torch.Tensor = self.b(z)
        elif self.way == "pools":
            out = self.c(torch.cat([nn.functional.max_pool2d(z, 3, 1, 1), z], 1))
        elif self.way == "also read":
            out = self.b(z).mean((2, 3)) + self.b(y).mean((2, 3))
        else:
            out = self.c(torch.cat([y, y * 2], 1))
        return out.flatten(2).mean(2) if out.dim() > 2 else out


def table(way: str, folder: Path, fill: float = -1e4) -> CalibrationTable:
    torch.manual_seed(0)
    captured = capture(nets.loaded(Shared(way, fill).eval(), out_shape=("N", 4 if way in ("pools", "cat") else 3)))
    np.save(folder / "x.npy", nets.images(16, 3, 8, 8).numpy())
    source = open_source(DataSpec(arrays=str(folder / "x.npy")), [InputSpec("image", "float32", (3, 8, 8))])
    return calibrate(
        captured, source, batch_size=4, algorithm="minmax", percentile=99.99, digests={}, progress=Silent()
    )


@pytest.mark.parametrize("way", ["pool", "pools", "also read"])
@pytest.mark.parametrize("fill", [-1e4, -65504.0, float(np.finfo(np.float32).min)])
def test_what_a_pool_never_chooses_has_no_say_in_a_scale(way: str, fill: float, tmp_path: Path) -> None:
    """The padding of "same" pools was the largest of its tensor, so that all else was rounded to zero."""
    found = table(way, tmp_path, fill)
    assert found.amax == table(way, tmp_path, 0.0).amax  # behind a ReLU a padding of zeros changes nothing
    assert max(found.amax.values()) < 10


@pytest.mark.parametrize(
    ("way", "elements"),
    [("pool", {16 * 80}), ("pools", {16 * 160}), ("also read", {16 * 80, 16 * 320}), ("cat", {16 * 640})],
)
def test_what_operations_read_is_counted_once(way: str, elements: set[int], tmp_path: Path) -> None:
    found = table(way, tmp_path).audit.tensors
    assert {t.elements for key, t in found.items() if key != "a:input"} == elements

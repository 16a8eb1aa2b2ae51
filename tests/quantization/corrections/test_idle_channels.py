"""A channel that no sample activates does not hold back the scales of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections.correct import correct

WIDTH = 48
SHAPES = {"linear": (WIDTH,), "conv": (WIDTH, 6, 6)}
OUTPUTS = {"linear": ("N", 10), "conv": ("N", 10, 4, 4)}


def network(kind: str, idle: int) -> nn.Module:
    """Two operations about a ReLU whose channels are a thousand times apart, every fifth of the first ones never
    active."""
    torch.manual_seed(0)
    first: Any
    second: Any
    if kind == "linear":
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
    else:
        first, second = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, 10, 3)
    factors = 10 ** torch.linspace(-2, 1, WIDTH)[torch.randperm(WIDTH)]
    with torch.no_grad():
        first.weight *= factors.view(-1, *[1] * (first.weight.dim() - 1))
        first.bias *= factors
        second.weight /= factors.view(1, -1, *[1] * (second.weight.dim() - 2))
        first.bias[: 5 * idle : 5] = -1e4
    return nn.Sequential(first, nn.ReLU(), second).eval()


@pytest.mark.parametrize("idle", [0, 1, 6])
@pytest.mark.parametrize("kind", SHAPES)
def test_equalization_gains_beside_idle_channels(tmp_path: Path, kind: str, idle: int) -> None:
    captured = capture(nets.loaded(network(kind, idle), ("N", *SHAPES[kind]), out_shape=OUTPUTS[kind]))
    np.save(tmp_path / "x.npy", nets.images(64, *SHAPES[kind], seed=1).numpy())
    source = open_source(DataSpec(arrays=str(tmp_path / "x.npy")), [InputSpec("x", "float32", SHAPES[kind])])
    options: dict[str, Any] = {"batch_size": 8, "progress": Silent()}
    plain = calibrate(captured, source, algorithm="minmax", percentile=99.99, digests={"graph": "g"}, **options)
    corrections = correct(captured, plain, source, which=("equalization",), **options).corrections
    assert corrections is not None
    (step,) = corrections.steps
    assert step.kept
    assert step.after_db > step.before_db + 3

"""Thresholds are judged by more samples than other steps: what they cut shows on few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.corrections import Step
from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections import correct as stage
from trtpipe.quantization.corrections.samples import Samples

SHAPE = (3, 16, 16)


def images(seed: int, bright: int) -> list[torch.Tensor]:
    """A batch of 8, of which the first `bright` have values ten times as large."""
    x = nets.images(8, *SHAPE, seed=seed)
    x[:bright] *= 10
    return [x]


def step_of(folder: Path, monkeypatch: pytest.MonkeyPatch, bright: int, batches: int = 5) -> Step:
    """The step on thresholds, of which as many bright images are in each batch to fit but the one that they are
    tried on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)).eval()
    fit = [images(0, 0), *(images(k, bright) for k in range(1, batches))]
    samples = Samples(tuple(fit), (images(50, 0),), (images(60, 0), images(61, 0)), complete=True)
    every = torch.cat([b[0] for b in (*fit, *samples.local, *samples.judge)]).numpy()
    np.save(folder / "x.npy", every * (1 if bright else 10))  # as large in all cases
    source = open_source(DataSpec(arrays=str(folder / "x.npy")), [InputSpec("x", "float32", SHAPE)])
    captured, given = capture(nets.loaded(net, ("N", *SHAPE), out_shape=("N", 8, 16, 16))), {"digests": {"graph": "g"}}
    options: dict[str, Any] = {"batch_size": 8, "progress": Silent()}
    plain = calibrate(captured, source, algorithm="minmax", percentile=99.99, **given, **options)
    monkeypatch.setattr(stage, "drawn", lambda *_: samples)
    table = stage.correct(captured, plain, source, which=("thresholds",), **options)
    assert table.corrections is not None
    (step,) = (s for s in table.corrections.steps if s.name == "thresholds")
    assert (table.amax == plain.amax) is not step.kept
    return step


def test_what_others_lose_by_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(tmp_path, monkeypatch, bright=1)
    assert not step.kept
    assert step.after_db > step.before_db + 3
    assert "dB on 32 others" in step.detail


def test_without_them_it_would_have_been_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "MORE_JUDGES", 0)
    assert step_of(tmp_path, monkeypatch, bright=1).kept


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_where_others_gain_too_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """As many as there are, and none at all."""
    step = step_of(tmp_path, monkeypatch, bright=0, batches=batches)
    assert step.kept
    assert "others" not in step.detail

"""Samples count once, whether they fill a fixed batch or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from calib.table import CalibrationTable
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.observers import _of_samples
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec

COUNT = 17


def of_batches(loaded: LoadedModel, least: int, most: int) -> Captured:
    """The network captured for batches of `least` to `most`, of one size where both are the same."""
    (spec,) = loaded.inputs
    dims = {} if least == most else {"N": DimRange(least, least, most)}
    inputs = (TensorSpec("x", spec.dtype, (most if least == most else "N", *spec.shape[1:]), dims),)
    return capture(replace(loaded, inputs=inputs))


def table_of(captured: Captured, folder: Path, batch: int) -> CalibrationTable:
    shape = tuple(int(d) for d in captured.inputs[0].shape[1:])
    x = nets.images(COUNT, *shape).numpy()
    x[-3:] *= np.float32([[2], [3], [4]]).reshape(3, *[1] * len(shape))  # each is missed, and copies of it show
    np.save(folder / "x.npy", x)
    source = open_source(DataSpec(arrays=str(folder / "x.npy")), [InputSpec("x", "float32", shape)])
    digests, progress = {"graph": "g"}, Silent()
    return calibrate(
        captured, source, batch_size=batch, algorithm="entropy_2", percentile=99.0, digests=digests, progress=progress
    )


@pytest.mark.parametrize("net", ["residual", "attention", "concat"])
@pytest.mark.parametrize(("least", "most"), [(16, 16), (5, 5), (3, 3), (6, 8)])
def test_a_fixed_batch_has_the_thresholds_of_any_batch(net: str, least: int, most: int, tmp_path: Path) -> None:
    loaded: LoadedModel = getattr(nets, net)()
    free = table_of(of_batches(loaded, 1, 8), tmp_path, 4)
    fixed = table_of(of_batches(loaded, least, most), tmp_path, least)
    assert fixed.amax == pytest.approx(free.amax, rel=1e-5)
    for algorithm in ("percentile", "mse", "auto"):
        assert fixed.recomputed(algorithm).amax == pytest.approx(free.recomputed(algorithm).amax, rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(2, 16),
    count=st.integers(1, 15),
    parts=st.integers(1, 4),
    rest=st.lists(st.integers(17, 20), max_size=3),
    before=st.booleans(),
)
def test_what_copies_gave_is_left_out(size: int, count: int, parts: int, rest: list[int], before: bool) -> None:
    """Wherever the batch is an axis, or an axis of several for each sample."""
    samples = torch.arange(size).repeat_interleave(parts).reshape(-1, *[1] * len(rest)).expand(-1, *rest)
    x = samples.movedim(0, -1) if before and parts == 1 else samples
    kept = _of_samples(x, min(count, size), size)
    assert set(kept.unique().tolist()) == set(range(min(count, size)))
    assert kept.numel() == x.numel() // size * min(count, size)
    whole = torch.ones(23, 29)
    assert _of_samples(whole, min(count, size), 7) is whole

"""Scalings are judged on samples mirrored or transposed too: these have features that one kind of sample lacks."""

from __future__ import annotations

from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from trtpipe.job.sections import CORRECTIONS
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections import correct as stage
from trtpipe.quantization.corrections.correct import correct
from trtpipe.quantization.corrections.edits import corrected
from trtpipe.quantization.corrections.guard import Guard, turned

SHAPE = (1, 16, 16)


def stripes(count: int, seed: int, along: int) -> torch.Tensor:
    """Images [N, 1, 16, 16] that are nearly constant along one axis."""
    made = torch.Generator().manual_seed(seed)
    lines = torch.rand((count, 1, 16, 1), generator=made) * 2 - 1
    rough = torch.rand((count, *SHAPE), generator=made) * 0.02
    return (lines if along == 3 else lines.transpose(2, 3)) + rough


def network() -> nn.Module:
    """Edges along either axis, which a second convolution reads alike."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 10, 3, padding=1)).eval()
    edge = torch.tensor([[-1.0, -2, -1], [0, 0, 0], [1, 2, 1]])
    with torch.no_grad():
        for k in range(16):
            kernel = edge if k % 2 else edge.T
            net[0].weight[k, 0] = kernel * (1 if k % 4 < 2 else -1) * (0.5 + k / 32)
        net[0].bias.zero_()
    return net


@pytest.mark.parametrize(("most", "kept"), [(1.0, False), (float("inf"), True)])
def test_a_scaling_made_from_one_kind_of_samples_is_taken_back(
    most: float, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lose on the others, of which nothing in the calibration tells."""
    monkeypatch.setattr(stage, "MOST_LOSS_DB", most)
    np.save(tmp_path / "x.npy", stripes(64, 0, 3).numpy())
    source = open_source(DataSpec(arrays=str(tmp_path / "x.npy")), [InputSpec("x", "float32", SHAPE)])
    captured = capture(nets.loaded(network(), ("N", *SHAPE), out_shape=("N", 10, 16, 16)))
    plain = calibrate(
        captured, source, algorithm="minmax", batch_size=8, percentile=99.99, digests={}, progress=Silent()
    )
    table = correct(captured, plain, source, which=CORRECTIONS, batch_size=8, progress=Silent())
    assert table.corrections is not None
    (step,) = (s for s in table.corrections.steps if s.name == "equalization")
    assert step.kept is kept
    assert ("dB on samples mirrored or transposed" in step.detail) is not kept
    assert step.after_db > step.before_db + 0.5
    both = Guard(captured, [[torch.cat([stripes(8, 5, along) for along in (2, 3)])]])
    before = both.measured(captured, plain.amax).decibels
    after = both.measured(corrected(captured, table.corrections.arrays), table.amax).decibels
    assert (after > before - 1) is not kept


@pytest.mark.parametrize("shape", [(5, 3, 8, 8), (4, 3, 6, 8), (3, 1, 4, 5, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_turned_images_have_the_same_values_elsewhere(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    (y,) = turned([x], 0)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    for one, other in zip(x, y, strict=True):
        assert torch.equal(one.flatten().sort().values, other.flatten().sort().values)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_images_are_turned_in_every_way_whatever_the_batches_size(size: int) -> None:
    """Of few calibration samples a batch has one or two."""
    x = torch.rand(1, 1, 4, 4).expand(15, 1, 4, 4)
    made = torch.cat([turned([part], k * size)[0] for k, part in enumerate(x.split(size))])
    ways = [x[0].flip(-1), x[0].flip(-2), x[0].transpose(-1, -2)]
    for k, one in enumerate(made):
        assert torch.equal(one, ways[k % 3])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4,), torch.float32), ((4, 9), torch.float32), ((4, 9, 5), torch.float32), ((4, 3, 5, 5), torch.int64)],
)
def test_what_is_no_image_is_not_turned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A column of whole numbers may have a table of its own, which another one's do not fit."""
    x = torch.ones(shape, dtype=dtype)
    assert turned([x], 0)[0] is x

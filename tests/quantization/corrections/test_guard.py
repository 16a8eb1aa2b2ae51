"""When a step is kept, by hand; and by thresholds that have not seen what judges."""

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
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections.guard import MOST_DB, CrossGuard, Guard, Score, of_halves
from trtpipe.quantization.corrections.samples import Samples
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ([1.0, 1.0], [0.5, 0.5], True),
        ([1.0, 1.0], [0.99, 0.99], False),  # 0.044 dB
        ([1.0, 1.0], [1.0, 1.0], False),
        ([100.0, 1.0, 1.0], [10.0, 2.0, 2.0], True),  # 9 dB in all; 10 - 3 - 3 dB, 1.3 in the mean
        ([100.0, 1.0, 1.0], [10.0, 4.0, 4.0], False),  # all together gain 7.5 dB, and two of three samples lose 6
        ([1.0, 1.0, 1.0], [2.0, 0.1, 0.1], True),
        ([1.0, 1.0], [float("nan"), 0.1], False),
    ],
)
def test_a_step_gains_over_all_samples_and_in_their_mean(before: list[float], after: list[float], kept: bool) -> None:
    one, other = Score(torch.tensor(after, dtype=torch.float64)), Score(torch.tensor(before, dtype=torch.float64))
    assert one.beats(other) is kept


@pytest.mark.parametrize(
    ("gains", "kept"),
    [
        ([1.0, 1.0, 1.0, 1.0], True),
        ([1.2, -1.0, 1.2, -1.0], False),  # a mean of 0.1 dB, of a standard error of 0.64
        ([2.0, 0.0, 2.0, 0.0], True),  # of 1 dB, of 0.58
        ([0.04] * 8, False),  # less than any step must gain
        ([1.0, float("nan")], False),
    ],
)
def test_a_scaling_gains_more_than_by_chance(gains: list[float], kept: bool) -> None:
    one = Score(10 ** (-torch.tensor(gains, dtype=torch.float64) / 10))
    assert one.surely_beats(Score(torch.ones(len(gains), dtype=torch.float64))) is kept


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ([1.0, 1.0], [1.0, 1.0], True),
        ([1.0, 1.0], [1.01, 1.01], True),  # 0.043 dB
        ([1.0, 1.0], [1.02, 1.02], False),  # 0.086 dB
        ([1.0, 1.0, 1.0], [3.0, 0.1, 0.1], False),  # one sample has all the loss: 0.3 dB over all, 5 gained in the mean
        ([100.0, 1.0, 1.0], [10.0, 4.0, 4.0], False),  # two of three lose 6 dB
        ([1.0, 1.0], [0.5, 0.5], True),
        ([0.0, 1.0], [0.0, 1.0], True),
        ([1.0, 1.0], [float("nan"), 0.1], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
    ],
)
def test_a_step_keeps_up_over_all_samples_and_in_their_mean(
    before: list[float], after: list[float], kept: bool
) -> None:
    one, other = Score(torch.tensor(after, dtype=torch.float64)), Score(torch.tensor(before, dtype=torch.float64))
    assert one.keeps_up(other) is kept
    assert kept or not one.beats(other)


def of_outputs(*noise: float) -> Score:
    shares = torch.tensor(noise, dtype=torch.float64)
    return Score(shares.mean().reshape(1), shares)


@pytest.mark.parametrize(
    ("before", "after", "kept", "said"),
    [
        # The noisy output gains 0.3 dB, which is nearly all the noise there is, and the precise one loses 3.
        ((1e-2, 1e-5), (0.93e-2, 2e-5), False, "; b 50.0 to 47.0 dB"),
        ((1e-2, 1e-5), (0.4e-2, 2e-5), True, "; b 50.0 to 47.0 dB"),  # 4 dB for 3
        ((1e-2, 1e-5), (0.4e-2, 1e-5), True, ""),
        ((1e-2, 1e-14), (0.9e-2, 1e-13), True, ""),  # what is exact stays so
        ((1e-2, 0.0), (0.9e-2, 0.0), True, ""),  # no signal
    ],
)
def test_of_several_outputs_none_pays_more_than_the_others_gain(
    before: tuple[float, float], after: tuple[float, float], kept: bool, said: str
) -> None:
    """A precise output was nothing beside a noisy one: of a network with two it lost 1.6 dB for 0.1 of the other."""
    was, now = of_outputs(*before), of_outputs(*after)
    assert now.beats(was) is kept
    assert now.keeps_up(was) is kept
    assert now.losses(was, ["a", "b"]) == said
    assert not now.losses(was, ["a"])


def test_the_noise_of_each_output_is_a_share_of_its_own_signal() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x).mean((2, 3)), 1000 * self.b(x).mean((2, 3))

    torch.manual_seed(0)
    x = TensorSpec("x", "float32", ("N", 3, 8, 8), {"N": DimRange(1, 2, 4)})
    specs = tuple(TensorSpec(n, "float32", ("N", 4), x.dims) for n in ("a", "b"))
    captured = capture(LoadedModel(bind(Two().eval(), (x,), {}, ("a", "b")), (x,), specs, "0" * 64, "two"))
    some = batches(2)
    score = Guard(captured, some).measured(captured, {s.group: 20.0 for s in captured.sites if s.axis is None})
    assert score.of_outputs.shape == (2,)
    assert float(score.of_outputs.mean()) == pytest.approx(float(score.noise.sum()))
    assert 0.1 < float(score.of_outputs[0] / score.of_outputs[1]) < 10


def test_decibels_are_those_of_the_whole_noise() -> None:
    assert Score(torch.tensor([0.05, 0.05], dtype=torch.float64)).decibels == pytest.approx(10.0)
    assert Score(torch.zeros(3, dtype=torch.float64)).decibels == MOST_DB
    assert Score(torch.tensor([float("nan")], dtype=torch.float64)).decibels == -MOST_DB


def batches(count: int, seed: int = 0) -> list[list[torch.Tensor]]:
    return [[nets.images(4, 3, 8, 8, seed=seed + k) * (k + 1)] for k in range(count)]


def calibrated(captured: Captured, folder: Path, some: list[list[torch.Tensor]]) -> CalibrationTable:
    np.save(folder / "x.npy", torch.cat([b[0] for b in some]).numpy())
    source = open_source(DataSpec(arrays=str(folder / "x.npy")), [InputSpec("image", "float32", (3, 8, 8))])
    return calibrate(
        captured, source, batch_size=4, algorithm="minmax", percentile=99.99, digests={}, progress=Silent()
    )


def network() -> Captured:
    torch.manual_seed(0)
    return capture(nets.loaded(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)).eval(),
                               out_shape=("N", 4, 4, 4)))  # fmt: skip


def test_each_half_is_judged_with_thresholds_of_the_other(tmp_path: Path) -> None:
    captured, first, second = network(), batches(3), batches(3, 50)
    tables = [calibrated(captured, tmp_path, half) for half in (first, second)]
    cross = CrossGuard(captured, (first, second), 2)
    amax = of_halves(tables[0].recounted(cross.counted(captured)))
    assert amax == tuple(table.amax for table in tables)
    of_first = Guard(captured, first[-2:]).measured(captured, tables[1].amax)
    of_second = Guard(captured, second[-2:]).measured(captured, tables[0].amax)
    both = cross.measured(captured, amax)
    torch.testing.assert_close(both.noise, torch.cat([of_first.noise, of_second.noise]) / 2)


def test_a_threshold_that_only_the_judges_have_made_does_not_count(tmp_path: Path) -> None:
    """The larger half is cut by the other's thresholds, by all samples' it is not."""
    captured, small, large = network(), batches(2), [[b[0] * 4] for b in batches(2, 50)]
    table = calibrated(captured, tmp_path, [*small, *large])
    cross = CrossGuard(captured, (small, large), 2)
    unseen = cross.measured(captured, of_halves(table.recounted(cross.counted(captured)))).decibels
    assert unseen < cross.measured(captured, (table.amax, table.amax)).decibels - 6


@pytest.mark.parametrize("count", [8, 16])
def test_halves_are_of_all_samples_and_as_large(count: int) -> None:
    every = batches(count)
    fit = tuple(b for i, b in enumerate(every) if i % 8 != 1 and i % 4 != 3)
    judge = tuple(b for i, b in enumerate(every) if i % 4 == 3)
    samples = Samples(fit, tuple(b for i, b in enumerate(every) if i % 8 == 1), judge, complete=True)
    first, second = samples.halves
    assert len(first) == len(second) == count // 2
    assert {id(b[0]) for b in (*first, *second)} == {id(b[0]) for b in every}
    assert second[-len(judge) :] == judge

"""When a step is kept, by hand."""

import pytest
import torch

from trtpipe.quantization.corrections.guard import MOST_DB, Score


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


def test_decibels_are_those_of_the_whole_noise() -> None:
    assert Score(torch.tensor([0.05, 0.05], dtype=torch.float64)).decibels == pytest.approx(10.0)
    assert Score(torch.zeros(3, dtype=torch.float64)).decibels == MOST_DB
    assert Score(torch.tensor([float("nan")], dtype=torch.float64)).decibels == -MOST_DB

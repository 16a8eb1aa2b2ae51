"""Weights that several operations share: one set of levels, along one axis of outputs."""

from __future__ import annotations

import itertools
from pathlib import Path

import nets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_correct import decibels, made, without
from torch import nn

from calib.errors import CalibError
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.corrections.edits import corrected
from trtpipe.quantization.corrections.sweep import Sweep
from trtpipe.values import Captured


class Tied(nn.Module):
    """An encoder of `channels`, and a decoder that is its transpose."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(channels, 8, 3, 3) * 0.2)
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = F.relu(F.conv2d(F.relu(self.stem(x)), self.w, padding=1))
        return self.head(F.relu(F.conv_transpose2d(z, self.w, padding=1)).mean((2, 3)))


class Twice(nn.Module):
    """One convolution on two values, of which the second is a thousand times as large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.stem, self.head = (nn.Conv2d(i, o, 3) for i, o in ((8, 8), (3, 8), (8, 10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.stem(x))
        return self.head(F.relu(self.conv(y)) + F.relu(self.conv(1000 * y.flip(1)))).mean((2, 3))


def fitted(captured: Captured, fixed: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    amax = {s.group: 4.0 for s in captured.sites if s.axis is None}
    batches = [[x] for x in nets.images(32, 3, 8, 8).split(4)]
    sweep = Sweep(captured, amax, batches[:5], batches[5:], ("rounding",), Silent(), fixed)
    return {name: levels for name, (levels, _) in sweep.run().levels.items()}


@pytest.mark.parametrize("channels", [8, 16])
def test_a_weight_that_a_convolution_and_a_transposed_one_share_is_rounded_to_nearest(
    channels: int, tmp_path: Path
) -> None:
    captured, plain, table, _ = made(Tied(channels), tmp_path, shape=(3, 8, 8))
    assert table.corrections is not None
    shared = {str(n.target) for n in captured.graph.graph.nodes if n.op == "get_attr" and len(n.users) == 2}
    assert len(shared) == 1
    levels = {key.partition(":")[2] for key in table.corrections.arrays if key.startswith("levels:")}
    assert levels
    assert not levels & shared
    x = nets.images(64, 3, 8, 8, seed=9)
    assert decibels(captured, table, x) > decibels(captured, plain, x) - 0.3
    for step in table.corrections.steps:
        assert step.after_db > step.before_db - 3


def test_operations_that_share_a_weight_have_the_levels_of_the_first(tmp_path: Path) -> None:
    """And those of one that stays as it is, before it or behind."""
    captured = capture(nets.loaded(Twice().eval(), ("N", 3, 8, 8), out_shape=("N", 10)))
    (name,) = {
        str(n.target)
        for n in captured.graph.graph.nodes
        if n.op == "get_attr" and n.name.endswith("weight") and len(n.users) == 2
    }
    alone = {
        one: fitted(without(other).of(captured)) for one, other in itertools.permutations(("conv2d_1", "conv2d_2"))
    }
    assert not torch.equal(alone["conv2d_1"][name], alone["conv2d_2"][name])
    assert torch.equal(fitted(captured)[name], alone["conv2d_1"][name])
    for one in alone:
        steps = captured.graph.get_parameter(name).detach().abs().amax((1, 2, 3)) / 127
        held = corrected(captured, {f"levels:{name}": alone[one][name].numpy(), f"steps:{name}": steps.numpy()})
        assert name not in fitted(held, (one,))


def test_levels_of_a_weight_with_two_axes_of_outputs_are_refused() -> None:
    """As an earlier release wrote them, for either of the two."""
    captured = capture(nets.loaded(Tied(8).eval(), ("N", 3, 8, 8), out_shape=("N", 10)))
    (name,) = {str(n.target) for n in captured.graph.graph.nodes if n.op == "get_attr" and len(n.users) == 2}
    arrays = {f"levels:{name}": np.ones((8, 8, 3, 3), np.int8), f"steps:{name}": np.ones(8, np.float32)}
    expected = rf"corrections: levels:{name} must be of a weight with one axis of outputs \(got one that a convolution"
    with pytest.raises(CalibError, match=expected):
        corrected(captured, arrays)

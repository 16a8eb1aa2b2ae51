"""Resizing by a factor at dynamic sizes, beside what makes the same size otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from trtpipe.errors import BuildError
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.values import DimRange, LoadedModel, TensorSpec

DIMS = {"N": DimRange(1, 2, 5), "H": DimRange(4, 8, 12), "W": DimRange(4, 8, 12)}


def loaded(network: nn.Module) -> LoadedModel:
    """Behind one input with dynamic sizes."""
    inputs = (TensorSpec("x", "float32", ("N", 3, "H", "W"), DIMS),)
    outputs = (TensorSpec("y", "float32", ("N", 3, "h", "w"), {"N": DIMS["N"]}),)
    return LoadedModel(bind(network, inputs, {}, ("y",)), inputs, outputs, "w" * 64, "test")


class Enlarged(nn.Module):
    """A skip beside a PixelShuffle, as networks for super-resolution have it."""

    def __init__(self, mode: str, factor: object, *, beside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shuffled = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2))
        self.mode, self.factor, self.beside = mode, factor, beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "as in a .pt2":
            larger = torch.ops.aten.upsample_bicubic2d.vec(x, None, False, [2.0, 2.0])
        else:
            larger = interpolate(x, scale_factor=self.factor, mode=self.mode)
        return self.shuffled(x) + larger if self.beside else self.shuffled(x).mean((2, 3), keepdim=True) + larger


@pytest.mark.parametrize("factor", [2, 2.0, (2, 2)])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear", "nearest", "as in a .pt2"])
def test_a_whole_factor_makes_the_size_of_what_is_beside_it(mode: str, factor: object) -> None:
    network = Enlarged(mode, factor, beside=True).eval()
    captured = capture(loaded(network))
    for shape in ((1, 3, 8, 8), (2, 3, 7, 5), (5, 3, 6, 8)):
        x = torch.randn(*shape)
        torch.testing.assert_close(captured.graph(x)[0], network(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [1.5, (2, 1.5)])
def test_another_factor_is_left_as_it_is(factor: object) -> None:
    network = Enlarged("bicubic", factor, beside=False).eval()
    graph = capture(loaded(network)).graph
    x = torch.randn(2, 3, 7, 5)
    torch.testing.assert_close(graph(x)[0], network(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(BuildError, match=r"^capture: torch\.export"):
        capture(loaded(Enlarged("bicubic", factor, beside=True).eval()))

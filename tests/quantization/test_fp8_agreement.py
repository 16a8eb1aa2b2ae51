"""FP8 graphs against an independent emulation in PyTorch: `benchmarks/fp8.py` on small networks of the same kinds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from models import Attention, line
from torch.nn import functional

from trtpipe.quantization.narrow import Statistics
from trtpipe.quantization.policy import Modes
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import Narrow, quantize
from trtpipe.routes.onnx import to_onnx

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import fp8
import fp8_emulation


class Block(torch.nn.Module):
    """A block of a vision transformer, its attention in one call."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).view(*x.shape[:2], 4, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(functional.scaled_dot_product_attention(q * 4, k * 4, v).transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Dense(torch.nn.Module):
    """A patch embedding, six blocks, and a decoder of transposed convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = torch.nn.Conv2d(3, 64, 4, 4)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(6)))
        self.decoder = torch.nn.Sequential(
            torch.nn.ConvTranspose2d(64, 32, 4, 2, 1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
            torch.nn.Conv2d(32, 32, 3, padding=1, bias=False), torch.nn.BatchNorm2d(32), torch.nn.Conv2d(32, 1, 1),
        )  # fmt: skip
        for norm in (self.decoder[1], self.decoder[4]):
            norm.running_mean.uniform_(-0.1, 0.1)
            norm.running_var.uniform_(0.1, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.patch(x).flatten(2).transpose(1, 2))
        return self.decoder(x.transpose(1, 2).unflatten(2, (4, 4))).flatten(1)


def measured(network, outputs, damage=lambda network: None):
    """The agreement with a network that `damage` was done to after the graph was made."""
    model = line(network.eval(), 16, outputs)
    narrow = Narrow(Modes(frozenset({"fp8"})), Statistics(model.amax, {}))
    found = quantize(model.captured, int8=False, half=None, keep=Keep(), amax={}, ranges={}, narrow=narrow)
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        damage(network)
    return fp8.agreement(fp8_emulation.folded(network), found, to_onnx(found).data, model.amax, images)


@pytest.mark.parametrize(("network", "outputs", "quantizers"), [(Attention, 10, 8), (Dense, 64, 50)])
def test_every_part_of_the_graph_agrees_and_end_to_end_as_far_as_one_bit_allows(network, outputs, quantizers):
    found = measured(network(), outputs)
    assert found.tensors == quantizers
    assert found.differ == 0
    assert found.parts < 1e-5
    assert found.program < 1e-3
    assert found.exact < 1e-12
    assert found.noise > 1e-2  # it is quantized at all
    # Another order of summation is worth no more than a changed last bit of the input, or the quantization itself.
    assert found.wide_last_bit < 1e-5
    assert found.graph < max(1e-3, 2 * found.last_bit, found.noise)


def test_the_measure_sees_one_weight_of_one_percent_more():
    def damage(network):
        network.blocks[3].fc1.weight.mul_(1.01)

    found = measured(Dense(), 64, damage)
    assert found.parts > 1e-3
    assert found.program > 1e-3
    assert found.exact > 1e-3

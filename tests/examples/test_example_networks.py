from __future__ import annotations

import sys

import torch
from torch import nn

from trtpipe.examples.networks import untrained
from trtpipe.examples.pictures import Pairs, Pictures


class Fading(nn.Module):
    """Forty convolutions that each make the signal smaller, and a head of zeros."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(40):
            convolution = nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False)
            nn.init.normal_(convolution.weight, std=0.05)
            layers += [convolution, nn.BatchNorm2d(8), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(8, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image).mean((2, 3)))


def faded(classes: int = 5) -> nn.Module:
    return Fading(classes)


def test_the_signal_of_an_untrained_network_arrives() -> None:
    torch.manual_seed(7)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert Fading(5).eval().body(images).abs().max() < 1e-9  # as it is, nothing arrives
        before = torch.random.get_rng_state()
        network = untrained(f"{__name__}:faded", side=16, classes=4)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert not any(layer.training for layer in network.modules())
        answers = network(images)
        assert answers.shape == (2, 4)
        assert float(answers.abs().max()) > 0.1
        assert not torch.allclose(answers[0], answers[1], atol=0.01)
        assert torch.equal(untrained(f"{__name__}:faded", side=16, classes=4)(images), answers)
    assert {layer.momentum for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)} == {0.1}
    assert __name__ in sys.modules


def test_made_up_pictures_come_to_an_end() -> None:
    assert [picture.shape for picture in Pictures(8, 3)] == [(3, 8, 8)] * 3
    assert len(list(Pairs(2))) == 2

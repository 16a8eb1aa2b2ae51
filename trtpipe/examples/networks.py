"""Small networks with random weights for the example jobs. The same call gives the same weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from trtpipe.examples.pictures import Pictures

if TYPE_CHECKING:
    import torch


def untrained(of: str, side: int = 224, **args: object) -> torch.nn.Module:
    """A network with random weights whose activations are as those of a trained one.

    Random weights alone may say nothing: the signal of a deep network fades (EfficientNet's logits are 1e-14), and some
    begin with a classifier of zeros (ViT). Here batch norms get the statistics of 8 made-up pictures, and linear layers
    of zeros get random numbers.

    Args:
        of: what makes the network, `package.module:callable`, called with `args`.
        side: of the pictures, float32 [8, 3, side, side].
    """
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    module, _, name = of.partition(":")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        network: torch.nn.Module = getattr(importlib.import_module(module), name)(**args)
        for layer in network.modules():
            if isinstance(layer, torch.nn.Linear) and not layer.weight.any():
                torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    network.eval()
    norms = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
    if norms:
        usual = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all batches, here of one
            norm.train()
        with torch.inference_mode():
            pictures = Pictures(side, 8)
            network(torch.stack([torch.from_numpy(pictures[i]) for i in range(len(pictures))]))
        for norm, momentum in zip(norms, usual, strict=True):
            norm.momentum = momentum
    return network.eval()


def detector(num_classes: int = 4, width: int = 16) -> torch.nn.Module:
    """A one-stage detector's shape: float32 [N, 3, 128, 128] to boxes [N, 256, 4] and scores [N, 256, num_classes].

    What follows in a real one (sigmoid, decoding, non-maximum suppression) stays outside of the engine.
    """
    from torch import nn

    def conv(inner: int, outer: int, stride: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU())

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                conv(3, width, 2),
                conv(width, 2 * width, 2),
                conv(2 * width, 4 * width, 2),
                conv(4 * width, 4 * width, 1),
            )
            self.boxes = nn.Conv2d(4 * width, 4, 1)
            self.scores = nn.Conv2d(4 * width, num_classes, 1)

        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.backbone(image)
            return self.boxes(x).flatten(2).transpose(1, 2), self.scores(x).flatten(2).transpose(1, 2)

    return _seeded(Detector)


def arm(actions: int = 7, width: int = 16) -> torch.nn.Module:
    """A policy of two inputs: image float32 [N, 3, 64, 64] and state float32 [N, 6] to action [N, actions]."""
    import torch
    from torch import nn

    class Arm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eye = nn.Sequential(
                nn.Conv2d(3, width, 5, 2, 2), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(),
                nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            )  # fmt: skip
            self.sense = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
            self.head = nn.Sequential(nn.Linear(32 * width + 32, 64), nn.ReLU(), nn.Linear(64, actions))

        def forward(self, image: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([self.eye(image), self.sense(state)], 1))  # type: ignore[no-any-return]

    return _seeded(Arm)


def _seeded(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """What `make` returns, its weights drawn from seed 0; the generator's state outside is left as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: torch.nn.Module = make()
    return module

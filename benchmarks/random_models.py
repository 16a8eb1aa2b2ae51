"""Architectures with seeded random weights, as job files name them: `random_models:create`. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

#: How many crops set the batch norms.
CROPS = 8


def create(name: str, size: int) -> Any:
    """The timm model `name`, or `tiny`, whose batch norms were set by one pass over photos of `size` pixels.

    Without that pass the running means are 0 and the variances 1, and activations grow or die with depth, which no
    trained network's do; quantization would then be measured on something that does not exist.
    """
    import torch
    from photos import crops

    torch.manual_seed(0)
    model = tiny() if name == "tiny" else _timm(name)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model.train()(torch.from_numpy(crops(CROPS, size, seed=2)))
    return model.eval()


def _timm(name: str) -> Any:
    import timm

    # A ResNet of timm starts with residual branches that add nothing.
    return timm.create_model(name, pretrained=False, **({"zero_init_last": False} if name.startswith("resnet") else {}))


def tiny() -> Any:
    """A small convolutional network of ten classes, for tests of the programs here."""
    import torch
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ).to(torch.float32)

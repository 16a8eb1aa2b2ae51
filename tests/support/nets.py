"""Small networks for the tests of the line, and a way to put one behind bindings."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec

N = DimRange(1, 4, 8)


class Residual(nn.Module):
    """conv+bn+relu, max-pool, one residual block whose skip branch is a convolution, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.bn(self.stem(x))))
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.down(x))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """One attention layer over 6 tokens of 8 numbers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.proj = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(x.shape[0], 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(x.shape[0], 6, 8).mean(1))


class Concat(nn.Module):
    """Two convolutions whose outputs are concatenated and read by a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(3, 4, 1)
        self.c = nn.Conv2d(8, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.cat([torch.relu(self.a(x)), self.b(x)], 1)).mean((2, 3))


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def settled(network: nn.Module, x: torch.Tensor) -> nn.Module:
    """`network` with batch statistics of `x`, in eval mode, its weights from a seed."""
    torch.manual_seed(0)
    for module in network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    network.train()
    with torch.no_grad():
        network(x)
    return network.eval()


def loaded(
    network: nn.Module,
    shape: tuple[int | str, ...] = ("N", 3, 8, 8),
    *,
    dtype: str = "float32",
    outputs: tuple[str, ...] = ("logits",),
    out_dtype: str = "float32",
    out_shape: tuple[int | str, ...] = ("N", 5),
    normalize: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] | None = None,
) -> LoadedModel:
    """`network` behind one input called `x` with a dynamic batch of 1 to 8."""
    inputs = (TensorSpec("x", dtype, shape, {"N": N}),)
    specs = tuple(TensorSpec(n, out_dtype, out_shape, {"N": N}) for n in outputs)
    return LoadedModel(bind(network, inputs, normalize or {}, outputs), inputs, specs, "w" * 64, "test")


@cache
def residual() -> LoadedModel:
    """`Residual` behind its bindings."""
    return loaded(settled(Residual(), images(16, 3, 8, 8)))


@cache
def attention() -> LoadedModel:
    """`Attention` behind its bindings."""
    return loaded(settled(Attention(), images(4, 6, 8)), ("N", 6, 8))


@cache
def concat() -> LoadedModel:
    """`Concat` behind its bindings."""
    return loaded(settled(Concat(), images(4, 3, 8, 8)))


@cache
def captured(name: str) -> Captured:
    """The captured graph of the net made by the function `name`; stages must not change it, so tests share it."""
    return capture({"residual": residual, "attention": attention, "concat": concat}[name]())

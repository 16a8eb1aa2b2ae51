"""Small seeded models taken down the line as far as a route begins, with a calibration by exact maxima."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trtpipe.job.job import Job
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.quantization import quantize as quantization
from trtpipe.quantization.precision import Keep
from trtpipe.values import Captured, DimRange, LoadedModel, Quantized, TensorSpec


def tiny() -> torch.nn.Module:
    """Conv, ReLU, conv with a residual add, pool, linear: what Q/DQ placement looks at."""

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.body = torch.nn.Conv2d(8, 8, 3, padding=1)
            self.skip = torch.nn.Conv2d(8, 8, 1)
            self.head = torch.nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.stem(x))
            x = torch.relu(self.body(x) + self.skip(x))
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    return Tiny().eval()


class Attention(torch.nn.Module):
    """A patch embedding, a convolution, one head of attention, an MLP and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Conv2d(3, 128, 4, 4)
        self.conv = torch.nn.Conv2d(128, 128, 3, padding=1)
        self.norm = torch.nn.LayerNorm(128)
        self.q, self.k, self.v, self.mlp = (torch.nn.Linear(128, 128) for _ in range(4))
        self.narrow = torch.nn.Linear(128, 24)
        self.head = torch.nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.stem(x)).flatten(2).transpose(1, 2)
        h = self.norm(x)
        a = torch.softmax(self.q(h) @ self.k(h).transpose(1, 2) * 0.1, -1) @ self.v(h)
        return self.head(self.narrow(x + self.mlp(a))).mean(1)


@dataclass(frozen=True)
class Line:
    """A model up to its capture, and one amax for every table key."""

    loaded: LoadedModel
    captured: Captured
    amax: dict[str, float]

    def quantized(self, *, int8: bool = False, half: torch.dtype | None = None) -> Quantized:
        return quantization.quantize(
            self.captured, int8=int8, half=half, keep=Keep(), amax=self.amax, ranges={}
        )  # fmt: skip


def line(
    network: torch.nn.Module,
    size: int,
    outputs: int,
    *,
    dtype: str = "float32",
    out: str = "float32",
    channels: int = 3,
) -> Line:
    """`network` with input image [N, channels, size, size], N from 1 by 8 to 32."""
    dims = {"N": DimRange(1, 8, 32)}
    inputs = (TensorSpec("image", dtype, ("N", channels, size, size), dims),)
    loaded = LoadedModel(
        bind(network, inputs, {}, ("logits",)),
        inputs,
        (TensorSpec("logits", out, ("N", outputs), dims),),
        "0" * 64,
        "test",
    )
    captured = capture(loaded)
    prepared = quantization.prepare(captured)
    amax: dict[str, float] = {}
    hooks = [
        o.register_forward_hook(
            lambda _m, args, _y, key=key: amax.__setitem__(key, max(amax.get(key, 0.0), float(args[0].abs().max())))
        )
        for key, o in prepared.observers.items()
    ]
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        prepared.graph(torch.rand(4, channels, size, size, generator=generator).to(getattr(torch, dtype)))
    for hook in hooks:
        hook.remove()
    return Line(loaded, captured, amax)


def job(route: str, target: str, *, size: int = 16, build: dict[str, Any] | None = None, **sections: Any) -> Job:
    """A job for `line`'s models."""
    raw = {
        "name": "tiny",
        "model": {"factory": "models:tiny"},
        "inputs": {"image": {"shape": ["N", 3, size, size], "N": {"min": 1, "opt": 8, "max": 32}}},
        "outputs": {"logits": {}},
        "build": {"route": route, "target": target, **(build or {})},
        "check": {"arrays": "/nowhere/check.npy"},
    }
    return Job.model_validate(raw | sections)

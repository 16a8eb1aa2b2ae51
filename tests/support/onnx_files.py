"""ONNX files for tests: small networks as PyTorch's exporters write them, and a job for one."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.nets import Residual, images, settled


class Views(nn.Module):
    """A batch norm behind a convolution, and shapes that the exporter computes from those of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.act = nn.ReLU6()
        self.query = nn.Linear(8, 8)
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.act(self.bn(self.conv(x))))
        n, c, h, w = x.shape
        tokens = self.query(x.reshape(n, c, h * w).transpose(1, 2))
        return self.head(tokens.softmax(1).mean(1).view(x.size(0), -1))


class Attending(nn.Module):
    """Attention as torch.nn has it, as Whisper scales it, and as a batched product of three dimensions, one after the
    other; the width makes the scale no power of two."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 2, 2)
        self.plain = nn.MultiheadAttention(width, 2, batch_first=True)
        self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.plain(x, x, x, need_weights=False)[0]
        n, length, width = x.shape
        q, k = (f(x).view(n, length, 2, -1).transpose(1, 2) * (width / 2) ** -0.25 for f in (self.query, self.key))
        x = x + (q @ k.transpose(2, 3)).softmax(-1).matmul(x.view(n, length, 2, -1).transpose(1, 2)).flatten(2, 3).view(
            n, length, width
        )
        x = torch.bmm(x.transpose(1, 2).softmax(-1), x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def network(name: str) -> nn.Module:
    """A seeded network in eval mode: residual, views or attending."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = {"residual": Residual, "views": Views, "attending": Attending}[name]()
    return settled(net, images(16, 3, 8, 8))


def export(module: nn.Module, path: Path, *, dynamo: bool = True, external: bool = False) -> Path:
    """`module` with input x [N, 3, 8, 8] and output logits, as one of PyTorch's exporters writes it."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        names: dict[str, Any] = {"input_names": ["x"], "output_names": ["logits"]}
        x = torch.zeros(2, 3, 8, 8)
        if dynamo:
            shapes = ({0: torch.export.Dim("N", min=1, max=8)},)
            torch.onnx.export(module, (x,), path, dynamic_shapes=shapes, external_data=external, verbose=False, **names)
        else:
            axes = {"x": {0: "N"}, "logits": {0: "N"}}
            torch.onnx.export(module, (x,), str(path), dynamo=False, dynamic_axes=axes, opset_version=17, **names)
    return path


def write_job(folder: Path, name: str, **sections: Any) -> Path:
    """A job in INT8 for onnxruntime, calibrated and checked on the same 16 samples; `sections` replace its own."""
    np.save(folder / "x.npy", images(16, 3, 8, 8, seed=1).numpy())
    job: dict[str, Any] = {
        "name": name,
        "model": {"onnx": f"{name}.onnx"},
        "inputs": {"x": {"shape": ["N", 3, 8, 8], "N": {"min": 1, "opt": 4, "max": 8}}},
        "outputs": {"logits": {}},
        "precision": {"int8_mode": True},
        "calibration": {"arrays": "x.npy", "batch_size": 8},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npy", "batch_size": 8, "limits": {"cosine_min": 0.9}},
    } | sections
    (folder / f"{name}.yaml").write_text(json.dumps({k: v for k, v in job.items() if v is not None}))
    return folder / f"{name}.yaml"

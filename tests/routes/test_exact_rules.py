"""What a network computes is what its ONNX file computes, however small a term is."""

from __future__ import annotations

from collections.abc import Callable

import nets
import numpy as np
import pytest
import torch
from onnxscript import rewriter
from torch import nn

from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.exact_rules import exact_rules
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner

EACH = torch.arange(8)
STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm of pixels": lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-8),
    "a sum that may be zero": lambda x: x / (x.sum(1, keepdim=True) + 1e-9),
    "a deviation that may be zero": lambda x: (x - x.mean()) / ((x - x.mean()).pow(2).mean().sqrt() + 1e-8),
    "a logarithm": lambda x: torch.log(x + 1e-12),
    "a difference": lambda x: (x + 1e-10) / (x - 1e-10),
    "a small term made large": lambda x: (x * 1e-8 + 5e-9) * 1e8,
    "a factor near one": lambda x: (x * (1 + 2e-6) - x) * 1e6,
    "clips that exclude each other": lambda x: x.clamp(0, 0.3).clamp(0.31, 3),
    "a clip below zero, and a relu": lambda x: torch.relu(x.clamp(-2, -1)),
    "a relu, and a clip below zero": lambda x: torch.relu(x).clamp(-2, -1),
    "least and largest": lambda x: torch.clamp_min(torch.clamp_max(x, 0.2), 0.4),
    "rows that are added to": lambda x: (
        x.transpose(0, 3).index_put((EACH,), x.transpose(0, 3) * 2, accumulate=True).transpose(0, 3)
    ),
}


class Step(nn.Module):
    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.step, self.head = step, nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.step(x).mean((2, 3)))


@pytest.mark.parametrize("name", STEPS)
def test_a_file_computes_what_its_network_does(name: str) -> None:
    captured = capture(nets.loaded(Step(STEPS[name]).eval()))
    program = quantize(captured, int8=False, half=None, keep=Keep(), amax={}, ranges={})
    with OrtRunner(to_onnx(program).data, as_written=True) as runner:
        for x in (torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.25), nets.images(2, 3, 8, 8).abs()):
            with torch.inference_mode():
                wanted = captured.graph(x)[0].numpy()
            np.testing.assert_allclose(runner.run({"x": x.numpy()})["logits"], wanted, rtol=1e-3, atol=1e-5)


def test_the_optimizer_has_its_rules_again_afterwards() -> None:
    before = rewriter._DEFAULT_REWRITE_RULES
    with exact_rules():
        kept = rewriter._DEFAULT_REWRITE_RULES
    assert rewriter._DEFAULT_REWRITE_RULES is before
    assert 0 < len(kept) < len(before)

"""Channels whose weights are nothing beside their bias, as folding a BatchNorm leaves them: stock runtimes add biases
in INT32, in units of the product of two scales."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
import torch
from models import line
from torch import nn

from calib.algorithms import SMALLEST_SCALE
from trtpipe.quantization.formats import FORMATS, least_scales, scales_of
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner

FEW = slice(3, 7)
KINDS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(16, 16, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    "transposed": lambda: nn.ConvTranspose2d(16, 16, 3, padding=1),
    "linear": lambda: nn.Linear(8, 8),
}


def network(kind: str, factor: float, bias: float) -> nn.Module:
    """Two operations of one kind, several channels of which have `factor` times their weights, and this bias."""
    torch.manual_seed(0)
    first, second = KINDS[kind](), KINDS[kind]()
    for module in (first, second):
        with torch.no_grad():
            weight = module.weight.transpose(0, 1) if kind == "transposed" else module.weight
            weight[FEW] *= factor
            module.bias[FEW] = bias
    layers = (nn.Conv2d(3, 16, 1), first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    for module in layers:
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            with torch.no_grad():
                _alternate(module.weight, 0 if kind == "transposed" and module in (first, second) else 1)
    return nn.Sequential(*layers)


def _alternate(weight: torch.Tensor, axis: int) -> None:
    """Give weights of neighbouring input channels opposite signs: on x86 without VNNI ONNX Runtime adds the products of
    two in 16 bits, which two of one sign overflow."""
    signs = torch.ones(weight.shape[axis])
    signs[1::2] = -1
    weight.abs_().mul_(signs.view([-1 if d == axis else 1 for d in range(weight.dim())]))


@pytest.mark.parametrize("bias", [0.0, -3.0, 50.0])
@pytest.mark.parametrize("factor", [0.0, 1e-35, 1e-12, 1e-8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_runtime_computes_what_the_graph_says(kind: str, factor: float, bias: float) -> None:
    model = line(network(kind, factor, bias).eval(), 8, 10)
    data = to_onnx(model.quantized(int8=True)).data
    image = np.random.default_rng(0).random((4, 3, 8, 8), dtype=np.float32)
    with OrtRunner(data, as_written=True) as runner:
        wanted = runner.run({"image": image})["logits"]
    (stock,) = ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"image": image})
    assert np.linalg.norm(stock - wanted) < 0.01 * np.linalg.norm(wanted)


class Computed(nn.Module):
    """A convolution whose bias is computed, of the input or of its parameters."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.gain, self.of_input = nn.Conv2d(3, 16, 1), nn.Parameter(torch.ones(16)), of_input
        self.head = nn.Linear(1024, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.conv.bias * (x.mean() if self.of_input else torch.exp(self.gain))
        return self.head(torch.relu(nn.functional.conv2d(x, self.conv.weight, bias)).flatten(1))


@pytest.mark.parametrize("of_input", [False, True])
def test_a_bias_that_is_computed_bounds_no_scale(of_input: bool) -> None:
    model = line(Computed(of_input).eval(), 8, 10)
    image = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        (answer,) = model.quantized(int8=True).program.module()(image)
        (wanted,) = model.captured.graph(image)
    assert float((answer - wanted).norm()) < 0.05 * float(wanted.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_zero_has_the_scale_of_a_dead_activation(name: str) -> None:
    found = FORMATS[name]
    amax = torch.tensor([0.0, SMALLEST_SCALE, 1.0, 3.0])
    assert scales_of(amax, found, None).tolist() == pytest.approx([1 / found.largest] * 3 + [3 / found.largest])


def test_a_bias_in_units_of_two_scales_is_far_from_the_end_of_int32() -> None:
    bias = torch.tensor([0.0, -2.0, 5e8])
    least = least_scales(bias, 0.25)
    assert (bias.abs() <= least * 0.25 * 2**30).all()
    assert least[0] == 0

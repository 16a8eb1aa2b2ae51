"""The scales of quantizers in a PyTorch model, as they are checked one by one."""

from __future__ import annotations

import math

import pytest
import torch
import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401  registers quantized_decomposed

from trtpipe.errors import InputError
from trtpipe.model.marks import Mark
from trtpipe.model.quantizers import _mark, _take_qdq_off, _TorchAffine, take_quantizers_off
from trtpipe.model.torch_versions import graph_module


def test_scales_are_a_mark() -> None:
    assert _mark(_TorchAffine((0.5, 0.25), (0.0, 0.0), 1, -128, 127), "a") == Mark((0.5, 0.25), 1)


@pytest.mark.parametrize(
    ("scale", "zero", "low", "what"),
    [
        (math.inf, 0, -128, "must have finite scales (got inf). Calibrate the model again."),
        (0.5, 3, -128, "must have the zero point 0 (got 3). "),
        (0.5, 0, 0, "must quantize to -128 to 127 (got 0 to 127). "),
    ],
)
def test_scales_that_tensorrt_cannot_have(scale: float, zero: float, low: int, what: str) -> None:
    with pytest.raises(InputError) as caught:
        _mark(_TorchAffine((0.5, scale), (0.0, zero), None, low, 127), "model.factory: stem.input")
    assert str(caught.value).startswith(f"model.factory: stem.input {what}")


def test_a_fake_quantizer_of_another_kind_is_refused_when_it_is_executed() -> None:
    kind = type("FakeQuantizerBase", (torch.nn.Identity,), {"__module__": "torchao.quantization"})
    network = take_quantizers_off(torch.nn.Sequential(kind()), "model.factory")
    with pytest.raises(InputError) as caught:
        network(torch.zeros(1))
    assert str(caught.value) == (
        "model.factory: 0 must be a fake quantizer of symmetric INT8 with fixed scales (got "
        "torchao.quantization.FakeQuantizerBase). Give the model in FP32, which trtpipe then quantizes itself."
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_weights_that_are_stored_quantized_are_refused() -> None:
    network = torch.nn.Module()
    network.register_buffer("stored", torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8))
    with pytest.raises(InputError) as caught:
        take_quantizers_off(network, "model.factory")
    assert str(caught.value) == (
        "model.factory: stored must be in floating point (got torch.qint8). Give the model in FP32, which trtpipe "
        "then quantizes itself."
    )


def test_a_dequantize_of_integers_that_the_model_is_given_is_refused() -> None:
    class Stored(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.quantized_decomposed.dequantize_per_tensor.default(x, 0.1, 0, -128, 127, torch.int8)

    graph = graph_module(torch.export.export(Stored(), (torch.zeros(2, 2, dtype=torch.int8),)))
    with pytest.raises(InputError) as caught:
        _take_qdq_off(graph, "model.program", False)
    assert str(caught.value) == (
        "model.program: dequantize_per_tensor dequantizes what no quantize has made (x). Give the model in FP32, "
        "which trtpipe then quantizes itself."
    )


def test_recalibration_is_offered_only_where_nothing_else_is_refused() -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind = (0.1, 3, -128, 127, torch.int8)
            stored = torch.ops.quantized_decomposed.quantize_per_tensor.default(x, *kind)
            float_again = torch.ops.quantized_decomposed.dequantize_per_tensor.default(stored, *kind)
            return float_again + stored

    for recalibrate in (False, True):
        graph = graph_module(torch.export.export(Reads(), (torch.zeros(2, 2),)))
        with pytest.raises(InputError) as caught:
            _take_qdq_off(graph, "model.program", recalibrate)
        assert str(caught.value) == (
            "model.program: quantize_per_tensor has a reader that is no dequantize (add). Give the model in FP32, "
            "which trtpipe then quantizes itself."
        )


@pytest.mark.parametrize("channels", [-1, 3])
def test_a_learned_scale_is_taken_without_data(channels: int) -> None:
    """LSQ: its scale is a parameter, whatever its observer has seen."""
    from torch.ao.quantization import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

    observer, scheme = MovingAverageMinMaxObserver, torch.per_tensor_symmetric
    if channels > 0:
        observer, scheme = MovingAveragePerChannelMinMaxObserver, torch.per_channel_symmetric
    learned = _LearnableFakeQuantize(
        observer, quant_min=-128, quant_max=127, scale=0.05, channel_len=channels, dtype=torch.qint8, qscheme=scheme
    )
    learned.enable_param_learning()
    (found,) = take_quantizers_off(torch.nn.Sequential(learned).eval(), "model.factory").children()
    assert found.scales == pytest.approx([0.05] * max(1, channels))
    assert found.axis == (-1 if channels < 0 else 0)

"""Small networks that came quantized: by PT2E (PTQ and QAT), and with fake quantizers as modules."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchao.quantization.pt2e import fake_quantize, observer
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from tests.support.nets import images

X = {0: torch.export.Dim("N", min=1, max=8)}


class Small(nn.Module):
    """A convolution, a batch norm and a linear; float32 [N, 3, 8, 8] to [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(128, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bn(self.conv(x)).relu().flatten(1))  # type: ignore[no-any-return]


def small() -> nn.Module:
    """`Small` in eval mode, drawn from seed 0, its batch norm settled on images."""
    torch.manual_seed(0)
    network = Small().train()
    network(images(16, 3, 8, 8))
    return network.eval()


class Symmetric(Quantizer):  # type: ignore[misc]
    """Inputs and weights of convolutions and linears in INT8, as TensorRT has it; or otherwise."""

    def __init__(self, *, qat: bool = False, scheme: torch.qscheme = torch.per_tensor_symmetric, low: int = -128):
        fake = fake_quantize.FakeQuantize.with_args
        least = observer.MinMaxObserver, observer.PerChannelMinMaxObserver
        a, w = (fake(observer=o) for o in least) if qat else least
        int8: dict[str, Any] = {"dtype": torch.int8, "quant_min": low, "quant_max": 127, "is_dynamic": False}
        self.x = QuantizationSpec(qscheme=scheme, observer_or_fake_quant_ctr=a, **int8)
        self.w = QuantizationSpec(qscheme=torch.per_channel_symmetric, ch_axis=0, observer_or_fake_quant_ctr=w, **int8)

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in model.graph.nodes:
            if node.target in (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default):
                specs = {node.args[0]: self.x, node.args[1]: self.w}
                node.meta["quantization_annotation"] = QuantizationAnnotation(input_qspec_map=specs, _annotated=True)
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        pass


def converted(*, qat: bool = False, **quantizer: Any) -> torch.fx.GraphModule:
    """`small` after PT2E, calibrated on 8 images; one of each kind is made (with QAT that takes torchao long)."""
    return copy.deepcopy(_converted(qat, **quantizer))


@functools.cache
def _converted(qat: bool, **quantizer: Any) -> torch.fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.export.export(small(), (images(4, 3, 8, 8),), dynamic_shapes=(X,)).module()
        prepare = prepare_qat_pt2e if qat else prepare_pt2e
        prepared = prepare(graph, Symmetric(qat=qat, **quantizer))
        with torch.no_grad():
            prepared(images(8, 3, 8, 8, seed=1))
        made: torch.fx.GraphModule = convert_pt2e(prepared)
    return made


def saved(path: Path, **options: Any) -> Path:
    """`converted` as a .pt2 file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(converted(**options), (images(4, 3, 8, 8),), dynamic_shapes=(X,))
        torch.export.save(program, path)
    return path


class Quantized(nn.Module):
    """A layer whose input and weight go through fake quantizers, as QAT's modules have it."""

    def __init__(self, layer: Any, x: nn.Module, w: nn.Module) -> None:
        super().__init__()
        self.layer, self.x, self.w = layer, x, w

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = self.x(x), self.w(self.layer.weight)
        if isinstance(self.layer, nn.Conv2d):
            return self.layer._conv_forward(x, weight, self.layer.bias)
        return nn.functional.linear(x, weight, self.layer.bias)


def fake(channels: bool = False, scheme: Any = None) -> nn.Module:
    """One of torchao's fake quantizers: of a tensor, or one scale a channel."""
    kind = observer.PerChannelMinMaxObserver if channels else observer.MinMaxObserver
    scheme = scheme or (torch.per_channel_symmetric if channels else torch.per_tensor_symmetric)
    more = {"ch_axis": 0} if channels else {}
    made: nn.Module = fake_quantize.FakeQuantize(
        observer=kind, quant_min=-128, quant_max=127, dtype=torch.int8, qscheme=scheme, **more
    )
    return made


def with_fake_quantizers(seen: bool = True, scheme: Any = None) -> nn.Module:
    """`small` with fake quantizers; `seen`: they have observed 8 images."""
    network: Any = small()
    scheme = torch.per_tensor_affine if scheme == "affine" else scheme
    network.conv = Quantized(network.conv, fake(scheme=scheme), fake(channels=True))
    network.head = Quantized(network.head, fake(scheme=scheme), fake(channels=True))
    if seen:
        with torch.no_grad():
            network(images(8, 3, 8, 8, seed=1))
    return network.eval()  # type: ignore[no-any-return]


def quantized_output(enabled: bool = True) -> nn.Module:
    """`small` with one fake quantizer, behind its last layer."""
    network: Any = nn.Sequential(small(), fake())
    with torch.no_grad():
        network(images(8, 3, 8, 8, seed=1))
    return (network if enabled else network.apply(fake_quantize.disable_fake_quant)).eval()  # type: ignore[no-any-return]

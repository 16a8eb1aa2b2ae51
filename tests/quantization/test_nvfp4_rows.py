"""Linears in NVFP4 whose inputs have two dynamic dimensions, through TensorRT-RTX's own builder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trtpipe.job.sections import Build, Precision
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, op_name
from trtpipe.progress import Silent
from trtpipe.quantization.narrow import Statistics
from trtpipe.quantization.policy import modes_of
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import Narrow, quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.trt.isolated import build_isolated
from trtpipe.values import DimRange, LoadedModel, TensorSpec

N, L = DimRange(1, 4, 8), DimRange(8, 20, 48)


class OneHead(nn.Module):
    """Attention of one head, whose three projections read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(32, 64), nn.Linear(64, 16)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.head((self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x) + x)


class Gram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return (x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize("dynamic", ["N", "L", "NL"])
@pytest.mark.parametrize(("network", "sources"), [(Gram, 1), (OneHead, 3)])
def test_attention_of_one_head_is_compiled(network: type[nn.Module], sources: int, dynamic: str) -> None:
    torch.manual_seed(0)
    dims = {name: r for name, r in (("N", N), ("L", L)) if name in dynamic}
    shape = tuple(name if name in dims else size for name, size in (("N", 4), ("L", 20)))
    x = TensorSpec("x", "float32", (*shape, 32), dims)
    y = TensorSpec("y", "float32", (*shape, 64 if network is Gram else 16), dims)
    module = bind(network().eval(), (x,), {}, ("y",))
    captured = capture(LoadedModel(module, (x,), (y,), "0" * 64, "test"))
    values = torch.randn(4, 20, 32)
    amax = {site.group: 6.0 for site in captured.sites if site.axis is None}
    modes = modes_of(Precision(nvfp4_mode=True))
    found = quantize(
        captured, int8=False, half=None, keep=Keep(), amax=amax, ranges={},
        narrow=Narrow(modes, Statistics(amax, {})),
    )  # fmt: skip
    quantized = [n for n in calls(found.program.graph) if op_name(n) == "fp4_dynamic"]
    assert len(quantized) == sources
    assert {op_name(n.args[0]) == "reshape" for n in quantized} == {dynamic == "NL"}  # type: ignore[arg-type]
    with torch.inference_mode():
        wanted, got = module(values)[0], found.program.module()(values)[0]
    assert got.shape == wanted.shape
    assert float((got - wanted).norm() / wanted.norm()) < 0.3
    graph = to_onnx(found)
    build = Build(target="tensorrt_rtx", compute_capability=("12.0",))
    assert build_isolated(graph, build, progress=Silent(), precision=Precision(nvfp4_mode=True)).data

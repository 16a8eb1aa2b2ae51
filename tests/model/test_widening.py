"""Networks that compute in FP16 or BF16 themselves: their graph is that of the same network in FP32. What is
computed in float64 is said."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.corners import corner_outputs, require_corners
from trtpipe.model.nodes import HALVES
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec

N = {"N": DimRange(1, 4, 8)}


class Net(nn.Module):
    """A convolution with a batch norm, and a head: what folding and quantizing touch."""

    def __init__(self, casts: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        nn.init.uniform_(self.norm.running_mean, -1, 1)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        own = self.conv.weight.dtype
        y = torch.relu(self.norm(self.conv(x.to(own))))
        if self.casts is not None:
            y = y.to(self.casts)
        return self.head(y.sum((2, 3), dtype=self.casts).to(own))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.net(x)
        return y.float()


NETWORKS = {
    "half": lambda: Net().half(),
    "bfloat16": lambda: Net().bfloat16(),
    "a part": lambda: Net(torch.float16),
    "autocast": Autocast,
}


def captured_of(network: nn.Module, dtype: str = "float32") -> tuple[LoadedModel, Captured]:
    x, y = TensorSpec("x", dtype, ("N", 3, 8, 8), N), TensorSpec("y", dtype, ("N", 5), N)
    loaded = LoadedModel(bind(network.eval(), (x,), {}, ("y",)), (x,), (y,), "0" * 64, "test")
    return loaded, capture(loaded)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_the_graph_is_that_of_the_same_network_in_fp32(kind: str, dtype: str) -> None:
    network = NETWORKS[kind]()
    twin = copy.deepcopy(network).float().eval()
    if isinstance(twin, Autocast):
        twin = twin.net
    for part in twin.modules():
        if isinstance(part, Net):
            part.casts = None
    loaded, captured = captured_of(network, dtype)
    nodes = captured.graph.graph.nodes
    narrow = {n for n in nodes if isinstance(v := n.meta.get("val"), Tensor) and v.dtype in HALVES}
    assert all(n.op == "placeholder" or {u.op for u in n.users} == {"output"} for n in narrow), narrow
    assert not any(t.dtype in HALVES for t in (*captured.graph.parameters(), *captured.graph.buffers()))
    x = torch.randn(3, 3, 8, 8, dtype=getattr(torch, dtype))
    (got,) = captured.graph(x)
    assert got.dtype == loaded.module(x)[0].dtype
    torch.testing.assert_close(got, twin(x.float()), atol=1e-5, rtol=1e-5)
    name = "float16" if kind in ("half", "a part") else "bfloat16"
    (note,) = captured.notes
    assert note.startswith(f"the model computes in {name} (first: ")
    assert note.endswith("): its graph computes in FP32, and the job's precision decides what is narrower")
    assert captured.rounding == torch.finfo(getattr(torch, name)).eps
    samples = {"x": np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(dtype)}
    require_corners(loaded, captured, samples, corner_outputs(loaded, samples, ()), ())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_network_in_fp32_is_left_as_it_is(dtype: str) -> None:
    _, captured = captured_of(Net(), dtype)
    assert (captured.notes, captured.rounding) == ((), 0.0)


class Wide(nn.Module):
    """float64 in one place: of what is computed from a sample, or of weights alone."""

    def __init__(self, of_sample: bool) -> None:
        super().__init__()
        self.net, self.of_sample = Net(), of_sample

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        if self.of_sample:
            return (y.double() * 3).float()
        return y + (self.net.head.bias.double() * 3).float()


@pytest.mark.parametrize(
    ("network", "first"),
    [(lambda: Wide(True), "the model itself"), (lambda: Net(torch.float64), "the model itself"),
     (lambda: Net().double(), "conv")],
)  # fmt: skip
def test_what_is_computed_in_float64_is_said(network: Callable[[], nn.Module], first: str) -> None:
    _, captured = captured_of(network())
    (note,) = captured.notes
    assert note.startswith(f"the model computes in float64 (first: {first}, test_widening.py:")
    assert note.endswith("), which TensorRT has not: it is computed in FP32, and what its small digits decide is lost")


@pytest.mark.parametrize("network", [lambda: Wide(False), lambda: nn.Sequential(Net(), Double())])
def test_float64_that_nothing_is_computed_in_is_not(network: Callable[[], nn.Module]) -> None:
    _, captured = captured_of(network())
    assert captured.notes == ()


class Double(nn.Module):
    """Passes its input on as float64, which bindings have not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()

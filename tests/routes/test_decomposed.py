"""An export to ONNX traces a program again only where something in it is to be decomposed; the graph is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nets
import onnx
import pytest
import torch
from torch import nn

from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes import onnx as route
from trtpipe.values import Quantized


def quantized(net: str | nn.Module, half: torch.dtype | None, int8: bool) -> Quantized:
    captured = nets.captured(net) if isinstance(net, str) else capture(nets.loaded(net, out_shape=("N", 3)))
    amax = {s.group: 2.0 for s in captured.sites if s.axis is None}
    return quantize(captured, int8=int8, half=half, keep=Keep(), amax=amax, ranges={})


class Clipped(nn.Module):
    """Its clip, with bounds of one kind, is not what torch.onnx translates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.clip(x, 0.0, 1.0).mean((2, 3)))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each program that is traced again."""
    again: list[int] = []
    real: Callable[..., Any] = torch.export.ExportedProgram.run_decompositions

    def counted(self: torch.export.ExportedProgram, *given: Any, **named: Any) -> Any:
        again.append(1)
        return real(self, *given, **named)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    return again


def shape(file: bytes) -> Any:
    """All of a graph but the names of what is inside it, and what PyTorch calls one reshape and another."""
    graph = onnx.load_from_string(file).graph
    ends = [v.name for v in (*graph.input, *graph.output)]
    names: dict[str, str] = {}
    constants = {
        i.name: (i.data_type, list(i.dims), onnx.numpy_helper.to_array(i).tobytes()) for i in graph.initializer
    }

    def named(name: str) -> Any:
        if name in constants:
            return constants[name]
        return name if name in ends or not name else names.setdefault(name, str(len(names)))

    return [
        (n.op_type, n.name, [named(v) for v in n.input], [named(v) for v in n.output],
         sorted(a.SerializeToString() for a in n.attribute if a.name != "allowzero"))
        for n in graph.node
    ], [v.SerializeToString() for v in (*graph.input, *graph.output)]  # fmt: skip


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("half", [None, torch.float16])
@pytest.mark.parametrize("net", ["residual", "attention", "clipped"])
def test_the_graph_is_that_of_a_program_that_is_traced_again(
    net: str, half: torch.dtype | None, int8: bool, traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = quantized(Clipped() if net == "clipped" else net, half, int8)
    del traced[:]
    found = route.to_onnx(given)
    assert len(traced) == (net == "clipped")
    monkeypatch.setattr("trtpipe.routes.decomposed._stays", lambda node, table: False)
    del traced[:]
    again = route.to_onnx(given)
    assert len(traced) == 1
    assert shape(found.data) == shape(again.data)


def test_the_program_itself_stays_as_it_is() -> None:
    """torch.onnx writes into the graph that it is given."""
    given = quantized("attention", torch.float16, True)
    before = given.program.graph_module.code
    first = route.to_onnx(given)
    assert given.program.graph_module.code == before
    assert route.to_onnx(given) == first

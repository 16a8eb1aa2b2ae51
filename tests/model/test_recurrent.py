"""Recurrent layers with any of their options compute in the graph what PyTorch computes, or are refused by name."""

from __future__ import annotations

from typing import Any

import nets
import numpy as np
import pytest
import torch
from torch import nn

from trtpipe.errors import BuildError
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.output_specs import output_specs
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import DimRange, LoadedModel, OnnxModel, TensorSpec

INPUT = TensorSpec("x", "float32", ("N", 7, 6), {"N": DimRange(1, 4, 8)}, 0)
DEEP = {"num_layers": 2, "bidirectional": True, "bias": False, "dropout": 0.3}
#: Options of the module, and whether its first states are given.
OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({}, False), ({"bias": False}, True), ({"batch_first": True}, False), ({"bidirectional": True}, True), (DEEP, False)
]  # fmt: skip


class Recurrent(nn.Module):
    """A recurrent layer, begun with zeros or with states that are computed, on padded or on packed sequences."""

    def __init__(self, kind: str, given: bool = False, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(6, 5, **options)
        self.given, self.packed, self.batch_first = given, packed, options.get("batch_first", False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch = x.shape[0]
        x = x if self.batch_first else x.transpose(0, 1)
        state: Any = None
        if self.given:
            layers = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
            sizes = (self.rnn.proj_size or 5, 5) if isinstance(self.rnn, nn.LSTM) else (5,)
            states = tuple(x.mean().expand(layers, batch, size).contiguous() for size in sizes)
            state = states if len(sizes) == 2 else states[0]
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.full((batch,), 7), batch_first=self.batch_first)
        y, last = self.rnn(x, state)
        y = nn.utils.rnn.pad_packed_sequence(y, batch_first=self.batch_first)[0] if self.packed else y
        last = torch.cat(last, -1) if isinstance(last, tuple) else last
        return {"y": y if self.batch_first else y.transpose(0, 1), "last": last.transpose(0, 1)}


def built(kind: str, **options: Any) -> tuple[nn.Module, OnnxModel]:
    """A layer and its graph."""
    torch.manual_seed(0)
    network = nets.settled(Recurrent(kind, **options), torch.zeros(2, 7, 6))
    module = bind(network, (INPUT,), {}, ("y", "last"))
    specs, _ = output_specs(module, (INPUT,), dict.fromkeys(("y", "last"), "float32"))
    captured = capture(LoadedModel(module, (INPUT,), specs, "digest", "factory"))
    return network, to_onnx(quantize(captured, int8=False, half=None, keep=Keep(), amax={}, ranges={}))


@pytest.mark.parametrize(("options", "given"), OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "RNN relu"])
def test_a_recurrent_layer_is_what_pytorch_has(kind: str, options: dict[str, Any], given: bool) -> None:
    name, _, nonlinearity = kind.partition(" ")
    more = {"nonlinearity": nonlinearity} if nonlinearity else {}
    network, graph = built(name, given=given, **options, **more)
    x = np.random.default_rng(0).standard_normal((3, 7, 6)).astype(np.float32)
    outputs = OrtRunner(graph.data).run({"x": x})
    with torch.inference_mode():
        for output, wanted in network(torch.from_numpy(x)).items():
            np.testing.assert_allclose(outputs[output], wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize(("options", "given"), OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_an_lstm_with_a_projection_is_refused(options: dict[str, Any], given: bool) -> None:
    with pytest.raises(BuildError) as caught:
        built("LSTM", given=given, proj_size=3, **options)
    assert str(caught.value) == (
        "capture: rnn is an LSTM with proj_size 3, which no engine has. Train it without proj_size, or write its steps "
        "as a Python loop of linears, sigmoids and tanhs."
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_packed_sequence_is_refused_at_its_line(kind: str) -> None:
    with pytest.raises(
        BuildError,
        match=(
            r"^capture: torch\.export cannot capture the model at test_recurrent\.py:\d+ \(y, last = self\.rnn(.|\n)*"
            r"Write that line in operations on tensors alone, or keep it out of forward\.$"
        ),
    ):
        built(kind, packed=True, batch_first=True)

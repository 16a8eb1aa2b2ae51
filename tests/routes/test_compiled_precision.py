"""What the report says of a layer's precision is what the compiled graph's own types say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import nets
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from trtpipe.errors import InputError
from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.compiled_precision import dequantizer, read_back
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt.element_types import element_types

#: What GELU and hard swish are written as.
COMPUTING = ("Gelu", "Erf", "Div", "Mul", "Add", "HardSwish", "HardSigmoid")


class Masked(nets.Attention):
    """Attention in one of its forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        torch.manual_seed(0)
        self.register_buffer("seen", torch.rand(6, 6) > 0.4)
        self.register_buffer("bias", torch.randn(6, 6))
        self.seen[2] = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(x.shape[0], 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        more: dict[str, Any] = {
            "plain": {},
            "causal": {"is_causal": True},
            "bool mask": {"attn_mask": self.seen},
            "bool mask of the data": {"attn_mask": (x[:, None, :, :1] > 0).expand(-1, 2, -1, 6)},
            "float mask": {"attn_mask": self.bias},
            "minus infinity": {"attn_mask": torch.where(x[:, None, :, :1] > 0, 0.0, -torch.inf)},
            "scale": {"scale": 0.3, "dropout_p": 0.0},
            "grouped": {"enable_gqa": True},
            "grouped and causal": {"enable_gqa": True, "is_causal": True},
        }[self.form]
        if "enable_gqa" in more:
            k, v = k[:, :1], v[:, :1]
        y = nn.functional.scaled_dot_product_attention(q, k, v, **more)
        return self.proj(y.transpose(1, 2).reshape(x.shape[0], 6, 8).mean(1))


FORMS = (
    "plain", "causal", "bool mask", "bool mask of the data", "float mask", "minus infinity", "scale", "grouped",
    "grouped and causal",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_attention_is_spelt_out_and_its_softmax_is_fp32(form: str) -> None:
    loaded = nets.loaded(nets.settled(Masked(form), nets.images(4, 6, 8)), ("N", 6, 8))
    captured = capture(loaded)
    x = nets.images(3, 6, 8)
    with torch.inference_mode():
        eager = loaded.module(x)[0]
        assert torch.allclose(captured.graph(x)[0], eager, atol=1e-5)
    quantized = quantize(captured, int8=False, half=torch.float16, keep=Keep(), amax={}, ranges={})
    graph = to_onnx(quantized)
    layers = read_back(quantized.layers, graph)
    assert [(layer.op, layer.precision) for layer in layers if layer.op == "softmax"] == [("softmax", "fp32")]
    assert layers == quantized.layers
    found = OrtRunner(graph.data, as_written=True).run({"x": x.numpy()})["logits"]
    assert np.abs(found - eager.numpy()).max() < 0.01
    types = {v.name: v.type.tensor_type.elem_type for v in onnx.load_from_string(graph.data).graph.value_info}
    softmax = [n for n in onnx.load_from_string(graph.data).graph.node if n.op_type == "Softmax"]
    assert [types[n.input[0]] for n in softmax] == [onnx.TensorProto.FLOAT]


def test_a_graph_that_is_not_what_was_planned_is_said() -> None:
    captured = capture(nets.loaded(nets.settled(nets.Attention(), nets.images(4, 6, 8)), ("N", 6, 8)))
    quantized = quantize(captured, int8=False, half=torch.float16, keep=Keep(), amax={}, ranges={})
    graph = to_onnx(quantized)
    planned = tuple(replace(layer, precision="fp32") for layer in quantized.layers)
    found = {layer.module: layer for layer in read_back(planned, graph) if layer.op == "linear"}
    assert found["proj"].precision == "fp16"
    assert found["proj"].reason == "planned as fp32; the compiled graph computes it in fp16"


def test_attention_with_dropout_is_refused() -> None:
    class Random(nets.Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.qkv(x)
            return self.proj(nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)[..., :8].mean(1))

    with pytest.raises(
        InputError,
        match=r"^model: it draws random numbers in eval mode \(scaled_dot_product_attention at .+:\d+\), and an engine "
        r"draws others than PyTorch, whatever the seed\. Take that out \(a dropout by training=self\.training, in "
        r"attention dropout_p=0\.0\), or make them an input\.$",
    ):
        capture(nets.loaded(nets.settled(Random(), nets.images(4, 6, 8)), ("N", 6, 8)))


@pytest.mark.parametrize("version", ["8.6.1", "10.3.0"])
@pytest.mark.parametrize("half", [False, True])
def test_what_is_said_of_a_graph_for_a_release_is_what_its_types_say(version: str, half: bool) -> None:
    """For TensorRT 8.6 a weight has a Q of its own, and what is behind a DQ computes in float32."""
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Hardswish(), nn.Linear(64, 8)).eval()
    captured = capture(nets.loaded(net, ("N", 6, 32)))
    amax = {site.key: 3.0 for site in captured.sites}
    dtype = torch.float16 if half else None
    quantized = quantize(captured, int8=True, half=dtype, keep=Keep(), amax=amax, ranges={})
    graph = to_onnx(quantized, version)
    types = element_types(onnx.load_from_string(graph.data))
    nodes = onnx.load_from_string(graph.data).graph.node
    layers = read_back(quantized.layers, graph)
    assert [layer.precision for layer in layers if layer.op == "linear"] == ["int8"] * 3
    for layer in layers:
        if layer.op == "linear":
            continue
        computing = {
            types[n.output[0]] for n in nodes if n.name.startswith(f"{layer.module}/") and n.op_type in COMPUTING
        }
        names = {onnx.TensorProto.FLOAT: "fp32", onnx.TensorProto.FLOAT16: "fp16"}
        assert {names[t] for t in computing} == {layer.precision}
    wide = [layer for layer in layers if layer.precision == "fp32"]
    assert len(wide) == (0 if half and version != "8.6.1" else 2)
    assert all((layer.reason == "planned as fp16; the compiled graph computes it in fp32") == half for layer in wide)


@pytest.mark.parametrize("fed", [False, True])
def test_a_product_of_moved_activations_is_not_taken_for_one_of_a_weight(fed: bool) -> None:
    """Only a stored weight is moved about behind its DQ: for an activation there would be another Q."""
    make = onnx.helper.make_node
    nodes = [make("Relu", ["x"], ["r"])] if fed else []
    nodes += [
        make("QuantizeLinear", ["r" if fed else "x", "s", "z"], ["q"]),
        make("DequantizeLinear", ["q", "s", "z"], ["d"]),
        make("Transpose", ["d"], ["t"]),
    ]
    producers = {output: node for node in nodes for output in node.output}
    assert dequantizer("t", producers, {"s", "z", "w"}) is None
    assert dequantizer("d", producers, {"s", "z", "w"}) is nodes[-2]
    assert dequantizer("t", producers, {"s", "z", "w", "r" if fed else "x"}) is nodes[-2]


class Several(nn.Module):
    """Operations without a name in ONNX, several of a kind in one module, beside others in other precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(x)
        x = x + self.b(nn.functional.gelu(self.a(y)))
        return self.head(torch.relu(x.amax(1)) - x.amin(1))


@pytest.mark.parametrize("version", ["8.6.1", "10.3.0", None])
@pytest.mark.parametrize("int8", [False, True])
def test_each_operation_of_a_module_is_what_its_own_nodes_compute_in(version: str | None, int8: bool) -> None:
    captured = capture(nets.loaded(nets.settled(Several(), nets.images(4, 6, 32)), ("N", 6, 32)))
    amax = {site.key: 3.0 for site in captured.sites} if int8 else {}
    quantized = quantize(captured, int8=int8, half=torch.float16, keep=Keep(), amax=amax, ranges={})
    graph = to_onnx(quantized, version)
    types = element_types(onnx.load_from_string(graph.data))
    said = [(layer.op, layer.precision) for layer in read_back(quantized.layers, graph)]
    assert [p for op, p in said if op in ("amax", "amin")] == ["fp32", "fp32"]  # ONNX Runtime and TensorRT reduce so
    wide = int8 and version == "8.6.1"
    gelus = {types[n.output[0]] for n in onnx.load_from_string(graph.data).graph.node if n.op_type in ("Gelu", "Erf")}
    assert gelus == ({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16} if wide else {onnx.TensorProto.FLOAT16})
    assert [p for op, p in said if op == "gelu"] == (["fp16", "fp32"] if wide else ["fp16", "fp16"])

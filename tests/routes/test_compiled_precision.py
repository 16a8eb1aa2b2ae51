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

from trtpipe.errors import BuildError
from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.compiled_precision import read_back
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner


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

    with pytest.raises(BuildError) as caught:
        capture(nets.loaded(nets.settled(Random(), nets.images(4, 6, 8)), ("N", 6, 8)))
    assert str(caught.value) == (
        "the model: attention has dropout_p 0.1 in eval mode, so its outputs are random. "
        "Pass dropout_p=self.dropout if self.training else 0.0."
    )

"""INT8 in an FP16 graph for target onnxruntime: a file that ONNX Runtime opens with its default settings, and right."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from models import line

from trtpipe.routes.float_scales import with_float_scales
from trtpipe.routes.onnx import lowered_for, to_onnx
from trtpipe.values import OnnxModel

#: What may stand between two convolutions.
BETWEEN = {
    "concat": lambda y: torch.cat([y[:, 8:], y[:, :8]], 1),
    "split": lambda y: torch.cat(torch.split(y, 8, 1)[::-1], 1),
    "pad": lambda y: F.pad(y, (1, 1, 1, 1))[:, :, 1:-1, 1:-1],
    "resize": lambda y: F.interpolate(y, scale_factor=2.0)[:, :, ::2, ::2],
    "max pool": lambda y: F.max_pool2d(y, 3, 1, 1),
    "average pool": lambda y: F.avg_pool2d(y, 3, 1, 1),
    "add": lambda y: y + y.flip(1),
    "mul": lambda y: y * y.flip(1),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "hard swish": F.hardswish,
    "leaky relu": F.leaky_relu,
    "softmax": lambda y: torch.softmax(y, 1),
    "matmul": lambda y: torch.matmul(y, y.transpose(2, 3)),
    "where": lambda y: torch.where(y > 0.1, y, -y),
    "clip": lambda y: y.clamp(0, 6),
    "gelu": F.gelu,
    "layer norm": lambda y: F.layer_norm(y, (8, 8)),
    "transpose": lambda y: y.transpose(2, 3),
    "channel shuffle": lambda y: y.reshape(-1, 2, 8, 8, 8).transpose(1, 2).flatten(1, 2),
}


class Between(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1)
        self.head = torch.nn.Linear(16 * 64, 5)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(BETWEEN[self.name](torch.relu(self.first(x)))).flatten(1))


def run(data: bytes, x: np.ndarray, *, optimized: bool) -> np.ndarray:
    """A session with default settings, or one without any graph optimization."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"image": x})[0]
    return found


def lowered(name: str) -> OnnxModel:
    return to_onnx(line(Between(name).eval(), 8, 5).quantized(int8=True, half=torch.float16))


@pytest.mark.parametrize("name", BETWEEN)
def test_a_default_session_opens_it_and_computes_what_the_file_says(name: str) -> None:
    """Property over what stands between two quantized operators; INT8 steps are the tolerance."""
    plain = lowered(name)
    model = lowered_for(plain, "onnxruntime")
    x = np.random.default_rng(0).random((4, 3, 8, 8), np.float32)
    exact = run(plain.data, x, optimized=False)
    found = run(model.data, x, optimized=True)
    assert np.linalg.norm(found - exact) <= 0.03 * np.linalg.norm(exact)
    np.testing.assert_allclose(found, run(model.data, x, optimized=False), rtol=1e-3, atol=1e-4)


def test_the_fault_is_still_there() -> None:
    """Why the graph is lowered so. Where this fails, ONNX Runtime has learnt FP16 scales, and the lowering may go."""
    x = np.random.default_rng(0).random((4, 3, 8, 8), np.float32)
    with pytest.raises(Exception, match="QLinearConcat"):
        run(lowered("concat").data, x, optimized=True)
    softmax = lowered("softmax").data
    exact = run(softmax, x, optimized=False)
    assert np.linalg.norm(run(softmax, x, optimized=True) - exact) > 0.2 * np.linalg.norm(exact)


def test_every_scale_is_float32_and_the_file_is_byte_stable() -> None:
    data = lowered_for(lowered("concat"), "onnxruntime").data
    assert lowered_for(lowered("concat"), "onnxruntime").notes == (
        "ONNX Runtime has operators in INT8 beside FP32 alone: beside FP16, what INT8 rounds is computed in FP16. For "
        "INT8 operators leave out precision.fp16_mode",
    )
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(data)).graph
    types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info} | {
        i.name: i.data_type for i in graph.initializer
    }
    types |= {n.output[0]: n.attribute[0].t.data_type for n in graph.node if n.op_type == "Constant"}
    scales = [types[n.input[1]] for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert set(scales) == {onnx.TensorProto.FLOAT}
    assert len({n.name for n in graph.node}) == len(graph.node)
    assert with_float_scales(data) is data
    assert lowered_for(lowered("concat"), "onnxruntime").data == data


def test_other_targets_and_other_graphs_keep_theirs() -> None:
    plain = lowered("concat")
    assert lowered_for(plain, "tensorrt") is plain
    assert lowered_for(plain, "tensorrt_rtx") is plain
    whole = to_onnx(line(Between("concat").eval(), 8, 5).quantized(int8=True, half=None))
    assert with_float_scales(whole.data) is whole.data
    there = lowered_for(whole, "onnxruntime")
    assert there.notes == whole.notes
    assert lowered_for(there, "onnxruntime") is there
    wide = to_onnx(line(Between("concat").eval(), 8, 5).quantized(int8=False, half=None))
    assert lowered_for(wide, "onnxruntime") is wide

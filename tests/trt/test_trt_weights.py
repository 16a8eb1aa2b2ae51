"""How a plan stores the INT8 weights of its graph: made-up plans, and one that TensorRT-RTX built."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtpipe.progress import Silent
from trtpipe.trt.weights import stored_weights
from trtpipe.values import OnnxModel, TensorSpec, WeightBytes

WEIGHT = np.random.default_rng(0).integers(-127, 128, (16, 6, 3, 3)).astype(np.int8)
SCALES = np.linspace(0.01, 0.02, 16).astype(np.float32)
SPEC = TensorSpec("x", "float32", (1, 6, 5, 5)), TensorSpec("y", "float32", (1, 16, 3, 3))


def graph() -> bytes:
    """One INT8 convolution: [1, 6, 5, 5] -> [1, 16, 3, 3]."""
    scale, zero = np.float32(0.05), np.int8(0)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["weight", "scales"], ["w"], axis=0),
        helper.make_node("Conv", ["d", "w"], ["y"]),
    ]
    constants = {"scale": scale, "zero": zero, "weight": WEIGHT, "scales": SCALES}
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 6, 5, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 3, 3])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


WIDE = WEIGHT.astype(np.float32) * SCALES.reshape(16, 1, 1, 1)
LAST = WEIGHT.transpose(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("stored", "int8", "dequantized"),
    [
        (WEIGHT, WEIGHT.size, 0),
        (LAST, WEIGHT.size, 0),
        *((np.pad(LAST, [(0, 0)] * 3 + [(0, channels - 6)]), WEIGHT.size, 0) for channels in (8, 16, 32)),
        (np.pad(LAST, [(0, 0)] * 3 + [(0, 4)]), 0, 0),
        (WIDE, 0, WEIGHT.size),
        (WIDE.transpose(0, 2, 3, 1).astype(np.float16), 0, WEIGHT.size),
        (WEIGHT[::-1], 0, 0),
        (WEIGHT[:-1], 0, 0),
    ],
)
def test_a_weight_is_where_its_bytes_are(stored: np.ndarray, int8: int, dequantized: int) -> None:
    plan = b"head" + np.ascontiguousarray(stored).tobytes() + b"tail"
    assert stored_weights(plan, graph()) == WeightBytes(WEIGHT.size, int8, dequantized)


def test_a_plan_of_tensorrt_rtx_holds_them_in_int8() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    from trtpipe.job.sections import Build
    from trtpipe.trt.isolated import build_isolated

    data = graph()
    engine = build_isolated(OnnxModel(data, 20, SPEC[:1], SPEC[1:]), Build(), progress=Silent())
    assert stored_weights(engine.data, data) == WeightBytes(WEIGHT.size, WEIGHT.size, 0)

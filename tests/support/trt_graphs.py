"""Small ONNX graphs for the tests of trtpipe.trt."""

from __future__ import annotations

import numpy as np

from trtpipe.values import DimRange, OnnxModel, TensorSpec

BATCH = DimRange(1, 4, 8)


def conv_model(*, node: str = "layer3.1.conv2", op: str = "Relu", channels: int = 8) -> OnnxModel:
    """Conv named `node`, then `op`: image float32 [N, 3, 16, 16] to map float32 [N, channels, 16, 16]."""
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).standard_normal((channels, 3, 3, 3), dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "weight"], ["hidden"], name=node, pads=[1, 1, 1, 1]),
            helper.make_node(op, ["hidden"], ["map"], name="layer3.1.act"),
        ],
        "graph",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("map", TensorProto.FLOAT, ["N", channels, 16, 16])],
        [numpy_helper.from_array(weights, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return OnnxModel(
        model.SerializeToString(),
        18,
        (TensorSpec("image", "float32", ("N", 3, 16, 16), {"N": BATCH}),),
        (TensorSpec("map", "float32", ("N", channels, 16, 16), {"N": BATCH}),),
    )


def cast_model(
    input_type: int, output_type: int, inputs: str, outputs: str, shape: tuple[int | str, ...] = (2, 3)
) -> OnnxModel:
    """A cast of x to y, of these ONNX types and this shape, declared with these dtypes."""
    from onnx import helper

    dims = {"N": BATCH} if "N" in shape else {}
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=output_type, name="cast")],
        "graph",
        [helper.make_tensor_value_info("x", input_type, shape)],
        [helper.make_tensor_value_info("y", output_type, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return OnnxModel(
        model.SerializeToString(), 18, (TensorSpec("x", inputs, shape, dims),), (TensorSpec("y", outputs, shape, dims),)
    )

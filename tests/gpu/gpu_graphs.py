"""Small ONNX graphs that run on a GPU in milliseconds."""

from __future__ import annotations

import numpy as np

from trtpipe.values import DimRange, OnnxModel, TensorSpec

_BATCH = DimRange(1, 4, 8)


def batch(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """An input of either model."""
    return {"image": np.random.default_rng(seed).standard_normal((size, 3, 16, 16), dtype=np.float32)}


def conv_model() -> OnnxModel:
    """Conv `layer3.1.conv2` and Relu: image float32 [N, 3, 16, 16] to map float32 [N, 8, 16, 16]."""
    return _model(quantized=False)


def quantized_model() -> OnnxModel:
    """The same with Q/DQ before the convolution: the input per tensor, the weight per channel, both symmetric."""
    return _model(quantized=True)


def _model(*, quantized: bool) -> OnnxModel:
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.default_rng(0).standard_normal((8, 3, 3, 3), dtype=np.float32)
    nodes, constants = [], [numpy_helper.from_array(weight, "weight")]
    conv_inputs = ["image", "weight"]
    if quantized:
        scales = (np.abs(weight).max(axis=(1, 2, 3)) / 127).astype(np.float32)
        constants = [
            numpy_helper.from_array(np.round(weight / scales[:, None, None, None]).astype(np.int8), "weight_q"),
            numpy_helper.from_array(scales, "weight_scale"),
            numpy_helper.from_array(np.float32(4 / 127), "image_scale"),
            numpy_helper.from_array(np.int8(0), "zero"),
            numpy_helper.from_array(np.zeros(8, np.int8), "zeros"),
        ]
        nodes = [
            helper.make_node("QuantizeLinear", ["image", "image_scale", "zero"], ["q"], name="layer3.1.conv2/q"),
            helper.make_node("DequantizeLinear", ["q", "image_scale", "zero"], ["dq"], name="layer3.1.conv2/dq"),
            helper.make_node(
                "DequantizeLinear", ["weight_q", "weight_scale", "zeros"], ["w"], name="layer3.1.conv2/w", axis=0
            ),
        ]
        conv_inputs = ["dq", "w"]
    nodes += [
        helper.make_node("Conv", conv_inputs, ["hidden"], name="layer3.1.conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["hidden"], ["map"], name="layer3.1.relu"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("map", TensorProto.FLOAT, ["N", 8, 16, 16])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return OnnxModel(
        model.SerializeToString(),
        18,
        (TensorSpec("image", "float32", ("N", 3, 16, 16), {"N": _BATCH}),),
        (TensorSpec("map", "float32", ("N", 8, 16, 16), {"N": _BATCH}),),
    )

"""Q/DQ pairs as ONNX Runtime's optimizer understands them: with FP32 scales, and each DQ with its zero point."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trtpipe.onnx_format import QDQ

if TYPE_CHECKING:
    import onnx


def with_float_scales(model: bytes) -> bytes:
    """The graph with each FP16 scale of QuantizeLinear and DequantizeLinear in FP32, and a Cast on its float side.

    ONNX Runtime (1.31) fuses DequantizeLinear, an operator and QuantizeLinear into one quantized operator whatever the
    type of the scales, and its quantized operators read FP32 scales: an FP16 graph with a Concat is then refused, and
    one with a Mul or a Softmax computes nonsense. With a Cast between them nothing is fused.

    Args:
        model: a serialized ModelProto; scales are initializers, or outputs of Constant nodes.

    Returns:
        The model itself where every scale is FP32.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(model)
    graph = proto.graph
    halves = {i.name: i for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT16}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].t.data_type == onnx.TensorProto.FLOAT16:
            halves[node.output[0]] = node.attribute[0].t
    widened: dict[str, onnx.TensorProto] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        scale = node.input[1] if node.op_type in QDQ else ""
        if scale not in halves:
            nodes.append(node)
            continue
        wide = f"{scale}/float32"
        if wide not in widened:
            values = numpy_helper.to_array(halves[scale]).astype(np.float32)
            widened[wide] = numpy_helper.from_array(values, wide)
        nodes += _cast_pair(node, wide)
    if not widened:
        return model
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(widened.values())
    unused = set(halves) - {name for node in nodes for name in node.input}
    kept = [i for i in graph.initializer if i.name not in unused]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    del graph.value_info[:]  # types of the tensors that were cut in two
    onnx.checker.check_model(proto, full_check=True)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def with_zero_points(model: bytes) -> bytes:
    """The graph with a zero point at each DequantizeLinear of INT8 codes, which say their type by themselves.

    ONNX Runtime before 1.28 moves a Transpose over a weight's DQ by a QuantizeLinear with the DQ's own inputs: without
    a zero point it gives UINT8, and the graph of an attention is refused.

    Args:
        model: a serialized ModelProto; codes and scales are initializers.

    Returns:
        The model itself where every one has its zero point.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(model)
    graph = proto.graph
    stored = {i.name: i for i in graph.initializer}
    added: dict[str, onnx.TensorProto] = {}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and len(node.input) == 2:
            codes, scale = (stored.get(name) for name in node.input)
            if codes is not None and scale is not None and codes.data_type == onnx.TensorProto.INT8:
                zeros = np.zeros(tuple(scale.dims), np.int8)
                point = added.setdefault(scale.name, numpy_helper.from_array(zeros, f"{scale.name}/zero_point"))
                node.input.append(point.name)
    if not added:
        return model
    graph.initializer.extend(added.values())
    onnx.checker.check_model(proto, full_check=True)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _cast_pair(node: onnx.NodeProto, scale: str) -> list[onnx.NodeProto]:
    """The node with an FP32 scale, and the Cast before (Q) or after (DQ) it."""
    import onnx

    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.input[1] = scale
    between = f"{node.output[0]}/float32"
    name = f"{node.name}/Cast"
    if node.op_type == "QuantizeLinear":
        made.input[0] = between
        return [onnx.helper.make_node("Cast", [node.input[0]], [between], name, to=onnx.TensorProto.FLOAT), made]
    made.output[0] = between
    return [made, onnx.helper.make_node("Cast", [between], [node.output[0]], name, to=onnx.TensorProto.FLOAT16)]

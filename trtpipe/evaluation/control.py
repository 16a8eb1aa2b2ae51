"""The control of a check: a copy of the ONNX graph with one tensor damaged."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtpipe.errors import BuildError
from trtpipe.values import OnnxModel

#: A calibration gone wrong by this factor leaves only -1, 0 and 1 of the 255 levels.
SCALE_FACTOR = 127.0


def damaged_copy(model: OnnxModel) -> tuple[bytes, str, str]:
    """The graph's bytes with one tensor damaged, which one, and how.

    In a quantized graph the scale of the last activation (in its Q and in every DQ that reads it) is multiplied by
    127, as if calibration had gone wrong by that much. In any other graph the last weight is set to zero.

    Raises:
        BuildError: the graph has neither; nothing in it can be damaged.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(model.data)
    graph = proto.graph
    constants: dict[str, Any] = {i.name: i for i in graph.initializer}
    quantizers = [n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[1] in constants]
    if quantizers:
        last = quantizers[-1]
        readers = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] == last.output[0]]
        for k, node in enumerate((last, *readers)):
            scale = numpy_helper.to_array(constants[node.input[1]])
            new = (scale.astype(np.float32) * SCALE_FACTOR).astype(scale.dtype)
            node.input[1] = f"damaged_scale_{k}"
            graph.initializer.append(numpy_helper.from_array(new, node.input[1]))
        return proto.SerializeToString(), last.name, f"scale x {SCALE_FACTOR:g}"
    weights = [
        (n, i)
        for n in graph.node
        for i in n.input[:2]
        if i in constants and n.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")
    ]
    if not weights:
        raise BuildError("check: the graph must have a weight or a scale to damage for the control (got neither).")
    node, name = weights[-1]
    zero = np.zeros_like(numpy_helper.to_array(constants[name]))
    graph.initializer.append(numpy_helper.from_array(zero, "damaged_weight"))
    for k, given in enumerate(node.input):
        if given == name:
            node.input[k] = "damaged_weight"
    return proto.SerializeToString(), node.name, "weight set to zero"

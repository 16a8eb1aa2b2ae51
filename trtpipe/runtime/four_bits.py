"""NVFP4 for ONNX Runtime, which has no kernels of it: the same numbers, computed by operators that it has.

Weights of FLOAT4E2M1 become the float32 numbers that they stand for; TensorRT's `TRT_FP4DynamicQuantize` becomes a
small graph that finds each block's scale, rounds to E4M3 and to E2M1, and multiplies back. INT4 is left alone: ONNX
Runtime dequantizes it by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from calib.types import Array
from trtpipe.trt.formats import DYNAMIC_QUANTIZE, E2M1_MAX, E4M3_MAX, NVFP4_BLOCK

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

#: Axes of the last dimension.
_LAST = np.array([-1], np.int64)


def widened(model: bytes) -> bytes | None:
    """The graph with every NVFP4 number dequantized, its bindings unchanged; None where it holds none.

    Args:
        model: a serialized ModelProto.
    """
    proto = onnx.load_from_string(model)
    graph = proto.graph
    constants = {i.name: i for i in graph.initializer}
    four = {n for n, i in constants.items() if i.data_type == TensorProto.FLOAT4E2M1}
    dynamic = {n.output[0] for n in graph.node if n.op_type == DYNAMIC_QUANTIZE}
    if not four and not dynamic:
        return None
    for name in four:
        values = numpy_helper.to_array(constants[name]).astype(np.float32)
        constants[name].CopyFrom(numpy_helper.from_array(values, name))
    made = _Nodes(graph)
    for node in graph.node:
        if node.op_type == DYNAMIC_QUANTIZE:
            _quantize(made, node)
        elif node.op_type == "DequantizeLinear" and node.input[0] in four | dynamic:
            _dequantize(made, node)
        else:
            made.nodes.append(node)
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in made.nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    data: bytes = proto.SerializeToString()
    return data


class _Nodes:
    """New nodes and constants of a graph."""

    def __init__(self, graph: GraphProto) -> None:
        self.graph = graph
        self.nodes: list[NodeProto] = []
        self._made = 0

    def constant(self, value: Array) -> str:
        name = self._name("constant")
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def number(self, value: float) -> str:
        return self.constant(np.asarray(value, np.float32))

    def add(self, op: str, *inputs: str, to: str | None = None, **attributes: object) -> str:
        """The output of a new node, called `to` where that is given."""
        output = to or self._name(op)
        self.nodes.append(helper.make_node(op, list(inputs), [output], self._name(op), **attributes))
        return output

    def cast(self, x: str, dtype: int, to: str | None = None) -> str:
        output = to or self._name("Cast")
        self.nodes.append(helper.make_node("Cast", [x], [output], self._name("Cast"), to=dtype))
        return output

    def blocks(self, x: str) -> str:
        """`x` [..., K] as [..., K / 16, 16]."""
        shape = self.add("Shape", x, start=0, end=-1)
        return self.add(
            "Reshape", x, self.add("Concat", shape, self.constant(np.array([-1, NVFP4_BLOCK], np.int64)), axis=0)
        )

    def _name(self, op: str) -> str:
        self._made += 1
        return f"four_bits/{op}_{self._made}"


def _quantize(made: _Nodes, node: NodeProto) -> None:
    """`node`'s two outputs: E2M1 numbers as float32 [..., K], and E4M3 block scales [..., K / 16]."""
    x, scale = made.cast(node.input[0], TensorProto.FLOAT), node.input[1]
    blocks, last = made.blocks(x), made.constant(_LAST)
    amax = made.add("ReduceMax", made.add("Abs", blocks), last, keepdims=0)
    ratio = made.add("Div", made.add("Div", amax, made.number(E2M1_MAX)), scale)
    scales = made.cast(made.add("Min", ratio, made.number(E4M3_MAX)), TensorProto.FLOAT8E4M3FN, to=node.output[1])
    wide = made.add("Unsqueeze", made.add("Mul", made.cast(scales, TensorProto.FLOAT), scale), last)
    zero = made.add("Equal", wide, made.number(0.0))
    value = made.add("Div", blocks, made.add("Where", zero, made.number(1.0), wide))
    size = made.add("Abs", value)
    large = made.add("Where", made.add("Less", size, made.number(4.0)), made.number(1.0), made.number(2.0))
    step = made.add("Where", made.add("Less", size, made.number(2.0)), made.number(0.5), large)
    near = made.add("Mul", made.add("Round", made.add("Div", value, step)), step)
    near = made.add("Clip", near, made.number(-E2M1_MAX), made.number(E2M1_MAX))
    made.add("Reshape", near, made.add("Shape", x), to=node.output[0])


def _dequantize(made: _Nodes, node: NodeProto) -> None:
    """`node`'s output: numbers, which are float32 by now, times the scale of their block along the last axis."""
    numbers, scale = node.input[:2]
    wide = made.add("Unsqueeze", made.cast(scale, TensorProto.FLOAT), made.constant(_LAST))
    product = made.add("Mul", made.blocks(numbers), wide)
    whole = made.add("Reshape", product, made.add("Shape", numbers))
    made.add("CastLike", whole, scale, to=node.output[0])

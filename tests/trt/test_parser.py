"""The table of TensorRT 8.6's parser against hand-made graphs, one for each fact of it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtpipe.trt.parser import TYPES_8_6, newest_opset, refused_nodes

FLOATS = {"x": TensorProto.FLOAT}


def graph(*nodes, opset=17, inputs=None, constants=None, domains=()):
    """A model of these nodes; every constant is an initializer, the outputs of the last node are the graph's."""
    made = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(n, t, [1, 4, 8, 8]) for n, t in (inputs or FLOATS).items()],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid(d, v) for d, v in (("", opset), *domains)]
    return helper.make_model(made, opset_imports=opsets)


def node(op, inputs=("x",), outputs=("y",), **attributes):
    return helper.make_node(op, list(inputs), list(outputs), name="a", **attributes)


SCALE, ZERO = np.float32(0.5), np.int8(0)
Q = node("QuantizeLinear", ("x", "s", "z"), ("q",))
#: (graph, what is said of it); "" is accepted.
CASES = [
    (graph(node("Relu")), ""),
    (graph(node("Gelu"), opset=20), "the file: opset 20, where 8.6 takes 17 at most; a [Gelu]: not an operator of 8.6"),
    (graph(node("Mish"), opset=18), "the file: opset 18, where 8.6 takes 17 at most; a [Mish]: not an operator of 8.6"),
    (graph(node("Own", domain="own"), domains=[("own", 1)]),
     "the file: operators of the domain own; a [Own]: not an operator of 8.6"),
    (graph(node("Relu"), inputs={"x": TensorProto.BFLOAT16}),
     "a [Relu]: takes FLOAT or FLOAT16 or INT8, not BFLOAT16"),
    (graph(node("Add", ("x", "x")), inputs={"x": TensorProto.INT64}), ""),
    (graph(node("MatMul", ("x", "x")), inputs={"x": TensorProto.INT64}),
     "a [MatMul]: takes FLOAT or FLOAT16, not INT32"),
    (graph(node("ReduceMean", axes=[2, 3])), ""),
    (graph(node("ReduceMean", ("x", "axes")), opset=17, constants={"axes": np.array([2, 3])}),
     "a [ReduceMean]: takes its axes as an attribute alone: an input is ignored, and every axis is reduced"),
    (graph(node("ReduceSum", ("x", "axes")), constants={"axes": np.array([2, 3])}), ""),
    (graph(node("ReduceSum", ("x", "w")), inputs=FLOATS | {"w": TensorProto.INT64}),
     "a [ReduceSum]: its input 1 must be a constant"),
    (graph(Q, node("DequantizeLinear", ("q", "s", "z")), constants={"s": SCALE, "z": ZERO}), ""),
    (graph(Q, node("DequantizeLinear", ("q", "s")), constants={"s": SCALE, "z": ZERO}),
     "a [DequantizeLinear]: needs its zero point input"),
    (graph(Q, node("DequantizeLinear", ("q", "s", "one")), constants={"s": SCALE, "z": ZERO, "one": np.int8(1)}),
     "a [DequantizeLinear]: its zero point must be INT8 and 0"),
    (graph(Q, node("DequantizeLinear", ("q", "s", "two")),
           constants={"s": SCALE, "z": ZERO, "two": np.zeros(2, np.int8)}),
     "a [DequantizeLinear]: its scale and zero point must have as many values"),
    (graph(Q, node("DequantizeLinear", ("q", "h", "z")), opset=17,
           constants={"s": SCALE, "z": ZERO, "h": np.float16(0.5)}),
     "a [DequantizeLinear]: its scale is read as FLOAT memory, not FLOAT16"),
    (graph(node("DequantizeLinear", ("w", "s", "z")), constants={"w": np.ones(4, np.int8), "s": SCALE, "z": ZERO}),
     "a [DequantizeLinear]: an INT8 constant, which 8.6 does not have: quantize a FLOAT constant"),
    (graph(Q, node("DequantizeLinear", ("q", "s", "z")), inputs={"x": TensorProto.FLOAT16},
           constants={"s": SCALE, "z": ZERO}),
     "a [QuantizeLinear]: quantizes FLOAT alone, not FLOAT16"),
    (graph(node("MaxPool", kernel_shape=[2])), "a [MaxPool]: pools 2 or 3 axes, not 1"),
    (graph(node("MaxPool", outputs=("y", "i"), kernel_shape=[2, 2])), "a [MaxPool]: has no Indices output"),
    (graph(node("Resize", ("x", "", "k"), mode="cubic"), constants={"k": np.ones(4, np.float32)}),
     "a [Resize]: mode cubic is not among nearest, linear"),
    (graph(node("Pad", ("x", "p", "", "w")), opset=17, constants={"p": np.zeros(2, np.int64), "w": np.array([1])}),
     "a [Pad]: takes no axes input"),
    (graph(node("Einsum", ("x",), equation="...i->...")), "a [Einsum]: takes no ellipsis"),
    (graph(node("Where", ("c", "x", "x")), inputs=FLOATS | {"c": TensorProto.BOOL}), ""),
]  # fmt: skip


@pytest.mark.parametrize(("model", "said"), CASES, ids=[str(k) for k in range(len(CASES))])
def test_what_8_6_does_not_parse_is_named(model, said):
    assert "; ".join(refused_nodes(model, "8.6.1")) == said
    assert refused_nodes(model, "10.3.0") == ()


def test_the_table_holds_what_the_documentation_counts():
    """docs/operators.md of release/8.6-GA: 145 rows with Y, three of which ONNX itself does not define."""
    assert len(TYPES_8_6) == 142
    assert TYPES_8_6["LayerNormalization"] == {"FLOAT", "FLOAT16"}
    assert not {"Gelu", "Mish", "BitwiseAnd", "QLinearConv", "DFT", "Unique", "Bernoulli"} & set(TYPES_8_6)


def test_opsets_by_release():
    assert [newest_opset(v) for v in ("8.6.1", "10.0.1", "10.3.0", "11.4.0.106")] == [17, None, None, None]

"""An ONNX graph in the form that TensorRT 8.6 parses: opset 17, and Q/DQ with float32 on their other side.

`trt.parser` has the facts, and holds what is written here against them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.errors import BuildError
from trtpipe.trt.parser import OPSET_8_6, newest_opset, refused_nodes
from trtpipe.trt.regions import Operation, OperationKind, int8_regions

if TYPE_CHECKING:
    import onnx
    from onnx_ir import DataType, Graph, Model, Node, Value

#: The opset that is exported for 8.6, the exporter's own; `lower` brings it to `OPSET_8_6`.
EXPORTED_OPSET = 18
IR_VERSION = 8


def needs_lowering(release: str | None) -> bool:
    """Whether this TensorRT parses less than what is written for every later one; None is no TensorRT in particular."""
    return release is not None and newest_opset(release) is not None


def lower(model: Model) -> None:
    """Bring an onnx_ir model of opset 18, its Q/DQ float32, into 8.6's form, in place."""
    graph = model.graph
    for node in list(graph):
        if node.op_type == "Mish":
            _mish(graph, node)
    _type_int8_regions(graph)
    for node in list(graph):
        if rewrite := _REWRITES.get(node.op_type):
            rewrite(graph, node)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
    model.opset_imports[""] = OPSET_8_6
    model.ir_version = IR_VERSION


def require_parsable(model: onnx.ModelProto, release: str) -> None:
    """Hold a graph against the table of what this TensorRT parses.

    Raises:
        BuildError: naming every node that it does not take.
    """
    if refused := refused_nodes(model, release):
        listed = "; ".join(refused[:8]) + (f"; and {len(refused) - 8} more" if len(refused) > 8 else "")
        raise BuildError(
            f"onnx: TensorRT {release} does not parse this graph ({listed}). "
            "Change the model there, or build with TensorRT 10 or later."
        )


def _is_float16(value: Value) -> bool:
    import onnx_ir as ir

    return value is not None and value.dtype == ir.DataType.FLOAT16


def _type_int8_regions(graph: Graph) -> None:
    """Make FP16 operations that INT8 kernels do whole float32: casts beside Q/DQ go, others come at the rim."""
    import onnx_ir as ir

    nodes = list(graph)
    widened = {  # a cast to FP16 behind a DQ counts as part of the DQ, one to float32 before Q as part of the Q
        n
        for n in nodes
        if n.op_type == "Cast"
        and (
            (n.inputs[0].producer() is not None and n.inputs[0].producer().op_type == "DequantizeLinear")
            or (n.outputs[0].uses() and all(u.node.op_type == "QuantizeLinear" for u in n.outputs[0].uses()))
        )
    }
    inside = {nodes[k] for k in int8_regions([_operation(n, widened) for n in nodes]) if _computes_in_half(nodes[k])}
    for node in inside:
        for k, value in enumerate(node.inputs):
            if not _is_float16(value) or (value.producer() in inside):
                continue
            node.replace_input_with(k, _in_float32(graph, node, value, widened))
    for node in inside:
        for output in node.outputs:
            if not _is_float16(output):
                continue
            output.type = ir.TensorType(ir.DataType.FLOAT)
            if node.op_type == "Cast":
                node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
            half = None
            for reader, k in list(output.uses()):
                if reader in inside:
                    continue
                if reader in widened and reader.outputs[0].dtype == ir.DataType.FLOAT:
                    reader.outputs[0].replace_all_uses_with(output)
                    continue
                half = half or _cast(graph, node, output, ir.DataType.FLOAT16, after=True)
                reader.replace_input_with(k, half)
            if output.is_graph_output():
                raise AssertionError("outputs are cast to the dtype of their binding")
    for node in widened:
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)


def _operation(node: Node, widened: set[Node]) -> Operation:
    kinds: dict[str, OperationKind] = {
        "QuantizeLinear": "quantize",
        "DequantizeLinear": "dequantize",
        "Constant": "constant",
    }
    kind: OperationKind = kinds.get(node.op_type, "other")
    if node in widened:
        producer = node.inputs[0].producer()
        kind = "dequantize" if producer is not None and producer.op_type == "DequantizeLinear" else "quantize"
    inputs = tuple(v.name for v in node.inputs if v is not None and not v.is_initializer())
    return Operation(kind, inputs, tuple(v.name for v in node.outputs))


def _computes_in_half(node: Node) -> bool:
    return any(_is_float16(v) for v in (*node.inputs, *node.outputs))


def _in_float32(graph: Graph, node: Node, value: Value, widened: set[Node]) -> Value:
    """`value` as float32 for `node`: what stands before the cast behind a DQ, a constant rewritten, or a cast."""
    import onnx_ir as ir

    producer = value.producer()
    if producer in widened and producer.inputs[0].dtype == ir.DataType.FLOAT:
        return producer.inputs[0]
    if (constant := ir.convenience.get_const_tensor(value)) is not None:
        return _initializer(graph, f"{value.name}_float32", constant.numpy().astype(np.float32))
    return _cast(graph, node, value, ir.DataType.FLOAT, after=False)


def _cast(graph: Graph, node: Node, value: Value, dtype: DataType, *, after: bool) -> Value:
    import onnx_ir as ir

    name = f"{node.name}/Cast_{value.name}_{dtype.name}"
    cast = ir.node("Cast", [value], {"to": int(dtype)}, name=name)
    cast.outputs[0].name = name
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    (graph.insert_after if after else graph.insert_before)(node, cast)
    return cast.outputs[0]


def _initializer(graph: Graph, name: str, array: Array) -> Value:
    import onnx_ir as ir

    if name not in graph.initializers:
        graph.register_initializer(
            ir.Value(
                name=name,
                type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                shape=ir.Shape(array.shape),
                const_value=ir.tensor(array, name=name),
            )
        )
    return graph.initializers[name]


def _dequantize(graph: Graph, node: Node) -> None:
    """A zero point for each scale; an INT8 constant as the float32 one that it was quantized from, and a Q."""
    import onnx_ir as ir

    data, scale = node.inputs[0], node.inputs[1]
    scales = ir.convenience.get_const_tensor(scale)
    assert scales is not None  # placement writes constant scales alone
    if len(node.inputs) < 3 or node.inputs[2] is None:
        zero = _initializer(graph, f"{scale.name}_zero", np.zeros(scales.shape.numpy(), np.int8))
        _append_input(node, zero)
    weight = ir.convenience.get_const_tensor(data)
    if weight is None:
        return
    axis = node.attributes.get_int("axis", 1)
    steps = scales.numpy().astype(np.float32)
    along = [1] * len(weight.shape)
    if steps.size > 1:
        along[axis] = -1
    name = node.outputs[0].name  # equal codes of two weights are one constant, at two scales
    # Multiples of float32 steps: dividing by the step and rounding gives each INT8 value back.
    values = _initializer(graph, f"{name}_float32", weight.numpy().astype(np.float32) * steps.reshape(along))
    attributes = {} if steps.size == 1 else {"axis": axis}
    q = ir.node("QuantizeLinear", [values, scale, node.inputs[2]], attributes, name=f"{node.name}/QuantizeLinear")
    q.outputs[0].name = f"{name}_quantized"
    q.outputs[0].type, q.outputs[0].shape = ir.TensorType(ir.DataType.INT8), data.shape
    graph.insert_before(node, q)
    node.replace_input_with(0, q.outputs[0])


def _append_input(node: Node, value: Value) -> None:
    node.resize_inputs(3)
    node.replace_input_with(2, value)


def _axes_as_attribute(graph: Graph, node: Node) -> None:
    """Opset 17's reductions take their axes as an attribute."""
    import onnx_ir as ir

    node.attributes.pop("noop_with_empty_axes", None)
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return
    axes = ir.convenience.get_const_tensor(node.inputs[1])
    if axes is None:
        return  # the table refuses it by name
    node.resize_inputs(1)
    node.attributes["axes"] = ir.AttrInt64s("axes", [int(a) for a in axes.numpy()])


def _mish(graph: Graph, node: Node) -> None:
    """Mish came with opset 18: before it, x * tanh(softplus(x))."""
    import onnx_ir as ir

    value = node.inputs[0]
    for kind in ("Softplus", "Tanh"):
        part = ir.node(kind, [value], name=f"{node.name}/{kind}")
        part.outputs[0].name = part.name
        part.outputs[0].type, part.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        graph.insert_before(node, part)
        value = part.outputs[0]
    node.op_type = "Mul"
    node.resize_inputs(2)
    node.replace_input_with(1, value)


def _split(graph: Graph, node: Node) -> None:
    """Opset 17's Split has as many equal parts as outputs; unequal ones are an input."""
    count = node.attributes.pop("num_outputs", None)
    if count is None or (len(node.inputs) > 1 and node.inputs[1] is not None):
        return
    axis = node.attributes.get_int("axis", 0)
    shape, parts = node.inputs[0].shape, count.as_int()
    extent = None if shape is None else shape[axis]
    if not isinstance(extent, int) or extent % parts == 0:
        return
    size = -(-extent // parts)
    sizes = np.array([size] * (parts - 1) + [extent - size * (parts - 1)], np.int64)
    node.resize_inputs(2)
    node.replace_input_with(1, _initializer(graph, f"{node.name}/sizes", sizes))


def _resize(graph: Graph, node: Node) -> None:
    """Opset 18's attributes at their defaults say what opset 17 always does."""
    for name, default in (("antialias", 0), ("keep_aspect_ratio_policy", "stretch")):
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.value == default:
            del node.attributes[name]


_REWRITES: Mapping[str, Callable[[Graph, Node], None]] = {
    "DequantizeLinear": _dequantize,
    **{
        f"Reduce{kind}": _axes_as_attribute
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    "Split": _split,
    "Resize": _resize,
}

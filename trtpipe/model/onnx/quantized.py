"""Q/DQ of an ONNX file that is quantized already: taken off, their scales kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtpipe.errors import InputError
from trtpipe.model.marks import Mark

if TYPE_CHECKING:
    import onnx_ir as ir

_RECALIBRATE = "Quantize it symmetrically in INT8 (ONNX Runtime: ActivationSymmetric), or give the file in FP32."


Marks = dict["tuple[ir.Node, int]", Mark]


def take_qdq_off(model: ir.Model) -> tuple[Marks, tuple[str, ...]]:
    """Make a file its own FP32 form; the scales of the inputs that were quantized, by node and place, and notes.

    A pair of QuantizeLinear and DequantizeLinear becomes the tensor before it, a DequantizeLinear of a constant the
    constant in FP32. An INT32 bias is no quantized input: TensorRT adds biases in float.

    Args:
        model: changed in place.

    Raises:
        InputError: the file is quantized in a way that TensorRT has not: asymmetric, by blocks, in other types.
    """
    import onnx_ir as ir

    marks: Marks = {}
    notes: list[str] = []
    graph = model.graph
    nodes = [n for n in graph if n.op_type == "DequantizeLinear"]
    for node in nodes:
        mark = _mark(node)
        stored, quantizer = node.inputs[0], node.inputs[0].producer() if node.inputs[0] is not None else None
        assert stored is not None
        if quantizer is not None and quantizer.op_type == "QuantizeLinear":
            if _mark(quantizer) != mark:
                raise _refused(node, "dequantizes with another scale than it was quantized with")
            before = quantizer.inputs[0]
            assert before is not None
        elif stored.const_value is not None:
            before = _in_float(graph, node, stored.const_value.numpy(), mark)
        else:
            raise _refused(node, "dequantizes what no QuantizeLinear has made")
        for reader, place in list(node.outputs[0].uses()):
            if stored.dtype != ir.DataType.INT32:
                marks[reader, place] = mark
        output = node.outputs[0]
        if output.is_graph_output():
            notes.append(
                f"{output.name}: the file's Q/DQ before this output was left out, TensorRT fuses it with nothing"
            )
            name, output.name = output.name, f"{output.name}.quantized"
            before.name, before.type, before.shape = name, output.type, output.shape
        output.replace_all_uses_with(before, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    for node in [n for n in graph if n.op_type == "QuantizeLinear"]:
        if list(node.outputs[0].uses()):
            raise _refused(node, "has a reader that is no DequantizeLinear")
        graph.remove(node, safe=True)
    return marks, tuple(notes)


def _mark(node: ir.Node) -> Mark:
    """The scales of a QuantizeLinear or DequantizeLinear."""
    scale, zero = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    scales = None if scale is None or scale.const_value is None else scale.const_value.numpy()
    if scales is None:
        raise _refused(node, "has a scale that is computed from the data")
    if "block_size" in node.attributes and node.attributes["block_size"].value:
        raise _refused(node, "quantizes by blocks")
    if zero is not None:
        value = None if zero.const_value is None else zero.const_value.numpy()
        if value is None or value.dtype.name not in ("int8", "int32"):
            raise _refused(node, f"quantizes to {'an unknown type' if value is None else value.dtype.name}")
        if np.any(value != 0):
            raise _refused(node, "has a zero point other than 0")
    elif node.op_type == "QuantizeLinear":
        raise _refused(node, "quantizes to uint8")
    axis = node.attributes["axis"].value if "axis" in node.attributes else 1
    return Mark(tuple(float(s) for s in scales.astype(np.float32).reshape(-1)), int(axis) if scales.ndim else None)


def _in_float(graph: ir.Graph, node: ir.Node, stored: NDArray[Any], mark: Mark) -> ir.Value:
    """A new initializer with the numbers that stored integers stand for."""
    import onnx_ir as ir

    if stored.dtype.name not in ("int8", "int32"):
        raise _refused(node, f"dequantizes {stored.dtype.name}")
    scales = np.array(mark.scales, np.float32)
    if mark.axis is not None:
        scales = scales.reshape([-1 if a == mark.axis % stored.ndim else 1 for a in range(stored.ndim)])
    name = f"{node.inputs[0].name}.float"
    if name not in graph.initializers:
        array = stored.astype(np.float32) * scales
        graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
    return graph.initializers[name]


def _refused(node: ir.Node, what: str) -> InputError:
    return InputError(f"model.onnx: {node.op_type} ({node.name or node.outputs[0].name}) {what}. {_RECALIBRATE}")

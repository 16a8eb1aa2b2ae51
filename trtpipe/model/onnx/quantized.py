"""Q/DQ of an ONNX file that is quantized already: taken off, their scales kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.errors import InputError
from trtpipe.model.marks import ANY_SCALE, Mark

if TYPE_CHECKING:
    import onnx_ir as ir

_IN_FLOAT = "Quantize it symmetrically in INT8 (ONNX Runtime: ActivationSymmetric), or give the file in FP32."
_RECALIBRATE = (
    "Quantize it symmetrically in INT8 (ONNX Runtime: ActivationSymmetric), or set calibration.recalibrate: true, "
    "which starts from its FP32 form."
)
_BETWEEN = (
    "Take the file as it was before an optimizer moved an operation between a QuantizeLinear and its DequantizeLinear, "
    "or give the file in FP32."
)

_ONE_SCALE = "Give each tensor one scale, or set calibration.recalibrate: true, which starts from the file's FP32 form."

#: Types that are read, by NumPy's names; of those that are not INT8 (and INT32 for biases) no scale is taken.
_READ = ("int8", "uint8", "int16", "uint16", "int32")

Marks = dict["tuple[ir.Node, int]", Mark]


def take_qdq_off(model: ir.Model, *, any_scales: bool) -> tuple[Marks, tuple[str, ...]]:
    """Make a file its own FP32 form; the scales of the inputs that were quantized, by node and place, and notes.

    A pair of QuantizeLinear and DequantizeLinear becomes the tensor before it, a DequantizeLinear of a constant the
    constant in FP32. An INT32 bias is no quantized input: TensorRT adds biases in float. Where a pair's range may do
    the work of an activation, a Clip to it stays.

    Of a file that is refused for its scales alone the message offers `calibration.recalibrate`: all that is refused
    with it too comes first.

    Args:
        model: changed in place.
        any_scales: the scales are not used; every mark is `ANY_SCALE`.

    Raises:
        InputError: the file is quantized in a way that TensorRT has not: asymmetric, by blocks, in other types.
    """
    import onnx_ir as ir

    marks: Marks = {}
    notes: list[str] = []
    unfit: list[InputError] = []  # scales that TensorRT has not
    clips: dict[ir.Node, ir.Value] = {}
    graph = model.graph
    _transpose_constants(graph)
    nodes = [n for n in graph if n.op_type == "DequantizeLinear"]
    for node in nodes:
        affine = _affine(node)
        stored, quantizer = node.inputs[0], node.inputs[0].producer() if node.inputs[0] is not None else None
        assert stored is not None
        if quantizer is not None and quantizer.op_type == "QuantizeLinear":
            if _affine(quantizer) != affine:
                raise _refused(node, "dequantizes with another scale than it was quantized with")
            before = quantizer.inputs[0]
            assert before is not None
            if affine.saturates:
                if quantizer not in clips:
                    clips[quantizer] = _clipped(graph, quantizer, before, affine, model.opset_imports.get("", 0))
                before = clips[quantizer]
        elif stored.const_value is not None:
            before = _in_float(graph, node, stored.const_value.numpy(), affine)
        else:
            raise _refused(node, "dequantizes what no QuantizeLinear has made", _BETWEEN)
        for use in node.outputs[0].uses():
            if use[0].op_type == "QuantizeLinear" and _affine(use[0]) != affine:
                unfit.append(_refused(use[0], "quantizes with another scale what is quantized already", _ONE_SCALE))
        if stored.dtype != ir.DataType.INT32:
            unfit += [_refused(node, why, _RECALIBRATE) for why in affine.misfits]
            mark = ANY_SCALE if any_scales else affine.mark(None if stored.shape is None else len(stored.shape))
            marks |= dict.fromkeys(((use[0], use[1]) for use in node.outputs[0].uses()), mark)
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
        if list(node.outputs[0].uses()) or node.outputs[0].is_graph_output():
            raise _refused(node, "has a reader that is no DequantizeLinear", _BETWEEN)
        graph.remove(node, safe=True)
    if unfit and not any_scales:
        raise unfit[0]
    return marks, tuple(notes)


def _transpose_constants(graph: ir.Graph) -> None:
    """Transpose a quantized constant itself where it is dequantized first: exporters write a linear's weight so."""
    import onnx_ir as ir

    nodes = [n for n in graph if n.op_type == "DequantizeLinear"]
    while nodes:
        node = nodes.pop()
        stored = node.inputs[0]
        if stored is None or stored.const_value is None:
            continue
        array = stored.const_value.numpy()
        for user in [use[0] for use in node.outputs[0].uses() if use[0].op_type == "Transpose"]:
            order = [int(a) for a in user.attributes["perm"].value] if "perm" in user.attributes else None
            order = list(reversed(range(array.ndim))) if order is None else order
            moved = ir.Value(
                name=f"{user.outputs[0].name}.stored", const_value=ir.tensor(array.transpose(order).copy())
            )
            moved.dtype, moved.shape = stored.dtype, ir.Shape([array.shape[a] for a in order])
            graph.register_initializer(moved)
            attributes = dict(node.attributes)
            if array.ndim:
                axis = int(attributes["axis"].value) if "axis" in attributes else 1
                attributes["axis"] = ir.AttrInt64("axis", order.index(axis % array.ndim))
            made = ir.Node("", "DequantizeLinear", [moved, *node.inputs[1:]], list(attributes.values()), name=user.name)
            graph.insert_before(user, made)
            name, output = user.outputs[0].name, user.outputs[0]
            made.outputs[0].type, made.outputs[0].shape = output.type, output.shape
            output.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
            graph.remove(user, safe=True)
            made.outputs[0].name = name
            nodes.append(made)
        if not list(node.outputs[0].uses()) and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)


@dataclass(frozen=True)
class _OnnxAffine:
    """real = scale * (stored - zero), by tensor or along `axis`; one zero stands for all, where all are equal. `dtype`
    is NumPy's name of the stored integers."""

    scales: tuple[float, ...]
    zeros: tuple[int, ...]
    axis: int | None
    dtype: str

    @property
    def saturates(self) -> bool:
        """Whether its range may do the work of an activation: exporters leave out a ReLU before asymmetric Q/DQ."""
        return self.dtype.startswith("uint") or any(self.zeros)

    @property
    def misfits(self) -> tuple[str, ...]:
        """Why TensorRT refuses this node, in words; empty where it takes it."""
        other = (f"quantizes to {self.dtype}",) if self.dtype not in ("int8", "int32") else ()
        return (*other, "has a zero point other than 0") if any(self.zeros) else other

    def mark(self, dimensions: int | None) -> Mark:
        """The scales, of a tensor with so many dimensions, where that is known."""
        axis = self.axis % dimensions if self.axis is not None and dimensions else self.axis
        return Mark(self.scales, axis)


def _affine(node: ir.Node) -> _OnnxAffine:
    """How a QuantizeLinear or DequantizeLinear quantizes.

    Raises:
        InputError: in a way of which no FP32 form is made.
    """
    import onnx_ir as ir

    scale, zero = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    scales = None if scale is None or scale.const_value is None else scale.const_value.numpy()
    if scales is None or (zero is not None and zero.const_value is None):
        fold = "Fold its constants (ONNX Runtime: save the file with ORT_ENABLE_BASIC), or give the file in FP32."
        raise _refused(node, "has a scale that the graph computes", fold)
    if "block_size" in node.attributes and node.attributes["block_size"].value:
        raise _refused(node, "quantizes by blocks")
    zeros = np.zeros(1, np.uint8) if zero is None or zero.const_value is None else zero.const_value.numpy()
    if zero is None and node.op_type == "DequantizeLinear":
        stored = node.inputs[0]
        held = None if stored is None or stored.const_value is None else stored.const_value.numpy()
        before = None if stored is None else stored.producer()
        zeros = zeros.astype(np.int8 if held is None else held.dtype)
        if before is not None and before.op_type == "QuantizeLinear":
            zeros = zeros.astype(_affine(before).dtype)
    elif zero is None and "output_dtype" in node.attributes and node.attributes["output_dtype"].value:
        zeros = zeros.astype(ir.DataType(node.attributes["output_dtype"].value).numpy())
    if zeros.dtype.name not in _READ:
        raise _refused(node, f"quantizes to {zeros.dtype.name}")
    axis = node.attributes["axis"].value if "axis" in node.attributes else 1
    return _OnnxAffine(
        tuple(math.nan if np.isnan(s) else float(s) for s in scales.astype(np.float32).reshape(-1)),  # one NaN is one
        tuple(np.unique(zeros).tolist()) if len(np.unique(zeros)) == 1 else tuple(zeros.reshape(-1).tolist()),
        int(axis) if scales.ndim else None,
        zeros.dtype.name,
    )


def _clipped(graph: ir.Graph, quantizer: ir.Node, x: ir.Value, affine: _OnnxAffine, opset: int) -> ir.Value:
    """`x` clipped to what its integers can hold, and not rounded."""
    import onnx_ir as ir

    if len(affine.scales) != 1:
        raise _refused(quantizer, "quantizes an activation with several scales and zero points")
    whole = np.iinfo(affine.dtype)
    ends = [(float(n) - affine.zeros[0]) * affine.scales[0] for n in (whole.min, whole.max)]
    name = str(quantizer.outputs[0].name)
    if opset < 11:
        clip = ir.node("Clip", [x], {"min": ends[0], "max": ends[1]}, name=f"{name}/Clip")
    else:
        bounds = [
            ir.Value(name=f"{name}.{end}", const_value=ir.tensor(np.float32(value), name=f"{name}.{end}"))
            for end, value in zip(("least", "largest"), ends, strict=True)
        ]
        for bound in bounds:
            graph.register_initializer(bound)
        clip = ir.node("Clip", [x, *bounds], name=f"{name}/Clip")
    made = clip.outputs[0]
    made.name, made.type, made.shape = f"{name}.clipped", x.type, x.shape
    graph.insert_before(quantizer, clip)
    return made


def _in_float(graph: ir.Graph, node: ir.Node, stored: Array, affine: _OnnxAffine) -> ir.Value:
    """A new initializer with the numbers that stored integers stand for."""
    import onnx_ir as ir

    scales, zeros = np.array(affine.scales, np.float32), np.array(affine.zeros, np.float32)
    if affine.axis is not None:
        shape = [-1 if a == affine.axis % stored.ndim else 1 for a in range(stored.ndim)]
        scales, zeros = scales.reshape(shape), zeros.reshape(shape) if zeros.size > 1 else zeros
    name = f"{node.inputs[0].name}.float"
    array = ((stored.astype(np.float32) - zeros) * scales).reshape(stored.shape)
    there = graph.initializers.get(name)
    if there is not None and not np.array_equal(there.const_value.numpy(), array):  # equal integers of other scales
        name, there = f"{node.outputs[0].name}.float", None
    if there is None:
        there = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        graph.register_initializer(there)
    return there


def _refused(node: ir.Node, what: str, step: str = _IN_FLOAT) -> InputError:
    return InputError(f"model.onnx: {node.op_type} ({node.name or node.outputs[0].name}) {what}. {step}")

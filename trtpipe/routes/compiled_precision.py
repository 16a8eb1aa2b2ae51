"""What each operation of a compiled ONNX graph computes in, read from the graph's own types."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trtpipe.model.onnx.names import WEIGHTED_OPERATORS
from trtpipe.onnx_format import ELEMENT_TYPES
from trtpipe.trt.element_types import element_types
from trtpipe.trt.formats import DYNAMIC_QUANTIZE, product_format
from trtpipe.values import PRECISIONS_BY_WIDTH, LayerPrecision, OnnxModel, PrecisionName

if TYPE_CHECKING:
    from onnx import NodeProto

#: Operation of the captured graph -> what it is in ONNX. Others are written as several operations, or by other names.
ONNX_OPERATORS = {
    "conv1d": ("Conv",),
    "conv2d": ("Conv",),
    "conv3d": ("Conv",),
    "conv_transpose1d": ("ConvTranspose",),
    "conv_transpose2d": ("ConvTranspose",),
    "linear": ("Gemm", "MatMul"),
    "matmul": ("MatMul",),
    "bmm": ("MatMul",),
    "softmax": ("Softmax",),
    "layer_norm": ("LayerNormalization",),
    "mean": ("ReduceMean",),
}

#: Operations between a stored weight's DequantizeLinear and its reader that change no number.
_MOVES = ("Transpose", "Reshape", "Cast")
#: Operations that move values, or make the integers: their type is not what an operation computes in.
_NOT_COMPUTING = (
    *_MOVES, "Concat", "Constant", "ConstantOfShape", "DequantizeLinear", "Expand", "Flatten", "Gather", "Identity",
    "Pad", "QuantizeLinear", "Slice", "Split", "Squeeze", "Tile", "Unsqueeze",
)  # fmt: skip
#: How the exporter, and casts that are added later, name what lies within an operation.
_INNER = re.compile(r"val_\d+$|.*/")
#: Floating-point types by ONNX's numbers.
_FLOATS: Mapping[int, PrecisionName] = {
    ELEMENT_TYPES["float32"]: "fp32",
    ELEMENT_TYPES["float16"]: "fp16",
    ELEMENT_TYPES["bfloat16"]: "bf16",
}


def read_back(layers: Sequence[LayerPrecision], graph: OnnxModel) -> tuple[LayerPrecision, ...]:
    """`layers` with the precision that the graph says: a product whose factors are dequantized is what they were stored
    in, any other node what its input is.

    An operation is found by its module and its place among those of one kind there; one that is written as several
    nodes, and was planned in floating point, by its output, which the exporter names after it, and is what the widest
    of its nodes computes in. Where their numbers differ (the exporter split or merged some), what was planned stays.
    """
    import onnx

    model = onnx.load_from_string(graph.data)
    types = element_types(model)
    producers = {output: node for node in model.graph.node for output in node.output}
    weights = {i.name for i in model.graph.initializer}
    nodes: dict[tuple[str, tuple[str, ...]], list[PrecisionName]] = {}
    kinds = dict.fromkeys(ONNX_OPERATORS.values())
    ends: dict[tuple[str, str], list[str]] = {}
    for node in model.graph.node:
        path = re.sub(rf"/?{node.op_type}(_\d+)?$", "", node.name)
        for kind in kinds:
            if node.op_type in kind:
                nodes.setdefault((path, kind), []).append(_precision(node, types, producers, weights))
        for output in node.output:
            ends.setdefault((path, re.sub(r"_\d+$", "", output)), []).append(output)
    planned: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for at, layer in enumerate(layers):
        if layer.op in ONNX_OPERATORS:
            planned.setdefault((layer.module, ONNX_OPERATORS[layer.op]), []).append(at)
    found: dict[int, PrecisionName] = {}
    for key, places in planned.items():
        compiled = nodes.get(key, [])
        if len(compiled) == len(places):
            found.update(zip(places, compiled, strict=True))
    written: dict[tuple[str, str], list[int]] = {}
    for at, layer in enumerate(layers):
        if layer.op not in ONNX_OPERATORS and layer.precision in _FLOATS.values():
            written.setdefault((layer.module, layer.op), []).append(at)
    for place, ats in written.items():
        outputs = ends.get(place, [])
        if len(outputs) == len(ats):
            computed = (_widest(output, types, producers) for output in outputs)
            found.update((at, p) for at, p in zip(ats, computed, strict=True) if p is not None)
    return tuple(
        layer if (now := found.get(at, layer.precision)) == layer.precision else _otherwise(layer, now)
        for at, layer in enumerate(layers)
    )


def _widest(output: str, types: Mapping[str, int], producers: Mapping[str, NodeProto]) -> PrecisionName | None:
    """The widest floating-point type that an operation's nodes compute in; that of its output where they only move."""
    computed, way, seen = set[PrecisionName | None](), [output], {output}
    while way:
        node = producers[way.pop()]
        if node.op_type not in _NOT_COMPUTING:
            computed |= {_float_of(types.get(name)) for name in (*node.input, *node.output)}
        if node.op_type == "DequantizeLinear":  # what it is made of is another operation's
            continue
        inner = [i for i in node.input if i in producers and i not in seen and _INNER.match(i)]
        seen.update(inner)
        way += inner
    known = [p for p in computed if p is not None]
    return max(known, key=PRECISIONS_BY_WIDTH.index) if known else _float_of(types.get(output))


def _otherwise(layer: LayerPrecision, precision: PrecisionName) -> LayerPrecision:
    reason = f"planned as {layer.precision}; the compiled graph computes it in {precision}"
    return replace(layer, precision=precision, reason=reason)


def _float_of(element_type: int | None) -> PrecisionName | None:
    """The precision of a floating-point type of onnx.TensorProto; None of another."""
    return _FLOATS.get(element_type or 0)


def _precision(
    node: NodeProto, types: Mapping[str, int], producers: Mapping[str, NodeProto], weights: Collection[str]
) -> PrecisionName:
    """The precision of one node."""
    if node.op_type in WEIGHTED_OPERATORS:
        left, right = (_number_format(i, types, producers, weights) for i in node.input[:2])
        if (narrow := product_format(left, right)) is not None:
            return narrow
    return _float_of(types.get(node.input[0])) or "fp32"


def _number_format(
    value: str, types: Mapping[str, int], producers: Mapping[str, NodeProto], weights: Collection[str]
) -> PrecisionName | None:
    """What a dequantized value was stored in; a stored weight may be moved about once it is dequantized."""
    import onnx

    made = dequantizer(value, producers, weights)
    if made is None:
        return None
    names: dict[int, PrecisionName] = {
        onnx.TensorProto.FLOAT8E4M3FN: "fp8",
        onnx.TensorProto.INT4: "int4",
        onnx.TensorProto.FLOAT4E2M1: "nvfp4",
    }
    return names.get(stored_type(made, types, producers), "int8")


def stored_type(made: NodeProto, types: Mapping[str, int], producers: Mapping[str, NodeProto]) -> int:
    """The element type, a number of onnx.TensorProto.DataType, of what a DequantizeLinear reads: its own, or that of
    the zero point; INT8 where neither is known."""
    import onnx

    stored = made.input[0]
    if dynamic(stored, producers):
        return int(onnx.TensorProto.FLOAT4E2M1)
    zero_point = made.input[2] if len(made.input) > 2 else stored
    return types.get(stored, types.get(zero_point, onnx.TensorProto.INT8))


def dequantizer(value: str, producers: Mapping[str, NodeProto], weights: Collection[str]) -> NodeProto | None:
    """The DequantizeLinear that an operation reads a value through; a stored weight may be moved about behind its own.

    Args:
        value: the operation's input.
        producers: the node that makes each value.
        weights: names of the graph's initializers; for TensorRT 8.6 a weight is one in float32, before a Q of its own.
    """
    moved, made = False, producers.get(value)
    while made is not None and made.op_type in _MOVES:
        moved, made = True, producers.get(made.input[0])
    if made is None or made.op_type != "DequantizeLinear":
        return None
    stored = made.input[0]
    if moved and stored not in weights:
        quantizer = producers.get(stored)
        if quantizer is None or quantizer.op_type != "QuantizeLinear" or quantizer.input[0] not in weights:
            return None
    return made


def dynamic(stored: str, producers: Mapping[str, NodeProto]) -> bool:
    """Whether TensorRT's dynamic quantization to NVFP4 makes a value; onnx infers no type of that."""
    return stored in producers and producers[stored].op_type == DYNAMIC_QUANTIZE

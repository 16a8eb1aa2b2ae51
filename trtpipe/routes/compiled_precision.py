"""What each operation of a compiled ONNX graph computes in, read from the graph's own types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trtpipe.model.onnx.names import WEIGHTED
from trtpipe.trt.element_types import element_types
from trtpipe.trt.formats import DYNAMIC_QUANTIZE, product_format
from trtpipe.values import LayerPrecision, OnnxModel, PrecisionName

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


def read_back(layers: Sequence[LayerPrecision], graph: OnnxModel) -> tuple[LayerPrecision, ...]:
    """`layers` with the precision that the graph says: a product whose factors are dequantized is what they were stored
    in, any other node what its input is.

    An operation is found by its module and its place among those of one kind there. Where their numbers differ (the
    exporter split or merged some), or the operation has no name in ONNX, what was planned stays.
    """
    import onnx

    model = onnx.load_from_string(graph.data)
    types = element_types(model)
    producers = {output: node for node in model.graph.node for output in node.output}
    nodes: dict[tuple[str, tuple[str, ...]], list[PrecisionName]] = {}
    kinds = dict.fromkeys(ONNX_OPERATORS.values())
    for node in model.graph.node:
        path = re.sub(rf"/?{node.op_type}(_\d+)?$", "", node.name)
        for kind in kinds:
            if node.op_type in kind:
                nodes.setdefault((path, kind), []).append(_precision(node, types, producers))
    planned: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for at, layer in enumerate(layers):
        if layer.op in ONNX_OPERATORS:
            planned.setdefault((layer.module, ONNX_OPERATORS[layer.op]), []).append(at)
    updated = list(layers)
    for key, places in planned.items():
        compiled = nodes.get(key, [])
        if len(compiled) != len(places):
            continue
        for at, precision in zip(places, compiled, strict=True):
            if updated[at].precision != precision:
                reason = f"planned as {updated[at].precision}; the compiled graph computes it in {precision}"
                updated[at] = replace(updated[at], precision=precision, reason=reason)
    return tuple(updated)


def _precision(node: NodeProto, types: dict[str, int], producers: dict[str, NodeProto]) -> PrecisionName:
    """The precision of one node."""
    import onnx

    if node.op_type in WEIGHTED:
        left, right = (_number_format(i, types, producers) for i in node.input[:2])
        if (narrow := product_format(left, right)) is not None:
            return narrow
    names: dict[int, PrecisionName] = {onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}
    return names.get(types.get(node.input[0], onnx.TensorProto.FLOAT), "fp32")


def _number_format(value: str, types: dict[str, int], producers: dict[str, NodeProto]) -> PrecisionName | None:
    """What a dequantized value was stored in; a stored weight may be moved about once it is dequantized."""
    import onnx

    made = dequantizer(value, producers)
    if made is None:
        return None
    stored = made.input[0]
    if dynamic(stored, producers):
        return "nvfp4"
    names: dict[int, PrecisionName] = {
        onnx.TensorProto.FLOAT8E4M3FN: "fp8",
        onnx.TensorProto.INT4: "int4",
        onnx.TensorProto.FLOAT4E2M1: "nvfp4",
    }
    zero_point = made.input[2] if len(made.input) > 2 else stored
    return names.get(types.get(stored, types.get(zero_point, onnx.TensorProto.INT8)), "int8")


def dequantizer(value: str, producers: Mapping[str, NodeProto]) -> NodeProto | None:
    """The DequantizeLinear that an operation reads a value through; a stored weight may be moved about behind its own.

    Args:
        value: the operation's input.
        producers: the node that makes each value.
    """
    moved, made = False, producers.get(value)
    while made is not None and made.op_type in _MOVES:
        moved, made = True, producers.get(made.input[0])
    if made is None or made.op_type != "DequantizeLinear" or (moved and made.input[0] in producers):
        return None
    return made


def dynamic(stored: str, producers: Mapping[str, NodeProto]) -> bool:
    """Whether TensorRT's dynamic quantization to NVFP4 makes a value; onnx infers no type of that."""
    return stored in producers and producers[stored].op_type == DYNAMIC_QUANTIZE

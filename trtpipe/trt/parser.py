"""What the ONNX parser of TensorRT 8.6 takes, as a table, so that a graph can be checked without it.

The facts are those of onnx-tensorrt's branch release/8.6-GA: docs/operators.md and, where that says less than the code,
builtin_op_importers.cpp and onnx2trt_utils.cpp. From 10.0 on, parsers take what route onnx writes, and
no table is needed. No graph was ever given to a parser of 8.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from trtpipe.onnx_format import ONNX_DOMAINS
from trtpipe.trt.element_types import element_types
from trtpipe.version_numbers import parse_version

if TYPE_CHECKING:
    import onnx

#: The newest opset that 8.6's parser takes.
OPSET_8_6 = 17

#: Types of the first input, and the operators that take them (of Where: the second). INT64 is taken as INT32 and DOUBLE
#: as FLOAT, which "TensorRT will attempt to cast down". ConstantOfShape's row is of its shape; it gives FLOAT.
_TABLE_8_6 = """
FLOAT FLOAT16: Acos Acosh Asin Asinh Atan Atanh BatchNormalization Ceil Celu Cos Cosh CumSum Dropout Einsum Erf Exp
FLOAT FLOAT16: Floor GRU GridSample GroupNormalization InstanceNormalization IsInf LRN LSTM LayerNormalization Log
FLOAT FLOAT16: LogSoftmax LpNormalization MatMul MeanVarianceNormalization NonMaxSuppression NonZero Pow QuantizeLinear
FLOAT FLOAT16: RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal ReduceL1 ReduceL2 ReduceLogSum
FLOAT FLOAT16: ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Resize RNN RoiAlign
FLOAT FLOAT16: Scan Sin Sinh Softmax Sqrt Tan Upsample
FLOAT FLOAT16 INT8: Clip Conv ConvTranspose Elu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool HardSigmoid HardSwish
FLOAT FLOAT16 INT8: LeakyRelu LpPool MaxPool PRelu Relu Round Selu Sigmoid Softplus Softsign Tanh ThresholdedRelu
FLOAT FLOAT16 INT32: Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Mean
FLOAT FLOAT16 INT32: Min Mod Mul Neg Range Shrink SpaceToDepth Sub Sum TopK
FLOAT FLOAT16 INT32 BOOL: Expand EyeLike Flatten If Loop OneHot Split Tile Where
FLOAT FLOAT16 INT32 INT8: AveragePool Pad Scatter ScatterElements ScatterND Sign
FLOAT FLOAT16 INT32 INT8 BOOL: Concat Constant ConstantOfShape Gather GatherElements GatherND Identity Reshape
FLOAT FLOAT16 INT32 INT8 BOOL: ReverseSequence Shape Size Slice Squeeze Transpose Trilu Unsqueeze
FLOAT FLOAT16 INT32 INT8 UINT8 BOOL: Cast
INT8: DequantizeLinear
BOOL: And Not Or Xor
"""
TYPES_8_6: Mapping[str, frozenset[str]] = {
    name: frozenset(types.split())
    for types, _, names in (line.partition(":") for line in _TABLE_8_6.strip().splitlines())
    for name in names.split()
}
_AS = {"INT64": "INT32", "DOUBLE": "FLOAT"}
#: Inputs that have to be constants, by operator.
_CONSTANT_INPUTS: Mapping[str, tuple[int, ...]] = {
    "CumSum": (1,), "Slice": (3,), "Squeeze": (1,), "Unsqueeze": (1,), "ReduceSum": (1,), "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
}  # fmt: skip
_RESIZE = {
    "mode": ("nearest", "linear"),
    "coordinate_transformation_mode": (
        "half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners",
    ),
    "nearest_mode": ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"),
}  # fmt: skip


def newest_opset(release: str) -> int | None:
    """The newest opset that the parser of this TensorRT takes; None from 10 on, which take all that is written."""
    return OPSET_8_6 if parse_version(release) < (10,) else None


def too_new_an_opset(target: str, release: str, opset: int | None) -> str:
    """Why this release of a target does not parse a graph of this opset; empty where it does, or where it has none."""
    newest = newest_opset(release) if target == "tensorrt" else None
    if newest is None or opset is None or opset <= newest:
        return ""
    return (
        f"onnx: TensorRT {release} parses opset {newest} at most (got {opset}). Prepare the kit for it: "
        f"trtpipe prepare --for {release}."
    )


def refused_nodes(model: onnx.ModelProto, release: str) -> tuple[str, ...]:
    """`<node> [<operator>]: <why>` of everything in a graph that this TensorRT's parser does not take.

    Only 8.6 has a table; () for later releases.
    """
    if newest_opset(release) is None:
        return ()
    return tuple(_refused(model))


def _refused(model: onnx.ModelProto) -> Iterator[str]:
    import onnx

    opset = next(o.version for o in model.opset_import if o.domain in ONNX_DOMAINS)
    if opset > OPSET_8_6:
        yield f"the file: opset {opset}, where 8.6 takes {OPSET_8_6} at most"
    for domain in sorted(
        {o.domain for o in model.opset_import} - {*ONNX_DOMAINS} & {n.domain for n in model.graph.node}
    ):
        yield f"the file: operators of the domain {domain}"
    graph, types = model.graph, element_types(model)
    constants = {i.name: i for i in graph.initializer}
    constants |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant" and n.attribute}
    name_of = onnx.TensorProto.DataType.Name

    def type_of(tensor: str) -> str:
        name: str = name_of(types.get(tensor, 0))
        return _AS.get(name, name)

    for node in graph.node:
        where = f"{node.name or node.output[0]} [{node.op_type}]"
        legal = TYPES_8_6.get(node.op_type)
        if legal is None:
            yield f"{where}: not an operator of 8.6"
            continue
        data = type_of(node.input[1 if node.op_type == "Where" else 0]) if node.input else "UNDEFINED"
        if data != "UNDEFINED" and data not in legal:
            yield f"{where}: takes {' or '.join(sorted(legal))}, not {data}"
        for k in _CONSTANT_INPUTS.get(node.op_type, ()):
            if k < len(node.input) and node.input[k] and node.input[k] not in constants:
                yield f"{where}: its input {k} must be a constant"
        if check := _CHECKS.get(node.op_type):
            yield from (f"{where}: {text}" for text in check(node, constants, type_of))


def _attributes(node: onnx.NodeProto) -> dict[str, object]:
    import onnx

    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


_Constants = Mapping[str, "onnx.TensorProto"]
_Check = Callable[["onnx.NodeProto", _Constants, Callable[[str], str]], Iterator[str]]


def _quantization(node: onnx.NodeProto, constants: _Constants, type_of: Callable[[str], str]) -> Iterator[str]:
    from onnx import numpy_helper

    if len(node.input) < 3:
        yield "needs its zero point input"
        return
    scale, zero = (constants.get(n) for n in node.input[1:3])
    if type_of(node.input[1]) != "FLOAT":
        yield f"its scale is read as FLOAT memory, not {type_of(node.input[1])}"
    if type_of(node.input[2]) not in ("INT8", "UNDEFINED") or (zero is not None and numpy_helper.to_array(zero).any()):
        yield "its zero point must be INT8 and 0"
    if scale is not None and zero is not None and numpy_helper.to_array(scale).size != numpy_helper.to_array(zero).size:
        yield "its scale and zero point must have as many values"
    if node.op_type == "QuantizeLinear" and type_of(node.input[0]) != "FLOAT":
        yield f"quantizes FLOAT alone, not {type_of(node.input[0])}"  # IQuantizeLayer's documentation: no FP16 input
    if node.op_type == "DequantizeLinear" and node.input[0] in constants:
        yield "an INT8 constant, which 8.6 does not have: quantize a FLOAT constant"


def _reduction(node: onnx.NodeProto, constants: _Constants, type_of: Callable[[str], str]) -> Iterator[str]:
    if len(node.input) > 1:
        yield "takes its axes as an attribute alone: an input is ignored, and every axis is reduced"


def _pool(node: onnx.NodeProto, constants: _Constants, type_of: Callable[[str], str]) -> Iterator[str]:
    kernel = _attributes(node).get("kernel_shape")
    if isinstance(kernel, list) and len(kernel) not in (2, 3):
        yield f"pools 2 or 3 axes, not {len(kernel)}"
    if len(node.output) > 1 and node.output[1]:
        yield "has no Indices output"


def _resize(node: onnx.NodeProto, constants: _Constants, type_of: Callable[[str], str]) -> Iterator[str]:
    given = _attributes(node)
    for name, legal in _RESIZE.items():
        if name in given and given[name] not in legal:
            yield f"{name} {given[name]} is not among {', '.join(legal)}"


def _pad(node: onnx.NodeProto, constants: _Constants, type_of: Callable[[str], str]) -> Iterator[str]:
    if len(node.input) > 3 and node.input[3]:
        yield "takes no axes input"


def _einsum(node: onnx.NodeProto, constants: _Constants, type_of: Callable[[str], str]) -> Iterator[str]:
    if "..." in str(_attributes(node).get("equation", "")):
        yield "takes no ellipsis"


def _gemm(node: onnx.NodeProto, constants: _Constants, type_of: Callable[[str], str]) -> Iterator[str]:
    if type_of(node.input[0]) == "INT32":
        yield "takes no integers"


_CHECKS: Mapping[str, _Check] = {
    "QuantizeLinear": _quantization,
    "DequantizeLinear": _quantization,
    **{n: _reduction for n in TYPES_8_6 if n.startswith("Reduce") and n != "ReduceSum"},
    "AveragePool": _pool,
    "MaxPool": _pool,
    "Resize": _resize,
    "Pad": _pad,
    "Einsum": _einsum,
    "Gemm": _gemm,
}

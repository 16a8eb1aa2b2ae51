"""What ONNX files hold as numbers and words, for where the package onnx is not loaded."""

from __future__ import annotations

from collections.abc import Mapping

#: How the domain of ONNX's own operators is written.
ONNX_DOMAINS = ("", "ai.onnx")
#: The operators of a Q/DQ pair.
QDQ = ("QuantizeLinear", "DequantizeLinear")
#: Numbers of onnx.TensorProto.DataType by NumPy's names; by ONNX's, in small letters, where NumPy has none.
ELEMENT_TYPES: Mapping[str, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
    "float8e4m3fn": 17,
    "int4": 22,
    "float4e2m1": 23,
}

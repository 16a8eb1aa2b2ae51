"""ONNX's numbers of element types are those of the package onnx."""

from __future__ import annotations

import onnx

from trtpipe.onnx_format import ELEMENT_TYPES

#: What onnx.proto calls what NumPy has other names for.
NAMES = {"float32": "FLOAT", "float64": "DOUBLE"}


def test_numbers_of_element_types_are_those_of_onnx() -> None:
    assert {n: onnx.TensorProto.DataType.Value(NAMES.get(n, n.upper())) for n in ELEMENT_TYPES} == ELEMENT_TYPES

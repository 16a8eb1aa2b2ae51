"""FP8 and 4 bits in ONNX, as TensorRT's parser reads them.

FP8: QuantizeLinear and DequantizeLinear of FLOAT8E4M3FN, scales in the dtype of the float side (opset 19 on). INT4:
DequantizeLinear with a block size (opset 21 on). NVFP4: a weight's DequantizeLinear of FLOAT4E2M1 (opset 23 on), whose
scales are themselves dequantized from FLOAT8E4M3FN; activations through `TRT_FP4DynamicQuantize` of TensorRT's own
domain, which gives numbers and block scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from trtpipe.trt.formats import DYNAMIC_QUANTIZE, INT4_SUPPORT, NVFP4_SUPPORT
from trtpipe.values import Quantized

if TYPE_CHECKING:
    from onnx.defs import OpSchema
    from onnx_ir import DataType, Model, Value
    from onnxscript.values import Opset

#: What an operator of PyTorch is in ONNX: a function of its inputs that writes the nodes.
Translations = dict[Callable[..., object], Callable[..., "Value"]]

#: Opset of the files: the first whose Q/DQ take FP16 is 19; 20 has Gelu.
OPSET = 20
#: The first opset with the types that an operator needs.
_OPSETS = {
    "int4_dequantize": INT4_SUPPORT.opset,
    "fp4_dequantize": NVFP4_SUPPORT.opset,
    "fp4_dynamic": NVFP4_SUPPORT.opset,
}
#: TensorRT's domain of operators that ONNX does not have.
DOMAIN = "trt"


def opset_of(quantized: Quantized) -> int:
    """The opset that the program's number formats need, `OPSET` or later."""
    from trtpipe.model.nodes import calls, op_name

    names = {op_name(n) for n in calls(quantized.program.graph)}
    return max(OPSET, *(_OPSETS.get(n, OPSET) for n in names))


def dequantized_type(out_dtype: int | None) -> DataType:
    """The type that a DequantizeLinear gives: its `out_dtype` as ONNX numbers types; float32 for None or -1."""
    from onnx_ir import DataType

    return DataType.FLOAT if out_dtype in (None, -1) else DataType(int(out_dtype))


def translations() -> Translations:
    """What `torch.ops.trtpipe`'s operators in FP8 and 4 bits are in ONNX."""
    import ml_dtypes
    import onnx_ir as ir
    import torch
    from onnxscript import opset20, opset21, opset23, values

    import trtpipe.quantization.narrow  # noqa: F401  # registers torch.ops.trtpipe.fp8_* and so on
    from trtpipe.quantization import formats

    ops = torch.ops.trtpipe
    dynamic_quantize = values.Op(values.Opset(DOMAIN, 1), DYNAMIC_QUANTIZE, _dynamic_quantize_schema())
    floats = {
        ir.DataType.FLOAT: np.float32,
        ir.DataType.FLOAT16: np.float16,
        ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
    }

    def constant(op: Opset, value: float, dtype: ir.DataType) -> Value:
        return op.Constant(value=ir.tensor(np.asarray(value, floats[dtype])))

    def zero(op: Opset) -> Value:
        return op.Constant(value=ir.tensor(np.asarray(0, ml_dtypes.float8_e4m3fn)))

    def cast(op: Opset, scales: Value, dtype: ir.DataType) -> Value:
        return scales if dtype == ir.DataType.FLOAT else op.Cast(scales, to=int(dtype))

    def fp8_quantize(x: Value, scale: float) -> Value:
        return opset20.QuantizeLinear(x, constant(opset20, scale, x.dtype or ir.DataType.FLOAT), zero(opset20))

    def fp8_dequantize(q: Value, scale: float, out_dtype: int = -1) -> Value:
        return opset20.DequantizeLinear(q, constant(opset20, scale, dequantized_type(out_dtype)), zero(opset20))

    def int4_dequantize(q: Value, scales: Value, out_dtype: int = -1) -> Value:
        block = q.shape[1] // scales.shape[1]
        return opset21.DequantizeLinear(q, cast(opset21, scales, dequantized_type(out_dtype)), axis=1, block_size=block)

    def by_block(q: Value, scales: Value, scale: float, axis: int, out_dtype: int) -> Value:
        op = opset23
        wide = op.DequantizeLinear(scales, constant(op, scale, ir.DataType.FLOAT))
        return op.DequantizeLinear(
            q, cast(op, wide, dequantized_type(out_dtype)), axis=axis, block_size=formats.NVFP4.blocks[0]
        )

    def fp4_dequantize(q: Value, scales: Value, scale: float, out_dtype: int = -1) -> Value:
        return by_block(q, scales, scale, 1, out_dtype)

    def fp4_dynamic(x: Value, scale: float, out_dtype: int = -1) -> Value:
        q, scales = dynamic_quantize(
            x,
            constant(opset23, scale, ir.DataType.FLOAT),
            axis=-1,
            block_size=formats.NVFP4.blocks[0],
            scale_type=int(ir.DataType.FLOAT8E4M3FN),
        )
        return by_block(q, scales, scale, -1, out_dtype)

    return {
        ops.fp8_quantize.default: fp8_quantize,
        ops.fp8_dequantize.default: fp8_dequantize,
        ops.int4_dequantize.default: int4_dequantize,
        ops.fp4_dequantize.default: fp4_dequantize,
        ops.fp4_dynamic.default: fp4_dynamic,
    }


def _dynamic_quantize_schema() -> OpSchema:
    """The operator of TensorRT's parser, as onnx describes operators: numbers and their block scales."""
    from onnx.defs import OpSchema

    parameter, attribute, kinds = OpSchema.FormalParameter, OpSchema.Attribute, OpSchema.AttrType
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    return OpSchema(
        DYNAMIC_QUANTIZE,
        DOMAIN,
        1,
        inputs=[parameter("x", "T"), parameter("scale", "S")],
        outputs=[parameter("y", "Q"), parameter("y_scale", "B")],
        type_constraints=[
            ("T", floats, ""),
            ("S", floats[:1], ""),
            ("Q", ["tensor(float4e2m1)"], ""),
            ("B", ["tensor(float8e4m3fn)"], ""),
        ],
        attributes=[attribute(n, kinds.INT, "", required=True) for n in ("axis", "block_size", "scale_type")],
    )


def store_four_bits(model: Model) -> None:
    """Give the weights of blocked DequantizeLinear nodes their 4-bit types: the program holds them in bytes, which
    PyTorch has no narrower type for. int8 becomes INT4 and uint8 FLOAT4E2M1; changed in place."""
    import ml_dtypes
    import onnx_ir as ir

    narrow = {
        ir.DataType.INT8: (ir.DataType.INT4, lambda a: a.astype(ml_dtypes.int4)),
        ir.DataType.UINT8: (ir.DataType.FLOAT4E2M1, lambda a: a.view(ml_dtypes.float4_e2m1fn)),
    }
    for node in model.graph.all_nodes():
        if node.op_type != "DequantizeLinear" or "block_size" not in node.attributes:
            continue
        value = node.inputs[0]
        if value.const_value is not None and value.dtype in narrow:
            dtype, convert = narrow[value.dtype]
            stored = convert(value.const_value.numpy())  # type: ignore[no-untyped-call]
            value.const_value = ir.Tensor(stored, dtype=dtype, name=value.name)
            value.dtype = dtype

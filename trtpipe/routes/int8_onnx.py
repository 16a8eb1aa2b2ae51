"""INT8 Q/DQ of PyTorch in ONNX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.routes.narrow_onnx import Translations, dequantized_type

if TYPE_CHECKING:
    from onnx_ir import Value


def translations(*, float32_only: bool) -> Translations:
    """Q/DQ whose scales have the dtype of the float side, as ONNX before opset 23 and TensorRT want them.

    Args:
        float32_only: of opset 18, where Q/DQ are float32 on that side; other dtypes are cast.
    """
    import onnx_ir as ir
    import torch

    if float32_only:
        return _float32_translations()
    from onnxscript import opset20 as op

    ops = torch.ops.quantized_decomposed
    floats = {ir.DataType.FLOAT: np.float32, ir.DataType.FLOAT16: np.float16}

    def scale_of(scale: float, dtype: ir.DataType | None) -> Value:
        if dtype == ir.DataType.BFLOAT16:
            import ml_dtypes

            return op.Constant(value=ir.tensor(np.asarray(scale, ml_dtypes.bfloat16)))
        return op.Constant(value=ir.tensor(np.asarray(scale, floats.get(dtype or ir.DataType.FLOAT, np.float32))))

    def zero(dtype: int) -> Value:
        del dtype  # always torch.int8 here: placement quantizes to nothing else
        return op.Constant(value=ir.tensor(np.asarray(0, np.int8)))

    def quantize(input: Value, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int) -> Value:
        return op.QuantizeLinear(input, scale_of(scale, input.dtype), zero(dtype))

    def dequantize(
        input: Value, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int, out_dtype: int = -1
    ) -> Value:
        return op.DequantizeLinear(input, scale_of(scale, dequantized_type(out_dtype)), zero(dtype))

    def dequantize_channel(
        input: Value,
        scales: Value,
        zero_points: Value,
        axis: int,
        quant_min: int,
        quant_max: int,
        dtype: int,
        out_dtype: int = -1,
    ) -> Value:
        kind = dequantized_type(out_dtype)
        if kind != ir.DataType.FLOAT:
            scales = op.Cast(scales, to=int(kind))
        return op.DequantizeLinear(input, scales, axis=axis)

    return {
        ops.quantize_per_tensor.default: quantize,
        ops.dequantize_per_tensor.default: dequantize,
        ops.dequantize_per_channel.default: dequantize_channel,
    }


def _float32_translations() -> Translations:
    import onnx_ir as ir
    import torch
    from onnxscript import opset18 as op

    ops = torch.ops.quantized_decomposed

    def constant(array: Array | np.generic) -> Value:
        return op.Constant(value=ir.tensor(array))

    def wide(value: Value) -> Value:
        return value if value.dtype == ir.DataType.FLOAT else op.Cast(value, to=int(ir.DataType.FLOAT))

    def narrow(value: Value, out_dtype: int | None) -> Value:
        kind = dequantized_type(out_dtype)
        return value if kind == ir.DataType.FLOAT else op.Cast(value, to=int(kind))

    def quantize(input: Value, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int) -> Value:
        return op.QuantizeLinear(wide(input), constant(np.float32(scale)), constant(np.int8(0)))

    def dequantize(
        input: Value, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int, out_dtype: int = -1
    ) -> Value:
        return narrow(op.DequantizeLinear(input, constant(np.float32(scale)), constant(np.int8(0))), out_dtype)

    def dequantize_channel(
        input: Value,
        scales: Value,
        zero_points: Value,
        axis: int,
        quant_min: int,
        quant_max: int,
        dtype: int,
        out_dtype: int = -1,
    ) -> Value:
        return narrow(op.DequantizeLinear(input, wide(scales), axis=axis), out_dtype)

    return {
        ops.quantize_per_tensor.default: quantize,
        ops.dequantize_per_tensor.default: dequantize,
        ops.dequantize_per_channel.default: dequantize_channel,
    }

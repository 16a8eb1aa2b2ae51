"""How Torch-TensorRT converts our operators.

Its own converters of FP8 and NVFP4 are for the operators of ModelOpt alone, have one scale for a whole FP8 weight, and
none are for INT4; TensorRT's network, which these write to, takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

import trtpipe.quantization.narrow
import trtpipe.quantization.operators  # noqa: F401  # both register torch.ops.trtpipe
from trtpipe.quantization.formats import NVFP4

if TYPE_CHECKING:
    from tensorrt import DataType
    from torch_tensorrt.dynamo.conversion import ConversionContext

    from trtpipe.trt.types import ILayer, ITensor

#: A converter's arguments: tensors of TensorRT for the node's inputs, its other arguments as they are.
Args = Sequence[Any]
KeywordArgs = Mapping[str, Any]
#: (context, operator, arguments, keyword arguments, name of the layer) to TensorRT's tensor.
_Converter = Callable[["ConversionContext", object, Args, KeywordArgs, str], "ITensor"]


@cache
def register_converters() -> None:
    """Teach Torch-TensorRT our operators, once a process, through its public decorator."""
    from torch_tensorrt.dynamo.conversion import dynamo_tensorrt_converter

    for operator, converter in _Converters().by_operator().items():
        dynamo_tensorrt_converter(operator, supports_dynamic_shapes=True)(converter)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes (int8 or uint8, an even number of them), two in a byte, the first one in its low half: uint8."""
    low, high = (codes.cpu().contiguous().view(torch.uint8).reshape(-1, 2) & 15).unbind(1)
    return low | high << 4


class _Converters:
    """The converters, with the TensorRT that Torch-TensorRT has put under the name `tensorrt`."""

    def __init__(self) -> None:
        import tensorrt
        from torch_tensorrt.dynamo.conversion import converter_utils

        self.trt, self.utils = tensorrt, converter_utils
        self.halves = {tensorrt.float16: torch.float16, tensorrt.bfloat16: torch.bfloat16}
        self.kinds = {torch.float32: tensorrt.float32} | {half: kind for kind, half in self.halves.items()}

    def by_operator(self) -> dict[object, _Converter]:
        """The converter of each of our operators."""
        ops = torch.ops.trtpipe
        return {
            ops.quantize.default: self.quantize,
            ops.fp8_quantize.default: self.fp8_quantize,
            ops.dequantize.default: self.dequantize,
            ops.dequantize_beside.default: self.dequantize_per_channel,
            ops.dequantize_per_channel.default: self.dequantize_per_channel,
            ops.fp8_dequantize.default: self.fp8_dequantize,
            ops.int4_dequantize.default: self.int4_dequantize,
            ops.fp4_dequantize.default: self.fp4_dequantize,
            ops.fp4_dynamic.default: self.fp4_dynamic,
        }

    def quantize(self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
        return self._quantized(ctx, args, name, self.trt.int8)

    def fp8_quantize(
        self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str
    ) -> ITensor:
        return self._quantized(ctx, args, name, self.trt.fp8)

    def dequantize(self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
        return self._dequantized(ctx, self._tensor(ctx, args[0], name), args[1], args[2], name)

    def dequantize_per_channel(
        self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str
    ) -> ITensor:
        return self._dequantized(ctx, self._tensor(ctx, args[0], name), args[1], args[3], name, args[2])

    def fp8_dequantize(
        self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str
    ) -> ITensor:
        return self._dequantized(ctx, self._tensor(ctx, args[0], name), args[1], _kind(kwargs), name)

    def int4_dequantize(
        self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str
    ) -> ITensor:
        return self._dequantized(ctx, self._four_bits(ctx, args[0], self.trt.int4, name), args[1], _kind(kwargs), name)

    def fp4_dequantize(
        self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str
    ) -> ITensor:
        numbers = self._four_bits(ctx, args[0], self.trt.DataType.FP4, name)
        scales = self._tensor(ctx, args[1], f"{name}_scales")
        scale = self._scale_of(ctx, args[2], torch.float32, name)
        return self._by_block(ctx, numbers, scales, scale, _kind(kwargs), name)

    def fp4_dynamic(
        self, ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str
    ) -> ITensor:
        x, scale = self._tensor(ctx, args[0], name), self._scale_of(ctx, args[1], torch.float32, name)
        axis, number = len(x.shape) - 1, self.trt.DataType.FP4
        layer = ctx.net.add_dynamic_quantize(x, axis, NVFP4.blocks[0], number, self.trt.fp8)
        layer.set_input(1, scale)
        layer.name = f"{name}_quantize"
        return self._by_block(ctx, layer.get_output(0), layer.get_output(1), scale, _kind(kwargs), name)

    def _tensor(self, ctx: ConversionContext, value: Any, name: str) -> ITensor:
        if isinstance(value, self.trt.ITensor):
            return value
        return self.utils.get_trt_tensor(ctx, value, f"{name}_constant")

    def _scale_of(self, ctx: ConversionContext, scale: float | torch.Tensor, dtype: torch.dtype, name: str) -> ITensor:
        # Q and DQ want their scale in the dtype of the float side (TensorRT's documentation of IQuantizeLayer).
        return self.utils.get_trt_tensor(ctx, torch.as_tensor(scale, dtype=torch.float32).to(dtype), f"{name}_scale")

    def _quantized(self, ctx: ConversionContext, args: Args, name: str, number: DataType) -> ITensor:
        x = self._tensor(ctx, args[0], name)
        scale = self._scale_of(ctx, args[1], self.halves.get(x.dtype, torch.float32), name)
        return _out(ctx.net.add_quantize(x, scale, number), name)

    def _dequantized(
        self,
        ctx: ConversionContext,
        x: ITensor,
        scale: float | torch.Tensor,
        to: torch.dtype,
        name: str,
        axis: int | None = None,
    ) -> ITensor:
        scales = self._scale_of(ctx, scale, to, name)
        return _out(ctx.net.add_dequantize(x, scales, scales.dtype), name, axis)

    def _four_bits(self, ctx: ConversionContext, codes: torch.Tensor, dtype: DataType, name: str) -> ITensor:
        """A constant of 4-bit numbers, which PyTorch holds in bytes and TensorRT two in a byte."""
        name, count = f"{name}_constant", codes.numel()
        weights = self.utils.to_trt_weights(ctx, packed(codes), name, "CONSTANT", "CONSTANT", dtype=dtype, count=count)
        return _out(ctx.net.add_constant(list(codes.shape), weights), name)

    def _by_block(
        self, ctx: ConversionContext, numbers: ITensor, scales: ITensor, scale: ITensor, dtype: torch.dtype, name: str
    ) -> ITensor:
        """NVFP4 `numbers` times their E4M3 `scales`, which are themselves in units of `scale`, float32 in TensorRT."""
        to, single = self.kinds[dtype], self.trt.float32
        wide = _out(ctx.net.add_dequantize(scales, scale, single), f"{name}_scales")
        wide = wide if to == single else ctx.net.add_cast(wide, to).get_output(0)
        return _out(ctx.net.add_dequantize(numbers, wide, to), name)


def _out(layer: ILayer, name: str, axis: int | None = None) -> ITensor:
    layer.name = name
    if axis is not None:
        layer.axis = axis
    return layer.get_output(0)


def _kind(kwargs: KeywordArgs) -> torch.dtype:
    dtype: torch.dtype | None = kwargs.get("out_dtype")
    return dtype or torch.float32

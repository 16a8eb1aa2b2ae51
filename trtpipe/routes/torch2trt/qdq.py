"""Q/DQ for torch2trt: Python functions for it to hook, and the converters that write TensorRT's layers for them.

torch2trt replaces a function by its name in its module while the network is made, so each one here is called through
this module. The layers are those of TensorRT's explicit quantization (developer guide, "Working with Quantized Types"):
an activation goes through IQuantizeLayer and IDequantizeLayer, and a weight is a float constant in front of such a
pair, which every TensorRT from 8.6 on takes; 8.6 has no INT8 constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import trtpipe.quantization.operators  # noqa: F401  # registers torch.ops.trtpipe
from calib.types import Array
from trtpipe.version_numbers import parse_version

if TYPE_CHECKING:
    from torch2trt import ConversionContext

    from trtpipe.trt.types import ITensor


def quantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """int8 of float `x` of any shape, as TensorRT rounds and saturates it."""
    result: torch.Tensor = torch.ops.trtpipe.quantize(x, scale)
    return result


def dequantize(q: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 of int8 `q` of any shape."""
    result: torch.Tensor = torch.ops.trtpipe.dequantize(q, scale, torch.float32)
    return result


def weighted(
    name: str, x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, axis: int, *rest: object
) -> torch.Tensor:
    """The operation `name` of torch.nn.functional on `x` and an INT8 weight.

    Args:
        name: one of `products.WEIGHTED`.
        x: float32 activation.
        q: int8 weight.
        scales: float32 [C], one for each index of `axis` of the weight.
        axis: the weight's axis of output channels.
        rest: what follows the weight in that function's arguments: bias, stride, padding and so on.
    """
    weight = _float_weight(q, scales, axis)
    result: torch.Tensor = getattr(torch.nn.functional, name)(x, weight, *rest)
    return result


def _float_weight(q: torch.Tensor, scales: torch.Tensor, axis: int) -> torch.Tensor:
    weight: torch.Tensor = torch.ops.trtpipe.dequantize_per_channel(q, scales, axis, torch.float32)
    return weight


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in float32 or float16."""
    return x.to(dtype)


def register(frontend: ModuleType, trt: ModuleType, flags: Collection[str], held: list[object]) -> None:
    """Give torch2trt converters for the functions here, through its public decorator.

    INT8 is allowed by a flag that the converters set themselves: under torch2trt's own `int8_mode` it would calibrate,
    and some of its converters would force layers into INT8 that have no scale. The same holds for `fp16_mode`.

    Args:
        frontend: the torch2trt package.
        trt: the TensorRT module that it writes to.
        flags: builder flags that the network needs, by name.
        held: gets the arrays that TensorRT may read until the engine is built.
    """
    layers = _Layers(trt, flags, held)

    def add(function: Callable[..., torch.Tensor], converter: Callable[[ConversionContext], None]) -> None:
        frontend.tensorrt_converter(f"{__name__}.{function.__name__}")(converter)

    add(quantize, layers.quantize)
    add(dequantize, layers.dequantize)
    add(weighted, layers.weighted)
    add(cast, layers.cast)


class _Layers:
    """The converters; `ctx` is torch2trt's context, with the arguments and the result of the function just called."""

    def __init__(self, trt: ModuleType, flags: Collection[str], held: list[object]) -> None:
        self._trt, self._flags, self._held = trt, list(flags)[::-1], held
        # The output's dtype is an argument since TensorRT 10, where a layer without one makes the network weakly typed.
        says = parse_version(trt.__version__) >= (10,)
        self._int8: tuple[object, ...] = (trt.int8,) if says else ()
        self._float: tuple[object, ...] = (trt.float32,) if says else ()

    def quantize(self, ctx: ConversionContext) -> None:
        x, scale = ctx.method_args
        while self._flags:
            ctx.builder_config.set_flag(getattr(self._trt.BuilderFlag, self._flags.pop()))
        layer = ctx.network.add_quantize(x._trt, self._constant(ctx, np.asarray(scale, np.float32)), *self._int8)
        ctx.method_return._trt = layer.get_output(0)

    def dequantize(self, ctx: ConversionContext) -> None:
        q, scale = ctx.method_args
        layer = ctx.network.add_dequantize(q._trt, self._constant(ctx, np.asarray(scale, np.float32)), *self._float)
        ctx.method_return._trt = layer.get_output(0)

    def cast(self, ctx: ConversionContext) -> None:
        x, dtype = ctx.method_args
        kind = {torch.float32: self._trt.float32, torch.float16: self._trt.float16}[dtype]
        ctx.method_return._trt = ctx.network.add_cast(x._trt, kind).get_output(0)

    def weighted(self, ctx: ConversionContext) -> None:
        name, x, q, scales, axis, *rest = ctx.method_args
        weight = _float_weight(q, scales, axis).cpu().numpy()
        scales = scales.cpu().numpy().astype(np.float32)
        make = self._linear if name == "linear" else self._convolution
        ctx.method_return._trt = make(ctx, name, x, weight, scales, axis, *rest)

    def _constant(self, ctx: ConversionContext, array: Array) -> ITensor:
        array = np.require(array, requirements="C")
        self._held.append(array)
        return ctx.network.add_constant(tuple(array.shape), array).get_output(0)

    def _weight(self, ctx: ConversionContext, weight: Array, scales: Array, axis: int) -> ITensor:
        """The weight behind its Q/DQ pair; it holds multiples of the scales, so rounding gives its INT8 back."""
        scale = self._constant(ctx, scales)
        q = ctx.network.add_quantize(self._constant(ctx, weight), scale, *self._int8)
        q.axis = axis
        dq = ctx.network.add_dequantize(q.get_output(0), scale, *self._float)
        dq.axis = axis
        return dq.get_output(0)

    def _linear(
        self,
        ctx: ConversionContext,
        name: str,
        x: Any,
        weight: Array,
        scales: Array,
        axis: int,
        bias: torch.Tensor | None = None,
    ) -> ITensor:
        """x [..., C_in] times weight [C_out, C_in] transposed; both get the same number of axes."""
        more = x.dim() - 2
        kernel = self._weight(ctx, weight.reshape((1,) * more + weight.shape), scales, axis + more)
        operation, net = self._trt.MatrixOperation, ctx.network
        out = net.add_matrix_multiply(x._trt, operation.NONE, kernel, operation.TRANSPOSE).get_output(0)
        if bias is None:
            return out
        term = self._constant(ctx, bias.detach().float().cpu().numpy().reshape((1,) * (more + 1) + (-1,)))
        return net.add_elementwise(out, term, self._trt.ElementWiseOperation.SUM).get_output(0)

    def _convolution(
        self,
        ctx: ConversionContext,
        name: str,
        x: Any,
        weight: Array,
        scales: Array,
        axis: int,
        bias: torch.Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        *rest: object,
    ) -> ITensor:
        """A (transposed) convolution whose kernel is its second input; one spatial axis gets a second one of 1."""
        transposed, spatial = name.startswith("conv_transpose"), weight.ndim - 2
        after, dilation, groups = _tail(transposed, spatial, *rest)
        stride, padding = _each(stride, spatial), _each(padding, spatial)
        flat = spatial == 1
        tensor = x._trt
        if flat:
            tensor, weight = self._reshaped(ctx, tensor, (0, 0, 0, 1)), weight[..., None]
            stride, padding, dilation, after = (*stride, 1), (*padding, 0), (*dilation, 1), (*after, 0)
        kernel = self._weight(ctx, weight, scales, axis)
        given = self._trt.Weights() if bias is None else np.require(bias.detach().float().cpu().numpy(), None, "C")
        self._held.append(given)
        add = ctx.network.add_deconvolution_nd if transposed else ctx.network.add_convolution_nd
        layer = add(tensor, int(weight.shape[axis]), tuple(weight.shape[2:]), self._trt.Weights(), given)
        layer.set_input(1, kernel)
        layer.stride_nd, layer.dilation_nd, layer.num_groups = stride, dilation, groups
        if any(a > p for a, p in zip(after, padding, strict=True)):
            raise ValueError(f"{name}: output_padding must be at most padding for TensorRT")
        layer.pre_padding = padding
        layer.post_padding = tuple(p - a for p, a in zip(padding, after, strict=True))
        out = layer.get_output(0)
        return self._reshaped(ctx, out, (0, 0, 0)) if flat else out

    def _reshaped(self, ctx: ConversionContext, tensor: ITensor, dims: tuple[int, ...]) -> ITensor:
        """0 stands for the axis as it is."""
        layer = ctx.network.add_shuffle(tensor)
        layer.reshape_dims = dims
        return layer.get_output(0)


def _tail(transposed: bool, spatial: int, *rest: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(output padding, dilation, groups) from what follows the padding: the two operations order them differently."""
    usual = (0, 1, 1) if transposed else (1, 1)
    given = [*rest, *usual[len(rest) :]]
    after, groups, dilation = given if transposed else (0, given[1], given[0])
    return _each(after, spatial), _each(dilation, spatial), int(groups)


def _each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(n) for n in (numbers * count if len(numbers) == 1 else numbers))

"""Q/DQ as the operators of `trtpipe.quantization.operators`, and how Torch-TensorRT converts them.

`quantized_decomposed.*`, which torchao writes, has no converter in Torch-TensorRT, and its constant folder would turn
INT8 weights back into FP32. Our own operators are tagged `nondeterministic_seeded`, which the folder leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

import trtpipe.quantization.narrow
import trtpipe.quantization.operators  # noqa: F401  # both register torch.ops.trtpipe
from trtpipe.model.nodes import calls, is_constant, module_path, op_name
from trtpipe.quantization.formats import NVFP4
from trtpipe.quantization.precision import DEQUANTIZE, QUANTIZE

if TYPE_CHECKING:
    from torch.fx.node import Argument
    from torch_tensorrt.dynamo.conversion import ConversionContext

    from trtpipe.trt.types import ILayer, ITensor

#: A converter's arguments: tensors of TensorRT for the node's inputs, its other arguments as they are.
Args = Sequence[Any]
KeywordArgs = Mapping[str, Any]
#: (context, operator, arguments, keyword arguments, name of the layer) to TensorRT's tensor.
_Converter = Callable[["ConversionContext", object, Args, KeywordArgs, str], "ITensor"]
#: Under which the "custom" metadata of a node, which torch.export copies, hold its module path.
_MODULE = "trtpipe_module"


def rewritten(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`graph` with every `quantized_decomposed` Q/DQ replaced by our operator; changed in place.

    Raises:
        ValueError: a Q/DQ that symmetric INT8 does not cover; `quantize` places none.
    """
    ops = torch.ops.trtpipe
    for node in list(calls(graph.graph)):
        name = op_name(node)
        if name not in QUANTIZE + DEQUANTIZE or "quantized_decomposed" not in str(node.target):
            continue
        dtype = node.kwargs.get("out_dtype") or torch.float32
        x, scale, zero = node.args[:3]
        target: torch._ops.OpOverload[..., torch.Tensor]
        args: tuple[Argument, ...]
        if name == "quantize_per_tensor":
            target, args = ops.quantize.default, (x, scale)
        elif name == "dequantize_per_tensor":
            target, args = ops.dequantize.default, (x, scale, dtype)
        elif name == "dequantize_per_channel":
            target, args = ops.dequantize_per_channel.default, (x, scale, node.args[3], dtype)
        else:
            raise ValueError(f"{name}: weights must be stored as INT8 (got a Q that runs)")
        if isinstance(zero, int) and zero != 0:
            raise ValueError(f"{node.name}: the zero point must be 0 (got {zero})")
        with graph.graph.inserting_after(node):
            new = graph.graph.call_function(target, args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    _name_after_readers(graph)
    graph.recompile()
    return graph


def kept_with_readers(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`graph`, as `rewritten` leaves it, with every weight's DQ beside the activation that is computed with it.

    A constant's DQ depends on nothing, so that a partitioner puts it into the first engine, and the convolution into a
    later one that gets its weights as an input in floats. Changed in place.
    """
    ops = torch.ops.trtpipe
    narrow = (ops.fp8_dequantize.default, ops.int4_dequantize.default, ops.fp4_dequantize.default)
    for node in list(calls(graph.graph)):
        if node.target not in (ops.dequantize_per_channel.default, *narrow) or len(node.users) != 1:
            continue
        if not is_constant(node.args[0]):
            continue
        reader = next(iter(node.users))
        others = (a for a in reader.args if isinstance(a, torch.fx.Node) and a is not node and a.op != "get_attr")
        if (beside := next(others, None)) is None:
            continue
        with graph.graph.inserting_before(reader):
            new = (
                graph.graph.call_function(node.target, node.args, {**node.kwargs, "beside": beside})
                if node.target in narrow
                else graph.graph.call_function(ops.dequantize_beside.default, (*node.args, beside))
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def remember_modules(graph: torch.fx.Graph) -> None:
    """Write each node's module path where lowering copies it and no pass removes it. See `remembered_module`."""
    for node in calls(graph):
        node.meta["custom"] = {**(node.meta.get("custom") or {}), _MODULE: module_path(node)}


def remembered_module(node: torch.fx.Node) -> str:
    """The module path of a node of a graph that `remember_modules` was given, whatever it was lowered to since."""
    kept = node.meta.get("custom") or {}
    return str(kept.get(_MODULE) or module_path(node))


def _name_after_readers(graph: torch.fx.GraphModule) -> None:
    """Give Q and DQ the module of the operation that reads them, and every node a module stack of its own.

    Torch-TensorRT names layers after the stack's last entry, and takes that entry out of the stack while it does.
    """
    key = "nn_module_stack"
    for node in reversed(graph.graph.nodes):
        stack = node.meta.get(key)
        if not module_path(node) and "trtpipe" in str(node.target) and node.users:
            stack = next(iter(node.users)).meta.get(key)
        if stack:
            node.meta[key] = dict(stack)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes (int8 or uint8, an even number of them), two in a byte, the first one in its low half: uint8."""
    low, high = (codes.cpu().contiguous().view(torch.uint8).reshape(-1, 2) & 15).unbind(1)
    return low | high << 4


@cache
def register_converters() -> None:
    """Teach Torch-TensorRT our operators, once a process, through its public decorator.

    Torch-TensorRT's own converters of FP8 and NVFP4 are for the operators of ModelOpt alone, have one scale for a whole
    FP8 weight, and none are for INT4; TensorRT's network, which these write to, takes all of them.
    """
    import tensorrt as trt  # torch_tensorrt has put its own flavour under this name
    from torch_tensorrt.dynamo.conversion import dynamo_tensorrt_converter
    from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor, to_trt_weights

    ops = torch.ops.trtpipe
    halves = {trt.float16: torch.float16, trt.bfloat16: torch.bfloat16}
    kinds = {torch.float32: trt.float32} | {torch_dtype: d for d, torch_dtype in halves.items()}

    def converter(operator: object) -> Callable[[_Converter], _Converter]:
        def registered(function: _Converter) -> _Converter:
            dynamo_tensorrt_converter(operator, supports_dynamic_shapes=True)(function)
            return function

        return registered

    def tensor(ctx: ConversionContext, value: Any, name: str) -> ITensor:
        return value if isinstance(value, trt.ITensor) else get_trt_tensor(ctx, value, f"{name}_constant")

    def scale_of(ctx: ConversionContext, scale: float | torch.Tensor, dtype: torch.dtype, name: str) -> ITensor:
        # Q and DQ want their scale in the dtype of the float side (TensorRT's documentation of IQuantizeLayer).
        return get_trt_tensor(ctx, torch.as_tensor(scale, dtype=torch.float32).to(dtype), f"{name}_scale")

    def out(layer: ILayer, name: str, axis: int | None) -> ITensor:
        layer.name = name
        if axis is not None:
            layer.axis = axis
        return layer.get_output(0)

    def quantizes(operator: Any, number: Any) -> None:
        @converter(operator)
        def quantize(ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
            x = tensor(ctx, args[0], name)
            scale = scale_of(ctx, args[1], halves.get(x.dtype, torch.float32), name)
            return out(ctx.net.add_quantize(x, scale, number), name, None)

    quantizes(ops.quantize.default, trt.int8)
    quantizes(ops.fp8_quantize.default, trt.fp8)

    @converter(ops.dequantize.default)
    def dequantize(ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
        scale = scale_of(ctx, args[1], args[2], name)
        return out(ctx.net.add_dequantize(tensor(ctx, args[0], name), scale, scale.dtype), name, None)

    @converter(ops.dequantize_beside.default)
    @converter(ops.dequantize_per_channel.default)
    def dequantize_per_channel(
        ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str
    ) -> ITensor:
        scale = scale_of(ctx, args[1], args[3], name)
        return out(ctx.net.add_dequantize(tensor(ctx, args[0], name), scale, scale.dtype), name, args[2])

    def kind(kwargs: KeywordArgs) -> torch.dtype:
        dtype: torch.dtype | None = kwargs.get("out_dtype")
        return dtype or torch.float32

    @converter(ops.fp8_dequantize.default)
    def fp8_dequantize(ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
        scale = scale_of(ctx, args[1], kind(kwargs), name)
        return out(ctx.net.add_dequantize(tensor(ctx, args[0], name), scale, scale.dtype), name, None)

    def four_bits(ctx: ConversionContext, codes: torch.Tensor, dtype: Any, name: str) -> ITensor:
        """A constant of 4-bit numbers, which PyTorch holds in bytes and TensorRT two in a byte."""
        name = f"{name}_constant"
        weights = to_trt_weights(ctx, packed(codes), name, "CONSTANT", "CONSTANT", dtype=dtype, count=codes.numel())
        layer = ctx.net.add_constant(list(codes.shape), weights)
        layer.name = name
        return layer.get_output(0)

    def by_block(
        ctx: ConversionContext, numbers: ITensor, scales: ITensor, scale: ITensor, dtype: torch.dtype, name: str
    ) -> ITensor:
        """NVFP4 `numbers` times their E4M3 `scales`, which are themselves in units of `scale`, float32 in TensorRT."""
        to = kinds[dtype]
        wide = out(ctx.net.add_dequantize(scales, scale, trt.float32), f"{name}_scales", None)
        wide = wide if to == trt.float32 else ctx.net.add_cast(wide, to).get_output(0)
        return out(ctx.net.add_dequantize(numbers, wide, to), name, None)

    @converter(ops.int4_dequantize.default)
    def int4_dequantize(ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
        scale = scale_of(ctx, args[1], kind(kwargs), name)
        return out(ctx.net.add_dequantize(four_bits(ctx, args[0], trt.int4, name), scale, scale.dtype), name, None)

    @converter(ops.fp4_dequantize.default)
    def fp4_dequantize(ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
        numbers, scales = four_bits(ctx, args[0], trt.DataType.FP4, name), tensor(ctx, args[1], f"{name}_scales")
        return by_block(ctx, numbers, scales, scale_of(ctx, args[2], torch.float32, name), kind(kwargs), name)

    @converter(ops.fp4_dynamic.default)
    def fp4_dynamic(ctx: ConversionContext, target: object, args: Args, kwargs: KeywordArgs, name: str) -> ITensor:
        x, scale = tensor(ctx, args[0], name), scale_of(ctx, args[1], torch.float32, name)
        layer = ctx.net.add_dynamic_quantize(x, len(x.shape) - 1, NVFP4.blocks[0], trt.DataType.FP4, trt.fp8)
        layer.set_input(1, scale)
        layer.name = f"{name}_quantize"
        return by_block(ctx, layer.get_output(0), layer.get_output(1), scale, kind(kwargs), name)

"""Q/DQ as operators of our own, and how Torch-TensorRT converts them.

`quantized_decomposed.*`, which torchao writes, has no converter in Torch-TensorRT, and its constant folder would turn
INT8 weights back into FP32. The operators here are tagged `nondeterministic_seeded`, which the folder leaves alone.
Their arithmetic is that of `quantized_decomposed` with a zero point of 0.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from trtpipe.graph import calls, module_path, op_name
from trtpipe.precision import DEQUANTIZE, QUANTIZE

#: Symmetric INT8 as TensorRT rounds and saturates it: half to even, to [-128, 127].
LOW, HIGH = -128, 127

_library: Any = torch.library.Library("trtpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    "quantize(Tensor x, float scale) -> Tensor",
    "dequantize(Tensor q, float scale, ScalarType dtype) -> Tensor",
    "dequantize_per_channel(Tensor q, Tensor scales, int axis, ScalarType dtype) -> Tensor",
)
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))


def _quantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.clamp(torch.round(x.to(torch.float32) * (1.0 / scale)), LOW, HIGH).to(torch.int8)


def _dequantize(q: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (q.to(torch.float32) * scale).to(dtype)


def _dequantize_per_channel(q: torch.Tensor, scales: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    shape = [-1 if d == axis else 1 for d in range(q.dim())]
    return (q.to(torch.float32) * scales.reshape(shape)).to(dtype)


for _name, _function in (
    ("quantize", _quantize),
    ("dequantize", _dequantize),
    ("dequantize_per_channel", _dequantize_per_channel),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


def rewritten(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`graph` with every `quantized_decomposed` Q/DQ replaced by the operator here; changed in place.

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
        target: Any
        args: tuple[Any, ...]
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


@cache
def register_converters() -> None:
    """Teach Torch-TensorRT the operators here, once a process, through its public decorator."""
    import tensorrt as trt  # torch_tensorrt has put its own flavour under this name
    from torch_tensorrt.dynamo.conversion import dynamo_tensorrt_converter
    from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor

    ops = torch.ops.trtpipe
    halves = {trt.float16: torch.float16, trt.bfloat16: torch.bfloat16}

    def tensor(ctx: Any, value: Any, name: str) -> Any:
        return value if isinstance(value, trt.ITensor) else get_trt_tensor(ctx, value, f"{name}_constant")

    def scale_of(ctx: Any, scale: Any, dtype: torch.dtype, name: str) -> Any:
        # Q and DQ want their scale in the dtype of the float side (TensorRT's documentation of IQuantizeLayer).
        return get_trt_tensor(ctx, torch.as_tensor(scale, dtype=torch.float32).to(dtype), f"{name}_scale")

    def out(layer: Any, name: str, axis: int | None) -> Any:
        layer.name = name
        if axis is not None:
            layer.axis = axis
        return layer.get_output(0)

    @dynamo_tensorrt_converter(ops.quantize.default, supports_dynamic_shapes=True)  # type: ignore[untyped-decorator]
    def quantize(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        x = tensor(ctx, args[0], name)
        scale = scale_of(ctx, args[1], halves.get(x.dtype, torch.float32), name)
        return out(ctx.net.add_quantize(x, scale, trt.int8), name, None)

    @dynamo_tensorrt_converter(ops.dequantize.default, supports_dynamic_shapes=True)  # type: ignore[untyped-decorator]
    def dequantize(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        scale = scale_of(ctx, args[1], args[2], name)
        return out(ctx.net.add_dequantize(tensor(ctx, args[0], name), scale, scale.dtype), name, None)

    @dynamo_tensorrt_converter(  # type: ignore[untyped-decorator]
        ops.dequantize_per_channel.default, supports_dynamic_shapes=True
    )
    def dequantize_per_channel(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        scale = scale_of(ctx, args[1], args[3], name)
        return out(ctx.net.add_dequantize(tensor(ctx, args[0], name), scale, scale.dtype), name, args[2])

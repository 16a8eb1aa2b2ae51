"""Q/DQ as the operators of `trtpipe.quantization.operators`, for which both frontends have converters of ours.

`quantized_decomposed.*`, which torchao writes, has no converter in Torch-TensorRT, and its constant folder would turn
INT8 weights back into FP32. Our own operators are tagged `nondeterministic_seeded`, which the folder leaves alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import trtpipe.quantization.operators  # noqa: F401  # registers torch.ops.trtpipe
from trtpipe.model.nodes import calls, module_path, op_name
from trtpipe.quantization.precision import DEQUANTIZE, QUANTIZE

if TYPE_CHECKING:
    from torch.fx.node import Argument


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

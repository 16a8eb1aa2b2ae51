"""Q/DQ as the operators of `trtpipe.quantization.operators`, which Torch-TensorRT keeps; `converters` converts them.

`quantized_decomposed.*`, which torchao writes, has no converter in Torch-TensorRT, and its constant folder would turn
INT8 weights back into FP32. Our own operators are tagged `nondeterministic_seeded`, which the folder leaves alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import trtpipe.quantization.narrow
import trtpipe.quantization.operators  # noqa: F401  # both register torch.ops.trtpipe
from trtpipe.model.nodes import calls, is_constant, module_path, op_name
from trtpipe.quantization.precision import DEQUANTIZE, QUANTIZE

if TYPE_CHECKING:
    from torch.fx.node import Argument

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

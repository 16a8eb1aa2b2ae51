"""The own Q/DQ of a program before Torch-TensorRT partitions it: where each stays, and the module that it is of."""

from __future__ import annotations

import torch

import trtpipe.quantization.narrow
import trtpipe.quantization.operators  # noqa: F401  # both register torch.ops.trtpipe
from trtpipe.model.nodes import calls, is_constant, module_path

#: Under which the "custom" metadata of a node, which torch.export copies, hold its module path.
_MODULE = "trtpipe_module"


def kept_with_readers(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`graph`, as `own_qdq.rewritten` leaves it, with every weight's DQ beside the activation that is computed with it.

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

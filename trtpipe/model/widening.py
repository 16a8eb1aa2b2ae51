"""A captured graph in FP32, whatever precision the model's code computes in: the job's `precision` decides over that.

A network that a factory returned by `.half()`, or that has autocast in its forward, would else be folded, calibrated
and corrected in FP16, whose rounding adds to that of INT8 and is no part of any engine.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from trtpipe.errors import titled
from trtpipe.model.nodes import HALVES, calls, constant_value, is_constant, module_path, set_constant, source_line

if TYPE_CHECKING:
    from torch.fx.node import Argument, Node


def widened(graph: torch.fx.GraphModule) -> tuple[tuple[str, ...], float]:
    """Make every computation in FP16 or BF16 one in FP32, in place. Bindings keep their dtypes.

    The graph's `val`s are then out of date: export it again.

    Returns:
        A note, where there was such a computation, and the largest rounding error of it as a share of a value; else
        nothing, 0 and the graph as it was.
    """
    narrow = [n for n in calls(graph.graph) if _dtype(n) in HALVES and not _is_binding(n)]
    if not narrow:
        return (), 0.0
    rounding = max(torch.finfo(_dtype(n)).eps for n in narrow)  # type: ignore[arg-type]
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    given = [_dtype(n) for n in output.args[0]]
    for node in list(graph.graph.nodes):
        if is_constant(node):
            if (value := constant_value(graph, node)).dtype in HALVES:
                set_constant(graph, node, value.float())
        elif node.op == "placeholder" and _dtype(node) in HALVES:
            users = [u for u in node.users if u.op != "output"]
            with graph.graph.inserting_after(node):
                cast = graph.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.float32})
            for user in users:
                user.replace_input_with(node, cast)
        elif node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, _wide)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _wide)
            if _is_done(node):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
    with graph.graph.inserting_before(output):
        results = tuple(
            graph.graph.call_function(torch.ops.aten._to_copy.default, (n,), {"dtype": dtype})
            if dtype in HALVES and n.op != "placeholder"
            else n
            for n, dtype in zip(output.args[0], given, strict=True)
        )
    output.args = (results,)
    graph.recompile()
    first = narrow[0]
    name = str(_dtype(first)).removeprefix("torch.")
    note = (
        f"the model computes in {name} (first: {titled(module_path(first))}, {source_line(first)}): its "
        "graph computes in FP32, and the job's precision decides what is narrower"
    )
    return (note,), rounding


def in_float64(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """A note where the model computes in float64, which no engine has: what is compiled does in FP32."""
    wide = [
        n
        for n in calls(graph.graph)
        if _dtype(n) is torch.float64 and n.target is not torch.ops.aten._to_copy.default and not _is_binding(n)
    ]
    if not wide:
        return ()
    first = wide[0]
    return (
        f"the model computes in float64 (first: {titled(module_path(first))}, {source_line(first)}), which TensorRT "
        "has not: it is computed in FP32, and what its small digits decide is lost",
    )


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_binding(node: Node) -> bool:
    """A cast of an input that is given in another dtype, or of a result to the dtype of its output."""
    if node.target is not torch.ops.aten._to_copy.default:
        return node.target is operator.getitem
    return all(u.op == "output" for u in node.users)


def _is_done(node: Node) -> bool:
    """A cast to FP32 of what is now computed in it, which would stand between a weight and its convolution."""
    if node.target is not torch.ops.aten._to_copy.default or dict(node.kwargs) != {"dtype": torch.float32}:
        return False
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    return _dtype(source) in (torch.float32, *HALVES) and not (source.op == "placeholder" and _dtype(source) in HALVES)


def _wide(value: Argument) -> Argument:
    return torch.float32 if value in HALVES else value

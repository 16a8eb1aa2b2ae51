"""Batch norms that may not go into the convolution before them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from trtpipe.model.nodes import add_constant, calls, constant_value, is_constant, op_name

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Batch norms, and where the epsilon is among their arguments; the first four behind x are the same.
BATCH_NORMS = {"batch_norm": 7, "_native_batch_norm_legit_no_training": 6}


def unpaired(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Batch norms behind a convolution that are no pair with it: something else reads what it gives, or its weight or
    bias, and would read them changed if the norm went into them."""
    readers = Counter(n.target for node in calls(graph.graph) for n in node.all_input_nodes if is_constant(n))

    def alone(made: torch.fx.Node) -> bool:
        return len(made.users) == 1 and all(readers[n.target] == 1 for n in made.all_input_nodes if is_constant(n))

    norms = [n for n in calls(graph.graph) if op_name(n) in BATCH_NORMS]
    return [n for n in norms if "conv" in op_name(n.args[0]) and not alone(n.args[0])]  # type: ignore[arg-type]


def spell_out_batch_norms(graph: torch.fx.GraphModule, which: Iterable[torch.fx.Node]) -> None:
    """Those among `which` as x * scale + shift: PT2E would fold one into the convolution before it, whose weight has
    scales of its own, or other readers. TensorRT fuses the two."""
    for node in [n for n in which if op_name(n) in BATCH_NORMS]:
        given: list[Any] = list(node.args)
        (x, weight, bias, mean, var), eps = given[:5], given[BATCH_NORMS[op_name(node)]]
        if not (is_constant(mean) and is_constant(var)):
            continue
        scale = (constant_value(graph, var).double() + eps).rsqrt()
        scale = scale * constant_value(graph, weight) if is_constant(weight) else scale
        shift = -constant_value(graph, mean) * scale
        shift = shift + constant_value(graph, bias) if is_constant(bias) else shift
        shape = [1, -1, *[1] * (x.meta["val"].dim() - 2)]
        y = x
        for what, value in (("mul", scale), ("add", shift)):
            constant = add_constant(graph, f"{node.name}_{what}", value.float().reshape(shape), node)
            with graph.graph.inserting_before(node):
                y = graph.graph.call_function(getattr(torch.ops.aten, what).Tensor, (y, constant))
            y.meta = dict(node.meta) | {"val": x.meta["val"]}
        for taken in [u for u in node.users if op_name(u) == "getitem" and u.args[1] == 0] or [node]:
            taken.replace_all_uses_with(y)
    graph.graph.eliminate_dead_code()

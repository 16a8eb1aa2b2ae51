"""What a network makes of its weights alone for each sample: learned queries behind a linear, say.

In a batch of one size that is a constant. In a range of them it is computed anew for each batch, all rows alike: here
it is made once, so that both have the same products to quantize, and one calibration table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtpipe.model.nodes import add_constant, constant_value, is_constant, op_name
from trtpipe.model.products import MATRIX_PRODUCTS, WEIGHTED
from trtpipe.model.pt2e import MADE

if TYPE_CHECKING:
    import torch

#: Batches whose rows have to be alike, and how far they may be from it, of the largest.
_BATCHES, _TOLERANCE = (2, 3), 1e-5


def fold_for_each(graph: torch.fx.GraphModule) -> None:
    """Replace each product of constants that the batch alone repeats, and what is made of it, by its rows, repeated;
    the graph is changed."""
    import torch

    (first, *_) = graph.graph.find_nodes(op="placeholder")
    batch = first.meta["val"].shape[0]
    given = set(graph.graph.find_nodes(op="placeholder"))
    made = list[torch.fx.Node]()
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            (given.add if not given.isdisjoint(node.all_input_nodes) else made.append)(node)
    products = {n for n in made if op_name(n) in (*WEIGHTED, *MATRIX_PRODUCTS)}
    for node in made:  # what is made of a product
        products.update({node} if not products.isdisjoint(node.all_input_nodes) else ())
    others, fixed = given | set(graph.graph.find_nodes(op="output")), isinstance(batch, int)
    ends = [n for n in made if n in products and not others.isdisjoint(n.users)]
    for node in ends:
        rows = _evaluated(graph, node, {}) if fixed else _rows(graph, node, batch.node.expr)
        if rows is None:
            continue
        held = add_constant(graph, MADE, rows, node)
        if fixed:
            node.replace_all_uses_with(held)
            continue
        with graph.graph.inserting_before(node):
            count = graph.graph.call_function(torch.ops.aten.sym_size.int, (first, 0))
            times: Any = [count, *[1] * (rows.dim() - 1)]
            repeated = graph.graph.call_function(torch.ops.aten.repeat.default, (held, times))
        count.meta["val"], repeated.meta = batch, node.meta
        node.replace_all_uses_with(repeated)
    if ends:
        graph.graph.eliminate_dead_code()
        graph.recompile()


def _rows(graph: torch.fx.GraphModule, node: torch.fx.Node, batch: Any) -> torch.Tensor | None:
    """The rows of one sample of a tensor that depends on the size `batch` (a symbol) alone; None where samples differ,
    or it depends on another size."""
    import torch

    found = []
    for count in _BATCHES:
        value = _evaluated(graph, node, {batch: count})
        if value is None or not value.dim() or len(value) % count:
            return None
        found.append(value)
    rows: torch.Tensor = found[0][: len(found[0]) // _BATCHES[0]].clone()
    for value, count in zip(found, _BATCHES, strict=True):
        repeated = rows.repeat(count, *[1] * (rows.dim() - 1))
        if repeated.shape != value.shape or not bool(torch.isfinite(value).all()):
            return None
        largest = float(rows.abs().max()) if rows.numel() else 0.0
        if not torch.allclose(repeated, value, rtol=0.0, atol=_TOLERANCE * largest):
            return None
    return rows


def _evaluated(graph: torch.fx.GraphModule, node: torch.fx.Node, sizes: dict[Any, int]) -> torch.Tensor | None:
    """The node's value where symbols have these `sizes`; None where another size decides, or it is no number."""
    import torch

    needed, todo = set[torch.fx.Node](), [node]
    while todo:
        if (at := todo.pop()) not in needed:
            needed.add(at)
            todo += [] if isinstance(at.meta.get("val"), torch.SymInt) else at.all_input_nodes
    values: dict[torch.fx.Node, Any] = {}
    with torch.no_grad():
        for at in graph.graph.nodes:
            if at not in needed:
                continue
            given = at.meta.get("val")
            if is_constant(at):
                values[at] = constant_value(graph, at).detach()
            elif isinstance(given, torch.SymInt):
                size = given.node.expr.subs(sizes)
                if not size.is_number:
                    return None
                values[at] = int(size)
            elif getattr(at.target, "namespace", "aten") != "aten":  # a quantizer, say, which is kept
                return None
            elif isinstance(given, torch.Tensor | tuple | list) and at.op == "call_function":
                args, kwargs = (torch.fx.map_arg(a, values.__getitem__) for a in (at.args, at.kwargs))
                values[at] = at.target(*args, **kwargs)
            else:
                return None
    result = values[node]
    return result if isinstance(result, torch.Tensor) and result.is_floating_point() else None

"""Transpositions that an exporter wrote between two reshapes, as the one permutation that they are.

torch.onnx.export(dynamo=True) swaps an attention key's last two axes with its leading axes made one. TensorRT-RTX does
not see through the reshapes: its INT8 engine of torch.nn.MultiheadAttention is 11 % larger with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtpipe.model.nodes import calls, op_name, shape_of

_RESHAPES = ("view", "reshape", "_unsafe_view")


def join_transposes(graph: torch.fx.GraphModule) -> None:
    """Replace each reshape of a permutation of a reshape by one permutation, where the reshapes only join neighbouring
    axes and part them again."""
    for node in list(calls(graph.graph)):
        permutation = _input(node, _RESHAPES)
        order = _order(permutation)
        joining = _input(permutation, ("permute", "transpose"))
        x = _input(joining, _RESHAPES)
        if order is None or joining is None or x is None:
            continue
        axes = _axes(shape_of(x), shape_of(joining), order, shape_of(node))
        if axes is not None:
            node.target, node.args, node.kwargs = torch.ops.aten.permute.default, (x, axes), {}


def _input(node: object, names: Sequence[str]) -> torch.fx.Node | None:
    """What an operation of one of these names reads, behind copies; None of anything else."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function" or op_name(node) not in names:
        return None
    x = node.args[0]
    while isinstance(x, torch.fx.Node) and x.op == "call_function" and op_name(x) in ("clone", "contiguous"):
        x = x.args[0]
    return x if isinstance(x, torch.fx.Node) else None


def _order(node: object) -> list[int] | None:
    """The axes of its input in the order that a transposition puts them in; None of anything else."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return None
    name, rank = op_name(node), node.meta["val"].dim() if isinstance(node.meta.get("val"), torch.Tensor) else 0
    order = list(range(rank))
    if name == "permute":
        return [int(k) % rank for k in node.args[1]]  # type: ignore[arg-type, union-attr]
    if name == "transpose":
        a, b = (int(k) % rank for k in node.args[1:])  # type: ignore[arg-type]
        order[a], order[b] = b, a
        return order
    return None


def _axes(
    parts: Sequence[object], joined: Sequence[object], order: Sequence[int], wanted: Sequence[object]
) -> list[int] | None:
    """The permutation of `parts` that gives what permuting `joined` and parting it to `wanted` gives; None where there
    is none. All but `order` are extents; an axis of one element is any axis' neighbour, and may stand anywhere."""
    moved = [k for k, extent in enumerate(parts) if extent != 1]
    alone = iter(k for k, extent in enumerate(parts) if extent == 1)
    left = iter(moved)
    groups: dict[int, list[int]] = {}
    for axis, extent in enumerate(joined):
        group = groups.setdefault(axis, [])
        product: object = 1
        while product != extent:
            if (k := next(left, None)) is None:
                return None
            product = product * parts[k]  # type: ignore[operator]
            group.append(k)
    following = iter([k for axis in order for k in groups[axis]])
    axes = [next(alone if extent == 1 else following, -1) for extent in wanted]
    same = sorted(axes) == list(range(len(parts))) and [parts[k] for k in axes] == list(wanted)
    return axes if same else None

"""Adaptive pools over dynamic dimensions, for which ONNX has an operator only where they give one value of all.

PyTorch's exporter takes the window from the sizes that the graph was captured with: at every other size the file pools
other values, silently where the output's shape does not show it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from trtpipe.errors import BuildError

if TYPE_CHECKING:
    import torch


def spell_out_adaptive_pools(graph: torch.fx.GraphModule) -> None:
    """Replace each adaptive pool over a dynamic dimension by `pooled`, which the next export takes apart.

    Raises:
        BuildError: such a dimension is divided into several windows, whose sizes would have to be dynamic, or the
            indices of the largest are used.
    """
    from trtpipe.model.nodes import calls, op_name, shape_of, source_line

    for node in list(calls(graph.graph)):
        kind = re.fullmatch(r"_?adaptive_(avg|max)_pool\dd", op_name(node))
        if kind is None:
            continue
        x, sizes = cast("tuple[torch.fx.Node, Sequence[int | torch.fx.Node]]", node.args[:2])
        extents = shape_of(x)[-len(sizes) :]
        wanted = [s if isinstance(s, int) else s.meta["val"].node.expr for s in sizes]
        if all(isinstance(e, int) for e in extents):
            continue
        divided = [(e, w) for e, w in zip(extents, wanted, strict=True) if w not in (1, e)]
        indices = any(u.target is operator.getitem and u.args[1] == 1 for u in node.users)
        if indices or any(not isinstance(n, int) for pair in divided for n in pair):
            at = source_line(node)
            raise BuildError(
                f"capture: {op_name(node)}{f' at {at}' if at else ''} divides a dynamic dimension into windows, whose "
                "sizes ONNX has to know, or gives indices in one. Declare one size of that dimension in inputs, pool "
                "it to 1, or pool it with a kernel and a stride of their own (avg_pool2d, max_pool2d)."
            )
        node.target, node.args, node.kwargs = pooled, (x, sizes, bool(divided), kind[1] == "max"), {}


def pooled(
    x: torch.Tensor, sizes: Sequence[int], divided: bool, largest: bool
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """An adaptive pool of the last dimensions: those that become 1 as a mean or maximum, then the others.

    Windows are products of intervals, so that the mean of an axis' means, and the largest of its largest, are the
    window's.

    Args:
        x: [..., D1, ..., Dn], floating-point.
        sizes: what D1 to Dn become.
        divided: whether one of them becomes neither 1 nor stays.
        largest: a maximum, not a mean.

    Returns:
        [..., *sizes] in x's dtype; of a maximum the first of a tuple, as the operator gives it beside its indices.
    """
    import torch

    axes = [k - len(sizes) for k, size in enumerate(sizes) if isinstance(size, int) and size == 1]
    if axes:
        x = x.amax(axes, keepdim=True) if largest else x.mean(axes, keepdim=True)
    if divided:
        name = f"adaptive_{'max' if largest else 'avg'}_pool{len(sizes)}d"
        x = getattr(torch.nn.functional, name)(x, sizes)
    return (x,) if largest else x

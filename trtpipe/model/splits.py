"""Splits along a dynamic dimension as slices.

torch.export asks of one how many pieces there are, which it does not see of `x.chunk(2)` where `x` has 2 N rows;
PyTorch's exporter makes a sequence of it, which TensorRT does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

_EQUAL = (torch.chunk, torch.Tensor.chunk, torch.tensor_split, torch.Tensor.tensor_split)
_BY_SIZE = (torch.split, torch.Tensor.split)
#: What these call their tensor and what it is split by.
_NAMES = {
    "input": "x", "tensor": "x", "self": "x", "chunks": "by", "split_size": "by", "split_size_or_sections": "by",
    "indices_or_sections": "by", "sections": "by",
}  # fmt: skip


class InSlices(TorchFunctionMode):
    """While it is active, a dynamic dimension that is split evenly, into a number of pieces that its expression shows,
    is sliced."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in _EQUAL or func in _BY_SIZE:
            given = dict(zip(("x", "by", "dim"), args, strict=False)) | {_NAMES.get(n, n): v for n, v in named.items()}
            x, dim = given["x"], given.get("dim", 0)
            if sizes := _evenly(x.shape[dim], given.get("by"), equal=func in _EQUAL):
                return pieces(x, sizes, dim)
        return func(*args, **named)


def _evenly(whole: int | torch.SymInt, by: object, *, equal: bool) -> list[Any]:
    """The sizes of the pieces, of which there are `by` where they are `equal`, and which have that size otherwise; none
    where PyTorch's own function is to decide."""
    if (
        not isinstance(whole, torch.SymInt)
        or not isinstance(by, int | torch.SymInt)
        or (isinstance(by, int) and by < 1)
    ):
        return []
    count = by if equal else (whole // by).node.hint
    if not isinstance(count, int):
        return []
    size = whole // count if equal else by
    return [size] * count if statically_known_true(size * count == whole) else []


def spell_out_splits(graph: torch.fx.GraphModule) -> None:
    """Replace each split into sizes some of which are dynamic by `pieces`, which the next export takes apart."""
    from trtpipe.model.nodes import calls, op_name

    for node in [n for n in calls(graph.graph) if op_name(n) == "split_with_sizes"]:
        x, sizes, dim = (*node.args, 0)[:3]
        if not all(isinstance(size, int) for size in sizes):  # type: ignore[union-attr]
            node.target, node.args, node.kwargs = pieces, (x, sizes, dim), {}


def pieces(x: torch.Tensor, sizes: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    """`x`, of any dtype and shape, cut along `dim` into pieces of `sizes`, which add up to its own."""
    found, begin = [], 0
    for size in sizes:
        found.append(torch.ops.aten.slice.Tensor(x, dim, begin, begin + size))
        begin = begin + size
    return tuple(found)

"""einsum of two tensors as the matmul that it is, which can be quantized; of a constant, as a linear."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Contraction:
    """What an einsum of two tensors does with each label: `batch` is in both and in the output, `summed` in both
    alone, `left` and `right` in one and in the output."""

    a: str
    b: str
    out: str
    batch: str
    left: str
    right: str
    summed: str


def spell_out_einsums(graph: torch.fx.GraphModule) -> None:
    """Replace each einsum that is a product of two tensors by `contracted`, which the next export takes apart."""
    from trtpipe.model.nodes import add_constant, calls, constant_value, is_constant, op_name

    for node in [n for n in calls(graph.graph) if op_name(n) == "einsum"]:
        equation, operands = node.args[:2]
        a, *others = cast("Sequence[torch.fx.Node]", operands)
        shapes = [[str(n) for n in x.meta["val"].shape] for x in (a, *others)]
        if len(shapes) != 2 or (how := contraction(str(equation), shapes)) is None:
            continue
        (b,) = others
        if is_constant(a) and not is_constant(b):
            a, b, how = b, a, Contraction(how.b, how.a, how.out, how.batch, how.right, how.left, how.summed)
        if weight := is_constant(b) and not how.batch:
            value = _arranged(constant_value(graph, b), how.b, how.right + how.summed)
            value = value.reshape(math.prod(value.shape[: len(how.right)]), -1).contiguous()
            sizes = tuple(constant_value(graph, b).shape[how.b.index(x)] for x in how.right)
            b = add_constant(graph, f"{str(b.target).replace('.', '_')}_arranged", value, node)
        else:
            sizes = ()
        node.target, node.args, node.kwargs = contracted, (a, b, astuple(how), weight, sizes), {}


def contraction(equation: str, shapes: Sequence[Sequence[str]]) -> Contraction | None:
    """How an einsum of two tensors is a matmul; None where it is something else: a label twice in one tensor, a
    dimension that is summed alone or stretched from 1, nothing that is summed.

    Args:
        equation: as torch.einsum takes it: letters, spaces, `...`, with or without `->`.
        shapes: of the two tensors, dimensions as text.
    """
    given, arrow, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    unused = [c for c in string.ascii_letters if c not in equation]
    ranks = [len(s) - len(t.replace("...", "")) for t, s in zip(terms, shapes, strict=True)]
    dots = "".join(unused[: max(ranks)])
    a, b = (t.replace("...", dots[len(dots) - r :]) for t, r in zip(terms, ranks, strict=True))
    if not arrow:
        out = "..." * bool(dots) + "".join(sorted(c for c in set(a + b) - set(dots) if (a + b).count(c) == 1))
    out = out.replace("...", dots)
    both = [c for c in a if c in b]
    sums = "".join(c for c in both if c not in out)
    plain = all(len(set(t)) == len(t) for t in (a, b, out)) and set(a + b) - set(sums) == set(out)
    same = all(shapes[0][a.index(c)] == shapes[1][b.index(c)] for c in both)
    if not (plain and same and sums and len(a) == len(shapes[0]) and len(b) == len(shapes[1])):
        return None
    kept = "".join(c for c in out if c in both)
    left, right = ("".join(c for c in out if c in t and c not in both) for t in (a, b))
    return Contraction(a, b, out, kept, left, right, sums)


def contracted(
    a: torch.Tensor, b: torch.Tensor, fields: tuple[str, ...], weight: bool, sizes: tuple[int, ...]
) -> torch.Tensor:
    """einsum as the `fields` of a Contraction say; a `weight` b is [outputs, inputs] already, outputs of `sizes`."""
    import torch

    how = Contraction(*fields)
    if weight:
        x = _arranged(a, how.a, how.left + how.summed)
        y = torch.nn.functional.linear(x if len(how.summed) == 1 else x.flatten(len(how.left)), b)
        y = y if len(how.right) == 1 else y.reshape([*y.shape[:-1], *sizes])
        return _arranged(y, how.left + how.right, how.out)
    size = dict(zip(how.a + how.b, (*a.shape, *b.shape), strict=True))
    x = _as_matrix(_arranged(a, how.a, how.batch + how.left + how.summed), len(how.batch), len(how.left))
    other = _arranged(b, how.b, how.batch + how.summed + how.right)
    y = torch.matmul(x, _as_matrix(other, len(how.batch), len(how.summed)))
    if len(how.left) != 1 or len(how.right) != 1:
        y = y.reshape([size[c] for c in how.batch + how.left + how.right])
    return _arranged(y, how.batch + how.left + how.right, how.out)


def _arranged(x: torch.Tensor, labels: str, wanted: str) -> torch.Tensor:
    return x if labels == wanted else x.permute([labels.index(c) for c in wanted])


def _as_matrix(x: torch.Tensor, batch: int, rows: int) -> torch.Tensor:
    """The dimensions behind the first `batch` as two: the next `rows` of them, and the rest."""
    if x.dim() - batch - rows == 1 and rows == 1:
        return x
    shape = list(x.shape)
    return x.reshape([*shape[:batch], math.prod(shape[batch : batch + rows]), math.prod(shape[batch + rows :])])

"""Marks: the scales of a model that is quantized already, as an operator that changes nothing.

`trtpipe::mark(x, scales, axis)` gives `x`. A model computes in FP32 with it, and its exported graph says which inputs
are quantized, and by which scales. `take_off` moves the marks from a graph's nodes into their readers' metadata.
Importing this module registers the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from trtpipe.errors import InputError, titled
from trtpipe.model.nodes import is_constant, module_path, op_name

_library: Any = torch.library.Library("trtpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # the tag keeps constant folders away
    "mark(Tensor x, float[] scales, int axis) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
_library.impl("mark", lambda x, scales, axis: x.clone(), "CompositeExplicitAutograd")

#: Where a node keeps the marks of its inputs: by the name of the input's node.
_MARKS = "trtpipe_marks"


@dataclass(frozen=True)
class Mark:
    """The float32 scales that one tensor is quantized with: one number, or one a slice along `axis`."""

    scales: tuple[float, ...]
    axis: int | None


#: In the place of scales that nobody is to use: the model is recalibrated.
ANY_SCALE = Mark((1.0,), None)


def mark(x: torch.Tensor, it: Mark) -> torch.Tensor:
    """`x`, of any dtype and shape, marked."""
    found: torch.Tensor = torch.ops.trtpipe.mark(x, list(it.scales), -1 if it.axis is None else it.axis)
    return found


def holds_marks(graph: GraphModule) -> bool:
    """Whether anything in a graph is marked, before its marks are taken off."""
    return any(n.target is torch.ops.trtpipe.mark.default for n in graph.graph.nodes)


def take_off(graph: GraphModule, inputs: Sequence[str], computes_with: Callable[[Node, Node], bool]) -> tuple[str, ...]:
    """Remove the marks from a graph and keep them at the nodes that read what was marked; notes on what was dropped.

    A constant loses the mark where its reader computes nothing with integers: the scalar of a multiplication, a bias.
    TensorRT fuses it with nothing, and refuses an INT8 constant that has no dimension.

    Args:
        graph: changed in place.
        inputs: the names of its inputs, for messages.
        computes_with: whether a reader computes with the integers of a quantized argument.

    Raises:
        InputError: one tensor is quantized twice, with scales that differ.
    """
    notes = []
    marks = [n for n in graph.graph.nodes if n.target is torch.ops.trtpipe.mark.default]
    kept: dict[Node, Mark] = {}
    named = dict(zip((n for n in graph.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    for node in marks:
        x, scales, axis = node.args
        name = named.get(x) or _title(x)
        one = Mark(tuple(scales), None if axis == -1 else axis)
        if kept.setdefault(x, one) != one:
            raise InputError(
                f"model: {name} must be quantized with one scale (got several). Quantize it again, or set "
                "calibration.recalibrate: true."
            )
        for reader in list(node.users):
            if reader.op == "output":
                notes.append(
                    f"{name}: its Q/DQ before an output of the model was left out, TensorRT fuses it with nothing"
                )
            elif is_constant(x) and not computes_with(reader, node):
                notes.append(
                    f"{_title(reader)}: Q/DQ of its constant {x.target} was left out, TensorRT fuses it with nothing"
                )
            else:
                reader.meta[_MARKS] = {**reader.meta.get(_MARKS, {}), x.name: one}
        node.replace_all_uses_with(x)
        graph.graph.erase_node(node)
    graph.recompile()
    return tuple(notes)


def _title(node: Node) -> str:
    """What computes a tensor, as a message names it."""
    return f"{titled(module_path(node))} ({op_name(node)})"


def marks_of(node: Node) -> Mapping[str, Mark]:
    """The marks of a node's inputs, by the names of these."""
    found: Mapping[str, Mark] = node.meta.get(_MARKS, {})
    return found


def is_marked(graph: GraphModule) -> bool:
    """Whether any input of a graph is marked."""
    return any(marks_of(n) for n in graph.graph.nodes)


def without_marks(graph: GraphModule) -> None:
    """Forget the marks of a graph; it must be a copy of its own."""
    for node in graph.graph.nodes:
        node.meta.pop(_MARKS, None)

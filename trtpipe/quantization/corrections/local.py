"""What an operation errs by: at its own output, or behind the activation that alone reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trtpipe.model.nodes import op_name
from trtpipe.model.products import WEIGHTED

if TYPE_CHECKING:
    from torch.fx import Node

    from trtpipe.quantization.partial import Partial

#: What an operation errs is measured behind these, where one of them alone reads it: what they cut does not matter.
ACTIVATIONS = (
    "relu",
    "relu6",
    "hardtanh",
    "clamp",
    "clamp_min",
    "leaky_relu",
    "elu",
    "gelu",
    "silu",
    "hardswish",
    "mish",
)


class LocalError:
    """Squared distances of one operation's outputs, executed by `machine`."""

    def __init__(self, machine: Partial, node: Node) -> None:
        self._machine, self._node, self._behind = machine, node, _behind(node)

    def distance(self, got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Of `got` from `wanted`, both floating [B, ..] of the operation's output, by channel: float64 [C], or [1] of a
        scalar."""
        if self._behind is not None:
            got, wanted = (self._machine.value(self._behind, {self._node: x}, {}) for x in (got, wanted))
        lost = (got - wanted).square_()
        kept = channel_axis(self._node) % max(1, lost.dim())
        others = [axis for axis in range(lost.dim()) if axis != kept]
        # In float32, whose sums by parts are as good: a conversion of every element takes ten times as long.
        result: torch.Tensor = (lost.sum(others) if others else lost.reshape(-1)).double()
        return result


def channel_axis(node: Node) -> int:
    """The axis of an operation's output that its weight's output channels are on, from the end."""
    return 1 - node.args[1].meta["val"].dim() if op_name(node) in WEIGHTED else -1  # type: ignore[union-attr]


def _behind(node: Node) -> Node | None:
    """The activation that alone reads an operation's output."""
    readers = list(node.users)
    if len(readers) != 1 or readers[0].op != "call_function" or op_name(readers[0]) not in ACTIVATIONS:
        return None
    return readers[0] if readers[0].all_input_nodes == [node] else None

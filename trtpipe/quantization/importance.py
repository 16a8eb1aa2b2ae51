"""Mean squares of the input features of each linear, which weigh the errors of its quantized weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from trtpipe.model.nodes import op_name

if TYPE_CHECKING:
    from trtpipe.values import Captured


class _Powers(Interpreter):
    """Runs the graph and sums the squares of every feature that a linear reads, in float64."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.sums: dict[str, torch.Tensor] = {}
        self.rows: dict[str, int] = {}

    def run_node(self, n: Node) -> Any:
        """The node's value; a linear's input [..., K] is counted first."""
        if n.op == "call_function" and op_name(n) == "linear":
            x = self.fetch_args_kwargs_from_env(n)[0][0]
            flat = x.reshape(-1, x.shape[-1]).double()
            self.sums[n.name] = self.sums.get(n.name, 0) + flat.square().sum(0)
            self.rows[n.name] = self.rows.get(n.name, 0) + len(flat)
        return super().run_node(n)


def input_importance(captured: Captured, batches: Iterable[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By the name of a linear's node, the mean square of each of its K input features: float32 [K].

    Args:
        captured: the hub graph.
        batches: calibration inputs, in order, each [B, ...].
    """
    powers = _Powers(captured.graph)
    with torch.inference_mode():
        for batch in batches:
            powers.run(*batch)
    return {name: (total / powers.rows[name]).float() for name, total in powers.sums.items()}

"""Second moments of what each linear reads, by blocks of its inputs: what its weight in 4 bits is fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from trtpipe.model.nodes import op_name
from trtpipe.quantization.formats import INT4, NVFP4

if TYPE_CHECKING:
    from trtpipe.values import Captured

#: The largest of these that divides a linear's inputs is its block; the smaller ones lie within it.
SIZES = (*INT4.blocks, *NVFP4.blocks)


#: Inputs over this are multiplied in float64: float32 holds their squares no longer.
LARGE = 1e15


class _Moments(Interpreter):
    """Runs the graph and sums x x^T of every block that a linear reads, in float64 over float32 batches."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.sums: dict[str, torch.Tensor] = {}
        self.rows: dict[str, int] = {}

    def run_node(self, n: Node) -> Any:
        """The node's value; a linear's input [..., K] is counted first."""
        if n.op == "call_function" and op_name(n) == "linear":
            x = self.fetch_args_kwargs_from_env(n)[0][0]
            if (size := next((s for s in SIZES if x.shape[-1] % s == 0), None)) is not None:
                large = float(x.abs().amax()) > LARGE
                parts = x.reshape(-1, x.shape[-1] // size, size).to(torch.float64 if large else torch.float32)
                parts = parts.transpose(0, 1)
                self.sums[n.name] = self.sums.get(n.name, 0) + (parts.mT @ parts).double()
                self.rows[n.name] = self.rows.get(n.name, 0) + parts.shape[1]
        return super().run_node(n)


def block_moments(captured: Captured, batches: Iterable[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By the name of a linear's node, E[x x^T] within each block of its K inputs, `shrunk`: float32 [K / m, m, m], each
    block in units of its mean square.

    m is 128, 64 or 16, the largest that divides K; a linear that none divides has no 4 bits, and is left out.

    Args:
        captured: the hub graph.
        batches: calibration inputs, in order, each [B, ...].
    """
    moments = _Moments(captured.graph)
    with torch.inference_mode():
        for batch in batches:
            moments.run(*batch)
        found = {name: shrunk(s / moments.rows[name], moments.rows[name]) for name, s in moments.sums.items()}
    squares = {name: m.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] for name, m in found.items()}
    return {name: (m / torch.where(squares[name] > 0, squares[name], 1.0)).float() for name, m in found.items()}


def shrunk(moments: torch.Tensor, rows: int) -> torch.Tensor:
    """Second moments without what so few rows show of them by chance: what is fitted to that is worse on other rows.

    What inputs have in common is shrunk by the oracle approximating shrinkage of their correlations about zero
    (Y. Chen et al., "Shrinkage Algorithms for MMSE Covariance Estimation" (2010), equation 23): by all of it where
    inputs are independent, by little where they have a mean or move together. Their squares, whose variance over rows
    is 2 / rows of what they are themselves, are drawn to their mean by that part of how much they differ.

    Args:
        moments: float64 [B, m, m], over all rows.
        rows: how many those are.

    Returns:
        float64 [B, m, m].
    """
    size, least = moments.shape[-1], torch.finfo(moments.dtype).tiny
    diagonal = moments.diagonal(dim1=1, dim2=2)
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    squares = (moments * scale[:, :, None] * scale[:, None, :]).square().sum((1, 2))
    trace = (diagonal > 0).sum(1).double()
    apart = (rows + 1 - 2 / size) * (squares - trace.square() / size).clamp_min(least)
    share = (((1 - 2 / size) * squares + trace.square()) / apart).clamp(0, 1)[:, None]
    mean, chance = diagonal.mean(1, keepdim=True), 2 / (rows + 2) * diagonal.square().mean(1, keepdim=True)
    part = (chance / (diagonal - mean).square().mean(1, keepdim=True).clamp_min(least)).clamp(0, 1)
    drawn = diagonal + part * (mean - diagonal)
    kept = moments * (1 - share[..., None])
    return kept + torch.diag_embed(drawn.maximum(diagonal * (1 - share)) - diagonal * (1 - share))

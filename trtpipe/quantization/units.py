"""The modules that a job can keep out of INT8, each with the tensors that are quantized because of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtpipe.model.nodes import module_path, op_name, source_line
from trtpipe.model.sites import fused_with, of_product
from trtpipe.values import Site

if TYPE_CHECKING:
    from torch.fx import Node


@dataclass(frozen=True)
class Unit:
    """One source module whose operations compute in INT8.

    `path` is what `precision.keep` names; `nodes` are its convolutions, linears and matmuls in execution order, and
    what else a model with its own Q/DQ quantizes; `sites` are its own inputs and weights (rules Q1, Q2, Q8) and, of the
    residual add that one of its convolutions is fused with, the skip branch (Q4, Q8): all Q/DQ that disappear when the
    module is kept. `source` is `file.py:line`.
    """

    path: str
    source: str
    op: str
    nodes: tuple[Node, ...]
    sites: tuple[Site, ...]


def find_units(sites: Sequence[Site]) -> tuple[Unit, ...]:
    """The units of a graph with the given sites, in execution order; each site but those of Q5 belongs to one.

    The inputs of concats and max-pools (Q5) have no unit: they share the scale of the tensor that a unit reads, and
    quantizing before such an operation rounds the same numbers as quantizing after it.
    """
    own: dict[str, list[Site]] = {}
    path_of = {s.consumer: module_path(s.consumer) for s in sites if of_product(s)}
    fused = {s: main for s in sites if (main := fused_with(s, path_of)) is not None}
    for site in sites:
        if of_product(site) or (site.rule == "Q8" and site not in fused):
            own.setdefault(module_path(site.consumer), []).append(site)
    for site, main in fused.items():
        own[path_of[main]].append(site)
    units = []
    for path, mine in own.items():
        nodes = tuple(dict.fromkeys(s.consumer for s in mine if s not in fused))
        units.append(Unit(path, source_line(nodes[0]), op_name(nodes[0]), nodes, tuple(mine)))
    return tuple(units)

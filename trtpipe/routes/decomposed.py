"""Programs that torch.onnx need not trace once more."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """A copy for torch.onnx.export, which changes the graph that it is given.

    That has every program decomposed by tracing it again, which takes three quarters of an export. The copy gives
    itself where it holds nothing that is decomposed: capture has spelt out what it does not keep.
    """
    own = copy.copy(program)
    own._graph_module = copy.deepcopy(program.graph_module)
    own.__class__ = _Decomposed
    return own


class _Decomposed(torch.export.ExportedProgram):
    def run_decompositions(self, decomp_table: Mapping[Any, Any] | None = None, **options: Any) -> ExportedProgram:
        if decomp_table is not None and all(_stays(n, decomp_table) for n in self.graph.nodes):
            return self
        again: ExportedProgram = super().run_decompositions(decomp_table, **options)
        return again


def _stays(node: torch.fx.Node, table: Mapping[Any, Any]) -> bool:
    """Whether decomposing by a table leaves the node as it is: neither in pieces nor without its writes."""
    if node.op != "call_function":
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target not in table and not target._schema.is_mutable
    return not isinstance(target, torch._ops.HigherOrderOperator)

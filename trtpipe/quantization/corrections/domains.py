"""Which tensors' channels can be scaled without changing what the network computes.

Multiplying a channel of a tensor by s > 0 changes nothing where the operation that makes the tensor can absorb s in its
weight or affine parameters, every operation that reads it can absorb 1 / s in its weight, and everything between
commutes with the scaling (ReLU, residual adds, pooling). Such tensors form a domain: one vector of scales.

Sources: Nagel et al., "Data-Free Quantization through Weight Equalization and Bias Correction" (2019); Xiao et al.,
"SmoothQuant" (2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from trtpipe.model.nodes import COPIES, bias_of, calls, groups_of, is_constant, is_float, op_name, shape_of
from trtpipe.model.products import WEIGHTED

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

#: Those that join values along the last two axes: channels stay apart on the axis before these alone.
_ACROSS = frozenset(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "mean"))
#: One input, and relu(s x) = s relu(x): the same channels before and after.
HOMOGENEOUS = frozenset((*COPIES, *_ACROSS, "relu", "leaky_relu", "dropout"))
#: Those that cut at a positive bound: exact for channels that stay below it when they are scaled.
_CLIPPED = frozenset(("hardtanh", "relu6", "clamp"))
#: Their weight is [C_out, C_in / groups, ...].
LINEAR = frozenset(name for name, axis in WEIGHTED.items() if axis == 0)


@dataclass(frozen=True, eq=False)
class Domain:
    """Tensors that share one vector of scales, one for each channel.

    Attributes:
        axis: of the channels in each of the tensors.
        tensors: the operations whose values belong to it.
        makers: operations that take the scales into their output channels.
        readers: operations that take the inverse scales into their input channels.
        clips: ReLU6-like operations among `tensors`, each with its upper bound.
        normalized: whether a LayerNorm is among the makers.
    """

    axis: int
    tensors: tuple[Node, ...]
    makers: tuple[Node, ...]
    readers: tuple[Node, ...]
    clips: tuple[tuple[Node, float], ...]
    normalized: bool

    def moved(self, nodes: Mapping[str, Node]) -> Domain:
        """The same domain of a copy of its graph, whose `nodes` are given by name."""
        return replace(
            self,
            tensors=tuple(nodes[n.name] for n in self.tensors),
            makers=tuple(nodes[n.name] for n in self.makers),
            readers=tuple(nodes[n.name] for n in self.readers),
            clips=tuple((nodes[n.name], bound) for n, bound in self.clips),
        )


@dataclass
class _DomainDraft:
    """A domain while it is looked for; a frozen one cannot be scaled. Mutable: operations join it."""

    axis: int | None = None
    frozen: bool = False
    tensors: list[Node] = field(default_factory=list)
    makers: list[Node] = field(default_factory=list)
    readers: list[Node] = field(default_factory=list)
    clips: list[tuple[Node, float]] = field(default_factory=list)


def find_domains(graph: GraphModule) -> tuple[Domain, ...]:
    """Every domain of the graph that can be scaled and has a reader with a weight, in execution order."""
    return _DomainSearch(graph).domains()


class _DomainSearch:
    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph.graph
        self._drafts: dict[Node, _DomainDraft] = {}  # of each tensor, in the order in which they were met
        users = Counter(c for n in calls(graph.graph) for c in n.all_input_nodes if is_constant(c))
        self._tied = {c for c, count in users.items() if count > 1}
        self._tied |= {n for n in graph.graph.nodes if is_constant(n) and _target_count(graph.graph, n) > 1}

    def domains(self) -> tuple[Domain, ...]:
        for node in self._graph.nodes:
            self._visit(node)
        domains = []
        for first, draft in self._drafts.items():
            if first is not draft.tensors[0]:
                continue
            if draft.frozen or draft.axis is None or not draft.readers or not draft.makers:
                continue
            normalized = any(op_name(m) == "layer_norm" for m in draft.makers)
            domains.append(
                Domain(
                    draft.axis, tuple(draft.tensors), tuple(draft.makers), tuple(draft.readers), tuple(draft.clips),
                    normalized,
                )
            )  # fmt: skip
        return tuple(domains)

    def _visit(self, node: Node) -> None:
        if node.op == "get_attr":
            return
        read = [a for a in node.all_input_nodes if not is_constant(a) and isinstance(a.meta.get("val"), torch.Tensor)]
        name = op_name(node)
        if node.op != "call_function" or not is_float(node):
            for x in (*read, node):
                self._freeze(x)
            return
        if name in LINEAR and self._absorbs(node):
            self._read(node, name)
            self._make(node, node.meta["val"].dim() - 1 if name == "linear" else 1)
        elif name in HOMOGENEOUS and len(read) == 1 and _keeps_channels(node, read[0], name):
            if name in _ACROSS:
                self._use(read[0], read[0].meta["val"].dim() - 3)
            self._join(read[0], node)
        elif name in _CLIPPED and len(read) == 1 and (bound := _upper_bound(node, name)) is not None:
            self._join(read[0], node)
            self._draft(node).clips.append((node, bound))
        elif name == "add" and len(read) == 2 and shape_of(read[0]) == shape_of(node) == shape_of(read[1]):
            self._join(read[0], node)
            self._join(read[1], node)
        elif name in ("reshape", "flatten", "view") and _drops_ones(node, read):
            self._use(read[0], 1)
            self._join(read[0], node)
        elif name == "layer_norm" and len(node.args) > 2 and self._own(node.args[2]):
            self._freeze(read[0])
            bias = node.args[3] if len(node.args) > 3 else None
            if (bias is None or self._own(bias)) and node.args[2].meta["val"].dim() == 1:  # type: ignore[union-attr]
                self._make(node, node.meta["val"].dim() - 1)
            else:
                self._freeze(node)
        else:
            for x in (*read, node):
                self._freeze(x)

    def _absorbs(self, node: Node) -> bool:
        """Whether weight and bias are constants of this operation alone."""
        bias = bias_of(node)
        return is_float(node.args[0]) and self._own(node.args[1]) and (bias is None or self._own(bias))

    def _own(self, node: object) -> bool:
        return is_constant(node) and node not in self._tied

    def _read(self, node: Node, name: str) -> None:
        x, weight = node.args[:2]
        shape = weight.meta["val"].shape  # type: ignore[union-attr]
        groups = groups_of(node)
        if groups == 1 or (shape[1] == 1 and shape[0] == groups):
            draft = self._use(x, x.meta["val"].dim() - 1 if name == "linear" else 1)  # type: ignore[arg-type, union-attr]
            draft.readers.append(node)
        else:
            self._freeze(x)  # type: ignore[arg-type]

    def _make(self, node: Node, axis: int) -> None:
        self._use(node, axis).makers.append(node)

    def _draft(self, node: Node) -> _DomainDraft:
        if node not in self._drafts:
            self._drafts[node] = _DomainDraft(tensors=[node])
        return self._drafts[node]

    def _freeze(self, node: Node) -> None:
        self._draft(node).frozen = True

    def _use(self, node: Node, axis: int) -> _DomainDraft:
        draft = self._draft(node)
        draft.frozen |= draft.axis not in (None, axis)
        draft.axis = axis
        return draft

    def _join(self, a: Node, b: Node) -> None:
        left, right = self._draft(a), self._draft(b)
        if left is right:
            return
        left.frozen |= right.frozen or (None not in (left.axis, right.axis) and left.axis != right.axis)
        left.axis = right.axis if left.axis is None else left.axis
        left.tensors += right.tensors
        left.makers += right.makers
        left.readers += right.readers
        left.clips += right.clips
        self._drafts.update(dict.fromkeys(right.tensors, left))


def _target_count(graph: torch.fx.Graph, node: Node) -> int:
    return sum(n.op == "get_attr" and n.target == node.target for n in graph.nodes)


def _upper_bound(node: Node, name: str) -> float | None:
    """The bound of a clip from 0 to a positive number; None for any other."""
    default = (0.0, 6.0) if name == "relu6" else (-1.0, 1.0) if name.startswith("hardtanh") else (None, None)
    low, high = (*node.args[1:3], *default[len(node.args) - 1 :])[:2]
    return float(high) if low == 0 and isinstance(high, (int, float)) and high > 0 else None


def _keeps_channels(node: Node, x: Node, name: str) -> bool:
    """Whether what is no mean, or one over the last two of four axes, may keep channels apart."""
    if name != "mean":
        return True
    dims = {d % x.meta["val"].dim() for d in node.args[1]} if len(node.args) > 1 else set()  # type: ignore[union-attr]
    return x.meta["val"].dim() == 4 and dims == {2, 3}


def _drops_ones(node: Node, read: list[Node]) -> bool:
    """Whether [N, C, 1, 1] becomes [N, C]."""
    if len(read) != 1 or node.meta["val"].dim() != 2:
        return False
    shape = shape_of(read[0])
    return len(shape) == 4 and shape[2:] == (1, 1) and shape[1] == shape_of(node)[1]

"""Running a captured graph in pieces, with some inputs of some operations rounded to INT8 on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from calib.algorithms import INT8_RANGE, WEIGHT_RANGE
from trtpipe.model.computing import CPU
from trtpipe.model.nodes import bias_of, constant_value, is_constant, op_name
from trtpipe.model.sites import shared_scales
from trtpipe.quantization.formats import INT8, rounded_up, scales_of
from trtpipe.quantization.macs import macs
from trtpipe.quantization.precision import ScaleTypes
from trtpipe.quantization.rounding import on_grid
from trtpipe.values import Int8Weight, Site

#: The inputs of one batch in order, each [B, ...].
BatchTensors = Sequence[torch.Tensor]
#: Turns an input of an operation into the tensor that the operation reads instead.
Rounding = Callable[[torch.Tensor], torch.Tensor]
Roundings = Mapping[Node, Mapping[Node, Rounding]]
#: Elements that are rounded together on a CPU: all four steps find them in its cache.
_IN_CACHE = 1 << 18


@dataclass
class Spent:
    """Work done so far: multiply-accumulates, and operations executed. Mutable: it counts."""

    macs: int = 0
    nodes: int = 0


def roundings(
    sites: Sequence[Site],
    amax: Mapping[str, float],
    types: ScaleTypes,
    int8: Mapping[str, Int8Weight] | None = None,
) -> dict[Node, dict[Node, Rounding]]:
    """For each consumer, the rounding of each of its quantized inputs: Q and DQ, in float32.

    The scales are those of `quantize`: amax / 127, rounded up to what `types` says. `int8` is that of the captured
    graph: a weight or bias with a correction is read in place of the constant.
    """
    result: dict[Node, dict[Node, Rounding]] = {}
    sharing = shared_scales(sites)
    for site in sites:
        half = types.of(sharing[site.shared])
        own = (int8 or {}).get(site.consumer.name)
        if site.axis is None:
            one: Rounding = per_tensor(amax[site.group], half)
        else:
            one = _per_channel(site.axis, half) if own is None or own.stored is None else _own(own, site.axis, half)
            bias = bias_of(site.consumer)
            if own is not None and own.bias is not None and bias is not None:
                result.setdefault(site.consumer, {})[bias] = replaced(own.bias)
        result.setdefault(site.consumer, {})[site.producer] = one
    return result


def replaced(value: torch.Tensor) -> Rounding:
    """A rounding that ignores its input and gives `value`, of the input's dtype and shape."""
    return lambda x: value.to(x.device)


def _own(own: Int8Weight, axis: int, half: torch.dtype | None) -> Rounding:
    """A rounding that gives an operation's own INT8 weight, rounded as the graph has it: one that came in float is not
    on the grid of its scales, nor are levels where these are rounded up."""

    def given(x: torch.Tensor) -> torch.Tensor:
        weight = on_grid(own)
        assert weight is not None
        if own.scales is not None and (half is not None or own.stored is weight):
            weight = _on_scales(weight, rounded_up(own.scales, half), axis, INT8_RANGE)
        return weight.to(x.device)

    return given


def per_tensor(amax: float, half: torch.dtype | None = None) -> Rounding:
    """Q and DQ with one scale: what `torch.fake_quantize_per_tensor_affine` gives, in a seventh of its time."""
    scale = scales_of(torch.tensor(amax), INT8, half)
    inverse, low, high = 1 / scale, *INT8_RANGE

    def rounded(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        all_rows, all_into = (x.detach(), result) if x.dim() else (x.detach()[None], result[None])
        rows = len(all_rows)
        if x.device.type == CPU:
            rows = max(1, _IN_CACHE * rows // max(1, x.numel()))
        for part, into in zip(torch.split(all_rows, rows), torch.split(all_into, rows), strict=True):
            torch.mul(part, inverse, out=into).round_().clamp_(low, high).mul_(scale)
        return result

    return rounded


def _per_channel(axis: int, half: torch.dtype | None) -> Rounding:
    def one(w: torch.Tensor) -> torch.Tensor:
        amax = w.abs().amax(dim=[d for d in range(w.dim()) if d != axis])
        return _on_scales(w, scales_of(amax, INT8, half), axis, WEIGHT_RANGE)

    return one


def _on_scales(w: torch.Tensor, scales: torch.Tensor, axis: int, levels: tuple[int, int]) -> torch.Tensor:
    zeros = torch.zeros_like(scales, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(w, scales, zeros, axis, *levels)


def value_bytes(graph: GraphModule) -> int:
    """Bytes of all values of the graph together for one sample, at the sizes that it was captured with."""
    total = 0
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            total += math.prod(extent_of(d) for d in value.shape) * value.element_size()
    first = next(n for n in graph.graph.nodes if n.op == "placeholder").meta["val"]
    return total // max(1, extent_of(first.shape[0]))


def extent_of(dimension: int | torch.SymInt) -> int:
    """The extent of one axis; of a dynamic one, what the graph was captured with."""
    if isinstance(dimension, int):
        return dimension
    hint = dimension.node.hint
    return 1 if hint is None else int(hint)


@dataclass
class Partial:
    """Executes a graph from any of its operations on, given the values alive there; counts what it does.

    `alive` maps node to value; constants are read when needed and never kept. `macs_of` is of the last execution.
    Mutable: it counts what it has executed.
    """

    graph: GraphModule
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.graph.nodes)
        self._interpreter = Interpreter(self.graph, garbage_collect_values=False)
        self._dying: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        for node in reversed(self.nodes):
            for read in node.all_input_nodes:
                if read not in seen:
                    seen.add(read)
                    self._dying.setdefault(node, []).append(read)
        self.macs_of: dict[Node, int] = {}

    @property
    def operations(self) -> Iterator[tuple[int, Node]]:
        """Every node that computes something, after its position among `nodes`."""
        return ((at, n) for at, n in enumerate(self.nodes) if n.op not in ("placeholder", "get_attr", "output"))

    def inputs(self, arrays: Sequence[torch.Tensor]) -> dict[Node, Any]:
        """The values alive before the first operation: the graph's inputs, in order, [B, ...] in their dtypes."""
        holders = [n for n in self.nodes if n.op == "placeholder"]
        return dict(zip(holders, arrays, strict=True))

    def value(self, node: Node, alive: Mapping[Node, Any], changed: Roundings) -> Any:
        """The value of one operation (of the output node: the outputs), computed from its changed inputs."""
        rounding = changed.get(node, {})

        def read(n: Node) -> Any:
            x = constant_value(self.graph, n) if is_constant(n) else alive[n]
            return rounding[n](x) if n in rounding else x

        args = torch.fx.map_arg(node.args, read)
        if node.op == "output":
            return args[0]
        kwargs = torch.fx.map_arg(node.kwargs, read)
        result = getattr(self._interpreter, node.op)(node.target, args, kwargs)
        self.spent.nodes += 1
        self.macs_of[node] = macs(op_name(node), args, result)
        self.spent.macs += self.macs_of[node]
        return result

    def step(self, node: Node, alive: dict[Node, Any], changed: Roundings) -> Any:
        """Execute one node, add its value to `alive` and remove those that no later node reads."""
        if node.op in ("placeholder", "get_attr"):
            return None
        result = self.value(node, alive, changed)
        alive[node] = result
        for dead in self.dying(node):
            alive.pop(dead, None)
        return result

    def dying(self, node: Node) -> Sequence[Node]:
        """The values that no later node reads."""
        return self._dying.get(node, ())

    def finish(
        self, at: int, alive: Mapping[Node, Any], changed: Roundings, watched: Sequence[Node] = ()
    ) -> tuple[tuple[torch.Tensor, ...], dict[Node, Any]]:
        """Execute from position `at` to the end: the outputs [B, ...], and the values of the `watched` nodes."""
        mine, seen = dict(alive), {}
        result: Any = ()
        with torch.inference_mode():
            for node in self.nodes[at:]:
                result = self.step(node, mine, changed)
                if node in watched:
                    seen[node] = result
        return tuple(result), seen

    def side_by_side(self, alive: Sequence[dict[Node, Any]], changed: Roundings) -> list[tuple[torch.Tensor, ...]]:
        """The outputs [B, ...] of several batches, which go through each operation together.

        A rounded constant is made once for all of them, and gone before the next operation: those of all operations
        would be the weights once more. `alive` are the batches' `inputs`, which are used up.
        """
        results: list[Any] = [()] * len(alive)
        with torch.inference_mode():
            for node in self.nodes:
                here = dict(changed.get(node, {}))
                for constant in [n for n in here if is_constant(n)]:
                    here[constant] = replaced(here[constant](constant_value(self.graph, constant)))
                for k, values in enumerate(alive):
                    results[k] = self.step(node, values, {node: here})
        return [tuple(result) for result in results]

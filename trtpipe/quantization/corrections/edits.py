"""Corrections as arrays: what a table's sidecar holds, and the captured graph with them applied.

    scale:AXIS:CONSTANT   float32 [C]: the constant of the graph times this along AXIS
    levels:CONSTANT       int8, the constant's shape: what the operation reads in INT8, and
    steps:CONSTANT        float32 [C_out]: the weight scale of each output channel
    bias:OPERATION        float32 [C_out]: the bias that goes with INT8 weights

Scales apply whatever precision the operation gets; levels and bias only where it is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from calib.errors import CalibError
from calib.types import Array
from trtpipe.model.nodes import (
    add_constant,
    calls,
    constant_value,
    copied,
    groups_of,
    is_constant,
    op_name,
    set_constant,
)
from trtpipe.model.products import WEIGHTED
from trtpipe.model.sites import find_sites
from trtpipe.quantization.rounding import scaled
from trtpipe.values import Captured, Int8Weight

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

Arrays = Mapping[str, Array]


def corrected(captured: Captured, arrays: Arrays, like: tuple[Captured, Arrays] | None = None) -> Captured:
    """The captured graph with a table's corrections; `captured` itself where there are none.

    Args:
        captured: as calibration saw it.
        arrays: of the table's `Corrections`: factors of a constant's channels and biases of operations, float32 [C];
            INT8 levels in the shape of their constant, with their steps.
        like: what this function gave for `captured` and other arrays, and these: a constant that has the very same
            factors in both is shared, not multiplied again.

    Raises:
        CalibError: an array is of no constant or operation of this graph, or has another shape than it needs.
    """
    if not arrays:
        return captured
    graph = copied(captured.graph)
    constants = {str(n.target): n for n in graph.graph.nodes if is_constant(n)}
    operations = {n.name: n for n in calls(graph.graph)}
    for key, array in sorted(arrays.items()):
        kind, _, name = key.partition(":")
        if kind == "scale":
            along, _, name = name.partition(":")
            shape = constant_value(graph, _known(constants, name, key)).shape
            _require_shape(key, array, shape[int(along) : int(along) + 1])
        elif kind == "levels":
            _require_shape(key, array, constant_value(graph, _known(constants, name, key)).shape)
            if not one_axis(weighted_by(graph, name)):
                raise CalibError(
                    f"corrections: {key} must be of a weight with one axis of outputs (got one that a convolution and "
                    "a transposed one share). Calibrate again."
                )
        elif kind == "bias":
            node = _known(operations, name, key)
            _require_shape(key, array, (_channels(graph, node),))
            _with_bias(graph, node, len(array))
    made = {} if like is None else _factors(like[1])
    for name, factors in _factors(arrays).items():
        node = constants[name]
        if like is not None and _same(factors, made.get(name, {})):
            set_constant(graph, node, constant_value(like[0].graph, node))
            continue
        for axis, factor in factors.items():
            set_constant(graph, node, scaled(constant_value(graph, node), torch.from_numpy(factor), axis))
    graph.recompile()
    sites, skipped = find_sites(graph)
    return replace(captured, graph=graph, sites=sites, skipped=skipped, int8=_int8(graph, arrays))


def _factors(arrays: Arrays) -> dict[str, dict[int, Array]]:
    """By the name of a constant, what its channels are multiplied by along which axis, in the order that it is done."""
    factors: dict[str, dict[int, Array]] = {}
    for key, array in sorted(arrays.items()):
        kind, _, name = key.partition(":")
        if kind == "scale":
            axis, _, name = name.partition(":")
            factors.setdefault(name, {})[int(axis)] = array
    return factors


def _same(factors: Mapping[int, Array], others: Mapping[int, Array]) -> bool:
    """Whether these are the same arrays, and not only equal ones."""
    return factors.keys() == others.keys() and all(array is others[axis] for axis, array in factors.items())


def _known(nodes: Mapping[str, Node], name: str, key: str) -> Node:
    if name not in nodes:
        raise CalibError(f"corrections: {key} is not of this model's graph. Calibrate again.")
    return nodes[name]


def _require_shape(key: str, array: Array, shape: Sequence[int]) -> None:
    if array.shape != tuple(shape):
        raise CalibError(
            f"corrections: {key} must have the shape {list(shape)} for this model's graph (got {list(array.shape)}). "
            "Calibrate again."
        )


def _channels(graph: GraphModule, node: Node) -> int:
    """Output channels of an operation with a weight."""
    name = op_name(node)
    channels = constant_value(graph, cast("Node", node.args[1])).shape[WEIGHTED[name]]
    return channels * groups_of(node) if name.startswith("conv_transpose") else channels


def _with_bias(graph: GraphModule, node: Node, channels: int) -> None:
    """Zeros as the bias of an operation that has none."""
    if len(node.args) < 3 or node.args[2] is None:
        zeros = add_constant(graph, f"{node.name}_bias", torch.zeros(channels), node)
        node.args = (*node.args[:2], zeros, *node.args[3:])


def weighted_by(graph: GraphModule, constant: str) -> list[Node]:
    """The operations whose weight a constant is, in execution order."""
    return [n for n in calls(graph.graph) if op_name(n) in WEIGHTED and _named(n.args[1], constant)]


def one_axis(readers: Sequence[Node]) -> bool:
    """Whether the outputs of all these are along one axis of the weight that they share: a convolution and a transposed
    one differ."""
    return len({WEIGHTED[op_name(n)] for n in readers}) <= 1


def _named(node: object, constant: str) -> bool:
    return is_constant(node) and str(node.target) == constant


def _int8(graph: GraphModule, arrays: Arrays) -> dict[str, Int8Weight]:
    weights = {}
    for node in calls(graph.graph):
        weight = node.args[1] if len(node.args) > 1 else None
        if not is_constant(weight):
            continue
        levels = arrays.get(f"levels:{weight.target}")
        bias = arrays.get(f"bias:{node.name}")
        if levels is None and bias is None:
            continue
        one = Int8Weight(None, None, None if bias is None else torch.from_numpy(bias.copy()))
        if levels is not None:
            steps, axis = arrays[key := f"steps:{weight.target}"], WEIGHTED[op_name(node)]
            _require_shape(key, steps, levels.shape[axis : axis + 1])
            one = replace(one, stored=torch.from_numpy(levels), scales=torch.from_numpy(steps.copy()), axis=axis)
        weights[node.name] = one
    return weights

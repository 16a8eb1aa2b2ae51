"""Batch norms that PT2E does not fold into what is before them: those that go into it here, and those that may not."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from trtpipe.errors import BuildError, titled
from trtpipe.model.nodes import add_constant, calls, constant_value, groups_of, is_constant, module_path, op_name

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What `torch.export` decomposes a batch norm in eval mode to; it returns a tuple, whose first element alone is used.
NATIVE_NORM = "_native_batch_norm_legit_no_training"
#: Those that can go into a weight, and where the epsilon is among their arguments; the four behind x are the same.
_EPSILON = {"batch_norm": 7, NATIVE_NORM: 6}
#: All batch norms. The last two keep statistics or have none (`no_stats`): they go into no weight.
BATCH_NORMS = (*_EPSILON, "_native_batch_norm_legit", "native_batch_norm")


def require_settled(graph: torch.fx.GraphModule) -> None:
    """Refuse norms in training mode that keep running statistics: PT2E would fold those in as if they were used.

    Raises:
        BuildError: there is one.
    """
    for node in calls(graph.graph):
        if op_name(node) == "_native_batch_norm_legit_functional" and node.args[5]:
            raise BuildError(
                f"capture: {titled(module_path(node))} is a norm in training mode, whose running statistics "
                "change with each call. Leave it in eval mode, or make it with track_running_stats=False."
            )


def unpaired(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Batch norms behind a convolution or a linear layer that are no pair with it: something else reads what it gives,
    or its weight or bias, and would read them changed if the norm went into them; or a parameter of either is computed
    from the input. Constants are folded before."""
    readers = Counter(n.target for node in calls(graph.graph) for n in node.all_input_nodes if is_constant(n))

    def alone(made: torch.fx.Node) -> bool:
        return len(made.users) == 1 and all(readers[n.target] == 1 for n in made.all_input_nodes if is_constant(n))

    def known(node: torch.fx.Node) -> bool:
        """Whether all that it takes but its first argument is constant."""
        return all(is_constant(n) for n in node.args[1:5] if isinstance(n, torch.fx.Node))

    norms = [n for n in calls(graph.graph) if op_name(n) in _EPSILON]
    behind = [(n, n.args[0]) for n in norms if isinstance(n.args[0], torch.fx.Node)]
    behind = [(n, made) for n, made in behind if "conv" in op_name(made) or op_name(made) == "linear"]
    return [n for n, made in behind if not (alone(made) and known(made) and known(n) and _of_its_outputs(made))]


def _of_its_outputs(made: torch.fx.Node) -> bool:
    """Whether dimension 1, which a batch norm is of, is what a row of the weight makes: of a linear layer it is the
    last dimension."""
    return op_name(made) != "linear" or made.meta["val"].dim() == 2


def fuse_other_bn(graph: torch.fx.GraphModule) -> None:
    """Batch norms behind what PT2E has no folding for go into its weights: linear layers [N, C], and transposed
    convolutions of several groups, whose weight it multiplies along an axis that is only one group's outputs. Those
    that may not are spelt out before."""
    for node in [n for n in calls(graph.graph) if op_name(n) in _EPSILON]:
        made: Any = node.args[0]
        if not _only_here(made) or node.args[3] is None:
            continue
        x, weight, bias, *rest = (*made.args, None) if len(made.args) < 3 else made.args
        scale, shift = _affine(graph, node)
        held = constant_value(graph, weight)
        shift = shift if bias is None else constant_value(graph, bias) * scale + shift
        new = {"weight": _times_outputs(held, scale, made), "bias": shift}
        fused = [add_constant(graph, f"{made.name}_{n}", v.to(held.dtype), made) for n, v in new.items()]
        made.args = (x, *fused, *rest)
        for taken in [u for u in node.users if op_name(u) == "getitem" and u.args[1] == 0] or [node]:
            taken.replace_all_uses_with(made)
    graph.graph.eliminate_dead_code()


def _only_here(made: torch.fx.Node) -> bool:
    name = op_name(made)
    return name == "linear" or (name.startswith("conv_transpose") and groups_of(made) > 1)


def _times_outputs(weight: torch.Tensor, scale: torch.Tensor, made: torch.fx.Node) -> torch.Tensor:
    """A weight, what makes each of the output channels multiplied by its own of `scale` [C_out]; float64."""
    if op_name(made) == "linear":
        return weight * scale[:, None]
    groups = groups_of(made)  # of the transposed convolution: [C_in, C_out / groups, ...]
    by_group = weight.double().reshape(groups, -1, *weight.shape[1:])
    return (by_group * scale.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).reshape(weight.shape)


def spell_out_batch_norms(graph: torch.fx.GraphModule, which: Iterable[torch.fx.Node]) -> None:
    """Those among `which` as x * scale + shift: PT2E would fold one into the convolution before it, whose weight has
    scales of its own, or other readers. TensorRT fuses the two."""
    for node in [n for n in which if op_name(n) in _EPSILON]:
        if node.args[3] is None or node.args[4] is None:
            continue
        x: Any = node.args[0]
        y = x
        for what, value in _steps(graph, node):
            y = _with(graph, node, what, y, value, x.meta["val"])
        for taken in [u for u in node.users if op_name(u) == "getitem" and u.args[1] == 0] or [node]:
            taken.replace_all_uses_with(y)
    graph.graph.eliminate_dead_code()


def _affine(graph: torch.fx.GraphModule, node: torch.fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """What a batch norm with constant parameters multiplies x with, and adds then: float64 [C] each."""
    given: Any = node.args
    weight, bias, mean, var = (None if v is None else constant_value(graph, v) for v in given[1:5])
    assert mean is not None
    assert var is not None
    scale = (var.double() + given[_EPSILON[op_name(node)]]).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def _steps(graph: torch.fx.GraphModule, node: torch.fx.Node) -> list[tuple[str, torch.Tensor | torch.fx.Node]]:
    """What is multiplied with, added to or taken from x, in order: two constants where all parameters are constant."""
    given: Any = node.args
    weight, bias, mean, var = given[1:5]
    if all(is_constant(v) for v in (weight, bias, mean, var) if v is not None):
        return list(zip(("mul", "add"), _affine(graph, node), strict=True))
    with graph.graph.inserting_before(node):
        deviation = graph.graph.call_function(torch.ops.aten.add.Scalar, (var, given[_EPSILON[op_name(node)]]))
        deviation = graph.graph.call_function(torch.ops.aten.rsqrt.default, (deviation,))
    steps = [("sub", mean), ("mul", deviation), ("mul", weight), ("add", bias)]
    return [(what, value) for what, value in steps if value is not None]


def _with(
    graph: torch.fx.GraphModule, node: torch.fx.Node, what: str, y: torch.fx.Node, value: Any, like: torch.Tensor
) -> torch.fx.Node:
    """`y` [N, C, ...] `what` `value` [C], in front of the batch norm `node`."""
    shape = [1, -1, *[1] * (like.dim() - 2)]
    if isinstance(value, torch.Tensor):
        by = add_constant(graph, f"{node.name}_{what}", value.float().reshape(shape), node)
    with graph.graph.inserting_before(node):
        if not isinstance(value, torch.Tensor):
            by = graph.graph.call_function(torch.ops.aten.reshape.default, (value, shape))
        y = graph.graph.call_function(getattr(torch.ops.aten, what).Tensor, (y, by))
    y.meta = dict(node.meta) | {"val": like}
    return y

"""What identifies a captured graph: to the letter, or whatever the sizes that the job declares."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trtpipe.model.nodes import COPIES, arguments_of, calls, is_constant, op_name
from trtpipe.model.products import MATMULS, WEIGHTED

if TYPE_CHECKING:
    import torch

#: Operations that give a tensor another shape and no other values.
MOVES = frozenset(("reshape", "view", "_unsafe_view", "expand", "flatten"))
#: Operations that a table's corrections name, with their constants.
NAMED = frozenset((*WEIGHTED, "layer_norm", "conv_transpose3d"))
#: Operations whose whole numbers are none of a size.
_ARITHMETIC = frozenset(("add", "sub", "rsub", "mul", "div", "pow"))
#: Functions of each number by itself, by which weights of one value are others.
_FUNCTIONS = frozenset((
    "exp", "log", "sigmoid", "tanh", "softplus", "sqrt", "rsqrt", "reciprocal", "neg", "abs", "relu", "square",
))  # fmt: skip
#: Names of arguments that are an axis, and operations that count it among more axes than they read.
_AXES, _ADD_AXES = ("dim", "dim0", "dim1"), ("unsqueeze", "stack")
#: Between these FP32 holds a number to seven digits.
_LEAST, _MOST = 1.2e-38, 3.4e38
#: The least variance of a batch norm, where nothing else is said.
_EPS = 1e-5
#: What a value made of constants alone is shown as, and a size.
_CONSTANT, _SIZE = "constant", "size"
#: How a number is shown.
_Held = Callable[[object], object]


def exact(graph: torch.fx.GraphModule, weights: str) -> str:
    """SHA-256 of every node with its arguments, and of the digest `weights`."""
    lines = [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in graph.graph.nodes]
    return hashlib.sha256("\n".join([weights, *lines]).encode()).hexdigest()


def literals(graph: torch.fx.GraphModule, tensors: Sequence[torch.Tensor], *, older: bool = False) -> str:
    """SHA-256 of the numbers of a network that are none of its weights and that folding takes out of its graph; empty
    where there are none.

    Args:
        graph: as it is before constants are folded.
        tensors: those that the network makes or holds beside its parameters and buffers, of any dtype and shape: means
            to subtract, say.
        older: as tables have it that were made before numbers were taken as FP32 holds them.
    """
    import torch

    lines = []
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        values = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        lines.append(f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(values).hexdigest()}")
    held = _as_given if older else in_float32
    given = {n for n in graph.graph.nodes if is_constant(n)}  # whatever the inputs hold
    for node in calls(graph.graph):
        arguments, kinds = _arguments(node, held), (float, int) if op_name(node) in _ARITHMETIC else float
        if "batch_norm" in op_name(node):
            lines += [f"batch_norm {eps}"] if (eps := held(arguments.get("eps", _EPS))) != _EPS else []
        elif _is_tensor(node) and given.issuperset(node.all_input_nodes):
            numbers = [held(a) for a in arguments.values() if isinstance(a, kinds)]
            lines += [f"{op_name(node)} {numbers}"] if numbers or op_name(node) in _FUNCTIONS else []
        if not _is_tensor(node) or given.issuperset(node.all_input_nodes):  # a size is, one of the batch too
            given.add(node)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def operations(graph: torch.fx.GraphModule, weights: str, *, older: bool = False) -> str:
    """SHA-256 of what is computed from the inputs, by which operations in which order, and of the digest `weights`.

    A network captured for one batch size has the digest that it has for a range of them: sizes, changes of shape and
    what is made of constants alone (a class token for each sample) are left out; of these, `literals` tells. So is what
    releases of PyTorch write differently: copies, arguments that are an operator's defaults, and whether cuDNN may
    compute it. What a calibration table names is in it: the operations that are corrected, and their constants. Numbers
    are in it as FP32 holds them, and axes counted from the first: an ONNX file has them so.

    Args:
        graph: the captured one.
        weights: the digest of its weights and literals.
        older: as tables have it that were made before that last sentence was so.
    """
    held = _as_given if older else in_float32
    names: dict[torch.fx.Node, str] = {n: n.name for n in graph.graph.nodes if n.op == "placeholder"}
    lines = [weights]
    for node in calls(graph.graph):
        if not node.users:
            continue
        if not _is_tensor(node):
            names[node] = _SIZE
        elif all(is_constant(a) or names[a] in (_CONSTANT, _SIZE) for a in node.all_input_nodes):
            names[node] = _CONSTANT
        elif op_name(node) in MOVES or _passes_on(node):
            names[node] = names[node.all_input_nodes[0]]
        else:
            names[node] = node.name if op_name(node) in NAMED else f"%{len(lines)}"
            given = _arguments(node, held) if older else _from_the_first(node, _arguments(node, held))
            kept = {name: given[name] for name in sorted(given) if not name.startswith("cudnn_")}
            read = _shown(kept, node, names, held)
            lines.append(f"{names[node]} {node.target} {read} {_rank(node.meta['val'])}{_summed(node, names)}")
    (end,) = (n for n in graph.graph.nodes if n.op == "output")
    return hashlib.sha256("\n".join([*lines, _shown(end.args, end, names, held)]).encode()).hexdigest()


def in_float32(value: object) -> object:
    """A float as FP32 holds it, in the fewest digits that name it, and as an integer where it is whole; what FP32 does
    not hold, and anything else, as it is."""
    if type(value) is not float or not _LEAST < abs(value) < _MOST:
        return 0 if value == 0 and type(value) is float else value
    short = float(str(np.float32(value)))
    return int(short) if short.is_integer() else short


def _as_given(value: object) -> object:
    return value


def _arguments(node: torch.fx.Node, held: _Held) -> dict[str, Any]:
    """A call's arguments that are not its operator's defaults, where numbers are compared as they are `held`."""
    return arguments_of(node, defaults=False, same=lambda a, b: held(a) == held(b))


def _from_the_first(node: torch.fx.Node, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with axes counted from the first."""
    import torch

    source = next((n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)), None)
    rank = 0 if source is None else source.meta["val"].dim()
    rank += op_name(node) in _ADD_AXES
    return {k: v % rank if rank and k in _AXES and type(v) is int else v for k, v in given.items()}


def _is_tensor(node: torch.fx.Node) -> bool:
    """Whether the node's value is a tensor, or several; a size is not."""
    import torch

    return isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def _passes_on(node: torch.fx.Node) -> bool:
    """Whether a node gives what it is given: a copy, or a slice of all there is."""
    given = arguments_of(node)
    ends = given.get("start") in (0, None), given.get("end") in (None, sys.maxsize), given.get("step") == 1
    return op_name(node) in COPIES or (op_name(node) == "slice" and all(ends))


def _rank(value: object) -> str:
    """Of a tensor, how many axes it has; of several nothing, as those that are read are nodes of their own."""
    import torch

    return str(value.dim()) if isinstance(value, torch.Tensor) else ""


def _summed(node: torch.fx.Node, names: Mapping[torch.fx.Node, str]) -> str:
    """Of a product of two computed stacks of matrices, over how many numbers its sums run (in attention, the size of a
    head); nothing where a job may vary that. Of two matrices alone it may be the batch."""
    factors = node.all_input_nodes if op_name(node) in MATMULS else []
    made = any(is_constant(f) or names[f] == _CONSTANT for f in factors)
    if not factors or made or any(f.meta["val"].dim() < 3 for f in factors):
        return ""
    size = factors[0].meta["val"].shape[-1]
    return f" {size}" if isinstance(size, int) else ""


def _shown(value: object, reader: torch.fx.Node, names: Mapping[torch.fx.Node, str], held: _Held) -> str:
    """An argument of `reader` as text, its numbers as they are `held`."""
    import torch

    if isinstance(value, tuple | list):
        return "(" + ", ".join(_shown(v, reader, names, held) for v in value) + ")"
    if isinstance(value, dict):
        return _shown([*value.items()], reader, names, held)
    if not isinstance(value, torch.fx.Node):
        return repr(held(value))
    if is_constant(value):
        return str(value.target) if op_name(reader) in NAMED else _CONSTANT
    return names[value]

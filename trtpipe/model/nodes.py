"""Reading an exported ATen graph: which module and line a node comes from, and what kind of operation it is."""

from __future__ import annotations

import copy
import itertools
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch

from calib.user_code import PACKAGE_FOLDERS
from trtpipe.model.bindings import INNER
from trtpipe.model.failures import is_the_models

#: The floating dtypes of fewer bits than FP32 that PyTorch computes in.
HALVES = (torch.float16, torch.bfloat16)
#: What torch.export puts behind the path of a module that is called once more.
CALL_SUFFIX = re.compile(r"@\d+$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


#: Operations that pass a tensor on, in a captured graph.
COPIES = ("alias", "clone", "contiguous", "detach", "lift_fresh_copy")


def copied(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy that reads the same constants: they are replaced (`set_constant`), and never written to."""
    shared = {id(t): t for t in (*graph.parameters(), *graph.buffers())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11 announces a deprecation of its own
        return copy.deepcopy(graph, shared)


def module_path(node: torch.fx.Node) -> str:
    """Path of the module whose forward made the node, as `layer1.0.conv1`; "" is the network itself."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = CALL_SUFFIX.sub("", str(list(stack.values())[-1][0]))
    if path == INNER or path.startswith("_empty_nn_module_stack"):  # torch's name for what no module's forward made
        return ""
    return path.removeprefix(INNER + ".")


def source_line(node: torch.fx.Node) -> str:
    """`package/file.py:line` of the innermost frame of the model's own, "" when the export kept none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line in reversed(frames):
        if not is_the_models(path):
            continue
        within = next((path.partition(f)[2] for f in PACKAGE_FOLDERS if f in path), path.rpartition("/")[2])
        return f"{within}:{line}"
    return ""


#: Libraries of operators whose names say what they compute; a user's own `lib::conv2d` may be anything.
_KNOWN = ("aten", "prim", "prims", "quantized_decomposed", "torchao", "torchvision", "trtpipe")


def op_name(node: torch.fx.Node) -> str:
    """The operator without namespace and overload, `conv2d` for aten.conv2d.default; of a user's own, `lib::conv2d`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name)
        return name if is_foreign(node) else name.rpartition("::")[2]
    return getattr(target, "__name__", str(target))


def arguments_of(
    node: torch.fx.Node, *, defaults: bool = True, same: Callable[[object, object], bool] = operator.eq
) -> dict[str, Any]:
    """A call's arguments by the names of its operator's schema, those that are its `defaults` too, or none that is the
    `same` as one; of a Python function by place and keyword."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(k): value for k, value in enumerate(node.args)} | node.kwargs
    arguments = node.target._schema.arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    default = {a.name: a.default_value for a in arguments if a.has_default_value()}
    if defaults:
        return default | given
    return {name: value for name, value in given.items() if name not in default or not same(value, default[name])}


def is_foreign(node: torch.fx.Node) -> bool:
    """Whether the node calls an operation of a user's own torch.library."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _KNOWN


def calls(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The call_function nodes in execution order."""
    return (n for n in graph.nodes if n.op == "call_function")


def is_float(node: object) -> TypeGuard[torch.fx.Node]:
    """Whether the node's value is one floating-point tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_whole(node: object) -> TypeGuard[torch.fx.Node]:
    """Whether the node's value is one tensor of whole numbers or of truth values."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def shape_of(node: torch.fx.Node) -> tuple[object, ...]:
    """The extents of a node's value: numbers, and formulas of the dynamic dimensions.

    These may be compared. Of PyTorch's own extents a comparison is decided by the sizes that the graph was captured
    with, and from then on holds the graph to sizes with which it comes out the same.
    """
    return tuple(e if isinstance(e, int) else e.node.expr for e in node.meta["val"].shape)


def bias_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The bias of a convolution or linear layer, a constant or not; None where it has none."""
    bias = node.args[2] if len(node.args) > 2 else None
    return bias if isinstance(bias, torch.fx.Node) else None


def groups_of(node: torch.fx.Node) -> int:
    """The groups of a convolution, transposed or not: its seventh argument; 1 of a linear."""
    return int(node.args[6]) if len(node.args) > 6 else 1  # type: ignore[arg-type]


def is_constant(node: object) -> TypeGuard[torch.fx.Node]:
    """Whether the node is a parameter, a buffer or a folded constant."""
    return isinstance(node, torch.fx.Node) and node.op == "get_attr"


def attribute(graph: torch.fx.GraphModule, node: torch.fx.Node) -> object:
    """What a get_attr node reads: a tensor, or a graph that an operation such as torch.cond is given."""
    owner: object = graph
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    return owner


def constant_value(graph: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    """The tensor of a get_attr node, in its own dtype and shape.

    Raises:
        TypeError: the node is of something else.
    """
    owner = attribute(graph, node)
    if not isinstance(owner, torch.Tensor):
        raise TypeError(f"{node.target} is no tensor")
    return owner


def set_constant(graph: torch.fx.GraphModule, node: torch.fx.Node, value: torch.Tensor) -> None:
    """Replace the tensor of a get_attr node by one of any dtype and shape, for every node that reads it.

    `graph` must be a copy of its own.
    """
    path, _, name = str(node.target).rpartition(".")
    owner = graph.get_submodule(path)
    if name in owner._parameters:
        owner._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[name] = value


def drop_unread_constants(graph: torch.fx.GraphModule) -> None:
    """Take out the parameters and buffers that no node reads: an exported program of the graph would hold them too.

    `graph` must be a copy of its own.
    """
    read = {str(n.target) for n in graph.graph.find_nodes(op="get_attr")}
    held = (*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False))
    for path, name in (n.rpartition(".")[::2] for n, _ in held if n not in read):
        delattr(graph.get_submodule(path), name)


def free_name(graph: torch.nn.Module, name: str) -> str:
    """`name`, with a number behind it where the module has an attribute of that name."""
    numbered = (f"{name}_{k}" for k in itertools.count(1))
    return next(n for n in itertools.chain((name,), numbered) if not hasattr(graph, n))


def add_constant(graph: torch.fx.GraphModule, name: str, value: torch.Tensor, like: torch.fx.Node) -> torch.fx.Node:
    """A new get_attr node, before `like`, for a buffer holding `value` (any dtype and shape); `name` is made unique."""
    unique = free_name(graph, name)
    graph.register_buffer(unique, value)
    with graph.graph.inserting_before(like):
        node = graph.graph.create_node("get_attr", unique, (), {}, name=unique)
    node.meta["val"] = value
    return node

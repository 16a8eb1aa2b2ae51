"""A quantized program as a module that calls the Python functions torch2trt hooks, one submodule for each operation.

torch2trt cannot take a graph: it converts what Python functions are called while a module runs. So the program that
every route shares is spelt out as such calls, Q/DQ included, and the Q/DQ sites, scales and INT8 weights are the very
ones of the other routes. Submodules are named `<module path>.<operation>`, and torch2trt names its layers after them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from trtpipe.errors import BuildError
from trtpipe.model.batch_norms import NATIVE_NORM
from trtpipe.model.export import example_inputs
from trtpipe.model.nodes import (
    COPIES,
    HALVES,
    add_constant,
    calls,
    constant_value,
    copied,
    is_constant,
    is_float,
    module_path,
    op_name,
)
from trtpipe.model.products import WEIGHTED
from trtpipe.model.torch_versions import graph_module
from trtpipe.quantization.precision import CASTS
from trtpipe.routes.own_qdq import rewritten
from trtpipe.routes.torch2trt import qdq as torch2trt_qdq
from trtpipe.values import Quantized

if TYPE_CHECKING:
    from torch.fx.node import Argument

#: Operations that change no value.
_SAME = (*COPIES, "dropout")
#: What torch.export leaves behind to hold shapes against its ranges.
ASSERTIONS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
#: Arguments that do not change what a network computes.
IGNORED_ARGUMENTS = (
    "memory_format",
    "dtype",
    "layout",
    "device",
    "pin_memory",
    "cudnn_enable",
    "cudnn_enabled",
    "non_blocking",
)
#: Arguments that change the result and that the converters do not read.
UNSUPPORTED_ARGUMENTS = ("alpha", "rounding_mode", "divisor_override")
#: Where a Python function of an operation is looked up, the first that torch2trt has a converter for.
PLACES: Mapping[str, object] = {
    "torch.nn.functional": torch.nn.functional,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
}
#: Relative difference allowed between the program and its replay, which run the same kernels.
AGREEMENT = 1e-4

Arguments = tuple[Any, ...]


class ReplayedCall(torch.nn.Module):
    """One call. The function is looked up when it is called, since torch2trt replaces it by its name."""

    def __init__(self, owner: object, name: str) -> None:
        super().__init__()
        self._owner, self._function = owner, name

    def forward(self, *args: object) -> object:
        """The result of the function."""
        return getattr(self._owner, self._function)(*args)


def replay(quantized: Quantized, converters: Collection[str]) -> torch.nn.Module:
    """The program as calls of Python functions; FP16 casts are left out, except at bindings of FP16.

    Args:
        quantized: with Q/DQ; its program is not changed.
        converters: names of the Python functions that torch2trt can convert.

    Returns:
        A module that takes and returns what the program does. It computes in float32.

    Raises:
        BuildError: an operation is none of those functions, or the replay does not compute what the program does.
    """
    graph = rewritten(copied(graph_module(quantized.program)))
    _in_float32(graph, quantized)
    _spell_out_hard(graph)
    lost: dict[str, None] = {}
    targets: dict[str, torch.nn.Module | torch.Tensor] = {}
    seen: Counter[str] = Counter()
    new, env = Graph(), {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = new.placeholder(node.name)
        elif node.op == "get_attr":
            env[node] = new.get_attr(f"constant_{len(targets)}")
            targets[str(env[node].target)] = constant_value(graph, node).detach().clone()
        elif node.op == "output":
            values = node.args[0]
            new.output(tuple(env[v] for v in (values if isinstance(values, (list, tuple)) else (values,))))
        elif op_name(node) in _SAME or (op_name(node) == "getitem" and op_name(node.args[0]) == NATIVE_NORM):
            env[node] = env[node.args[0]]
        elif op_name(node) in ASSERTIONS or (_is_weight(node) and all(_is_weighted(u) for u in node.users)):
            continue  # a weight's DQ belongs to the operation that reads it
        elif (call := _to_python_call(node, converters)) is not None:
            owner, name, args = call
            target = _unique(f"{module_path(node)}.{op_name(node)}".lstrip("."), seen)
            targets[target] = ReplayedCall(owner, name)
            env[node] = new.call_module(target, _mapped(args, env))
        else:
            lost[_shown(node)] = None
            env[node] = new.call_function(operator.pos)  # never run
    if lost:
        raise BuildError(
            f"build: torch2trt has no converter for operations of the quantized program ("
            f"{', '.join(lost)}). Use build.quantization implicit, or build.route onnx."
        )
    made = GraphModule(targets, new, "Replay").eval()
    _agree(graph, made, quantized)
    return made


def _shown(node: Node) -> str:
    path = module_path(node)
    return f"{node.target} ({path})" if path else str(node.target)


def _unique(stem: str, seen: Counter[str]) -> str:
    """A name for a submodule; one that nn.Module has a method of would hide it."""
    k = seen[stem]
    seen[stem] += 1
    name = stem if k == 0 else f"{stem}_{k}"
    return f"{name}_" if hasattr(torch.nn.Module, name.rpartition(".")[2]) else name


def _is_weight(node: object) -> bool:
    return isinstance(node, Node) and node.target is torch.ops.trtpipe.dequantize_per_channel.default


def _is_weighted(node: Node) -> bool:
    """Whether the node's weight, and nothing else of it, is INT8 behind a DQ."""
    own = [a for a in node.args if _is_weight(a)]
    return op_name(node) in WEIGHTED and len(node.args) > 1 and own == [node.args[1]]


def _mapped(value: Any, env: Mapping[Node, Node]) -> Any:
    """`value` with the new graph's nodes, and tuples for lists: converters take a list of sizes for one size."""
    if isinstance(value, Node):
        return env[value]
    if isinstance(value, (list, tuple)):
        return tuple(_mapped(v, env) for v in value)
    if isinstance(value, slice):
        return slice(*(_mapped(v, env) for v in (value.start, value.stop, value.step)))
    return value


def _in_float32(graph: GraphModule, quantized: Quantized) -> None:
    """Leave out casts between float dtypes, and put back those that FP16 bindings need."""
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and (value := constant_value(graph, node)).dtype in HALVES:
            new = add_constant(graph, f"{node.name}_float", value.float(), node)
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)
        elif node.op == "call_function" and op_name(node) in CASTS and is_float(node.args[0]) and is_float(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.op == "call_function":
            node.args = map_aggregate(node.args, _float32)
            node.kwargs = map_aggregate(node.kwargs, _float32)
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(inputs, quantized.inputs, strict=True):
        if spec.dtype == "float16":
            with graph.graph.inserting_after(inputs[-1]):
                wide = graph.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.float32})
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
            wide.meta = {"val": torch.zeros(())}
    output = graph.graph.output_node()
    values: Any = output.args[0]
    with graph.graph.inserting_before(output):
        output.args = (
            tuple(
                graph.graph.call_function(torch.ops.aten._to_copy.default, (v,), {"dtype": torch.float16})
                if s.dtype == "float16"
                else v
                for v, s in zip(values, quantized.outputs, strict=True)
            ),
        )
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _spell_out_hard(graph: GraphModule) -> None:
    """hardsigmoid(x) = relu6(x + 3) / 6 and hardswish(x) = x hardsigmoid(x) (Howard et al. 2019), in those terms."""
    aten = torch.ops.aten
    for node in [n for n in calls(graph.graph) if op_name(n) in ("hardsigmoid", "hardswish")]:
        x = node.args[0]
        with graph.graph.inserting_before(node):
            steps = [graph.graph.call_function(aten.add.Tensor, (x, 3.0))]
            steps.append(graph.graph.call_function(aten.hardtanh.default, (steps[-1], 0.0, 6.0)))
            steps.append(graph.graph.call_function(aten.div.Tensor, (steps[-1], 6.0)))
            if op_name(node) == "hardswish":
                steps.append(graph.graph.call_function(aten.mul.Tensor, (x, steps[-1])))
        for step in steps:
            step.meta = dict(node.meta)
        node.replace_all_uses_with(steps[-1])
        graph.graph.erase_node(node)
    graph.recompile()


def _float32(value: Argument) -> Argument:
    return torch.float32 if value in HALVES and isinstance(value, torch.dtype) else value


def _agree(graph: GraphModule, made: torch.nn.Module, quantized: Quantized) -> None:
    """Hold the replay against the program on noise.

    Raises:
        BuildError: they differ.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(x.shape, generator=generator).to(x.dtype) for x in example_inputs(quantized.inputs)]
    with torch.inference_mode():
        pairs = zip(quantized.outputs, graph(*inputs), made(*inputs), strict=True)
        for spec, want, got in pairs:
            bound = AGREEMENT * max(float(want.abs().max()), 1e-6)
            off = float((want.float() - got.float()).abs().max()) if want.shape == got.shape else float("inf")
            if not off <= bound:
                raise BuildError(
                    f"outputs.{spec.name}: the calls that torch2trt is to convert compute something else than the "
                    f"quantized program (a difference of {off:.3g}). Use build.quantization implicit, or build.route "
                    "onnx."
                )


def _to_python_call(node: Node, converters: Collection[str]) -> tuple[object, str, Arguments] | None:
    """(owner, function, arguments) of the Python call that does what the node does; None where there is none."""
    name = op_name(node)
    ours = torch.ops.trtpipe
    if node.target is ours.quantize.default:
        return torch2trt_qdq, "quantize", node.args
    if node.target is ours.dequantize.default:
        return torch2trt_qdq, "dequantize", node.args[:2]
    if _is_weight(node):
        return None
    if name in CASTS and node.kwargs.get("dtype") in (torch.float32, torch.float16):
        return torch2trt_qdq, "cast", (node.args[0], node.kwargs["dtype"])
    if not isinstance(node.target, torch._ops.OpOverload):
        return (operator, name, node.args) if getattr(operator, name, None) is node.target else None
    if name == "sym_size":
        return torch.Tensor, "size", node.args
    args = _positional(node)
    if args is None:
        return None
    if _is_weighted(node):
        weight: Any = args[1]
        return torch2trt_qdq, "weighted", (name, args[0], *weight.args[:3], *args[2:])
    if name in SPELLINGS:
        call = SPELLINGS[name](node, args)
        if call is None:
            return None
        name, args = call
    for place, owner in PLACES.items():
        if f"{place}.{name}" in converters:
            return owner, name, args
    return None


def _positional(node: Node) -> Arguments | None:
    """Every argument up to the last one that is given, by the operator's schema, without those that say nothing.

    None where an argument is given that changes the result and that Python functions or converters take otherwise.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    made: list[object] = []
    given = 0
    for k, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name, default)
        if argument.name in IGNORED_ARGUMENTS:
            continue
        if argument.name in UNSUPPORTED_ARGUMENTS:
            if value != default:
                return None
            continue
        made.append(value)
        if k < len(node.args) or argument.name in node.kwargs:
            given = len(made)
    return tuple(made[:given])


Spelling = Callable[[Node, Arguments], tuple[str, Arguments] | None]


def _batch_norm(node: Node, args: Arguments) -> tuple[str, Arguments] | None:
    x, weight, bias, mean, var, training, momentum, eps = args[:8]
    if weight is None or bias is None or mean is None or var is None or training:
        return None  # its converter reads them all
    return "batch_norm", (x, mean, var, weight, bias, False, momentum, eps)


def _native_norm(node: Node, args: Arguments) -> tuple[str, Arguments] | None:
    if any(user.args[1] != 0 for user in node.users):
        return None
    return _batch_norm(node, (*args[:5], False, *args[5:]))


def _over_axes(node: Node, args: Arguments) -> tuple[str, Arguments]:
    """A reduction; its converter takes axes from the front alone."""
    rank = _rank(node.args[0])
    if len(args) > 1 and args[1] is not None:
        axes = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
        args = (args[0], tuple(a % rank for a in axes), *args[2:])
    return op_name(node), args


def _pool(node: Node, args: Arguments) -> tuple[str, Arguments]:
    """Without a stride of its own a pool moves by its window."""
    if len(args) < 3 or not args[2]:
        args = (*args[:2], args[1], *args[3:])
    return op_name(node), args


def _hardtanh(node: Node, args: Arguments) -> tuple[str, Arguments]:
    low, high = _filled(args[1:], (-1.0, 1.0))
    return ("relu6", args[:1]) if (low, high) == (0, 6) else ("clamp", (args[0], low, high))


def _gelu(node: Node, args: Arguments) -> tuple[str, Arguments] | None:
    return ("gelu", args[:1]) if len(args) < 2 or args[1] == "none" else None


def _axes(node: Node, args: Arguments) -> tuple[str, Arguments]:
    return op_name(node), (args[0], *(a % _rank(args[0]) for a in args[1:]))


def _select(node: Node, args: Arguments) -> tuple[str, Arguments]:
    return _index(node, args[1], args[2])


def _slice(node: Node, args: Arguments) -> tuple[str, Arguments]:
    axis, start, stop, step = _filled(args[1:], (0, None, None, 1))
    far = isinstance(stop, int) and stop >= 2**62
    return _index(node, axis, slice(start, None if far else stop, None if step == 1 else step))


def _filled(given: Arguments, usual: Arguments) -> list[Any]:
    """The arguments, those not given by their defaults."""
    return [*given, *usual[len(given) :]]


def _index(node: Node, axis: int, what: object) -> tuple[str, Arguments]:
    x = node.args[0]
    return "__getitem__", (x, (*[slice(None)] * (axis % _rank(x)), what))


def _rank(x: Any) -> int:
    return int(x.meta["val"].dim())


def _expand(node: Node, args: Arguments) -> tuple[str, Arguments] | None:
    if is_constant(args[0]):
        return None  # torch2trt would freeze it at the example's batch
    return "expand", (args[0], *args[1])


def _without(count: int) -> Spelling:
    return lambda node, args: (op_name(node), args[:count])


#: Operations whose Python function takes other arguments, or has another name.
SPELLINGS: Mapping[str, Spelling] = {
    "batch_norm": _batch_norm,
    NATIVE_NORM: _native_norm,
    "mean": _over_axes,
    "sum": _over_axes,
    "max_pool2d": _pool,
    "avg_pool2d": _pool,
    "hardtanh": _hardtanh,
    "gelu": _gelu,
    "select": _select,
    "slice": _slice,
    "expand": _expand,
    "softmax": _without(2),
    "layer_norm": _without(5),
    "transpose": _axes,
}

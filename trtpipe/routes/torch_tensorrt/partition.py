"""A program that Torch-TensorRT has partitioned into engines and PyTorch operations, as a hybrid module."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from trtpipe.bundle.hybrid import DTYPE_BYTES, EngineStep, Hybrid, OperatorStep, StoredConstant, StoredPlan, allowed
from trtpipe.errors import BuildError, titled
from trtpipe.values import Fallback, TensorSpec

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node
    from torch.nn import Module
    from torch_tensorrt.dynamo.runtime import TorchTensorRTModule

#: Convertible operations that have to stand together for an engine of their own; Torch-TensorRT's own default. Fewer of
#: them cost more in changing between PyTorch and TensorRT than they gain.
MIN_BLOCK_SIZE = 5
SMALL_BLOCK = f"it has a converter, and stands among fewer than {MIN_BLOCK_SIZE} that have one"
REFUSED = "its converter does not take these arguments"
NONE = "Torch-TensorRT has no converter for it"
_NEXT = "Leave build.allow_torch_fallback out and use build.route onnx, or rewrite the operation."


@dataclass
class _HybridDraft:
    """The hybrid module under construction. Mutable: each node of the program adds to it."""

    steps: list[EngineStep | OperatorStep] = field(default_factory=list)
    engines: list[bytes] = field(default_factory=list)
    constants: dict[str, tuple[StoredConstant, bytes]] = field(default_factory=dict)
    fallback: list[Fallback] = field(default_factory=list)


def hybrid_of(
    compiled: GraphModule, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> tuple[Hybrid, tuple[Fallback, ...]]:
    """The module that `torch_tensorrt.dynamo.compile` gave, and the operations in it that stayed in PyTorch.

    Args:
        compiled: the partitioned torch.fx.GraphModule, whose TensorRT parts are `TorchTensorRTModule`s.
        inputs: the bindings, in the order of the module's inputs.
        outputs: likewise.

    Raises:
        BuildError: nothing of it became an engine, an operation cannot be written down, or an engine takes more than
            tensors.
    """
    draft = _HybridDraft()
    names = iter(s.name for s in inputs)
    values: dict[Node, JsonValue] = {}
    results: object = ()
    for node in compiled.graph.nodes:
        if node.op == "placeholder":
            values[node] = {"value": next(names)}
        elif node.op == "output":
            results = node.args[0]
        else:
            values[node] = _node(node, compiled, values, draft, "")
    if not draft.engines:
        raise BuildError(
            f"build: at least {MIN_BLOCK_SIZE} operations that stand together must have converters in Torch-TensorRT "
            "(got none that do). Use build.route onnx."
        )
    results = results if isinstance(results, list | tuple) else (results,)
    plan = StoredPlan(
        inputs=tuple(s.name for s in inputs),
        outputs={s.name: _argument(r, values, draft, compiled) for s, r in zip(outputs, results, strict=True)},
        steps=tuple(draft.steps),
        constants={n: c for n, (c, _) in draft.constants.items()},
    )
    kept = Hybrid(plan, tuple(draft.engines), {n: data for n, (_, data) in draft.constants.items()})
    return kept, tuple(draft.fallback)


def _node(node: Node, owner: Module, values: dict[Node, JsonValue], draft: _HybridDraft, prefix: str) -> JsonValue:
    """The value of a node, once its steps are written; `prefix` keeps names of inner graphs apart."""
    if node.op == "get_attr":
        return _constant(owner, str(node.target), draft)
    if node.op == "call_module":
        inner = owner.get_submodule(str(node.target))
        if hasattr(inner, "serialized_engine"):
            return _engine(node, cast("TorchTensorRTModule", inner), owner, values, draft, prefix)
        return _inner(node, cast("GraphModule", inner), owner, values, draft, prefix)
    if node.op != "call_function":
        raise BuildError(f"build: {node.name} must be an operation of a graph (got {node.op}). {_NEXT}")
    name = _operator_name(node)
    args = tuple(_argument(a, values, draft, owner) for a in node.args)
    if node.target is operator.getitem and isinstance(args[0], list) and isinstance(args[1], int):
        return args[0][args[1]]
    kwargs = {k: _argument(a, values, draft, owner) for k, a in node.kwargs.items()}
    draft.steps.append(OperatorStep(op=name, args=args, kwargs=kwargs, out=prefix + node.name))
    if not name.startswith("python."):
        draft.fallback.append(_fallback(node))
    return {"value": prefix + node.name}


def _inner(
    node: Node, inner: GraphModule, owner: Module, values: dict[Node, JsonValue], draft: _HybridDraft, prefix: str
) -> JsonValue:
    """A graph that stays in PyTorch, written in place; several results are a list."""
    given = iter(_argument(a, values, draft, owner) for a in node.args)
    mine: dict[Node, JsonValue] = {}
    for part in inner.graph.nodes:
        if part.op == "placeholder":
            mine[part] = next(given)
        elif part.op == "output":
            return _argument(part.args[0], mine, draft, inner)
        else:
            mine[part] = _node(part, inner, mine, draft, f"{prefix}{node.name}.")
    raise AssertionError(f"{node.name} has no outputs")


def _engine(
    node: Node,
    inner: TorchTensorRTModule,
    owner: Module,
    values: dict[Node, JsonValue],
    draft: _HybridDraft,
    prefix: str,
) -> JsonValue:
    """One engine."""
    import torch

    value = node.meta.get("val")
    numbers = [v for v in (value if isinstance(value, list | tuple) else [value]) if v is not None and not _tensor(v)]
    numbers += [a for a in node.args if isinstance(a, torch.fx.Node) and not _tensor(a.meta.get("val", _TENSOR))]
    if numbers or getattr(inner, "aliased_io", None) or getattr(inner, "requires_output_allocator", False):
        what = f"the number {numbers[0]}" if numbers else "an output whose shape only its values decide"
        raise BuildError(f"build: an engine would take or give what is no tensor of known shape ({what}). {_NEXT}")
    step = EngineStep(
        engine=len(draft.engines),
        inputs=tuple(inner.input_binding_names),
        args=tuple(_argument(a, values, draft, owner) for a in node.args),
        outputs=tuple(inner.output_binding_names),
        out=prefix + node.name,
    )
    draft.engines.append(bytes(inner.serialized_engine))
    draft.steps.append(step)
    return {"value": step.out}


class _Tensor:
    pass


_TENSOR = _Tensor()


def _tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor | _Tensor)


def _operator_name(node: Node) -> str:
    import torch

    target = node.target
    name = ""
    if isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable:
        name = str(target)
    elif getattr(operator, getattr(target, "__name__", ""), None) is target:
        name = f"python.{getattr(target, '__name__', '')}"
    if not allowed(name):
        from trtpipe.routes.torch_tensorrt.qdq import remembered_module

        raise BuildError(
            f"build: an operation that stays in PyTorch must be one of ATen's that writes to no argument (got {target} "
            f"in {titled(remembered_module(node))}). {_NEXT}"
        )
    return name


def _argument(value: object, values: dict[Node, JsonValue], draft: _HybridDraft, owner: Module) -> JsonValue:
    """An argument as the plan's JSON."""
    import torch

    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, list | tuple):
        return [_argument(v, values, draft, owner) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kind in ("dtype", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "runner"}
    raise BuildError(
        "build: arguments of an operation that stays in PyTorch must be tensors and numbers "
        f"(got {value!r:.60}). {_NEXT}"
    )


def _constant(owner: Module, target: str, draft: _HybridDraft) -> JsonValue:
    """A tensor of the module, kept once however often it is read."""
    import torch

    value: object = owner
    for part in target.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor) or (dtype := str(value.dtype).removeprefix("torch.")) not in DTYPE_BYTES:
        raise BuildError(f"build: {target} must be a tensor of a usual dtype (got {value!r:.60}). {_NEXT}")
    dense = value.detach().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    kept = (StoredConstant.model_validate({"dtype": dtype, "shape": tuple(dense.shape)}), data)
    for name, other in draft.constants.items():
        if other == kept:
            return {"tensor": name}
    name = f"c{len(draft.constants)}"
    draft.constants[name] = kept
    return {"tensor": name}


def _fallback(node: Node) -> Fallback:
    """Where an operation that stays in PyTorch comes from, and why it stays."""
    from torch_tensorrt.dynamo.conversion import DYNAMO_CONVERTERS

    from trtpipe.model.nodes import source_line
    from trtpipe.routes.torch_tensorrt.qdq import remembered_module

    if node in DYNAMO_CONVERTERS:
        why = SMALL_BLOCK
    elif node.target in DYNAMO_CONVERTERS:
        why = REFUSED
    else:
        why = NONE
    return Fallback(remembered_module(node), str(node.target), why, source_line(node))


def fallback_lines(fallback: tuple[Fallback, ...]) -> Iterator[str]:
    """One line for each operation and reason, with the modules that have it."""
    for op, why in dict.fromkeys((f.op, f.reason) for f in fallback):
        modules = sorted({titled(f.module) for f in fallback if (f.op, f.reason) == (op, why)})
        yield f"stayed in PyTorch: {op} in {', '.join(modules)}: {why}"


def plural(count: int, what: str) -> str:
    """Like "1 engine" or "2 engines"."""
    return f"{count} {what}{'' if count == 1 else 's'}"

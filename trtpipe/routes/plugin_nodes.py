"""Operations of torch.library as ONNX nodes that TensorRT's parser hands to a plugin.

`lib::op(Tensor x, float factor)` is a node `op` of the domain `lib`: tensors are its inputs in the schema's order, all
else its attributes by the schema's names, defaults included. The parser looks for a plugin called `op`, of the version
and namespace in the attributes plugin_version and plugin_namespace ("1" and "" without them), and gives it the
attributes as plugin fields (onnx-tensorrt, importFallbackPluginImporter).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtpipe.errors import BuildError

if TYPE_CHECKING:
    import torch
    from onnx.defs import OpSchema
    from onnx_ir import Value

    from trtpipe.routes.narrow_onnx import Translations

#: Types of attributes by the types of PyTorch's schemas: as Python has them, and as onnx calls them.
_ATTRIBUTES: dict[str, tuple[object, str]] = {
    "float": (float, "FLOAT"),
    "int": (int, "INT"),
    "SymInt": (int, "INT"),
    "bool": (int, "INT"),
    "str": (str, "STRING"),
    "List[float]": (Sequence[float], "FLOATS"),
    "List[int]": (Sequence[int], "INTS"),
    "List[SymInt]": (Sequence[int], "INTS"),
    "List[bool]": (Sequence[int], "INTS"),
    "List[str]": (Sequence[str], "STRINGS"),
}
#: Every type that a tensor of PyTorch can have in ONNX.
_TENSORS = [
    f"tensor({t})"
    for t in (
        "float", "float16", "bfloat16", "double", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16",
        "uint32", "uint64",
    )
]  # fmt: skip


def translations(graph: torch.fx.Graph) -> Translations:
    """What each operation of the graph that is of a library outside PyTorch is in ONNX.

    Raises:
        BuildError: one has an argument or a result that ONNX has no place for.
    """
    from trtpipe.model.nodes import calls, is_foreign

    targets: dict[Any, None] = dict.fromkeys(n.target for n in calls(graph) if is_foreign(n))
    return {target: _translation(target) for target in targets}


def _translation(target: torch._ops.OpOverload) -> Any:
    """A function of the operation's arguments that writes its node."""
    from onnxscript import values

    domain, _, name = str(target._schema.name).partition("::")
    arguments = list(target._schema.arguments)
    inputs = [a.name for a in arguments if _kind(a.type) == "Tensor"]
    write = values.Op(values.Opset(domain, 1), name, _schema(target, domain, name))

    def node(*args: Any, **kwargs: Any) -> Value | Sequence[Value]:
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given = defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        tensors = [given.get(n) for n in inputs]
        while tensors and tensors[-1] is None:
            tensors.pop()
        attributes = {n: v for n, v in given.items() if n not in inputs and v is not None}
        made: Value | Sequence[Value] = write(*tensors, **attributes)
        return made

    parameters = [
        inspect.Parameter(
            a.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
            annotation=_ATTRIBUTES[_kind(a.type)][0] if _kind(a.type) in _ATTRIBUTES else inspect.Parameter.empty,
        )
        for a in arguments
    ]
    node.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    node.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not inspect.Parameter.empty}
    return node


def _kind(kind: object) -> str:
    """A type of PyTorch's schemas without what makes it optional."""
    return str(kind).removeprefix("Optional[").removesuffix("]") if str(kind).startswith("Optional[") else str(kind)


def _schema(target: torch._ops.OpOverload, domain: str, name: str) -> OpSchema:
    """The operation as onnx describes operators.

    Raises:
        BuildError: see `translations`.
    """
    from onnx.defs import OpSchema

    inputs: list[Any] = []
    attributes = []
    for argument in target._schema.arguments:
        kind, optional = _kind(argument.type), argument.has_default_value() or str(argument.type).startswith("Optional")
        if kind == "Tensor":
            option = OpSchema.FormalParameterOption.Optional if optional else OpSchema.FormalParameterOption.Single
            inputs.append(OpSchema.FormalParameter(argument.name, f"T{len(inputs)}", param_option=option))
        elif kind in _ATTRIBUTES:
            attribute = getattr(OpSchema.AttrType, _ATTRIBUTES[kind][1])
            attributes.append(OpSchema.Attribute(argument.name, attribute, "", required=not optional))
        else:
            raise BuildError(
                f"onnx: {domain}.{name} has the argument {argument.name} of type {kind}, and a node for a plugin takes "
                "tensors, numbers, texts and lists of these. Give the operation such arguments."
            )
    results = [str(r.type) for r in target._schema.returns]
    if set(results) != {"Tensor"}:
        raise BuildError(
            f"onnx: {domain}.{name} returns {', '.join(results) or 'nothing'}, and a plugin returns tensors. Return a "
            "tensor, or a tuple of them."
        )
    outputs = [OpSchema.FormalParameter(f"y{k}", f"Y{k}") for k in range(len(results))]
    names = [*(p.type_str for p in inputs), *(p.type_str for p in outputs)]
    return OpSchema(
        name,
        domain,
        1,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[(n, _TENSORS, "") for n in names],
        attributes=attributes,
    )

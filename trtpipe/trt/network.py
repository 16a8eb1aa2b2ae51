"""The ONNX graph as a TensorRT network: parsed, and its bindings compared with those that the job declares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtpipe.errors import BuildError
from trtpipe.trt.flavour import Flavour
from trtpipe.trt.monitor import Watch
from trtpipe.values import OnnxModel, TensorSpec

if TYPE_CHECKING:
    from trtpipe.trt.types import Builder, ILogger, INetworkDefinition, ITensor, OnnxParser, ParserError

#: TensorRT's names of the binding dtypes.
DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "UINT8": "uint8", "INT8": "int8", "INT32": "int32", "INT64": "int64",
}  # fmt: skip


def enum_name(value: object) -> str:
    """The bare name of an enum, "HALF" of DataType.HALF: integers move between majors, names do not."""
    return str(value).rsplit(".", 1)[-1]


def create_network(flavour: Flavour, builder: Builder, *, weakly_typed: bool) -> INetworkDefinition:
    """An empty network: strongly typed where the release can, unless `weakly_typed`; always with explicit batch."""
    flags = flavour.module.NetworkDefinitionCreationFlag
    if flavour.has("strong_typing"):
        # On 11 and RTX every network is strongly typed and the flag says so; on 10 it is a choice.
        chosen = 0 if weakly_typed else 1 << int(flags.STRONGLY_TYPED)
    else:
        chosen = 1 << int(flags.EXPLICIT_BATCH)
    return builder.create_network(chosen)


def parse(flavour: Flavour, network: INetworkDefinition, logger: ILogger, model: OnnxModel, watch: Watch) -> OnnxParser:
    """The parser, after it has filled `network`; keep it as long as the network, whose weights may point into it.

    Raises:
        BuildError: with every error of the parser: node, operator and code.
    """
    since = watch.mark()
    parser = flavour.module.OnnxParser(network, logger)
    parsed = parser.parse(model.data)
    watch.check()
    if not parsed or parser.num_errors:
        errors = [_parser_error(flavour, parser.get_error(i)) for i in range(parser.num_errors)]
        errors = errors or list(watch.errors(since)) or ["the parser gave no reason"]
        step = "Change the model there, or try build.route torch_tensorrt."
        if any(re.search(r"\bcuda (error|driver)\b", text, re.IGNORECASE) for text in watch.errors(since)):
            step = (
                "A plugin of TensorRT's own stands for that operation, and it needs an NVIDIA GPU and its driver "
                "already while the network is parsed: build where they are, or change the model there."
            )
        raise BuildError(f"onnx: {flavour.title} does not accept every node ({'; '.join(errors)}). {step}")
    return parser


def _parser_error(flavour: Flavour, error: ParserError) -> str:
    where = f"node {error.node()}"
    if flavour.has("parser_node_names") and error.node_name():
        where = f"{error.node_name()} [{error.node_operator()}]"
    elif error.node() < 0:
        operator = error.func().removeprefix("import") if error.func().startswith("import") else ""
        where = f"a {operator} node" if operator else "the file"
    return f"{where}: {enum_name(error.code())}, {error.desc()}"


def check_bindings(flavour: Flavour, network: INetworkDefinition, model: OnnxModel) -> None:
    """Hold the network's inputs and outputs against the declared ones: names, dtypes and shapes.

    Raises:
        BuildError: listing every difference.
    """
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    problems = [*_differences("inputs", model.inputs, inputs), *_differences("outputs", model.outputs, outputs)]
    if problems:
        raise BuildError(
            f"onnx: the bindings that {flavour.title} sees must be those of the job (got {'; '.join(problems)}). "
            "Bindings get their dtype from casts in the graph; INT64 bindings need TensorRT 10 or later."
        )


def _differences(section: str, specs: Sequence[TensorSpec], tensors: Sequence[ITensor]) -> list[str]:
    by_name = {t.name: t for t in tensors}
    problems = [f"{section}.{n} is not in the job" for n in by_name if n not in {s.name for s in specs}]
    for spec in specs:
        tensor = by_name.get(spec.name)
        if tensor is None:
            problems.append(f"{section}.{spec.name} is not in the network")
            continue
        dtype = DTYPES.get(enum_name(tensor.dtype), enum_name(tensor.dtype))
        if dtype != spec.dtype:
            problems.append(f"{section}.{spec.name} is {dtype}, not {spec.dtype}")
        shape = tuple(tensor.shape)
        if len(shape) != len(spec.shape) or any(
            isinstance(want, int) and got not in (want, -1) for got, want in zip(shape, spec.shape, strict=True)
        ):
            problems.append(f"{section}.{spec.name} has shape {shape}, not {spec.shape}")
        elif section == "inputs" and any(
            isinstance(w, str) and g != -1 for g, w in zip(shape, spec.shape, strict=True)
        ):
            problems.append(f"inputs.{spec.name} has fixed shape {shape}, where {spec.shape} varies")
    return problems

"""Names in an ONNX file: the module path that a node stands under, in reports, in tables and in `precision.keep`; and
what a node reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

#: Operators whose second input is a weight.
WEIGHTED_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SCOPES = "pkg.torch.onnx.name_scopes"
_QUOTED = re.compile(r"'([^']*)'")
_PARAMETER = re.compile(r"(\w+(?:\.\w+)*)\.weight")


def scopes_of(metadata: Mapping[str, str]) -> list[str]:
    """The module paths, outermost first, that torch.onnx.export(dynamo=True) writes among a node's metadata_props."""
    return _QUOTED.findall(metadata.get(_SCOPES, ""))


def module_path(name: str, op: str, output: str, weight: str | None, metadata: dict[str, str]) -> str:
    """The path of a node, as `layer1.0.conv1`: the same that the exported PyTorch module has, where the file tells.

    That is the module whose forward ran it: by the scopes that torch.onnx.export(dynamo=True) writes, or those in the
    names that TorchScript's exporter makes (`/layer1/layer1.0/conv1/Conv`). The weight's own module stands before it,
    since exporters fold a batch norm into a convolution, whose scopes are then the batch norm's; but not where it lies
    within that module, which then computes with it by itself, as a torch.nn.MultiheadAttention does with its out_proj.
    Without any of them it is the node's name, or its output's.

    Args:
        name: the node's name, which may be empty.
        op: its operator.
        output: the name of its first output.
        weight: the name of its constant weight, None where it has none.
        metadata: its metadata_props.
    """
    scopes = scopes_of(metadata)
    parts = [p for p in name.split("/") if p]
    scoped = "/" in name and parts and re.fullmatch(rf"{op}(_\d+)?", parts[-1])
    runner = str(scopes[-2]) if len(scopes) > 1 else _joined(parts[:-1]) if scoped else None
    if weight is not None and (parameter := _PARAMETER.fullmatch(weight)):
        owner = parameter[1]
        within = runner is not None and owner.startswith(f"{runner}." if runner else "")
        return str(runner if within else owner)
    return _joined(parts or [p for p in output.split("/") if p] or [op]) if runner is None else runner


def _joined(parts: Sequence[str]) -> str:
    """The parts as one path; a part that begins with the one before it stands for both (`conv`, `conv.0`)."""
    path: list[str] = []
    for part in parts:
        if path and part.startswith(path[-1] + "."):
            path.pop()
        path.append(part)
    return ".".join(path)


def unmade(graph: onnx.GraphProto, around: frozenset[str] = frozenset()) -> str | None:
    """The first name that a node of a graph, or of one inside it, reads and nothing gives; `around` are given."""
    given = {v.name for v in (*graph.input, *graph.initializer)} | {t.values.name for t in graph.sparse_initializer}
    known = around | given | {name for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                return str(name)
        for attribute in node.attribute:
            for inside in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                if (found := unmade(inside, known)) is not None:
                    return found
    return None

"""What of a graph its damage changes, as a graph of its own: all before it is computed by the check already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtpipe.evaluation.control import damage
from trtpipe.trt.element_types import element_types
from trtpipe.values import OnnxModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnx import ValueInfoProto

#: Element types, by their names in ONNX, that outputs of ONNX Runtime have in NumPy.
_IN_NUMPY = (
    "FLOAT", "FLOAT16", "DOUBLE", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"
)  # fmt: skip


@dataclass(frozen=True)
class DamagedEnd:
    """A graph, the end of its damaged copy, and how one reads the other.

    graph: the undamaged file, with `reads` among its outputs.
    end: computes those of its outputs that are damaged, from `reads` and the inputs `given`.
    tensor, how: which node's tensor is damaged, and how (`damaged_copy`).
    """

    graph: bytes
    end: bytes
    reads: tuple[str, ...]
    given: tuple[str, ...]
    tensor: str
    how: str


def damaged_end(model: OnnxModel) -> DamagedEnd | None:
    """The end of the damaged copy of a graph; None where it reads what NumPy has no dtype for (BF16).

    Raises:
        BuildError: as `damaged_copy`.
    """
    import onnx

    proto = onnx.load_from_string(model.data)
    changed, tensor, how = damage(proto)
    graph = proto.graph
    inputs = [i.name for i in graph.input]
    data, wrong = set(inputs), changed
    for node in graph.node:
        data.update(node.output if not data.isdisjoint(node.input) else ())
        wrong.update(node.output if not wrong.isdisjoint(node.input) else ())
    needed, nodes = {o.name for o in graph.output if o.name in wrong}, []
    for node in reversed(graph.node):
        # What depends on no input, a weight that is dequantized, is computed by the end itself.
        if not needed.isdisjoint(node.output) and (not wrong.isdisjoint(node.output) or data.isdisjoint(node.output)):
            nodes.append(node)
            needed.update(node.input)
    reads = tuple(sorted((needed & data) - wrong - set(inputs)))
    types = element_types(proto)
    held = {getattr(onnx.TensorProto, name) for name in _IN_NUMPY}
    if any(types.get(name) not in held for name in reads):
        return None
    values = {name: onnx.helper.make_tensor_value_info(name, types[name], None) for name in reads}
    given = [i for i in graph.input if i.name in needed]
    end = onnx.helper.make_graph(
        nodes[::-1],
        graph.name,
        [*values.values(), *given],
        [o for o in graph.output if o.name in wrong],
        [i for i in graph.initializer if i.name in needed],
    )
    made = onnx.helper.make_model(
        end, opset_imports=proto.opset_import, functions=proto.functions, ir_version=proto.ir_version
    )
    for output in graph.output:  # one that no damage reaches may be read on the way to another
        values.pop(output.name, None)
    front = _with_outputs(model.data, list(values.values()))
    return DamagedEnd(front, made.SerializeToString(), reads, tuple(i.name for i in given), tensor, how)


def _with_outputs(data: bytes, values: Sequence[ValueInfoProto]) -> bytes:
    """A file with more outputs. Messages that follow each other are one: its weights are neither read nor copied."""
    import onnx

    more = onnx.ModelProto()
    more.graph.output.extend(values)
    added: bytes = more.SerializeToString()
    return data + added

"""FP16 and BF16 as the file has them: an ONNX graph that computes in FP32 and rounds where the file says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from trtpipe.runtime.node_order import weights_late
from trtpipe.trt.element_types import element_types

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
#: Operations whose results are among their inputs' values, or zero: rounded inputs give rounded results.
EXACT = frozenset(
    ("Abs", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GlobalMaxPool", "Identity", "Max",
     "MaxPool", "Min", "Neg", "Pad", "Relu", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile",
     "Transpose", "Unsqueeze", "Where")
)  # fmt: skip


class Unrounded(ValueError):
    """The graph cannot be rewritten; the message says why."""


def rounded(model: bytes) -> bytes | None:
    """The graph with every half-precision operation computed in FP32 and its result rounded by casts of its own.

    On a CPU, ONNX Runtime computes FP16 in FP32 and, at every optimization level, drops the roundings between two such
    operations: overflow, underflow and rounding then do not show. Casts that stand in the file it keeps. Rounding each
    result once is what TensorRT's kernels do, which accumulate in FP32.

    Args:
        model: a serialized ModelProto.

    Returns:
        The new model with the same bindings, weights dequantized where they are read first; None where nothing changes.

    Raises:
        Unrounded: it is no ONNX file, its types cannot be inferred, or it has subgraphs, which no route writes.
    """
    try:
        proto = onnx.load_from_string(model)
        types = element_types(proto)
    except (DecodeError, onnx.shape_inference.InferenceError) as error:
        raise Unrounded(f"its types cannot be read ({error})") from error
    graph = proto.graph
    halves = {n: t for n, t in types.items() if t in _HALVES}
    if not halves:
        late = weights_late(graph.node, (i.name for i in graph.input))
        return None if late == list(graph.node) else _with_nodes(proto, late)
    if any(a.g.node or a.graphs for n in graph.node for a in n.attribute):
        raise Unrounded("the graph has subgraphs")
    wide = {name: f"{name}/wide" for name in halves}
    # Weights stay as they are in the file, and each is widened where it is read first: it is then held but once.
    narrow = {i.name for i in graph.initializer if i.name in halves} | {i.name for i in graph.input if i.name in halves}
    nodes: list[NodeProto] = []
    ends = {o.name for o in graph.output}
    for node in graph.node:
        read = [name for name in dict.fromkeys(node.input) if name in narrow]
        nodes += [_cast(name, wide[name], onnx.TensorProto.FLOAT) for name in read]
        narrow.difference_update(read)
        nodes += _widened(node, halves, wide, ends)
    del graph.value_info[:]
    return _with_nodes(proto, weights_late(nodes, (i.name for i in graph.input)))


def _with_nodes(model: ModelProto, nodes: Sequence[NodeProto]) -> bytes:
    """The file of a model with these nodes."""
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    data: bytes = model.SerializeToString()
    return data


def _widened(node: NodeProto, halves: Mapping[str, int], wide: Mapping[str, str], ends: set[str]) -> list[NodeProto]:
    """The node on FP32 inputs, and the casts after it."""
    reads = any(name in halves for name in node.input)
    made, after = onnx.NodeProto(), []
    made.CopyFrom(node)
    made.input[:] = [wide.get(name, name) for name in node.input]
    for k, name in enumerate(node.output):
        if name not in halves:
            continue
        if node.op_type == "Cast" or not reads:  # it makes the half-precision tensor itself
            after.append(_cast(name, wide[name], onnx.TensorProto.FLOAT))
        elif node.op_type in EXACT and name not in ends:
            made.output[k] = wide[name]
        else:
            made.output[k] = f"{name}/exact"
            after.append(_cast(made.output[k], name, halves[name]))
            after.append(_cast(name, wide[name], onnx.TensorProto.FLOAT))
    for attribute in made.attribute:
        if attribute.name == "output_dtype" and attribute.i in _HALVES:
            attribute.i = onnx.TensorProto.FLOAT
    return [made, *after]


def _cast(source: str, target: str, to: int) -> NodeProto:
    """Without a name of its own, which a node of the file could have."""
    return onnx.helper.make_node("Cast", [source], [target], to=to)

"""The control of a check: a copy of the graph with one tensor damaged, as an ONNX file or as an exported program.

In a quantized graph the scale of the last activation on each way to an output (in its Q and in every DQ that reads it)
is multiplied by 127, as if calibration had gone wrong by that much; FP8 keeps its precision under a larger scale, so
there it is divided, and nearly all of the tensor is clipped. On each way: the branch of a residual block may change
little by itself, as its sum goes on without it. In any other graph the last weight is set to zero, or the scale that
it is stored with; without a convolution, a linear or a matmul of a weight, the last floating-point constant of all.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from trtpipe.errors import BuildError
from trtpipe.model.export import export
from trtpipe.model.onnx.names import WEIGHTED
from trtpipe.model.torch_versions import graph_module
from trtpipe.values import LoadedModel, OnnxModel, Quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from onnx import ModelProto, NodeProto, TensorProto
    from torch.fx import GraphModule, Node

#: A tensor of a file, by name, or a node of a program.
Value = TypeVar("Value")
#: A calibration gone wrong by this factor leaves only -1, 0 and 1 of the 255 levels.
SCALE_FACTOR = 127.0
HOW_SCALE, HOW_WEIGHT = f"scale x {SCALE_FACTOR:g}", "weight set to zero"
HOW_FP8 = f"scale / {SCALE_FACTOR:g}"
#: Operation of a program that quantizes an activation -> the factor of its scale, which its readers have too.
_QUANTIZERS = {"quantize_per_tensor": (SCALE_FACTOR, HOW_SCALE), "fp8_quantize": (1 / SCALE_FACTOR, HOW_FP8)}
_NOTHING = (
    "check: cannot build the negative control: the graph has no quantization scale, no weight and no other constant to "
    "damage. A model without any computes nothing that precision could change: run it outside the engine"
)
_READING_WEIGHTS = (*WEIGHTED, "DequantizeLinear")


def damaged_copy(model: OnnxModel) -> tuple[OnnxModel, str, str]:
    """The ONNX graph with one tensor damaged, which node's, and how.

    Raises:
        BuildError: it has no quantization scale and no weight.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_from_string(model.data)
    graph = proto.graph
    constants: dict[str, TensorProto] = {i.name: i for i in graph.initializer}
    quantizers = [
        n
        for n in graph.node  # of activations: for TensorRT 8.6 weights have a Q of their own
        if n.op_type == "QuantizeLinear" and n.input[1] in constants and n.input[0] not in constants
    ]
    if quantizers:
        damaged = _nearest_the_outputs(proto, quantizers)
        for i, quantizer in enumerate(damaged):
            zero_point = constants.get(quantizer.input[2]) if len(quantizer.input) > 2 else None
            fp8 = zero_point is not None and zero_point.data_type == onnx.TensorProto.FLOAT8E4M3FN
            factor = 1 / SCALE_FACTOR if fp8 else SCALE_FACTOR
            readers = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] == quantizer.output[0]]
            for k, node in enumerate((quantizer, *readers)):
                scale = numpy_helper.to_array(constants[node.input[1]])
                new = (scale.astype(np.float32) * factor).astype(scale.dtype)
                node.input[1] = f"damaged_scale_{i}_{k}"
                graph.initializer.append(numpy_helper.from_array(new, node.input[1]))
        last = damaged[-1]
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        return replace(model, data=proto.SerializeToString()), last.name + more, HOW_FP8 if fp8 else HOW_SCALE
    weights = [
        (n, i)
        for n in graph.node
        for i in (n.input[1:2] if n.op_type == "DequantizeLinear" else n.input[:2])
        if i in constants and n.op_type in _READING_WEIGHTS
    ] or [(n, i) for n in graph.node for i in n.input if i in constants and _is_damaged_by_zero(constants[i])]
    if not weights:
        raise BuildError(_NOTHING)
    node, name = weights[-1]
    zero = np.zeros_like(numpy_helper.to_array(constants[name]))
    graph.initializer.append(numpy_helper.from_array(zero, "damaged_weight"))
    for k, given in enumerate(node.input):
        if given == name:
            node.input[k] = "damaged_weight"
    return replace(model, data=proto.SerializeToString()), node.name, HOW_WEIGHT


def _is_damaged_by_zero(constant: TensorProto) -> bool:
    """Whether the constant is of floating point, and not zero already."""
    from onnx import numpy_helper

    value = numpy_helper.to_array(constant)
    return bool(value.dtype.kind == "f" and value.any())


def _nearest_the_outputs(proto: ModelProto, quantizers: Sequence[NodeProto]) -> list[NodeProto]:
    """The quantizers that a way back from an output meets first, in the order of the graph."""
    producer = {name: node for node in proto.graph.node for name in node.output}
    met = _met_first(
        (o.name for o in proto.graph.output),
        lambda name: producer[name].input if name in producer else (),
        {q.output[0] for q in quantizers},
    )
    return [q for q in quantizers if q.output[0] in met] or [quantizers[-1]]


def _met_first(
    outputs: Iterable[Value], inputs_of: Callable[[Value], Iterable[Value]], wanted: set[Value]
) -> set[Value]:
    """Of the `wanted` values, those that a way back from an output meets before any other of them."""
    todo, seen, met = list(outputs), set[Value](), set[Value]()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in wanted:
            met.add(value)
        else:
            todo += inputs_of(value)
    return met


def damaged_program(loaded: LoadedModel, quantized: Quantized) -> tuple[Quantized, LoadedModel, str, str]:
    """The same of an exported program and of the model it was made of, for routes that compile either without ONNX.

    Without quantization both have the same weight set to zero, so that it does not matter which one is compiled.

    Raises:
        BuildError: the program has no quantization scale and no weight.
    """
    from trtpipe.model.nodes import calls, module_path, op_name

    graph = graph_module(quantized.program)
    nodes = list(calls(graph.graph))
    quantizers = [n for n in nodes if op_name(n) in _QUANTIZERS]
    if quantizers:
        met = _met_first(graph.graph.output_node().all_input_nodes, lambda n: n.all_input_nodes, set(quantizers))
        damaged = [q for q in quantizers if q in met] or [quantizers[-1]]
        for quantizer in damaged:
            factor, _ = _QUANTIZERS[op_name(quantizer)]
            for node in (quantizer, *quantizer.users):
                node.args = (node.args[0], float(node.args[1]) * factor, *node.args[2:])  # type: ignore[arg-type]
        last = damaged[-1]
        how = _QUANTIZERS[op_name(last)][1]
        reader = next((u for d in last.users for u in d.users), last)
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    else:
        more = ""
        reader, how = _without_weight(graph, nodes), HOW_WEIGHT
        loaded = _without_weights_of(loaded, module_path(reader))
    graph.recompile()
    tensor = f"{module_path(reader) or 'the model'}/{op_name(reader)}{more}"
    return replace(quantized, program=export(graph, quantized.inputs)), loaded, tensor, how


def _without_weights_of(loaded: LoadedModel, path: str) -> LoadedModel:
    """The model with the weights of one of its modules set to zero."""
    module = copy.deepcopy(loaded.module)
    network = module.get_submodule("network")
    parameters = list(network.get_submodule(path).parameters(recurse=False))
    for parameter in [p for p in parameters if p.dim() > 1] or parameters:
        parameter.data.zero_()
    return replace(loaded, module=module)


def _without_weight(graph: GraphModule, nodes: list[Node]) -> Node:
    """The last operation that has a constant weight, which is now zero."""
    import torch

    from trtpipe.model.nodes import add_constant, constant_value, is_constant, op_name

    read = [(n, c, constant_value(graph, c)) for n in nodes for c in n.all_input_nodes if is_constant(c)]
    products = ("conv", "linear", "matmul", "addmm", "mm", "bmm")
    weights = [
        (n, c, value)
        for n, c, value in read
        if (op_name(n).startswith(products) and value.dim() > 1)
        or (op_name(n).endswith("_dequantize") and c is n.args[1])  # 4 bits: the scales of a weight's blocks
    ]
    weights = weights or [r for r in read if r[2].is_floating_point() and bool(r[2].any())]
    if not weights:
        raise BuildError(_NOTHING)
    node, constant, value = weights[-1]
    node.replace_input_with(constant, add_constant(graph, "damaged_weight", torch.zeros_like(value), node))
    return next(iter(node.users)) if op_name(node).endswith("_dequantize") else node

"""The control of a check: a copy of the graph with one tensor damaged, as an ONNX file or as an exported program.

In a quantized graph the scale of the last activation on each way to an output (in its Q and in every DQ that reads it)
is multiplied by 127, as if calibration had gone wrong by that much; FP8 keeps its precision under a larger scale, so
there it is divided, and nearly all of the tensor is clipped. On each way: the branch of a residual block may change
little by itself, as its sum goes on without it. Where a weight in 4 bits is nearer, it is set to zero; what lies before
it is left as it is. In any other graph the last weight on each way is set to zero; without a convolution, a linear or a
matmul of a weight, the last constant of the data that is not zero: the scales of a Resize say how a node computes.
Whole numbers and truth values count where no constant is of floating point: a table of indices, a mask.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from calib.algorithms import INT8_MAX
from trtpipe.errors import BuildError, titled
from trtpipe.model.export import export
from trtpipe.model.onnx.names import WEIGHTED_OPERATORS
from trtpipe.model.products import PRODUCTS
from trtpipe.model.torch_versions import graph_module
from trtpipe.values import LoadedModel, OnnxModel, Quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from onnx import GraphProto, ModelProto, NodeProto, TensorProto
    from torch.fx import GraphModule, Node

#: A tensor of a file, by name, or a node of a program.
Value = TypeVar("Value")
#: A calibration gone wrong by this factor leaves only -1, 0 and 1 of INT8's levels.
SCALE_FACTOR = float(INT8_MAX)
HOW_SCALE, HOW_WEIGHT = f"scale x {SCALE_FACTOR:g}", "weight set to zero"
HOW_FP8 = f"scale / {SCALE_FACTOR:g}"
#: Operation of a program that quantizes an activation -> the factor of its scale, which its readers have too.
_QUANTIZERS = {"quantize_per_tensor": (SCALE_FACTOR, HOW_SCALE), "fp8_quantize": (1 / SCALE_FACTOR, HOW_FP8)}
#: Operations of a program that give a weight stored in 4 bits; their second argument are the scales of its blocks.
_FOUR_BITS = ("int4_dequantize", "fp4_dequantize")
#: How many of an operator's inputs are data, where others are sizes, scales, axes or limits. Zeros in these make a
#: graph invalid, or change nothing.
_DATA_INPUTS = dict.fromkeys(("ConstantOfShape", "Range"), 0) | dict.fromkeys(
    ("CumSum", "Dropout", "Expand", "OneHot", "Pad", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile", "TopK",
     "Trilu", "Unsqueeze", "Upsample"), 1
)  # fmt: skip
#: Operations that a whole number of zero ends, with the process.
_DIVIDING = ("Div", "Mod")
_DIVIDING_IN_TORCH = ("div", "floor_divide", "fmod", "remainder")
_NOTHING = (
    "check: cannot build the negative control: the graph has no quantization scale, no weight and no other constant to "
    "damage. A model without any computes nothing that precision could change: run it outside the engine"
)


def damaged_copy(model: OnnxModel) -> tuple[OnnxModel, str, str]:
    """The ONNX graph with one tensor damaged, which node's, and how.

    The constants that hold it keep their names, by which a refit finds them in an engine; what else reads one of them
    reads a copy.

    Raises:
        BuildError: it has no quantization scale, no weight and no other constant that is not zero.
    """
    import onnx

    proto = onnx.load_from_string(model.data)
    _, tensor, how = damage(proto)
    return replace(model, data=proto.SerializeToString()), tensor, how


def damage(proto: ModelProto) -> tuple[set[str], str, str]:
    """The constants that are changed in the file to damage one tensor, which node's that is, and how.

    Raises:
        BuildError: as `damaged_copy`.
    """
    from onnx import numpy_helper

    graph = proto.graph
    constants: dict[str, TensorProto] = {i.name: i for i in graph.initializer}
    quantizers = [
        n
        for n in graph.node  # of activations: for TensorRT 8.6 weights have a Q of their own
        if n.op_type == "QuantizeLinear" and n.input[1] in constants and n.input[0] not in constants
    ]
    if quantizers:
        damaged = _nearest_the_outputs(proto, quantizers)
        hows = []
        changed = set[str]()
        scales: dict[str, list[NodeProto]] = {}
        factors: dict[str, float] = {}
        for node in damaged:
            if node.op_type == "DequantizeLinear":
                hows.append(HOW_WEIGHT)
                _changed(graph, node.input[0], [node], _zeros_like(constants[node.input[0]]))
                changed.add(node.input[0])
                continue
            readers, factor, how = _damage(proto, constants, node)
            hows.append(how)
            for reader in readers:
                scales.setdefault(reader.input[1], []).append(reader)
                factors[reader.input[1]] = factor
        for name, factor in factors.items():
            scale = numpy_helper.to_array(constants[name])
            new = (scale.astype(np.float32) * factor).astype(scale.dtype)
            _changed(graph, name, scales[name], numpy_helper.from_array(new, name))
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        return changed | factors.keys(), damaged[-1].name + more, hows[-1]
    weights = [
        (n, i)
        for n in graph.node
        for i in (n.input[:1] if n.op_type == "DequantizeLinear" else n.input[:2])
        if i in constants
        and (n.op_type in WEIGHTED_OPERATORS or (n.op_type == "DequantizeLinear" and _in_four_bits(constants[i])))
    ]
    weights = weights or _any_constants(graph, constants)
    if not weights:
        raise BuildError(_NOTHING)
    met = _met_on_the_way_back(proto, set(), {name for _, name in weights})
    chosen = [(n, name) for n, name in weights if name in met] or weights[-1:]
    for name in dict.fromkeys(name for _, name in chosen):
        _changed(graph, name, [n for n, of in chosen if of == name], _zeros_like(constants[name]))
    last = chosen[-1][0].name + (f" and {len(chosen) - 1} more" if len(chosen) > 1 else "")
    return {name for _, name in chosen}, last, HOW_WEIGHT


def _changed(graph: GraphProto, name: str, readers: Sequence[NodeProto], new: TensorProto) -> None:
    """Change a constant for some of its readers; the others have a copy of it."""
    (constant,) = (i for i in graph.initializer if i.name == name)
    others = [n for n in graph.node if name in n.input and n not in readers]
    if others:
        kept = graph.initializer.add()
        kept.CopyFrom(constant)
        kept.name = f"{name}_undamaged"
        for node in others:
            node.input[:] = [kept.name if given == name else given for given in node.input]
    constant.CopyFrom(new)


def _read_as_data(graph: GraphProto) -> list[tuple[NodeProto, str]]:
    """Every node from which data reach an output, with each of its inputs that is data, in the graph's order."""
    reaching, found = {o.name for o in graph.output}, []
    for node in reversed(graph.node):
        if not reaching.isdisjoint(node.output):
            count = 1 if node.op_type.startswith("Reduce") else _DATA_INPUTS.get(node.op_type, len(node.input))
            reaching.update(node.input[:count])
            found += [(node, name) for name in reversed(node.input[:count])]
    return found[::-1]


def _any_constants(graph: GraphProto, constants: Mapping[str, TensorProto]) -> list[tuple[NodeProto, str]]:
    """The nodes with data that are constants and not zero already: those of floating point, or where there is none
    those of other dtypes."""
    from onnx import numpy_helper

    read = [(n, i, numpy_helper.to_array(constants[i])) for n, i in _read_as_data(graph) if i in constants]
    floats = [(n, i) for n, i, value in read if value.dtype.kind == "f" and value.any()]
    return floats or [(n, i) for n, i, value in read if value.any() and n.op_type not in _DIVIDING]


def _in_four_bits(constant: TensorProto) -> bool:
    import onnx

    return constant.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.FLOAT4E2M1)


def _zeros_like(constant: TensorProto) -> TensorProto:
    """A constant of zeros, in any dtype: those of 4 bits lie two in a byte."""
    import onnx
    from onnx import numpy_helper

    size = -(-math.prod(constant.dims) // 2) if _in_four_bits(constant) else numpy_helper.to_array(constant).nbytes
    return onnx.helper.make_tensor(constant.name, constant.data_type, constant.dims, bytes(size), raw=True)


def _damage(
    proto: ModelProto, constants: Mapping[str, TensorProto], node: NodeProto
) -> tuple[list[NodeProto], float, str]:
    """The nodes whose scale is changed to damage what an activation's Q gives, by which factor, and how that is
    called."""
    import onnx

    zero_point = constants.get(node.input[2]) if len(node.input) > 2 else None
    fp8 = zero_point is not None and zero_point.data_type == onnx.TensorProto.FLOAT8E4M3FN
    readers = [n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == node.output[0]]
    return [node, *readers], *((1 / SCALE_FACTOR, HOW_FP8) if fp8 else (SCALE_FACTOR, HOW_SCALE))


def _nearest_the_outputs(proto: ModelProto, quantizers: Sequence[NodeProto]) -> list[NodeProto]:
    """The activations' Q and the 4-bit weights' DQ that a way back from an output meets first, in the graph's order."""
    stored = {i.name for i in proto.graph.initializer if _in_four_bits(i)}
    weights = [n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored]
    met = _met_on_the_way_back(proto, {q.output[0] for q in quantizers}, {w.output[0] for w in weights})
    found = [n for n in (*quantizers, *weights) if n.output[0] in met] or [quantizers[-1]]
    return sorted(found, key=list(proto.graph.node).index)


def _met_on_the_way_back(proto: ModelProto, quantizers: set[str], weights: set[str]) -> set[str]:
    """`_met_first` of a file."""
    producer = {name: node for node in proto.graph.node for name in node.output}
    data = {i.name for i in proto.graph.input}
    for node in proto.graph.node:
        if not data.isdisjoint(node.input):
            data.update(node.output)
    return _met_first(
        (o.name for o in proto.graph.output),
        lambda name: producer[name].input if name in producer else (),
        quantizers,
        weights,
        data.__contains__,
    )


def _met_first(
    outputs: Iterable[Value],
    inputs_of: Callable[[Value], Iterable[Value]],
    quantizers: set[Value],
    weights: set[Value],
    is_data: Callable[[Value], bool],
) -> set[Value]:
    """Of the values of `quantizers` and `weights`, those that a way back from an output meets before any other.

    A weight is met at the operation that reads it, directly or through what depends on no input.
    """
    todo, seen, met = list(outputs), set[Value](), set[Value]()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in quantizers:
            met.add(value)
            continue
        inputs = list(inputs_of(value))
        constant = [i for i in inputs if not is_data(i)]
        read = set[Value]()
        while constant:
            at = constant.pop()
            read |= {at} & weights
            constant += () if at in weights else inputs_of(at)
        met |= read
        todo += () if read else inputs
    return met


def damaged_program(loaded: LoadedModel, quantized: Quantized) -> tuple[Quantized, LoadedModel, str, str]:
    """The same of an exported program and of the model it was made of, for routes that compile either without ONNX.

    Without quantization both have the same weight set to zero, so that it does not matter which one is compiled.

    Raises:
        BuildError: the program has no quantization scale, no weight and no other constant that is not zero.
    """
    from trtpipe.model.nodes import calls, module_path, op_name

    graph = graph_module(quantized.program)
    nodes = list(calls(graph.graph))
    quantizers = [n for n in nodes if op_name(n) in _QUANTIZERS]
    weights = [n for n in nodes if op_name(n) in _FOUR_BITS]
    if quantizers:
        met = _met_in(graph, set(quantizers), set(weights))
        damaged = [n for n in nodes if n in met] or [quantizers[-1]]
        for node in damaged:
            if op_name(node) in _FOUR_BITS:
                _set_to_zero(graph, node, node.args[1])
                continue
            factor, _ = _QUANTIZERS[op_name(node)]
            for scaled in (node, *node.users):
                scaled.args = (scaled.args[0], float(scaled.args[1]) * factor, *scaled.args[2:])  # type: ignore[arg-type]
        last = damaged[-1]
        how = HOW_WEIGHT if op_name(last) in _FOUR_BITS else _QUANTIZERS[op_name(last)][1]
        reader = next(iter(last.users)) if op_name(last) in _FOUR_BITS else _behind(last)
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    else:
        readers, how = _without_weights(graph, nodes), HOW_WEIGHT
        loaded = _without_weights_of(loaded, [module_path(r) for r in readers])
        reader, more = readers[-1], f" and {len(readers) - 1} more" if len(readers) > 1 else ""
    graph.recompile()
    tensor = f"{titled(module_path(reader))}/{op_name(reader)}{more}"
    return replace(quantized, program=export(graph, quantized.inputs)), loaded, tensor, how


def _met_in(graph: GraphModule, quantizers: set[Node], weights: set[Node]) -> set[Node]:
    """`_met_first` of a program."""
    data = set(graph.graph.find_nodes(op="placeholder"))
    for node in graph.graph.nodes:
        if not data.isdisjoint(node.all_input_nodes):
            data.add(node)
    ends = graph.graph.output_node().all_input_nodes
    return _met_first(ends, lambda n: n.all_input_nodes, quantizers, weights, data.__contains__)


def _without_weights_of(loaded: LoadedModel, paths: Sequence[str]) -> LoadedModel:
    """The model with the weights of some of its modules set to zero."""
    from trtpipe.model.bindings import INNER

    module = copy.deepcopy(loaded.module)
    network = module.get_submodule(INNER)
    for path in paths:
        parameters = list(network.get_submodule(path).parameters(recurse=False))
        for parameter in [p for p in parameters if p.dim() > 1] or parameters:
            parameter.data.zero_()
    return replace(loaded, module=module)


def _without_weights(graph: GraphModule, nodes: list[Node]) -> list[Node]:
    """The last operations on the way to each output that have a constant weight, which is now zero."""
    from trtpipe.model.nodes import constant_value, is_constant, op_name

    read = [(n, c, constant_value(graph, c)) for n in nodes for c in n.all_input_nodes if is_constant(c)]
    weights = [
        (n, c)
        for n, c, value in read
        if (op_name(n).startswith(PRODUCTS) and value.dim() > 1) or (op_name(n) in _FOUR_BITS and c is n.args[1])
    ]
    weights = weights or [(n, c) for n, c, value in read if value.is_floating_point() and bool(value.any())]
    weights = weights or [(n, c) for n, c, value in read if bool(value.any()) and op_name(n) not in _DIVIDING_IN_TORCH]
    if not weights:
        raise BuildError(_NOTHING)
    met = _met_in(graph, set(), {c for _, c in weights})
    chosen = [(n, c) for n, c in weights if c in met] or weights[-1:]
    for node, constant in chosen:
        _set_to_zero(graph, node, constant)
    readers = (next(iter(n.users)) if op_name(n) in _FOUR_BITS else n for n, _ in chosen)
    return list(dict.fromkeys(readers))


def _behind(quantizer: Node) -> Node:
    """What reads the quantized activation, behind its dequantization."""
    return next((u for d in quantizer.users for u in d.users), quantizer)


def _set_to_zero(graph: GraphModule, node: Node, constant: Any) -> None:
    """Have an operation read zeros in the place of a constant."""
    import torch

    from trtpipe.model.nodes import add_constant, constant_value

    zeros = torch.zeros_like(constant_value(graph, constant))
    node.replace_input_with(constant, add_constant(graph, "damaged_weight", zeros, node))

"""What an ONNX file computes from its constants alone, as constants of their own: copies of any, and small values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.model.onnx.values import MOST_NUMBERS
from trtpipe.onnx_format import ONNX_DOMAINS, QDQ

if TYPE_CHECKING:
    from collections.abc import Collection

    import onnx
    import onnx_ir as ir


def without_copies(model: ir.Model) -> None:
    """Take out every Identity of a constant: exporters write one where two places read the same weight, codes or scale.

    Args:
        model: changed in place; its nodes in the order of execution.
    """
    for node in list(model.graph):
        constant = node.inputs[0] if node.op_type == "Identity" and node.domain in ONNX_DOMAINS else None
        if constant is not None and constant.const_value is not None and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(constant)
            model.graph.remove(node, safe=True)


def without_constant_outputs(model: ir.Model) -> None:
    """Make each output that a Constant node gives the Identity of it, as only what is no output becomes an initializer.

    Args:
        model: changed in place; the outputs keep their names.
    """
    import onnx_ir as ir

    graph = model.graph
    for k, value in enumerate(graph.outputs):
        node = value.producer()
        if node is not None and node.op_type == "Constant" and node.domain in ONNX_DOMAINS:
            copy = ir.node("Identity", [value])
            graph.insert_after(node, copy)
            graph.outputs[k] = copy.outputs[0]
            copy.outputs[0].name, value.name = value.name, f"{value.name}_constant"
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type


def make_dense(graph: onnx.GraphProto) -> None:
    """Write the sparse constants of a graph out, which onnx_ir does not read; the graph is changed."""
    from onnx import helper, numpy_helper

    for sparse in graph.sparse_initializer:
        graph.initializer.append(numpy_helper.from_array(_dense(sparse), sparse.values.name))
    del graph.sparse_initializer[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "sparse_value":
                tensor = numpy_helper.from_array(_dense(attribute.sparse_tensor), node.output[0])
                attribute.CopyFrom(helper.make_attribute("value", tensor))


def _dense(sparse: onnx.SparseTensorProto) -> Array:
    """The places of its values are numbers in the order of the dense elements, [NNZ], or their indices, [NNZ, rank]."""
    from onnx import numpy_helper

    values, places = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if places.ndim == 1:
        dense.reshape(-1)[places] = values
    else:
        dense[tuple(places.T)] = values
    return dense


def fold_constants(model: ir.Model, operators: Collection[str]) -> None:
    """Compute what depends on no input, where it reads numbers, lists and integers alone; weights are of a higher rank.

    A size that is computed from the data would make any engine impossible, and exporters write many a size as the root,
    the largest or the rounded quotient of constants. ONNX's reference implementation computes them.

    Args:
        model: changed in place; its nodes in the order of execution.
        operators: names of the operators that can be converted; others stay, to be refused by name.
    """
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator

    graph, version = model.graph, model.opset_imports.get("", 0)
    for node in list(graph):
        known = node.domain in ONNX_DOMAINS and node.op_type in operators and node.op_type not in QDQ
        read = {str(v.name): v for v in node.inputs if v is not None}
        if not known or not read or not all(_is_small(v) for v in read.values()):
            continue
        if len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            continue
        old = node.outputs[0]
        given = {n: v.const_value.numpy() for n, v in read.items() if v.const_value is not None}
        try:
            evaluator = ReferenceEvaluator(ir.to_proto(node), opsets={"": version})
            found = np.asarray(evaluator.run(None, given)[0])
        except Exception:  # noqa: BLE001  (what it has not, or refuses, is converted like any other node)
            continue
        if found.size > MOST_NUMBERS:
            continue
        name = str(old.name)
        value = ir.Value(name=f"{name}/folded", const_value=ir.tensor(found, name=f"{name}/folded"))
        old.replace_all_uses_with(value)
        graph.remove(node, safe=True)
        value.name = name
        graph.register_initializer(value)


def _is_small(value: ir.Value) -> bool:
    """Whether it is a constant that can be numbers: of rank 0 or 1, or of integers."""
    tensor = value.const_value
    if tensor is None or tensor.size > MOST_NUMBERS:
        return False
    return len(tensor.shape) <= 1 or not tensor.dtype.is_floating_point()

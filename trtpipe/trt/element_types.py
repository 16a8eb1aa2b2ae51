"""The element types of all tensors of an ONNX graph, inferred without its weights. Needs onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto

#: Constants larger than this, in bytes, are weights: no shape is computed from them.
LARGEST_SHAPE = 1 << 10


def element_types(model: ModelProto) -> dict[str, int]:
    """The element type (a number of onnx.TensorProto.DataType) of every value and initializer of the graph by name.

    ONNX's inference copies a whole file several times over. Here weights are inputs to it, which have types and shapes
    and no values.

    Raises:
        onnx.shape_inference.InferenceError: the file names no opset.
    """
    import onnx

    graph = model.graph
    known = {v.name for v in graph.input}
    large = [i for i in graph.initializer if i.ByteSize() > LARGEST_SHAPE]
    weights = [onnx.helper.make_tensor_value_info(i.name, i.data_type, i.dims) for i in large if i.name not in known]
    names = {i.name for i in large}
    light = onnx.helper.make_graph(
        graph.node,
        graph.name,
        [*graph.input, *weights],
        graph.output,
        [i for i in graph.initializer if i.name not in names],
        value_info=graph.value_info,
    )
    made = onnx.helper.make_model(
        light, opset_imports=model.opset_import, functions=model.functions, ir_version=model.ir_version
    )
    inferred = onnx.shape_inference.infer_shapes(made).graph
    values = (*inferred.input, *inferred.output, *inferred.value_info)
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    return types | {i.name: i.data_type for i in graph.initializer}

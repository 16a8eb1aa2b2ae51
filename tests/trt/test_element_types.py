"""Types of an ONNX graph inferred without its weights are those that ONNX infers from the whole file."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trtpipe.routes.onnx import to_onnx
from trtpipe.trt.element_types import LARGEST_SHAPE, element_types


class Net(torch.nn.Module):
    """Large and small constants, a reshape, integers and a boolean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.Linear(32 * 64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x)).flatten(1)
        return torch.where(y.sum(1, keepdim=True) > 0, self.head(y), 0.0)


def whole(model: onnx.ModelProto) -> dict[str, int]:
    """What ONNX's own inference says of the whole file."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    return types | {i.name: i.data_type for i in graph.initializer}


@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
def test_types_are_those_of_the_whole_file(int8: bool, half: Any) -> None:
    model = onnx.load_from_string(to_onnx(models.line(Net().eval(), 8, 5).quantized(int8=int8, half=half)).data)
    del model.graph.value_info[:]
    before = model.SerializeToString()
    assert max(i.ByteSize() for i in model.graph.initializer) > LARGEST_SHAPE
    types = element_types(model)
    assert types == whole(model)
    assert {o for n in model.graph.node for o in n.output} <= set(types)
    assert model.SerializeToString() == before


@pytest.mark.parametrize("version", [3, 10])
def test_a_weight_may_be_an_input_too(version: int) -> None:
    """Before IR version 4 every initializer is."""
    weight = numpy_helper.from_array(np.ones((64, 64), np.float16), "w")
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, s) for n, s in (("x", [2, 64]), ("w", [64, 64]))]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Cast", ["m"], ["y"], to=TensorProto.FLOAT)],
        "g",
        inputs[: 2 if version == 3 else 1],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 64])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=version)
    half, full = TensorProto.FLOAT16, TensorProto.FLOAT
    assert element_types(model) == {"x": half, "w": half, "m": half, "y": full}


def test_a_file_that_names_no_opset_is_refused() -> None:
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph)
    del model.opset_import[:]
    with pytest.raises(onnx.shape_inference.InferenceError, match="No opset import"):
        element_types(model)

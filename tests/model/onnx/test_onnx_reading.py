"""Files that say the same in other ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from trtpipe.errors import InputError
from trtpipe.model.onnx.network import load_network, require_bindings

X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def file(path: Path, *, domain: str = "", of_nodes: str = "", shape: list[int | str] | None) -> Path:
    """A ReLU, and another in a function."""
    relu = helper.make_node("Relu", ["a"], ["b"])
    function = helper.make_function("own", "F", ["a"], ["b"], [relu], [helper.make_opsetid("", 17)])
    nodes = [
        helper.make_node("Neg", ["x"], ["n"], domain=of_nodes),
        helper.make_node("F", ["n"], ["f"], domain="own"),
        helper.make_node("Relu", ["f"], ["y"], domain=of_nodes),
    ]
    bindings = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)] for n in "xy"]
    graph = helper.make_graph(nodes, "g", *bindings)
    opsets = [helper.make_opsetid(domain, 17), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8), path)
    return path


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
@pytest.mark.parametrize("of_nodes", ["", "ai.onnx"])
@pytest.mark.parametrize("shape", [["N", 4], None], ids=["a shape", "no shape"])
def test_both_names_of_onnxs_own_operators_and_any_declared_shape(
    domain: str, of_nodes: str, shape: list[int | str] | None, tmp_path: Path
) -> None:
    path = file(tmp_path / "m.onnx", domain=domain, of_nodes=of_nodes, shape=shape)
    (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": X})
    network = load_network(path)
    require_bindings(network.file, {"x": ("N", 4)})
    np.testing.assert_array_equal(network(torch.from_numpy(X))["y"].numpy(), expected)


def test_a_shape_that_the_file_does_not_give_is_shown_as_such(tmp_path: Path) -> None:
    network = load_network(file(tmp_path / "m.onnx", shape=None))
    with pytest.raises(InputError, match=r"and the file has x float32 of any shape\)\. Name them as the file does"):
        require_bindings(network.file, {"image": ("N", 4)})

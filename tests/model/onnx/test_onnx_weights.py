"""Weights that stand behind nodes in the file: exporters leave them there where several nodes read one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.support import nets
from trtpipe.errors import InputError
from trtpipe.model.capture import capture
from trtpipe.model.onnx.network import load_network


def file(path: Path, nodes: list[Any], *outputs: str, **constants: np.ndarray[Any, Any]) -> Path:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4, 6])
    held = [numpy_helper.from_array(a, name.replace("__", ".")) for name, a in constants.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], values, held))
    model.opset_import[0].version, model.ir_version = 17, 8
    onnx.save(model, path)
    return path


WEIGHTS = {
    "fc__weight": np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32),
    "fc__bias": np.random.default_rng(1).normal(size=6).astype(np.float32),
}
TIED = [
    helper.make_node("Transpose", ["fc.weight"], ["turned"], perm=[1, 0]),
    helper.make_node("Identity", ["fc.bias"], ["same"]),
    helper.make_node("Identity", ["turned"], ["passed on"]),
    helper.make_node("MatMul", ["x", "turned"], ["a"]),
    helper.make_node("Add", ["same", "a"], ["b"]),
    helper.make_node("Relu", ["b"], ["c"]),
    helper.make_node("MatMul", ["c", "passed on"], ["d"]),
    helper.make_node("Add", ["d", "fc.bias"], ["y"]),
]


@pytest.mark.parametrize("outputs", [("y",), ("y", "turned"), ("y", "passed on"), ("y", "a")])
def test_a_weight_that_several_nodes_read_is_one_weight_of_linears(outputs: tuple[str, ...], tmp_path: Path) -> None:
    path = file(tmp_path / "m.onnx", TIED, *outputs, **WEIGHTS)
    network = load_network(path)
    x = np.random.default_rng(2).normal(size=(2, 4, 6)).astype(np.float32)
    with torch.inference_mode():
        found = network(torch.from_numpy(x))
    expected = onnxruntime.InferenceSession(path).run(list(outputs), {"x": x})
    for name, value in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-5, atol=1e-6)
    if outputs == ("y",):
        captured = capture(nets.loaded(network.eval(), shape=("N", 4, 6), outputs=("y",), out_shape=("N", 4, 6)))
        assert [s.key for s in captured.sites] == ["fc:input", "fc:weight", "fc:input_1", "fc:weight_1"]
        assert [s.rule for s in captured.sites] == ["Q1", "Q2"] * 2
        assert len({s.producer for s in captured.sites if s.rule == "Q2"}) == 1
        bias = {n.args[2] for n in captured.graph.graph.nodes if "linear" in str(n.target)}
        assert len(bias) == 1


@pytest.mark.parametrize("before", [(), ("Transpose",), ("Unsqueeze", "Squeeze")])
@pytest.mark.parametrize("other", [False, True])
def test_pictures_in_uint8_are_cast_once(before: tuple[str, ...], other: bool, tmp_path: Path) -> None:
    """TensorRT takes no uint8 but an input's; what computes in it keeps it."""
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    nodes, name = [], "x"
    for op in before:
        inputs = [name] if op == "Transpose" else [name, "axes"]
        nodes.append(helper.make_node(op, inputs, [f"{name}_"], **({"perm": [0, 2, 1]} if op == "Transpose" else {})))
        name += "_"
    nodes += [helper.make_node("Cast", [name], ["f"], to=TensorProto.FLOAT), helper.make_node("Relu", ["f"], ["y"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    if other:
        nodes += [helper.make_node("Add", ["x", "x"], ["twice"]), helper.make_node("Cast", ["twice"], ["z"], to=1)]
        outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, ["N", 4, 6])
    model = helper.make_model(helper.make_graph(nodes, "g", [x], outputs, [axes]))
    model.opset_import[0].version, model.ir_version = 17, 8
    onnx.save(model, tmp_path / "m.onnx")
    network = load_network(tmp_path / "m.onnx")
    given = np.random.default_rng(0).integers(0, 256, (2, 4, 6)).astype(np.uint8)
    expected = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": given})
    with torch.inference_mode():
        found = network(torch.from_numpy(given).float())
    for value, output in zip(expected, found.values(), strict=True):
        np.testing.assert_array_equal(output.numpy(), value)
    program = torch.export.export(network, (torch.from_numpy(given).float(),))
    narrow = [n for n in program.graph.nodes if getattr(n.meta.get("val"), "dtype", None) is torch.uint8]
    assert bool(narrow) is other


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("kind", ["initializer", "constant"])
def test_a_sparse_weight_is_the_dense_one(rank: int, kind: str, tmp_path: Path) -> None:
    weight = np.where(WEIGHTS["fc__weight"] > 0.5, WEIGHTS["fc__weight"], 0)
    places = np.flatnonzero(weight) if rank == 1 else np.argwhere(weight)
    values = numpy_helper.from_array(weight[weight != 0], "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places.astype(np.int64), "at"), weight.shape)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if kind == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    path = file(tmp_path / "m.onnx", nodes, "y")
    if kind == "initializer":
        model = onnx.load(path)
        model.graph.sparse_initializer.append(sparse)
        onnx.save(model, path)
    x = np.random.default_rng(2).normal(size=(2, 4, 6)).astype(np.float32)
    with torch.inference_mode():
        found = load_network(path)(torch.from_numpy(x))["y"]
    np.testing.assert_allclose(found.numpy(), x @ weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["class", "heads.class.weight", "lambda.from.in", "None"])
def test_a_keyword_of_python_as_the_name_of_a_constant(name: str, tmp_path: Path) -> None:
    """PyTorch writes code of the names of a network's constants."""
    weight = WEIGHTS["fc__weight"]
    nodes = [helper.make_node("MatMul", ["x", name], ["def"]), helper.make_node("Relu", ["def"], ["y"])]
    network = load_network(file(tmp_path / "m.onnx", nodes, "y", **{name: weight}))
    captured = capture(nets.loaded(network.eval(), shape=("N", 4, 6), outputs=("y",), out_shape=("N", 4, 6)))
    x = np.random.default_rng(2).normal(size=(2, 4, 6)).astype(np.float32)
    with torch.inference_mode():
        (found,) = captured.graph(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), np.maximum(x @ weight, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        {"value": numpy_helper.from_array(np.arange(6, dtype=np.float32))},
        {"value": numpy_helper.from_array(np.array(2.5, np.float32))},
        {"value_float": 2.5},
        {"value_floats": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]},
    ],
)
def test_a_constant_may_be_an_output_and_be_read(kind: dict[str, Any], tmp_path: Path) -> None:
    """Anchors and scales are given along by detectors."""
    nodes = [helper.make_node("Constant", [], ["anchors"], **kind), helper.make_node("Add", ["x", "anchors"], ["y"])]
    path = file(tmp_path / "m.onnx", nodes, "y", "anchors")
    x = np.random.default_rng(2).normal(size=(2, 4, 6)).astype(np.float32)
    found = load_network(path)(torch.from_numpy(x))
    expected = onnxruntime.InferenceSession(path).run(["y", "anchors"], {"x": x})
    assert list(found) == ["y", "anchors"]
    for name, value in zip(found, expected, strict=True):
        np.testing.assert_array_equal(found[name].numpy(), value)


@pytest.mark.parametrize("parts", [2, 3])
def test_equal_parts_of_a_dynamic_size_are_refused_as_such(parts: int, tmp_path: Path) -> None:
    """How many elements a part has is known at run time alone."""
    names = [f"part{k}" for k in range(parts)]
    nodes = [helper.make_node("Split", ["x"], names, axis=0), helper.make_node("Relu", [names[-1]], ["y"])]
    network = load_network(file(tmp_path / "m.onnx", nodes, "y"))
    with pytest.raises(InputError, match=r"Split \(part0\) needs a dynamic size as a number\. Declare it as a number"):
        capture(nets.loaded(network, ("N", 4, 6), outputs=("y",), out_shape=("M", 4, 6)))

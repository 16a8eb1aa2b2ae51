"""What exporters compute of shapes stays numbers: networks whose pads and limits follow from them are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trtpipe.model.onnx.network import load_network

FIRST, A = np.array([0]), np.array([3, 2])
TRUE = np.array([True, False])
#: operator, attributes, inputs: "hw" is the image's [8, 6] by Shape, "compared" is hw > 7.
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    *((name, {}, ["hw", A]) for name in ("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Pow")),
    ("Mod", {"fmod": 1}, ["hw", A]),
    *((name, {}, ["hw", A]) for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    *((name, {}, ["compared", TRUE]) for name in ("And", "Or", "Xor")),
    ("Not", {}, ["compared"]),
    *((name, {}, ["hw"]) for name in ("Neg", "Abs", "Sign", "Identity", "Flatten")),
    *((name, {"keepdims": 1}, ["hw"]) for name in ("ReduceProd", "ReduceMax", "ReduceMin", "ReduceSum")),
    ("Where", {}, ["compared", "hw", A]),
    ("Cast", {"to": TensorProto.INT32}, ["hw"]),
    ("Gather", {}, ["hw", np.array([1, 0])]),
    ("Slice", {}, ["hw", np.array([-1]), np.array([-9]), FIRST, np.array([-1])]),
    ("Concat", {"axis": 0}, ["hw", A]),
    ("Split", {"num_outputs": 2}, ["hw"]),
    ("Unsqueeze", {}, ["hw", FIRST]),
    ("Reshape", {}, ["hw", np.array([2, 1])]),
    ("Transpose", {}, ["hw"]),
    ("Tile", {}, ["hw", np.array([2])]),
    ("Expand", {}, ["hw", np.array([2, 2])]),
]


@pytest.mark.parametrize(("operator", "attributes", "inputs"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_an_operator_of_shape_arithmetic_gives_numbers(
    tmp_path: Path, operator: str, attributes: dict[str, Any], inputs: list[Any]
) -> None:
    constants = {
        "seven": np.array([7, 7]),
        "first": FIRST,
        "one": FIRST + 1,
        "flat": FIRST - 1,
        "line": np.arange(64, dtype=np.float32),
    }
    names = []
    for k, given in enumerate(inputs):
        names.append(given if isinstance(given, str) else f"c{k}")
        if not isinstance(given, str):
            constants[f"c{k}"] = given
    nodes = [
        helper.make_node("Shape", ["x"], ["hw"], start=2),
        helper.make_node("Greater", ["hw", "seven"], ["compared"]),
        helper.make_node(operator, names, ["r", "rest"] if operator == "Split" else ["r"], **attributes),
        helper.make_node("Cast", ["r"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["whole", "flat"], ["row"]),
        helper.make_node("Slice", ["row", "first", "one"], ["end"]),
        helper.make_node("Slice", ["line", "first", "end"], ["part"]),  # whose limit has to be known
        helper.make_node("ReduceMean", ["x"], ["mean"]),
        helper.make_node("Mul", ["part", "mean"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "net.onnx")
    x = np.ones((2, 3, 8, 6), np.float32)
    (wanted,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})
    found = load_network(tmp_path / "net.onnx", ("y",))(torch.from_numpy(x))
    values = found[0] if isinstance(found, (tuple, list)) else found["y"] if isinstance(found, dict) else found
    np.testing.assert_allclose(values.numpy(), wanted, rtol=1e-6, err_msg=operator)


#: What a file computes of constants alone: nodes from floats `n` (1369), `l` ([3, 5]) and integers to `r`.
OF_CONSTANTS: dict[str, list[tuple[str, list[str], dict[str, Any]]]] = {
    "Pow": [("Pow", ["n", "half"], {}), ("Identity", ["t0"], {}), ("Cast", ["t1"], {"to": 7})],
    "Sqrt": [("Identity", ["n"], {}), ("Sqrt", ["t0"], {}), ("Floor", ["t1"], {}), ("Cast", ["t2"], {"to": 7})],
    "ReduceMax": [("ReduceMax", ["l"], {"keepdims": 0}), ("Cast", ["t0"], {"to": 7})],
    "Exp": [("Exp", ["half"], {}), ("Ceil", ["t0"], {}), ("Cast", ["t1"], {"to": 6}), ("Cast", ["t2"], {"to": 7})],
    "rank 2": [
        ("Concat", ["i", "i"], {"axis": 0}),
        ("Reshape", ["t0", "pairs"], {}),
        ("Transpose", ["t1"], {"perm": [1, 0]}),
        ("ReduceMax", ["t2"], {"keepdims": 0}),
    ],
}


@pytest.mark.parametrize("case", OF_CONSTANTS)
def test_a_size_computed_from_constants_alone_is_known(tmp_path: Path, case: str) -> None:
    constants = {
        "n": np.array(1369, np.float32), "half": np.array(0.5, np.float32), "l": np.array([3, 5], np.float32),
        "i": np.array([2, 4]), "pairs": np.array([-1, 2]), "flat": FIRST - 1, "first": FIRST,
        "line": np.arange(64, dtype=np.float32),
    }  # fmt: skip
    nodes = [helper.make_node(op, read, [f"t{k}"], **with_) for k, (op, read, with_) in enumerate(OF_CONSTANTS[case])]
    nodes += [
        helper.make_node("Reshape", [f"t{len(nodes) - 1}", "flat"], ["end"]),
        helper.make_node("Slice", ["line", "first", "end"], ["part"]),
        helper.make_node("ReduceMean", ["x"], ["mean"]),
        helper.make_node("Mul", ["part", "mean"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    x = np.ones((2, 3, 8, 6), np.float32)
    (wanted,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
    found = load_network(tmp_path / "m.onnx", ("y",))(torch.from_numpy(x))["y"]
    np.testing.assert_array_equal(found.numpy(), wanted)
    assert wanted.size > 1

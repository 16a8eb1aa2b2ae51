"""Weights are dequantized where they are read first, so that they are not all held in FP32 at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from trtpipe.errors import InputError
from trtpipe.runtime.half_rounding import rounded
from trtpipe.runtime.node_order import weights_late
from trtpipe.runtime.onnxruntime import OrtRunner

LAYERS, SIDE = 12, 1024


def early(element: int = TensorProto.FLOAT) -> bytes:
    """A chain of matmuls whose INT8 weights are all dequantized before the first."""
    rng = np.random.default_rng(0)
    kind = helper.tensor_dtype_to_np_dtype(element)
    held = [numpy_helper.from_array(np.array(2.0**-10, kind), "s")]
    first, then = [], []
    for k in range(LAYERS):
        held.append(numpy_helper.from_array(rng.integers(-128, 128, (SIDE, SIDE), np.int8), f"q{k}"))
        first.append(helper.make_node("DequantizeLinear", [f"q{k}", "s"], [f"w{k}"]))
        then.append(helper.make_node("MatMul", [f"y{k}" if k else "x", f"w{k}"], [f"y{k + 1}"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [*first, *then],
        "early",
        [value("x", element, ["N", SIDE])],
        [value(f"y{LAYERS}", element, ["N", SIDE])],
        held,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_each_weight_is_dequantized_where_it_is_read(element: int) -> None:
    changed = rounded(early(element))
    assert changed is not None
    kinds = [n.op_type for n in onnx.load_from_string(changed).graph.node if n.op_type != "Cast"]
    assert kinds == ["DequantizeLinear", "MatMul"] * LAYERS
    if element == TensorProto.FLOAT:
        assert rounded(changed) is None
    x = np.random.default_rng(1).standard_normal((3, SIDE)).astype(helper.tensor_dtype_to_np_dtype(element))
    if element == TensorProto.FLOAT:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        (wanted,) = onnxruntime.InferenceSession(early(), options).run(None, {"x": x})
        np.testing.assert_array_equal(OrtRunner(early(), as_written=True).run({"x": x})[f"y{LAYERS}"], wanted)


def test_a_runner_that_was_closed_says_so() -> None:
    with OrtRunner(early(), as_written=True) as runner:
        pass
    with pytest.raises(
        InputError, match=r"^graph: must be open to be run \(its session was closed\)\. Open it again\.$"
    ):
        runner.run({"x": np.zeros((1, SIDE), np.float32)})


def test_a_circle_ends() -> None:
    nodes = [helper.make_node("Op", ["b", "c"], ["a"]), helper.make_node("Op", ["a"], ["b"])]
    nodes += [helper.make_node("Op", ["c"], ["c"]), helper.make_node("Op", ["x", "a"], ["y"])]
    assert sorted(n.output[0] for n in weights_late(nodes, ["x"])) == ["a", "b", "c", "y"]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Any], list[str]]:
    """Nodes in a topological order over two inputs and three initializers, some within a branch; some make nothing that
    is read, or omit an input."""
    names, inputs = ["a", "b", "c0", "c1", "c2"], ["a", "b"]
    nodes = []
    for k in range(draw(st.integers(0, 12))):
        read = draw(st.lists(st.sampled_from([*names, ""]), max_size=3))
        outputs = [f"n{k}", *([f"m{k}"] if draw(st.booleans()) else [])]
        node = helper.make_node("Op", read, outputs)
        if draw(st.booleans()):
            inner = helper.make_node("Op", [draw(st.sampled_from(names))], ["inner"])
            branch = helper.make_graph([inner], "branch", [], [helper.make_tensor_value_info("inner", 1, [])])
            node.attribute.append(helper.make_attribute("then_branch", branch))
        nodes.append(node)
        names += outputs
    return nodes, inputs


def reads(node: Any) -> set[str]:
    inner = {name for a in node.attribute for n in a.g.node for name in n.input}
    return {name for name in (*node.input, *inner) if name}


@given(graphs())
def test_the_order_stays_one_in_which_everything_is_there_when_it_is_read(made: tuple[list[Any], list[str]]) -> None:
    nodes, inputs = made
    ordered = weights_late(nodes, inputs)
    assert sorted(n.output[0] for n in ordered) == sorted(n.output[0] for n in nodes)
    makers = {name for n in nodes for name in n.output}
    seen: set[str] = set()
    fed = set(inputs)
    for n in nodes:
        if reads(n) & fed:
            fed.update(n.output)
    for place, node in enumerate(ordered):
        assert reads(node) & makers <= seen
        seen.update(node.output)
        later = ordered[place + 1 :]
        if not reads(node) & fed and any(reads(n) & fed for n in later):  # what is read by none comes last
            assert any(set(node.output) & reads(n) for n in later)
    fed_order = [n.output[0] for n in nodes if reads(n) & fed]
    assert [n.output[0] for n in ordered if reads(n) & fed] == fed_order

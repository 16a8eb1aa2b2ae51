from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from trtpipe.ort import OrtRunner


def test_what_fp16_rounds_between_operations_does_not_show_on_a_cpu() -> None:
    """docs/choosing.md says so. Where this fails, ONNX Runtime has changed for the better, and the page has to."""
    tiny = numpy_helper.from_array(np.array([1e-4], np.float16), "tiny")
    huge = numpy_helper.from_array(np.array([1e4], np.float16), "huge")
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["half", "tiny"], ["a"]),
        helper.make_node("Mul", ["a", "tiny"], ["b"]),  # 1e-8: zero in FP16
        helper.make_node("Mul", ["b", "huge"], ["c"]),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [tiny, huge])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with OrtRunner(model.SerializeToString(), as_written=True) as runner:
        found = runner.run({"x": np.ones(1, np.float32)})["y"]
    assert np.float16(1e-4) * np.float16(1e-4) * np.float16(1e4) == 0
    np.testing.assert_allclose(found, [1e-4], rtol=1e-2)

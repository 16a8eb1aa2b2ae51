"""Nearest resizing takes the very elements that ONNX Runtime takes, whichever way the file asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trtpipe.model.onnx.network import load_network

SCALES = (1.7, 0.6, 2.0, 1.5, 3.3, 0.35)


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("how", ["asymmetric", "half_pixel", "pytorch_half_pixel", "align_corners"])
def test_nearest_takes_the_elements_that_onnx_runtime_takes(
    tmp_path: Path, how: str, rounding: str, sizes: bool
) -> None:
    x = np.arange(32 * 20, dtype=np.float32).reshape(1, 1, 32, 20)
    for up, across in zip(SCALES, SCALES[::-1], strict=True):
        shape = np.array([1, 1, int(32 * up), int(20 * across)])
        given = shape if sizes else np.array([1, 1, up, across], np.float32)
        inputs = ["x", "", "", "given"] if sizes else ["x", "", "given"]
        attributes = {"mode": "nearest", "coordinate_transformation_mode": how, "nearest_mode": rounding}
        graph = helper.make_graph(
            [helper.make_node("Resize", inputs, ["y"], **attributes)],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 32, 20])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(given, "given")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(model, tmp_path / "net.onnx")
        (wanted,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})
        found = load_network(tmp_path / "net.onnx")(torch.from_numpy(x))["y"].numpy()
        np.testing.assert_array_equal(found, wanted, err_msg=f"{up}, {across}")

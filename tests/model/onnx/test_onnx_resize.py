"""Resize and Gather take the very elements that ONNX Runtime takes, whichever way the file asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trtpipe.model.onnx.network import load_network

SCALES = (1.7, 0.6, 2.0, 1.3, 1.1, 1.5, 3.3, 0.35)  # at 1.3 ties are decided by how a division is rounded


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize(
    "how", ["asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners"]
)
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


@pytest.mark.parametrize(
    ("op", "opset", "how", "scales"),
    [("Upsample", 9, None, (2.0, 2.0)), ("Upsample", 9, None, (1.3, 1.1)), ("Upsample", 9, None, (1.0, 2.5))]
    + [
        ("Resize", opset, how, scales)
        for opset, how in ((10, None), (11, "tf_half_pixel_for_nn"), (11, "asymmetric"))
        for scales in ((2.0, 2.0), (1.3, 1.1), (1.0, 2.5), (0.5, 0.5), (0.4, 3.0))
    ],
)
def test_nearest_of_old_opsets(
    tmp_path: Path, op: str, opset: int, how: str | None, scales: tuple[float, float]
) -> None:
    """Opset 10 rounds down where it enlarges, and up where it makes smaller."""
    x = np.arange(20 * 7, dtype=np.float32).reshape(1, 1, 20, 7)
    given, roi = np.array([1, 1, *scales], np.float32), np.zeros(0, np.float32)
    attributes = {} if how is None else {"coordinate_transformation_mode": how}
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "s"] if how is None else ["x", "roi", "s"], ["y"], mode="nearest", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 20, 7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(given, "s"), numpy_helper.from_array(roi, "roi")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)
    onnx.save(model, tmp_path / "net.onnx")
    (wanted,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})
    found = load_network(tmp_path / "net.onnx")(torch.from_numpy(x))["y"].numpy()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("size", [4, 5, 7, 12, 15, 24])
def test_any_ratio_of_two_sizes_is_a_scale(tmp_path: Path, mode: str, size: int) -> None:
    """In float32, as files have it: its product with the size is whole there, and in float64 a little less."""
    x = np.random.default_rng(0).normal(size=(1, 2, size, size)).astype(np.float32)
    for other in range(2, 4 * size, 3):
        scale = np.array([1, 1, other / size, other / size], np.float32)
        graph = helper.make_graph(
            [helper.make_node("Resize", ["x", "", "s"], ["y"], mode=mode, coordinate_transformation_mode="half_pixel")],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(scale, "s")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(model, tmp_path / "net.onnx")
        (wanted,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})
        found = load_network(tmp_path / "net.onnx")(torch.from_numpy(x))["y"].numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=f"{size} to {other}")


@pytest.mark.parametrize("places", [[[0, -1], [3, 2]], [0, -1], [[-6]], -2])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_places_are_counted_from_the_end_too(tmp_path: Path, places: object, given: bool, axis: int) -> None:
    """By a constant and by a tensor that is computed."""
    x = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    indices = np.array(places, np.int64)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 6])]
    nodes = [helper.make_node("Gather", ["x", "i"], ["y"], axis=axis)]
    if given:
        inputs.append(helper.make_tensor_value_info("given", TensorProto.INT64, list(indices.shape)))
        nodes.insert(0, helper.make_node("Identity", ["given"], ["i"]))
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    held = [] if given else [numpy_helper.from_array(indices, "i")]
    graph = helper.make_graph(nodes, "g", inputs, output, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "net.onnx")
    fed = {"x": x} | ({"given": indices} if given else {})
    (wanted,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, fed)
    found = load_network(tmp_path / "net.onnx")(*map(torch.from_numpy, fed.values()))["y"].numpy()
    np.testing.assert_array_equal(found, wanted)

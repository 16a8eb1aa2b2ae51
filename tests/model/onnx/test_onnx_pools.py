"""Pools give what ONNX Runtime gives, in shape and in values, for any window, or are refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from trtpipe.errors import InputError
from trtpipe.model.onnx.network import load_network

#: What is refused by the node's name, for one that is called n0.
REFUSED = r"AveragePool \(n0\) has (dilations|uneven pads that are not counted)"


@st.composite
def pools(draw: st.DrawFn) -> tuple[str, list[int], dict[str, Any]]:
    """An operator, the spatial sizes of its input and its attributes, for one to three spatial dimensions."""
    rank = draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 4)) for _ in range(rank)]
    attributes = {
        "kernel_shape": kernel,
        "strides": [draw(st.integers(1, 3)) for _ in kernel],
        "pads": [draw(st.integers(0, k - 1)) for k in kernel * 2],
        "ceil_mode": draw(st.integers(0, 1)),
    }
    operator = draw(st.sampled_from(["MaxPool", "AveragePool"]))
    if operator == "AveragePool":
        attributes["count_include_pad"] = draw(st.integers(0, 1))
    if draw(st.booleans()):
        attributes["dilations"] = [draw(st.integers(1, 2)) for _ in kernel]
    return operator, [draw(st.integers(5, 9)) for _ in kernel], attributes


def compare(path: Path, operator: str, sizes: list[int], attributes: dict[str, Any]) -> None:
    """Hold one pool against ONNX Runtime."""
    x = np.random.default_rng(0).standard_normal((2, 3, *sizes)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], "n0", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path / "net.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    (wanted,) = onnxruntime.InferenceSession(path / "net.onnx", options, ["CPUExecutionProvider"]).run(None, {"x": x})
    found = load_network(path / "net.onnx")(torch.from_numpy(x))["y"].numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@settings(max_examples=400, deadline=None)
@given(pool=pools())
def test_a_pool_is_that_of_onnx_runtime_or_refused(
    pool: tuple[str, list[int], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    operator, sizes, attributes = pool
    spans = zip(sizes, attributes["kernel_shape"], attributes.get("dilations", [1] * len(sizes)), strict=True)
    assume(all(size >= (k - 1) * d + 1 for size, k, d in spans))
    pads, kernel = attributes["pads"], attributes["kernel_shape"]
    ends = zip(pads[: len(kernel)], pads[len(kernel) :], kernel, strict=True)
    uneven = any(a != b or a > k // 2 for a, b, k in ends) and not attributes.get("count_include_pad")
    refused = operator == "AveragePool" and (uneven or any(d != 1 for d in attributes.get("dilations", [])))
    with pytest.raises(InputError, match=REFUSED) if refused else contextlib.nullcontext():
        compare(tmp_path_factory.mktemp("pool"), *pool)


@pytest.mark.parametrize("pads", [[0, 0, 2, 2], [0, 1, 2, 1], [2, 2, 2, 2]])
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("size", [7, 8, 9, 10])
def test_no_window_starts_in_the_padding_behind(operator: str, pads: list[int], size: int, tmp_path: Path) -> None:
    attributes: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": pads, "ceil_mode": 1}
    counted = {"count_include_pad": 1} if operator == "AveragePool" else {}
    compare(tmp_path, operator, [size, size], attributes | counted)

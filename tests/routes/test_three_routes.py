"""The quickstart's model through each route: one table, the same scales, engines of like size."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import numpy as np
import onnx
import pytest
import torch
from driverless import driverless
from models import job, line
from onnx import numpy_helper
from torch2trt_on_rtx import torch2trt_on_rtx

from trtpipe.examples.digits import resnet
from trtpipe.progress import Silent
from trtpipe.routes.registry import route


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return line(resnet(num_classes=10).eval(), 32, 10, channels=1)


def scales_of(data: bytes) -> set[float]:
    graph = onnx.load_from_string(data).graph
    values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    values |= {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in graph.node if n.op_type == "Constant"}
    nodes = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    return {float(x) for n in nodes for x in np.asarray(values[n.input[1]], np.float32).reshape(-1)}


def test_onnx_and_torch_tensorrt_get_the_same_scales(model):
    try:
        importlib.metadata.version("torch-tensorrt-rtx")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch-tensorrt-rtx is not installed")
    quantized = model.quantized(int8=True)
    plain = route("onnx")(job("onnx", "tensorrt_rtx"), model.loaded, quantized, Silent())
    with driverless() as seen:
        other = route("torch_tensorrt")(job("torch_tensorrt", "tensorrt_rtx"), model.loaded, quantized, Silent())
    table = {float(np.float32(a) / np.float32(127)) for a in model.amax.values()}
    written = scales_of(plain.data if plain.graph is None else plain.graph.data)
    assert table < written  # and the weights' scales
    assert {float(x) for s in seen.scales.values() for x in s} == written
    assert 0.8 < len(other.data) / len(plain.data) < 1.25
    assert other.graph is not None
    assert other.graph.data == plain.graph.data


@pytest.mark.torch2trt
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("torch2trt") is None, reason="torch2trt is not installed")
def test_torch2trt_makes_an_fp32_engine_of_about_that_size(model):
    quantized = model.quantized()
    plain = route("onnx")(job("onnx", "tensorrt_rtx"), model.loaded, quantized, Silent())
    with torch2trt_on_rtx():
        other = route("torch2trt")(job("torch2trt", "tensorrt"), model.loaded, quantized, Silent())
    assert 0.5 < len(other.data) / len(plain.data) < 1.5

"""Binding dtypes are independent of the precision inside: read from the network that TensorRT-RTX parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tensorrt_rtx as trt

from trtpipe.job.load import read_job
from trtpipe.pipeline.build import Built, build
from trtpipe.progress import Silent

NET = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), *head)
"""


def built(folder: Path, dtype: str, output: str, precision: dict[str, Any]) -> Built:
    (folder / "net_for_bindings.py").write_text(NET)
    random = np.random.default_rng(0)
    x = random.random((24, 3, 16, 16)) * np.linspace(0.1, 1.0, 24).reshape(-1, 1, 1, 1)
    np.save(folder / "x.npy", (x * 255).astype(np.uint8) if dtype == "uint8" else x.astype(dtype))
    image: dict[str, Any] = {"dtype": dtype, "shape": ["N", 3, 16, 16], "N": {"min": 1, "opt": 4, "max": 8}}
    if dtype == "uint8":
        image["normalize"] = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    job = {
        "name": "bindings",
        "model": {"factory": "net_for_bindings:make"},
        "inputs": {"image": image},
        "outputs": {"logits": {"dtype": output}},
        "precision": precision,
        "check": {"arrays": "x.npy", "batch_size": 8, "limits": {"relative_l2_max": 0.02}},
    }
    if "int8_mode" in precision:
        job["calibration"] = {"arrays": "x.npy", "batch_size": 8}
    (folder / "job.yaml").write_text(json.dumps(job))
    return build(read_job(folder / "job.yaml"), folder / "out", Silent())


def parsed_types(data: bytes) -> tuple[Any, Any]:
    """Types of the one input and the one output as TensorRT-RTX's parser sees them."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(data)
    return network.get_input(0).dtype, network.get_output(0).dtype


@pytest.mark.parametrize(
    ("dtype", "output", "precision"),
    [
        ("float16", "float32", {"int8_mode": True}),
        ("uint8", "float32", {"int8_mode": True}),
        ("uint8", "float16", {"fp16_mode": True}),
        ("float16", "float16", {"int8_mode": True, "fp16_mode": True}),
        ("float32", "float32", {"fp16_mode": True}),
        ("float32", "float16", {}),
    ],
)
def test_bindings(tmp_path: Path, dtype: str, output: str, precision: dict[str, Any]) -> None:
    result = built(tmp_path, dtype, output, precision)
    assert result.report.passed, result.report
    types = {"float32": trt.float32, "float16": trt.float16, "uint8": trt.uint8}
    data = result.bundle.read("model.onnx")
    assert parsed_types(data) == (types[dtype], types[output])
    assert result.bundle.read("model.engine")[:4] == b"vtrt"
    inside = "int8" if "int8_mode" in precision else "fp16" if precision else "fp32"
    layers = [layer for layer in result.bundle.manifest.layers if layer.op in ("conv2d", "linear")]
    assert {layer.precision for layer in layers} == {inside}
    convolution = next(n for n in onnx.load_from_string(data).graph.node if n.op_type == "Conv")
    weights = {i.name: i.data_type for i in onnx.load_from_string(data).graph.initializer}
    if inside == "fp16":
        assert weights[convolution.input[1]] == onnx.TensorProto.FLOAT16
    assert result.bundle.golden().inputs["image"].dtype == np.dtype(dtype)

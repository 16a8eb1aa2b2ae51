"""Route torch2trt against the real torch2trt, where it is installed.

With TensorRT 8.6 to 10 and a GPU nothing is replaced. Elsewhere TensorRT-RTX's builder stands in: see torch2trt_on_rtx.
"""

from __future__ import annotations

import contextlib
import importlib.util

import numpy as np
import onnx
import pytest
from models import job, line, tiny
from onnx import numpy_helper
from torch2trt_on_rtx import torch2trt_on_rtx

from trtpipe.errors import BuildError
from trtpipe.model.data import open_calibration
from trtpipe.progress import Silent
from trtpipe.routes.native import native_calibration
from trtpipe.trt import driver, flavour

pytestmark = [
    pytest.mark.torch2trt,
    pytest.mark.skipif(importlib.util.find_spec("torch2trt") is None, reason="torch2trt is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def world():
    """What was seen, or None where the real TensorRT builds."""
    native = bool(driver.probe().devices) and "tensorrt" in flavour.installed()
    with contextlib.nullcontext() if native else torch2trt_on_rtx() as seen:
        yield seen


def build(model, quantized=None, **sections):
    from trtpipe.routes.torch2trt import route

    size = model.loaded.inputs[0].shape[2]
    wanted = job("torch2trt", "tensorrt", size=size, **sections)
    implicit = wanted.build.quantization == "implicit"
    calibration = native_calibration(wanted, open_calibration(wanted)) if implicit else None
    return route.compile_engine(wanted, model.loaded, quantized or model.quantized(), Silent(), calibration)


def test_resnet18_comes_out_as_an_engine(world):
    import torchvision

    engine = build(line(torchvision.models.resnet18().eval(), 64, 1000))
    assert 46e6 <= len(engine.data) <= 49e6


def test_the_quickstart_model_comes_out_as_an_engine(world):
    from trtpipe.examples.digits import resnet

    engine = build(line(resnet(num_classes=10).eval(), 32, 10, channels=1))
    assert engine.data[:4] in (b"ftrt", b"vtrt")


def test_the_calibrator_it_is_given_is_ours(world, tmp_path, monkeypatch):
    from calib import trt_calibrator

    made, given = [], []
    original = trt_calibrator.make_calibrator

    def noting(*a, **k):
        made.append(original(*a, **k))
        feed = made[-1]._feed
        get = feed.get_batch
        monkeypatch.setattr(feed, "get_batch", lambda names: given.append(names) or get(names))
        return made[-1]

    monkeypatch.setattr(trt_calibrator, "make_calibrator", noting)
    np.save(tmp_path / "calibration.npy", np.random.default_rng(0).random((20, 3, 16, 16), dtype=np.float32))
    engine = build(
        line(tiny(), 16, 5),
        build={"quantization": "implicit"},
        precision={"int8_mode": True, "fp16_mode": True},
        calibration={"arrays": str(tmp_path / "calibration.npy"), "batch_size": 8},
    )
    assert len(made) == 1
    assert made[0].get_batch_size() == 8
    assert made[0]._feed.given == 3
    if world is not None:
        assert world.calibrator is made[0]
        assert (world.batches, world.inputs) == (3, ["image"])
        assert world.flags == ["FP16", "INT8"]
    assert engine.data


EXPLICIT = {"precision": {"int8_mode": True}, "calibration": {"arrays": "/nowhere/x.npy"}}


def onnx_scales(data):
    """(the scales of Q layers on activations, the lists of scales of weights), each sorted, of an ONNX file."""
    graph = onnx.load_from_string(data).graph
    values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    values |= {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in graph.node if n.op_type == "Constant"}
    found = [(n.op_type, np.asarray(values[n.input[1]], np.float32).reshape(-1)) for n in graph.node
             if n.op_type in ("QuantizeLinear", "DequantizeLinear")]  # fmt: skip
    return (
        sorted(float(s[0]) for kind, s in found if kind == "QuantizeLinear"),
        sorted(tuple(map(float, s)) for kind, s in found if kind == "DequantizeLinear" and s.size > 1),
    )


def network_scales(network):
    """The same of the network that the builder was given; a weight's scales stand in its Q layer."""
    found = [s for name, s in network.scales.items() if network.kinds[name] == "QUANTIZE"]
    return (
        sorted(float(s[0]) for s in found if s.size == 1),
        sorted(tuple(map(float, s)) for s in found if s.size > 1),
    )


@pytest.mark.parametrize(("name", "size", "classes", "channels"), [("resnet18", 64, 1000, 3), ("digits", 32, 10, 1)])
def test_explicit_int8_is_the_onnx_routes_network(world, name, size, classes, channels):
    import torch
    import torchvision

    from trtpipe.examples.digits import resnet
    from trtpipe.routes import onnx as onnx_route

    torch.manual_seed(0)
    network = torchvision.models.resnet18() if name == "resnet18" else resnet(num_classes=10)
    model = line(network.eval(), size, classes, channels=channels)
    quantized = model.quantized(int8=True)
    engine = build(model, quantized, **EXPLICIT)
    if world is None:
        assert engine.data[:4] == b"ftrt"
        return
    plain = onnx_route.compile_engine(job("onnx", "tensorrt_rtx", size=size), model.loaded, quantized, Silent())
    seen = world.network
    assert network_scales(seen) == onnx_scales(plain.data if plain.graph is None else plain.graph.data)
    computing = [n for n, kind in seen.kinds.items() if kind in ("CONVOLUTION", "MATRIX_MULTIPLY")]
    int8 = [layer for layer in quantized.layers if layer.precision == "int8"]
    assert len(computing) == len(int8)
    assert all(seen.feeds[n] == ("DEQUANTIZE", "DEQUANTIZE") for n in computing)
    # torch2trt names its layers after the modules, as the report does
    assert {n.split(":")[0].rpartition(".")[0] for n in computing} == {layer.module for layer in int8}
    assert 0.8 < len(engine.data) / len(plain.data) < 1.2
    assert (world.flags, world.calibrator) == (["INT8"], None)
    if name == "resnet18":
        assert len(engine.data) < 16e6


def test_explicit_int8_of_what_has_one_axis_a_transposed_convolution_or_a_concat(world):
    import torch
    from torch import nn

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.side = nn.Conv2d(3, 4, 1, stride=2)
            self.pool = nn.MaxPool2d(2)
            self.up = nn.ConvTranspose2d(12, 4, 3, stride=2, padding=1, output_padding=1)
            self.hard = nn.Hardswish()
            self.line = nn.Conv1d(8, 4, 3, padding=1)
            self.head = nn.Linear(32, 5)

        def forward(self, x):
            x = self.pool(torch.cat([torch.relu(self.down(x)), torch.relu(self.side(x))], 1))
            x = self.hard(self.up(x)).mean(1)
            return self.head(torch.flatten(self.line(x), 1))

    torch.manual_seed(0)
    model = line(Mixed().eval(), 16, 5)
    engine = build(model, model.quantized(int8=True), **EXPLICIT)
    if world is not None:
        kinds = list(world.network.kinds.values())
        assert [kinds.count(k) for k in ("CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY")] == [3, 1, 1]
    assert engine.data


def test_a_constant_that_follows_the_batch_is_refused_and_not_frozen(world):
    import torch

    class Token(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.token = torch.nn.Parameter(torch.ones(1, 5))
            self.head = torch.nn.Linear(3, 5)

        def forward(self, x):
            return self.head(x.mean((2, 3))) + self.token.expand(x.shape[0], -1) * 2

    model = line(Token().eval(), 16, 5)
    with pytest.raises(
        BuildError, match=r"has no converter for operations of the quantized program \(aten\.expand\.default\)"
    ):
        build(model, model.quantized(int8=True), **EXPLICIT)


def test_an_operation_without_a_converter_is_named(world):
    import torch

    class Cumulative(torch.nn.Module):
        def forward(self, x):
            return torch.relu(torch.cumsum(x.mean((2, 3)), 1))

    with pytest.raises(BuildError, match=r"torch\.cumsum"):
        build(line(Cumulative().eval(), 16, 3))


def test_its_signature_is_the_doubles(world):
    import inspect

    import torch2trt
    from torch2trt_double import Double, tensorrt

    real = inspect.signature(torch2trt.torch2trt).parameters
    ours = inspect.signature(Double(tensorrt()).package.torch2trt).parameters
    assert [(n, p.kind) for n, p in real.items()] == [(n, p.kind) for n, p in ours.items()]
    plain = ("fp16_mode", "max_workspace_size", "int8_mode", "use_onnx", "dla_core", "gpu_fallback", "keep_network")
    assert {n: real[n].default for n in plain} == {n: ours[n].default for n in plain}

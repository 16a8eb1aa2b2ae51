"""Route torch2trt against the real torch2trt, where it is installed.

With TensorRT 8.6 to 10 and a GPU nothing is replaced. Elsewhere TensorRT-RTX's builder stands in: see torch2trt_on_rtx.
"""

from __future__ import annotations

import contextlib
import importlib.util

import numpy as np
import pytest
from models import job, line, tiny
from torch2trt_on_rtx import torch2trt_on_rtx

from trtpipe.errors import BuildError
from trtpipe.progress import Silent
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


def build(model, **sections):
    from trtpipe.routes import torch2trt as route

    size = model.loaded.inputs[0].shape[2]
    wanted = job("torch2trt", "tensorrt", size=size, **sections)
    return route.compile_engine(wanted, model.loaded, model.quantized(), Silent())


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

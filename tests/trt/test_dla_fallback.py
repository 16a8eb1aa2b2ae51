"""What a DLA was to run and cannot, by module; TensorRT's network and config are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trtpipe.errors import InputError
from trtpipe.job.sections import Build
from trtpipe.trt.config import dla_fallback
from trtpipe.trt.flavour import Flavour

DLA, GPU = "dla", "gpu"
TRT = Flavour("tensorrt", SimpleNamespace(DeviceType=SimpleNamespace(DLA=DLA, GPU=GPU)), "10.3.0", frozenset())


class World:
    """A network of layers (name, device, whether a DLA can run it), and its builder config."""

    def __init__(self, *layers):
        self.layers = [SimpleNamespace(name=name, device=device, able=able) for name, device, able in layers]
        self.num_layers = len(layers)

    def get_layer(self, index):
        return self.layers[index]

    def get_device_type(self, layer):
        return layer.device

    def can_run_on_DLA(self, layer):
        assert layer.device == DLA
        return layer.able


def fallback(world, **options):
    return dla_fallback(TRT, world, world, Build(target="tensorrt", default_device_type="dla", **options))


LAYERS = (
    ("layer1.conv", DLA, True), ("layer2.se/GlobalAveragePool", DLA, False), ("layer2.se/Mul", DLA, False),
    ("neck", GPU, False), ("head.softmax [Softmax]", DLA, False),
)  # fmt: skip


def test_modules_that_the_gpu_runs_are_named_once_and_in_order():
    world = World(*LAYERS)
    assert fallback(world, gpu_fallback=True) == ("DLA: 3 of 4 layers run on the GPU: layer2.se, head.softmax",)


def test_without_fallback_they_are_an_error_before_tensorrt_begins():
    with pytest.raises(InputError) as raised:
        fallback(World(*LAYERS))
    assert str(raised.value) == (
        "build.gpu_fallback: must be true where DLA cannot run a layer (got false; it cannot run layer2.se, "
        "head.softmax). Set it, or give them to the GPU with build.device_types."
    )


@pytest.mark.parametrize("gpu_fallback", [False, True])
def test_nothing_is_said_where_dla_runs_all_that_it_was_given(gpu_fallback):
    world = World(("layer1.conv", DLA, True), ("head", GPU, False))
    assert fallback(world, gpu_fallback=gpu_fallback) == ()


def test_the_stand_ins_methods_are_tensorrts():
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    assert hasattr(trt.INetworkDefinition, "get_layer")
    assert hasattr(trt.IBuilderConfig, "get_device_type")
    assert hasattr(trt.IBuilderConfig, "can_run_on_DLA")

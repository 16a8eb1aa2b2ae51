"""The names that the user gave the modules are the names that the engine inspector and profilers show."""

from __future__ import annotations

import pytest

from trtpipe.progress import Silent
from trtpipe.trt import flavour, network
from trtpipe.trt.config import module_path
from trtpipe.trt.monitor import Watch, make_logger
from trtpipe.values import DimRange, LoadedModel, TensorSpec


@pytest.mark.acceptance
def test_resnet50_shows_its_modules():
    torchvision = pytest.importorskip("torchvision")
    pytest.importorskip("tensorrt_rtx")
    import torch

    from trtpipe.model.capture import capture
    from trtpipe.quantization.precision import Keep
    from trtpipe.quantization.quantize import quantize
    from trtpipe.routes.onnx import to_onnx

    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval()
    inputs = (TensorSpec("image", "float32", ("N", 3, 64, 64), {"N": DimRange(1, 2, 4)}),)
    outputs = (TensorSpec("logits", "float32", ("N", 1000), {"N": DimRange(1, 2, 4)}),)
    loaded = LoadedModel(model, inputs, outputs, "0" * 64, "torchvision resnet50")
    captured = capture(loaded)
    quantized = quantize(captured, int8=False, half=None, keep=Keep((), ()), amax={}, ranges={})
    onnx = to_onnx(quantized)
    found = flavour.load("tensorrt_rtx")
    watch = Watch(Silent(), "error")
    logger = make_logger(found, watch)
    builder = found.module.Builder(logger)
    graph = network.create_network(found, builder, weakly_typed=False)
    parser = network.parse(found, graph, logger, onnx, watch)
    layers = [graph.get_layer(i) for i in range(graph.num_layers)]
    convolutions = [module_path(layer.name) for layer in layers if network.enum_name(layer.type) == "CONVOLUTION"]
    assert "layer3.1.conv2" in convolutions, convolutions
    assert len(convolutions) == len(set(convolutions)) == 53
    del parser, layers, graph, builder, logger

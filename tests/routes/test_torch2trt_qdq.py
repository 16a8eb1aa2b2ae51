"""Explicit INT8 on route torch2trt: the network that the double is given, layer by layer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from models import job, line, tiny
from torch2trt_double import DataType, Double, tensorrt
from torch2trt_hooks import ABLE, Layer, Network

from trtpipe.errors import BuildError
from trtpipe.model.torch_versions import graph_module
from trtpipe.progress import Silent
from trtpipe.quantization import quantize as quantization
from trtpipe.quantization.precision import Keep
from trtpipe.routes.torch2trt import qdq as torch2trt_qdq
from trtpipe.routes.torch2trt import replay, route
from trtpipe.trt import driver, flavour


@pytest.fixture(scope="module")
def small():
    return line(tiny(), 16, 5)


@pytest.fixture
def double(monkeypatch):
    return installed(monkeypatch, "10.3.0")


def installed(monkeypatch, version):
    trt = tensorrt()
    trt.__version__ = version
    made = Double(trt)
    made.install(monkeypatch)
    found = flavour.Flavour("tensorrt", trt, version, flavour.expected("tensorrt", version))
    monkeypatch.setattr(flavour, "load", lambda target: found)
    gpu = driver.Driver("12.6", (driver.Gpu(0, "NVIDIA Orin", "8.7", 8 << 30),))
    monkeypatch.setattr(driver, "probe", lambda: gpu)
    monkeypatch.setattr(route, "DEVICE", "cpu")
    return made


def compiled(model, quantized=None, *, fp16=False, build=None, **sections):
    wanted = job("torch2trt", "tensorrt", build=build, precision={"int8_mode": True, "fp16_mode": fp16},
                 calibration={"arrays": "/nowhere/x.npy"}, **sections)  # fmt: skip
    quantized = quantized or model.quantized(int8=True, half=torch.float16 if fp16 else None)
    return route.compile_engine(wanted, model.loaded, quantized, Silent())


def layers(network, kind):
    return [x for x in network.layers if x.kind == kind]


def before(layer: Layer, index: int) -> Layer:
    """The layer that an input comes from."""
    made = layer.get_input(index).layer
    assert made is not None
    return made


def weights_of(model):
    """Weight and bias by module, straight from the network that the user wrote."""
    return {n: (m.weight.numpy(), m.bias.numpy()) for n, m in model.loaded.module.network.named_children()}


def test_convolutions_and_linears_read_q_and_dq_on_both_sides(double, small):
    compiled(small)
    (network,) = double.networks
    quantized = {"stem": "stem:input", "body": "body:input", "skip": "skip:input", "head": "head:input"}
    found = {
        x.name.split(":")[0].split(".")[0]: x for k in ("CONVOLUTION", "MATRIX_MULTIPLY") for x in layers(network, k)
    }
    assert set(found) == set(quantized)
    for name, (weight, bias) in weights_of(small).items():
        layer = found[name]
        dq, weight_dq = before(layer, 0), before(layer, 1)
        assert (dq.kind, before(dq, 0).kind) == ("DEQUANTIZE", "QUANTIZE")
        assert (weight_dq.kind, before(weight_dq, 0).kind) == ("DEQUANTIZE", "QUANTIZE")
        key = "body:input" if name == "skip" else quantized[name]  # one tensor, one scale
        for pair in (dq, before(dq, 0)):
            scale = before(pair, 1).given["value"]
            assert scale.shape == ()
            assert scale == np.float32(small.amax[key]) / np.float32(127)
        amax = np.abs(weight).reshape(weight.shape[0], -1).max(1)
        for pair in (weight_dq, before(weight_dq, 0)):
            np.testing.assert_array_equal(before(pair, 1).given["value"], amax / np.float32(127))
            assert pair.axis == 0
        # what IQuantizeLayer makes of the constant is the rounded weight, to the integer
        constant, step = (
            before(before(weight_dq, 0), 0).given["value"],
            (amax / 127).reshape(-1, *[1] * (weight.ndim - 1)),
        )
        np.testing.assert_array_equal(np.rint(constant / step), np.rint(weight / step))
        if name == "head":
            assert layer.given["operations"] == ("NONE", "TRANSPOSE")
            (added,) = layers(network, "ELEMENTWISE")
            np.testing.assert_array_equal(before(added, 1).given["value"], bias[None])
        else:
            np.testing.assert_array_equal(layer.given["bias"], bias)
            pad = (0, 0) if name == "skip" else (1, 1)
            assert (layer.given["maps"], layer.given["window"]) == (8, weight.shape[2:])
            assert (layer.stride_nd, layer.pre_padding, layer.post_padding) == ((1, 1), pad, pad)
            assert (layer.dilation_nd, layer.num_groups) == ((1, 1), 1)
            assert isinstance(layer.given["kernel"], double.trt.Weights)  # empty: the kernel is the second input


def test_the_skip_branch_of_the_residual_add_is_quantized_too(double, small):
    """An add has no module: a wrapper around modules could not have found it."""
    compiled(small)
    (network,) = double.networks
    (add,) = [x for x in layers(network, "OTHER") if x.num_inputs == 2]
    kinds = [before(add, k).kind for k in (0, 1)]
    assert sorted(kinds) == ["CONVOLUTION", "DEQUANTIZE"]
    scale = before(before(add, kinds.index("DEQUANTIZE")), 1).given["value"]
    assert scale == np.float32(small.amax[":add.input_0"]) / np.float32(127)


def test_flags_are_set_where_q_is_written_and_no_mode_is_on(double, small):
    engine = compiled(small)
    (call,) = double.calls
    assert (call["int8_mode"], call["fp16_mode"], call["int8_calib_dataset"], call["kwargs"]) == (
        False,
        False,
        None,
        {},
    )
    assert double.flags == ["INT8"]
    assert double.calibrators == []
    assert route.EXPLICIT_NOTE in engine.notes
    assert route.EXPLICIT_GRAPH_NOTE in engine.notes
    assert route.INT8_NOTE not in engine.notes


def test_with_fp16_the_scales_are_fp16_numbers_and_the_casts_are_left_to_tensorrt(double, small):
    engine = compiled(small, fp16=True)
    (call,) = double.calls
    assert call["fp16_mode"] is False
    assert double.flags == ["FP16", "INT8"]
    (network,) = double.networks
    assert layers(network, "CAST") == []
    scales = [before(x, 1).given["value"] for x in layers(network, "QUANTIZE")]
    assert len(scales) == len(layers(network, "QUANTIZE")) > 0
    assert all(np.array_equal(s, s.astype(np.float16).astype(np.float32)) for s in scales)
    assert route.FP16_NOTE in engine.notes


def test_float16_bindings_are_cast_by_layers(double):
    halves = line(tiny(), 16, 5, dtype="float16", out="float16")
    image = {"dtype": "float16", "shape": ["N", 3, 16, 16], "N": {"min": 1, "opt": 8, "max": 32}}
    compiled(halves, inputs={"image": image}, outputs={"logits": {"dtype": "float16"}})
    (network,) = double.networks
    assert [t.dtype for t in (*network.inputs, *network.outputs)] == [DataType.HALF, DataType.HALF]
    first, last = layers(network, "CAST")
    assert (first.get_input(0), first.get_output(0).dtype) == (network.inputs[0], DataType.FLOAT)
    assert last.get_output(0) is network.outputs[0]


def test_what_the_job_keeps_out_of_int8_goes_through_torch2trts_own_converter(double, small):
    kept = quantization.quantize(
        small.captured, int8=True, half=None, keep=Keep(fp32=("head",)), amax=small.amax, ranges={}
    )
    compiled(small, kept)
    (network,) = double.networks
    assert layers(network, "MATRIX_MULTIPLY") == []
    assert len(layers(network, "CONVOLUTION")) == 3
    assert any(x.name.startswith("head.linear:") for x in layers(network, "OTHER"))


@pytest.mark.parametrize(("version", "says"), [("8.6.1", False), ("10.3.0", True)])
def test_the_output_type_is_given_where_the_release_takes_it(monkeypatch, small, version, says):
    double = installed(monkeypatch, version)
    given = []
    for name in ("add_quantize", "add_dequantize"):
        original = getattr(Network, name)
        monkeypatch.setattr(Network, name, lambda self, *a, o=original: given.append(len(a)) or o(self, *a))
    compiled(small)
    assert set(given) == {3 if says else 2}
    assert double.networks


def test_an_operation_without_a_converter_is_named_with_its_module(double):
    class Cumulative(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 4, 1)
            self.sums = Sums()

        def forward(self, x):
            return self.sums(self.stem(x).mean((2, 3)))

    class Sums(torch.nn.Module):
        def forward(self, x):
            return torch.cumsum(x, 1)

    torch.manual_seed(0)
    with pytest.raises(BuildError) as caught:
        compiled(line(Cumulative().eval(), 16, 4))
    assert str(caught.value) == (
        "build: torch2trt has no converter for operations of the quantized program ("
        "aten.cumsum.default (sums)). Use build.quantization implicit, or build.route onnx."
    )
    assert double.calls == []


def test_a_torch2trt_without_the_decorator_is_refused(double, small, monkeypatch):
    monkeypatch.delattr(double.package, "tensorrt_converter")
    with pytest.raises(BuildError) as caught:
        compiled(small)
    assert str(caught.value) == (
        "build.route: this torch2trt takes no converters for Q/DQ (no tensorrt_converter). Update it: "
        "pip install git+https://github.com/NVIDIA-AI-IOT/torch2trt; or use build.quantization implicit."
    )


def test_calls_that_compute_something_else_are_noticed(double, small, monkeypatch):
    monkeypatch.setattr(torch2trt_qdq, "dequantize", lambda q, scale: q.float() * scale * 2)
    with pytest.raises(BuildError) as caught:
        compiled(small)
    message = str(caught.value)
    assert message.startswith(
        "outputs.logits: the calls that torch2trt is to convert compute something else than the quantized program (a "
        "difference of "
    )
    assert message.endswith("). Use build.quantization implicit, or build.route onnx.")
    assert double.calls == []


def test_a_step_is_named_after_its_module_and_hides_no_method():
    assert replay._unique("body.to", Counter()) == "body.to_"
    seen = Counter()
    assert [replay._unique("body.relu", seen) for _ in "ab"] == ["body.relu", "body.relu_1"]


def test_the_steps_compute_what_the_program_does():
    halves = line(tiny(), 16, 5, dtype="float16", out="float16")
    made = replay.replay(halves.quantized(int8=True), ABLE)
    names = [n for n, m in made.named_modules() if isinstance(m, replay.ReplayedCall)]
    assert {"stem.conv2d", "body.conv2d", "skip.conv2d", "head.linear"} <= set(names)
    image = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(3)).half()
    (got,) = made(image)
    (want,) = graph_module(halves.quantized(int8=True).program)(image)
    torch.testing.assert_close(got, want)
    assert got.dtype is torch.float16


def test_the_program_is_left_as_it_was(double, small):
    """torch2trt leaves its tensors on what it touches: a second conversion must not find them."""
    quantized = small.quantized(int8=True)
    compiled(small, quantized)
    compiled(small, quantized)
    first, second = double.networks
    assert [x.kind for x in first.layers] == [x.kind for x in second.layers]
    program = quantized.program
    assert not any(hasattr(t, "_trt") for t in (*program.state_dict.values(), *program.constants.values()))


def test_an_output_padding_beyond_the_padding_is_an_error(double):
    up = torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1))
    with pytest.raises(BuildError, match="output_padding must be at most padding for TensorRT"):
        compiled(line(up, 8, 4))

"""Models that quantize themselves: what of them is in INT8, by every way to quantize a product's factors."""

from __future__ import annotations

import math
import re
from pathlib import Path

import nets
import pytest
import torch
from torch import nn

from calib.table import CalibrationTable, given_table
from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.model.capture import capture
from trtpipe.model.marks import Mark, mark
from trtpipe.progress import Silent
from trtpipe.quantization.given import as_given, given_amax
from trtpipe.quantization.partial import Partial, roundings
from trtpipe.quantization.payoff import keep_of
from trtpipe.quantization.precision import Keep, ScaleTypes
from trtpipe.quantization.quantize import place_qdq, prepare, quantize
from trtpipe.quantization.sensitivity import SampleBatch, measure_sensitivity
from trtpipe.quantization.units import find_units
from trtpipe.routes.compiled_precision import read_back
from trtpipe.routes.onnx import to_onnx
from trtpipe.values import Quantized

ONE = Mark((0.05,), None)


class Own(nn.Module):
    """A convolution, an attention-like product and a mean, whose inputs are quantized where `which` says so."""

    def __init__(self, which: frozenset[str]) -> None:
        super().__init__()
        self.which = which
        self.conv = nn.Conv2d(3, 5, 3)

    def own(self, x: torch.Tensor, name: str, it: Mark = ONE) -> torch.Tensor:
        return mark(x, it) if name in self.which else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.own(self.conv.weight, "weight", Mark((0.01,) * 5, 0))
        y = nn.functional.conv2d(self.own(x, "input"), weight)
        z = self.own(y.flatten(2), "left") @ self.own((y + 1).flatten(2).transpose(1, 2), "right")
        return self.own(z, "mean").mean(2)


def given(which: frozenset[str]) -> Quantized:
    captured = as_given(capture(nets.loaded(nets.settled(Own(which), nets.images(4, 3, 8, 8)))))
    keep = Keep()
    return quantize(captured, int8=True, half=None, keep=keep, amax=given_amax(captured), ranges={}, narrow=None)


@pytest.mark.parametrize("conv", [(), ("input",), ("weight",), ("input", "weight")])
@pytest.mark.parametrize("product", [(), ("left",), ("right",), ("left", "right")])
def test_a_product_is_in_int8_where_both_its_factors_are(conv: tuple[str, ...], product: tuple[str, ...]) -> None:
    made = given(frozenset({*conv, *product, "mean"}))
    layers = {x.op: (x.precision, x.reason) for x in made.layers}
    own = "the model's own Q/DQ leave {} out"
    lacks = {(): "it", ("input",): "its weight", ("weight",): "its input"}
    assert layers["conv2d"] == (("int8", "") if len(conv) == 2 else ("fp32", own.format(lacks[conv])))
    which = "one of its factors" if product else "it"
    assert layers["matmul"] == (("int8", "") if len(product) == 2 else ("fp32", own.format(which)))
    assert layers["mean"] == ("fp32", "")
    assert read_back(made.layers, to_onnx(made)) == made.layers  # what is exported says the same
    notes = "\n".join(made.notes)
    assert ("not quantized, the model's own Q/DQ leave" in notes) == (len(conv) + len(product) < 4)
    assert (
        "mean: quantized by the model and not fused by TensorRT, which computes it in float between Q and DQ: the "
        "model itself" in made.notes
    )


def test_what_a_job_keeps_out_of_int8_is_not_said_to_stand_between_q_and_dq() -> None:
    class Inner(nn.Module):
        """A mean in a module of its own, so that a glob can name it."""

        def __init__(self) -> None:
            super().__init__()
            self.own, self.pool = Own(frozenset({"input", "weight"})), Pool()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.pool(self.own(x))
            return y

    class Pool(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mark(x, ONE).mean(1, keepdim=True)

    captured = as_given(capture(nets.loaded(nets.settled(Inner(), nets.images(4, 3, 8, 8)))))
    amax = given_amax(captured)
    assert [u.path for u in find_units(captured.sites)] == ["own", "pool"]  # tune and the diagnosis can name it too

    def notes(keep: Keep) -> str:
        return "\n".join(quantize(captured, int8=True, half=None, keep=keep, amax=amax, ranges={}, narrow=None).notes)

    assert "mean: quantized by the model and not fused" in notes(Keep())
    assert "not fused" not in notes(Keep(fp32=("pool",)))


@pytest.mark.parametrize("half", [None, torch.float16])
@pytest.mark.parametrize("coarse", [False, True])
def test_weights_are_rounded_in_pieces_as_they_are_in_the_graph(half: torch.dtype | None, coarse: bool) -> None:
    """A fake quantizer's weights come in float: with one scale for all channels, a module that ruined the model was
    measured at 63 dB, which had 26 alone in INT8."""
    marks = Mark((0.1,), None) if coarse else Mark((0.001, 0.01, 0.02, 0.003, 0.004), 0)

    class Quantized(Own):
        def own(self, x: torch.Tensor, name: str, it: Mark = ONE) -> torch.Tensor:
            return mark(x, marks if name == "weight" else Mark((1e-3,), None))

    images = nets.images(4, 3, 8, 8)
    captured = as_given(capture(nets.loaded(nets.settled(Quantized(frozenset()), images))))
    amax, types = given_amax(captured), ScaleTypes(half)
    prepared = prepare(captured, types=types)
    graph, _ = place_qdq(prepared, amax)
    machine = Partial(captured.graph)
    outputs, _ = machine.finish(0, machine.inputs((images,)), roundings(prepared.sites, amax, types, captured.int8))
    with torch.inference_mode():
        torch.testing.assert_close(outputs[0], graph(images)[0], rtol=1e-4, atol=1e-5)
        assert float((outputs[0] - captured.graph(images)[0]).abs().max()) > 1e-3


class OwnConv(nn.Conv2d):
    """A convolution whose input and weight the model quantizes itself, the weight with one scale for all channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(quantized(x), mark(self.weight, Mark((0.02,), None)), self.bias)


def quantized(x: torch.Tensor) -> torch.Tensor:
    return mark(x, Mark((0.02,), None))


class Chain(nn.Module):
    """Three convolutions, with the model's own Q/DQ at what is between them too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.c = OwnConv(3, 6, 1), OwnConv(6, 6, 1), OwnConv(6, 4, 1)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(quantized(self.a(x)))
        if self.way == "split":
            left, right = quantized(y).chunk(2, 1)
            z = torch.relu(self.b(torch.cat([quantized(right), quantized(left)], 1)))
        elif self.way == "sum":
            z = torch.relu(self.b(y) + quantized(y))
        elif self.way == "sum of both":
            z = torch.relu(quantized(self.b(y)) + quantized(y))
        else:
            z = torch.relu(quantized(nn.functional.max_pool2d(quantized(self.b(y)), 2)))
        out: torch.Tensor = self.c(z)
        return out.mean((2, 3))


@pytest.mark.parametrize("way", ["split", "sum", "sum of both", "pool"])
def test_of_a_model_that_came_quantized_a_sensitivity_is_what_the_graph_of_that_module_alone_has(way: str) -> None:
    """ONNX Runtime puts Q/DQ around splits, sums and activations too: sensitivities failed at a split, left a skip
    branch out, and the graph kept what the file rounds behind modules that are kept."""
    images = nets.images(4, 3, 8, 8)
    captured = as_given(capture(nets.loaded(nets.settled(Chain(way), images), out_shape=("N", 4))))
    amax, batch = given_amax(captured), [SampleBatch((images,), 4)]
    found = measure_sensitivity(captured, amax, batch, half=None, keep=Keep(), progress=Silent())
    reference = captured.graph(images)[0]
    assert {m.module for m in found.modules} >= {"a", "b", "c"}
    for module in found.modules:
        if module.module not in ("a", "b", "c"):
            continue
        keep = Keep(fp32=tuple({"a", "b", "c"} - {module.module}))
        alone = quantize(captured, int8=True, half=None, keep=keep, amax=amax, ranges={}).program.module()(images)[0]
        noise = (reference - alone).double().square().sum()
        graph = 10 * math.log10(float(reference.double().square().sum() / noise))
        assert module.sqnr_db == pytest.approx(graph, abs=0.05)


def test_of_a_model_that_came_quantized_no_corrections_are_said_to_be_fitted() -> None:
    """Its own INT8 weights are none of a table."""
    captured = as_given(
        capture(nets.loaded(nets.settled(Own(frozenset({"input", "weight"})), nets.images(4, 3, 8, 8))))
    )
    assert captured.int8
    job = {
        "name": "j",
        "model": {"factory": "torch.nn:Identity", "quantized": True},
        "inputs": {"x": {"shape": (1, 3, 4, 4)}},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True, "keep": {"fp32": ["own"]}},
        "build": {"target": "tensorrt"},
        "check": {"arrays": "x.npy"},
    }
    assert keep_of(Job.model_validate(job), captured).notes == ()


class Twice(nn.Module):
    """One tensor is quantized with two scales: its input, or what a layer gives."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.stem, self.inside = nn.Linear(4, 4), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x) if self.inside else x
        return mark(y, ONE) + mark(y, Mark((0.1,), None))


@pytest.mark.parametrize(("inside", "named"), [(False, "x"), (True, "stem (linear)")])
def test_a_tensor_with_two_scales_is_named_as_the_user_knows_it(inside: bool, named: str) -> None:
    with pytest.raises(InputError) as caught:
        capture(nets.loaded(Twice(inside), ("N", 4)))
    assert str(caught.value) == (
        f"model: {named} must be quantized with one scale (got several). Quantize it again, or set "
        "calibration.recalibrate: true."
    )


class Last(nn.Module):
    """Quantizes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mark(self.head(mark(x, ONE)), ONE)


def test_a_quantized_output_is_named_by_its_module() -> None:
    assert capture(nets.loaded(Last(), ("N", 4))).notes == (
        "head (linear): its Q/DQ before an output of the model was left out, TensorRT fuses it with nothing",
    )


def test_an_activation_with_a_scale_for_each_channel_is_refused() -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = mark(self.head.weight, Mark((0.01,) * 5, 0))
            return nn.functional.linear(mark(x, Mark((0.1,) * 4, 1)), weight, self.head.bias)

    with pytest.raises(InputError) as caught:
        given_amax(capture(nets.loaded(Channels(), ("N", 4))))
    assert str(caught.value) == "model: an activation must have one scale (got 4). Quantize it by tensor."


class Scaled(nn.Module):
    """A linear with one scale that is given, of its weight or of its input."""

    def __init__(self, scale: float, weight: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.of_weight = Mark((0.1, scale, 0.2), 0) if weight else Mark((0.1,), None)
        self.of_input = ONE if weight else Mark((scale,), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(mark(x, self.of_input), mark(self.head.weight, self.of_weight), self.head.bias)


@pytest.mark.parametrize("scale", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("weight", [False, True])
def test_a_scale_that_tensorrt_does_not_take_is_refused(scale: float, weight: bool) -> None:
    """Clamped to the smallest scale, a channel would be zero in the engine."""

    captured = capture(nets.loaded(Scaled(scale, weight), ("N", 4)))
    with pytest.raises(InputError) as caught:
        as_given(captured) if weight else given_amax(captured)
    assert re.match(r"model: the scales of \w+ must be positive \(got ", str(caught.value))
    assert str(caught.value).endswith(
        f"(got {scale:g}), as TensorRT takes no other. Write a negative one positive and its integers negated, or set "
        "calibration.recalibrate: true."
    )


def test_a_constant_with_a_scale_for_each_channel_is_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mark(self.table, Mark((0.1,) * 4, 0)) @ mark(x, ONE)

    with pytest.raises(InputError) as caught:
        given_amax(capture(nets.loaded(Mixed(), ("N", 4, 4))))
    assert (
        str(caught.value) == "model: a constant that is no weight must have one scale (got 4). Quantize it by tensor."
    )


@pytest.mark.parametrize("scale", [0.0, 1e-40])
@pytest.mark.parametrize("weight", [False, True])
def test_a_scale_of_zero_is_the_least_one_in_table_and_graph(tmp_path: Path, scale: float, weight: bool) -> None:
    """Either gives zeros; the table can be read again, and a note names the tensor."""

    captured = as_given(capture(nets.loaded(Scaled(scale, weight), ("N", 4))))
    amax = given_amax(captured)
    table = given_table(amax, {})
    table.save(tmp_path / "t.json")
    assert CalibrationTable.load(tmp_path / "t.json").amax == table.amax
    made = quantize(captured, int8=True, half=None, keep=Keep(), amax=amax, ranges={})
    (note,) = [n for n in made.notes if "are raised" in n]
    assert note.startswith(
        "scales of the model that are 0, or too small for float32 or for INT32 biases, are raised: the model itself ("
    )


def test_a_scale_too_small_for_its_bias_in_int32_is_raised_with_a_note() -> None:
    """Stock ONNX Runtime adds the bias in units of both scales' product."""
    captured = as_given(capture(nets.loaded(Scaled(1e-12, weight=True), ("N", 4))))
    made = quantize(captured, int8=True, half=None, keep=Keep(), amax=given_amax(captured), ranges={})
    assert [n for n in made.notes if "are raised: the model itself (" in n]
    as_it_is = as_given(capture(nets.loaded(Scaled(0.1, weight=True), ("N", 4))))
    made = quantize(as_it_is, int8=True, half=None, keep=Keep(), amax=given_amax(as_it_is), ranges={})
    assert not [n for n in made.notes if "are raised" in n]

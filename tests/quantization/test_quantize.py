"""Q/DQ numbers against hand-worked scales and PyTorch's own fake quantization."""

from __future__ import annotations

from dataclasses import replace

import nets
import numpy as np
import pytest
import torch
from torch import nn

from trtpipe.errors import InputError
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, op_name
from trtpipe.quantization.formats import rounded_up
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import checked_plan, prepare, quantize
from trtpipe.values import Captured, DimRange, Int8Weight, LoadedModel, Skipped, TensorSpec


def table(captured: Captured, amax: float = 2.0) -> dict[str, float]:
    sites = captured.sites
    return {s.group: amax for s in sites if s.axis is None}


def test_one_convolution_equals_pytorchs_fake_quantization() -> None:
    network = nn.Conv2d(3, 5, 3)
    torch.manual_seed(0)
    network.reset_parameters()
    captured = capture(nets.loaded(network.eval(), out_shape=("N", 5, 6, 6)))
    found = quantize(captured, int8=True, half=None, keep=Keep(), amax={":input": 2.54}, ranges={})
    x = nets.images(4, 3, 8, 8) * 2  # some values lie beyond amax and must saturate
    scale = float(np.float32(2.54) / np.float32(127))
    xq = torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127)
    channel = network.weight.detach().abs().amax((1, 2, 3)) / 127
    wq = torch.fake_quantize_per_channel_affine(network.weight.detach(), channel, torch.zeros(5), 0, -127, 127)
    expected = torch.nn.functional.conv2d(xq, wq, network.bias)
    with torch.inference_mode():
        torch.testing.assert_close(found.program.module()(x)[0], expected, rtol=1e-5, atol=1e-5)
    assert found.scales == {":input": scale}


def test_weights_are_stored_as_int8() -> None:
    found = quantize(
        nets.captured("residual"), int8=True, half=None, keep=Keep(), amax=table(nets.captured("residual")), ranges={}
    )
    constants = [*found.program.state_dict.values(), *found.program.constants.values()]
    stored = [v for v in constants if v.dtype == torch.int8]
    assert len(stored) == 5
    assert all(int(v.min()) >= -127 for v in stored)
    assert all(int(v.abs().max()) == 127 for v in stored)


@pytest.mark.parametrize(("int8", "half"), [(True, None), (True, torch.float16), (False, torch.float16)])
def test_the_program_holds_what_its_nodes_read(int8: bool, half: torch.dtype | None) -> None:
    """The float weights that were quantized or cast are not carried through export and check."""
    captured = nets.captured("residual")
    amax = table(captured) if int8 else {}
    program = quantize(captured, int8=int8, half=half, keep=Keep(), amax=amax, ranges={}).program
    held = {t.untyped_storage().data_ptr() for t in (*program.state_dict.values(), *program.constants.values())}
    inputs = [n for n in program.graph.find_nodes(op="placeholder") if n.name in program.graph_signature.user_inputs]
    assert [n.name for n in program.graph.find_nodes(op="placeholder") if not n.users] == []
    assert len(held) == len(program.graph.find_nodes(op="placeholder")) - len(inputs)


def test_every_convolution_linear_and_matmul_reads_dequantized_inputs() -> None:
    for net in ("residual", "attention", "concat"):
        captured = nets.captured(net)
        found = quantize(captured, int8=True, half=None, keep=Keep(), amax=table(captured), ranges={})
        computing = [n for n in found.program.graph.nodes if op_name(n) in ("conv2d", "linear", "matmul")]
        assert computing
        for node in computing:
            assert all("dequantize" in op_name(a) for a in node.args[:2])


def test_biases_stay_in_float() -> None:
    captured = nets.captured("residual")
    found = quantize(captured, int8=True, half=None, keep=Keep(), amax=table(captured), ranges={})
    biases = [n.args[2].meta["val"].dtype for n in found.program.graph.nodes if op_name(n) == "conv2d"]
    assert biases == [torch.float32] * 4


def test_kept_modules_have_no_qdq_and_say_why() -> None:
    captured = nets.captured("residual")
    found = quantize(captured, int8=True, half=None, keep=Keep(fp32=("conv*",)), amax=table(captured), ranges={})
    precision = {(layer.module, layer.op): (layer.precision, layer.reason) for layer in found.layers}
    assert precision["conv1", "conv2d"] == ("fp32", "precision.keep.fp32: conv*")
    assert precision["stem", "conv2d"] == ("int8", "")


def test_a_glob_that_matches_nothing_names_the_nearest() -> None:
    captured = nets.captured("residual")
    with pytest.raises(InputError) as raised:
        quantize(captured, int8=True, half=None, keep=Keep(fp32=("haed",)), amax=table(captured), ranges={})
    assert str(raised.value).startswith(
        "precision.keep.fp32: each glob must match a module (got 'haed', which matches none). Nearest paths: head"
    )


def test_a_network_without_modules_has_no_paths() -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.w)

    captured = capture(nets.loaded(Bare().eval(), ("N", 8)))
    with pytest.raises(InputError) as raised:
        quantize(captured, int8=True, half=None, keep=Keep(fp32=("head",)), amax=table(captured), ranges={})
    assert str(raised.value) == (
        "precision.keep.fp32: each glob must match a module (got 'head', which matches none). No operation here is in "
        "a module, so that none has a path."
    )


def test_keeping_everything_is_an_error() -> None:
    captured = nets.captured("residual")
    with pytest.raises(
        InputError, match=r"no layer is left to quantize\. Narrow precision\.keep, or turn int8_mode off"
    ):
        quantize(captured, int8=True, half=None, keep=Keep(fp32=("*",)), amax=table(captured), ranges={})
    with pytest.raises(InputError, match=r"no layer is left to quantize\. Turn int8_mode off\.$"):
        checked_plan(replace(captured, sites=()), int8=True, keep=Keep(), modes=None)
    wide = Skipped(captured.sites[0].consumer, "it computes in float64")
    with pytest.raises(InputError, match=r"left to quantize \(conv2d: it computes in float64\)\. Turn int8_mode off"):
        checked_plan(replace(captured, sites=(), skipped=(wide,)), int8=True, keep=Keep(), modes=None)


def test_a_table_that_lacks_a_tensor_is_refused() -> None:
    captured = nets.captured("residual")
    amax = table(captured)
    del amax["conv2:input"]
    with pytest.raises(
        InputError, match=r"^calibration: the table must hold every quantized tensor \(got none for conv2:input\)\."
    ):
        quantize(captured, int8=True, half=None, keep=Keep(), amax=amax, ranges={})


def test_shared_tensors_are_observed_once() -> None:
    prepared = prepare(nets.captured("residual"))
    assert sorted(prepared.observers) == sorted(
        {"stem:input", "pool:max_pool2d.input", "conv2:input", ":add.input_1", "head:input"}
    )


def test_quantizing_leaves_the_captured_graph_alone() -> None:
    captured = nets.captured("residual")
    before = str(captured.graph.graph)
    quantize(captured, int8=True, half=torch.float16, keep=Keep(), amax=table(captured), ranges={})
    assert str(captured.graph.graph) == before
    assert not [n for n in calls(captured.graph.graph) if "quantize" in op_name(n)]


def test_scales_are_rounded_up_to_numbers_fp16_has() -> None:
    scales = torch.tensor([0.1, 1.0, 1e-7, 3e-5], dtype=torch.float32)
    up = rounded_up(scales, torch.float16)
    assert torch.equal(up, up.to(torch.float16).to(torch.float32))
    assert bool((up >= scales).all())
    # One unit in the last place of FP16 at most: 2^-11 relative, or the spacing of subnormals, 2^-24.
    assert bool(((up - scales) <= torch.maximum(scales * 2**-10, torch.tensor(2**-24))).all())
    assert torch.equal(rounded_up(scales, None), scales)


def test_half_precision_quantizes_with_scales_fp16_has() -> None:
    captured = nets.captured("residual")
    amax = table(captured, 1.2345)
    found = quantize(captured, int8=True, half=torch.float16, keep=Keep(), amax=amax, ranges={})
    assert len(found.scales) == len(amax)
    for scale in found.scales.values():
        assert np.float32(np.float16(scale)) == np.float32(scale)
        assert scale == pytest.approx(1.2345 / 127, rel=1e-3)


def test_a_tied_weight_in_int8_stays_as_it_is_for_what_reads_it_in_float() -> None:
    """The usual head of a language model is its embedding's table."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = self.table(x)
            return first, self.head(first)

    dims = {"N": DimRange(1, 2, 4)}
    spec = TensorSpec("x", "int64", ("N", 3), dims)
    outputs = tuple(TensorSpec(n, "float32", ("N", 3, k), dims) for n, k in (("first", 8), ("y", 12)))
    network = Tied().eval()
    captured = capture(LoadedModel(bind(network, (spec,), {}, ("first", "y")), (spec,), outputs, "w" * 64, "test"))
    (head,) = (s.consumer for s in captured.sites if s.axis is not None and s.producer.users)
    levels = torch.full((12, 8), 3, dtype=torch.int8)
    int8 = {head.name: Int8Weight(levels, torch.full((12,), 0.25), None, 0)}
    found = quantize(
        replace(captured, int8=int8), int8=True, half=None, keep=Keep(), amax=table(captured, 127.0), ranges={}
    )
    x = torch.tensor([[1, 5, 11]])
    first, y = found.program.module()(x)
    expected = network(x)[0]
    torch.testing.assert_close(first, expected, rtol=0, atol=0)
    rounded = expected.round().clamp(-127, 127)
    torch.testing.assert_close(y, (rounded.sum(-1, keepdim=True) * 0.75).expand_as(y))

"""Which operation computes in what: read from the program's own types."""

from __future__ import annotations

from dataclasses import replace

import nets
import numpy as np
import pytest
import torch
from torch import nn

from trtpipe.job.sections import Build
from trtpipe.model.capture import capture
from trtpipe.model.nodes import module_path, op_name
from trtpipe.progress import Silent
from trtpipe.quantization.precision import FP16_MAX, Keep, observe_ranges
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt.isolated import build_isolated
from trtpipe.values import Quantized, TensorSpec


def made(net: str, *, half: torch.dtype | None = torch.float16, int8: bool = False, **more: object) -> Quantized:
    captured = nets.captured(net)
    sites = captured.sites
    amax = {s.group: 2.0 for s in sites if s.axis is None}
    options = {"keep": Keep(), "ranges": {}} | more
    return quantize(captured, int8=int8, half=half, amax=amax, **options)


def types(found: Quantized) -> dict[str, set[torch.dtype]]:
    result: dict[str, set[torch.dtype]] = {}
    for node in found.program.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            result.setdefault(op_name(node), set()).add(node.meta["val"].dtype)
    return result


def test_attention_in_fp16_keeps_softmax_norm_and_reduction_in_fp32() -> None:
    found = types(made("attention"))
    assert found["linear"] == found["matmul"] == {torch.float16}
    assert found["softmax"] == found["layer_norm"] == found["mean"] == {torch.float32}


def test_the_reason_is_in_the_layers() -> None:
    reasons = {layer.op: layer.reason for layer in made("attention").layers}
    assert reasons["softmax"] == "softmax stays in FP32"
    assert reasons["layer_norm"] == "norms stay in FP32"
    assert reasons["mean"] == "reductions stay in FP32"
    assert reasons["linear"] == ""


def test_what_fp16_cannot_hold_stays_in_fp32() -> None:
    captured = nets.captured("residual")
    convolution = next(n for n in captured.graph.graph.nodes if op_name(n) == "conv2d" and module_path(n) == "conv2")
    for amax, dtype in ((FP16_MAX * 0.49, "fp16"), (FP16_MAX * 0.51, "fp32")):
        layers = made("residual", ranges={convolution.name: amax}).layers
        layer = next(one for one in layers if one.module == "conv2")
        assert layer.precision == dtype
        if dtype == "fp32":
            assert layer.reason == f"observed amax {amax:.4g} nears FP16's largest number 65504"


@pytest.mark.parametrize(
    ("amax", "precision", "reason"),
    [
        (6.2e-5, "fp16", ""),
        (6.1e-5, "fp32", "observed amax 6.1e-05 is below FP16's smallest normal number 6.104e-05"),
        (3e-9, "fp32", "observed amax 3e-09 is below FP16's smallest normal number 6.104e-05"),
        (0.0, "fp16", ""),
    ],
)
def test_what_would_vanish_in_fp16_stays_in_fp32(amax: float, precision: str, reason: str) -> None:
    captured = nets.captured("residual")
    convolution = next(n for n in captured.graph.graph.nodes if op_name(n) == "conv2d" and module_path(n) == "conv2")
    layer = next(one for one in made("residual", ranges={convolution.name: amax}).layers if one.module == "conv2")
    assert (layer.precision, layer.reason) == (precision, reason)


class Faint(nn.Module):
    """Values below FP16's, moved about between two quantized convolutions."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first, self.left, self.right = (nn.Conv2d(c, 32, 3, padding=1, bias=False) for c in (3, 32, 32))
        self.last = nn.Conv2d(64 if way == "cat" else 32, 32, 1)
        for convolution in (self.left, self.right):
            convolution.weight.data *= 1e-8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.first(x))
        b, c = torch.relu(self.left(a)), torch.relu(self.right(a))
        moved = {
            "cat": lambda: torch.cat([b, c], 1),
            "pooled": lambda: torch.nn.functional.max_pool2d(b, 2),
            "turned": lambda: b.transpose(2, 3).flip(2)[:, :, 1:],
            "resized": lambda: torch.nn.functional.interpolate(b, scale_factor=2.0),
            "added": lambda: b + c,
            "stacked": lambda: torch.stack([b, c]).amax(0),
        }
        return self.last(moved[self.way]()).flatten(1)


@pytest.mark.parametrize("way", ["cat", "pooled", "turned", "resized", "added", "stacked"])
def test_each_scale_is_held_by_the_type_that_it_has(way: str) -> None:
    captured = capture(nets.loaded(Faint(way)))
    ranges = observe_ranges(captured, [[torch.randn(4, 3, 8, 8)]])
    amax: dict[str, float] = {}
    for site in captured.sites:
        amax[site.group] = max(amax.get(site.group, 0.0), ranges.get(site.producer.name, 0.0))
    found = quantize(captured, int8=True, half=torch.float16, keep=Keep(), amax=amax, ranges=ranges)
    pairs = [n for n in found.program.graph.nodes if op_name(n).endswith("quantize_per_tensor")]
    assert len(pairs) >= 6
    for node in pairs:
        scale = torch.tensor(node.args[1], dtype=torch.float64)
        assert scale.to(node.kwargs.get("out_dtype") or torch.float32) == scale > 0, node


def test_bf16_holds_everything_fp32_does() -> None:
    captured = nets.captured("residual")
    ranges = {n.name: 1e6 for n in captured.graph.graph.nodes}
    found = made("residual", half=torch.bfloat16, ranges=ranges)
    assert types(found)["conv2d"] == {torch.bfloat16}


class Many(nn.Module):
    """Every kind of operation that a network's activations go through, side by side."""

    FUNCTIONS = (
        "hardswish", "hardsigmoid", "silu", "gelu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus", "softsign",
        "sigmoid", "tanh", "relu6", "logsigmoid", "softshrink", "relu",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 5, 1)
        flat = (nn.ConvTranspose2d(16, 16, 3, 1, 1), nn.ConvTranspose2d(16, 16, 3, 1, 1, groups=4))
        norms = (nn.GroupNorm(4, 16), nn.InstanceNorm2d(16), nn.LayerNorm(8), nn.PReLU(16))
        self.flat = nn.ModuleList([*flat, *norms, nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Linear(8, 8)])
        self.line = nn.ModuleList([nn.Conv1d(16, 16, 3, 1, 1), nn.ConvTranspose1d(16, 16, 3, 1, 1)])
        recurrent = (
            nn.GRU(16, 16, batch_first=True),
            nn.LSTM(16, 16, batch_first=True),
            nn.RNN(16, 16, batch_first=True),
        )
        self.steps = nn.ModuleList([*recurrent, nn.GRU(16, 8, batch_first=True, bidirectional=True)])
        self.deep = nn.ModuleList([nn.Conv3d(16, 16, 3, 1, 1), nn.ConvTranspose3d(16, 16, 3, 1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        several = [getattr(torch.nn.functional, name)(y) for name in self.FUNCTIONS]
        several += [module(y) for module in self.flat]
        several += [module(y.flatten(2)).view_as(y) for module in self.line]
        several += [module(y[..., :2, 0].mT)[0].mT.mean(2)[..., None, None].expand_as(y) for module in self.steps]
        several += [module(y[:, :, None])[:, :, 0] for module in self.deep]
        several += [
            y @ y.transpose(2, 3),
            torch.nn.functional.interpolate(y, scale_factor=2.0, mode="bilinear")[..., ::2, ::2],
        ]
        return self.last(torch.stack(several).sum(0)).flatten(1)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_tensorrt_rtx_builds_every_operation_in_half_precision(half: torch.dtype) -> None:
    captured = capture(nets.loaded(Many().eval()))
    found = quantize(captured, int8=False, half=half, keep=Keep(), amax={}, ranges={})
    narrow = {layer.op for layer in found.layers if layer.reason == "TensorRT-RTX has no BF16 for it"}
    transposed = {f"conv_transpose{n}d" for n in (1, 2, 3)}
    assert narrow == ({"hardswish", "mish", "gru", *transposed} if half is torch.bfloat16 else set())
    build = Build(target="tensorrt_rtx", compute_capability=("8.9",))
    assert build_isolated(to_onnx(found), build, progress=Silent()).data


def test_keep_reaches_into_containers_and_wins() -> None:
    layers = {layer.module: layer for layer in made("residual", keep=Keep(fp32=("conv*", "head"))).layers}
    assert layers["conv1"].precision == "fp32"
    assert layers["conv1"].reason == "precision.keep.fp32: conv*"
    assert layers["stem"].precision == "fp16"


def test_keep_fp16_is_out_of_int8_alone() -> None:
    layers = {layer.module: layer for layer in made("residual", int8=True, keep=Keep(fp16=("head",))).layers}
    assert layers["head"].precision == "fp16"
    assert layers["head"].reason == "precision.keep.fp16: head"
    assert layers["conv1"].precision == "int8"


def test_dequantized_values_are_fp16_where_fp16_reads_them() -> None:
    found = types(made("residual", int8=True))
    assert found["dequantize_per_tensor"] == {torch.float16}
    assert found["dequantize_per_channel"] == {torch.float16}
    assert found["quantize_per_tensor"] == {torch.int8}


def test_no_cast_follows_a_cast() -> None:
    for net in ("residual", "attention"):
        casts = [n for n in made(net).program.graph.nodes if n.op == "call_function" and op_name(n) == "_to_copy"]
        assert casts
        assert all(op_name(n.args[0]) != "_to_copy" for n in casts)


def test_without_half_nothing_is_cast() -> None:
    found = made("attention", half=None)
    assert "_to_copy" not in types(found)


def test_output_bindings_get_their_dtype() -> None:
    captured = nets.captured("residual")
    for name in ("float32", "float16"):
        outputs = tuple(TensorSpec(s.name, name, s.shape, s.dims) for s in captured.outputs)
        bound = replace(captured, outputs=outputs)
        for half in (None, torch.float16):
            found = quantize(bound, int8=False, half=half, keep=Keep(), amax={}, ranges={})
            output = next(n for n in found.program.graph.nodes if n.op == "output").args[0][0]
            assert output.meta["val"].dtype == getattr(torch, name)


class Cast(nn.Module):
    """A model that ends with a conversion."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.dtype = nn.Linear(8, 8), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(x) * 30).relu().to(self.dtype)


@pytest.mark.parametrize("half", [None, torch.float16])
@pytest.mark.parametrize("declared", ["float32", "float16", "int32"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_the_last_conversion_of_a_model_is_kept(dtype: torch.dtype, declared: str, half: torch.dtype | None) -> None:
    """To integers, whatever the output's binding is: without it other numbers are given, and a check may pass."""
    network = Cast(dtype).eval()
    loaded = nets.loaded(network, ("N", 8), out_shape=("N", 8))
    loaded = replace(loaded, outputs=(replace(loaded.outputs[0], dtype=declared),))
    found = quantize(capture(loaded), int8=False, half=half, keep=Keep(), amax={}, ranges={})
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        wanted = network(x).to(torch.float32)
        (answer,) = found.program.module()(x)
        assert answer.dtype is getattr(torch, declared)
        near = 0.02 * float(wanted.max()) + (1 if half is not None else 0.0)  # FP16 may round to the next integer
        if half is None and declared == "float32":
            assert torch.equal(answer, wanted)
        assert float((answer.to(torch.float32) - wanted).abs().max()) <= near
    run = OrtRunner(to_onnx(found).data, as_written=True)
    with run as runner:
        (written,) = runner.run({loaded.inputs[0].name: x.numpy()}).values()
    np.testing.assert_allclose(written.astype(np.float32), answer.numpy().astype(np.float32), atol=near)


def test_fp16_answers_are_near_fp32() -> None:
    x = nets.images(4, 6, 8)
    found = made("attention")
    with torch.inference_mode():
        near, exact = found.program.module()(x)[0], nets.attention().module(x)[0]
    assert float((near - exact).abs().max()) < 5e-3 * float(exact.abs().max())
    assert float((near - exact).abs().max()) > 0


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_complex_numbers_stay_in_fp32(half: torch.dtype) -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gain = nn.Linear(8, 8), nn.Parameter(torch.randn(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.fft.rfft(self.stem(x)) * self.gain
            return self.stem(torch.fft.irfft(y, n=8) + y.real.sum(-1, keepdim=True))

    captured = capture(nets.loaded(Spectrum().eval(), ("N", 8), out_shape=("N", 8)))
    found = quantize(captured, int8=False, half=half, keep=Keep(), amax={}, ranges={})
    have = types(found)
    assert have["linear"] == {half}
    assert have["fft_rfft"] == have["mul"] == {torch.complex64}
    assert have["fft_irfft"] == {torch.float32}
    x = nets.images(4, 8)
    with torch.inference_mode():
        near, exact = found.program.module()(x)[0], captured.graph(x)[0]
    assert float((near - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_ranges_are_the_largest_magnitudes_seen() -> None:
    captured = nets.captured("residual")
    x, y = nets.images(2, 3, 8, 8), 3 * nets.images(2, 3, 8, 8, seed=1)
    ranges = observe_ranges(captured, [(x,), (y,)])
    placeholder = next(n for n in captured.graph.graph.nodes if n.op == "placeholder")
    assert ranges[placeholder.name] == np.float32(max(x.abs().max(), y.abs().max()))


def test_ranges_of_every_operation_are_those_of_its_result_and_constants_have_none() -> None:
    captured = nets.captured("residual")
    x = nets.images(2, 3, 8, 8)
    ranges = observe_ranges(captured, [(x,)])
    results: dict[str, float] = {}

    class Kept(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value = super().run_node(n)
            if n.op in ("placeholder", "call_function"):
                results[n.name] = float(np.abs(value.detach().numpy()).max())
            return value

    Kept(captured.graph).run(x)
    assert ranges == results


def test_nan_counts_as_beyond_every_range() -> None:
    captured = nets.captured("residual")
    x = nets.images(2, 3, 8, 8)
    x[0, 0, 0, 0] = float("nan")
    ranges = observe_ranges(captured, [(x,)])
    placeholder = next(n for n in captured.graph.graph.nodes if n.op == "placeholder")
    assert ranges[placeholder.name] == float("inf")

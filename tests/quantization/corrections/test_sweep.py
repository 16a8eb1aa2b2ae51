"""The sweep's parts: inputs that moments are taken of, and the search for thresholds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import nets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_correct import made
from torch import nn
from torch.fx import Node

from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.corrections.edits import corrected
from trtpipe.quantization.corrections.sweep import Fitted, Sweep, _patches
from trtpipe.quantization.corrections.thresholds import ThresholdSearch
from trtpipe.quantization.partial import Partial, per_tensor
from trtpipe.values import Captured


def convolution(channels: int, out: int, kernel: int, stride: int, padding: int, dilation: int, groups: int) -> object:
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    args = (x, w, None, [stride] * 2, [padding] * 2, [dilation] * 2, groups)
    return graph.call_function(torch.ops.aten.conv2d.default, args)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 2), st.booleans(), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2),
    st.integers(1, 2), st.integers(1, 400),
)  # fmt: skip
def test_drawn_inputs_are_some_of_those_that_the_convolution_reads(
    images: int, each: int, grouped: bool, kernel: int, stride: int, padding: int, dilation: int, most: int
) -> None:
    groups, channels, out = (4 if grouped else 1), 4, 4 * each
    node = convolution(channels, out, kernel, stride, padding, dilation, groups)
    torch.manual_seed(0)
    x, w = torch.randn(images, channels, 11, 13), torch.randn(out, channels // groups, kernel, kernel)
    every, few = (_patches(node, x, w, groups, m) for m in (10**6, most))
    y = torch.nn.functional.conv2d(x, w, None, stride, padding, dilation, groups)
    rows = w.flatten(1).reshape(groups, out // groups, -1)
    want = y.movedim(1, 0).reshape(groups, out // groups, -1)
    torch.testing.assert_close(rows @ every, want, rtol=1e-4, atol=1e-4)
    all_columns = {tuple(c.tolist()) for c in every.movedim(2, 0).flatten(1)}
    drawn = few.movedim(2, 0).flatten(1)
    assert all(tuple(c.tolist()) in all_columns for c in drawn)
    assert min(most, every.shape[2]) / 4 - 1 <= len(drawn) <= 6 * max(most, images)


class Attention(nn.Module):
    """Probabilities that are nearly 1 for one column whose value is zero, and small for 95 others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.values = nn.Linear(12, 96), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(128, 10)
        self.register_buffer("seen", torch.ones(96, 1))
        with torch.no_grad():
            self.seen[0] = 0
            self.scores.weight[0, 0] = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(self.scores(x.reshape(-1, 16, 12)), -1)
        return self.head((probabilities @ self.values(x.reshape(-1, 96, 2) * self.seen)).flatten(1))


def test_thresholds_of_probabilities_are_where_the_output_errs_least(tmp_path: Path) -> None:
    _, plain, table, _ = made(Attention().eval(), tmp_path, ("thresholds",))
    (key,) = [k for k, t in plain.audit.tensors.items() if k.endswith("matmul.input_0")]
    assert plain.amax[key] > 0.9
    assert table.amax[key] < 0.5 * plain.amax[key]
    (step,) = [s for s in table.corrections.steps if s.name == "thresholds"]
    assert step.kept
    assert step.after_db > step.before_db + 1


@pytest.mark.parametrize("before", [0.5, 4.0, 60.0, 400.0])
def test_a_threshold_is_chosen_as_if_what_comes_before_were_float(before: float) -> None:
    """The second convolution does not read the channel with the largest values, so it wants a lower threshold, however
    coarse the first one's input is (at 400, all zero)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    with torch.no_grad():
        net[0].weight[0] *= 30
        net[2].weight[:, 0] = 0
    captured = capture(nets.loaded(net, out_shape=("N", 8, 8, 8)))
    first, second = dict.fromkeys(s.group for s in captured.sites if s.axis is None)
    batches = [[x] for x in nets.images(32, 3, 8, 8).split(8)]
    amax = {first: before, second: 40.0}
    search = ThresholdSearch(captured, amax, amax, (first,), batches[:3], batches[3:], Silent())
    assert search.run() == {second: pytest.approx(40 * 0.7**7 * 0.84)}


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(-8, 8), min_size=8, max_size=8))
def test_what_is_chosen_for_a_channel_does_not_depend_on_how_large_the_others_are(powers: list[int]) -> None:
    plain = convolution_of_eight()
    factors = 2.0 ** torch.tensor(powers)
    names = [n.target for n in plain.graph.graph.nodes if n.op == "get_attr"]
    scaled = corrected(plain, {f"scale:0:{name}": factors.numpy() for name in names})
    chosen = [fitted(plain), fitted(scaled)]
    (levels, steps), (own, own_steps) = (next(iter(found.levels.values())) for found in chosen)
    (bias,), (own_bias,) = (found.biases.values() for found in chosen)
    assert torch.equal(own, levels)
    assert torch.equal(own_steps, steps * factors)
    assert torch.equal(own_bias, bias * factors)


def fitted(captured: Captured) -> Fitted:
    """Levels and biases of a graph whose every threshold is 2."""
    amax = {s.group: 2.0 for s in captured.sites if s.axis is None}
    batches = [[x] for x in nets.images(32, 3, 8, 8).split(4)]
    return Sweep(captured, amax, batches[:5], batches[5:], ("rounding", "bias"), Silent()).run()


@pytest.mark.parametrize("kind", [Sweep, ThresholdSearch])
def test_nothing_is_executed_behind_the_last_operation_in_int8(
    kind: type[Sweep | ThresholdSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = capture(nets.loaded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()))
    first = replace(captured, sites=tuple(s for s in captured.sites if s.consumer.name == "conv2d"))
    (key,) = [s.group for s in first.sites if s.axis is None]
    batches, executed, value = [[x] for x in nets.images(8, 3, 8, 8).split(4)], set[str](), Partial.value

    def noted(self: Partial, node: Node, *rest: Any) -> Any:
        executed.add(node.name)
        return value(self, node, *rest)

    monkeypatch.setattr(Partial, "value", noted)
    if kind is Sweep:
        Sweep(first, {key: 2.0}, batches[:1], batches[1:], ("rounding",), Silent()).run()
    else:
        ThresholdSearch(first, {key: 2.0}, {key: 2.0}, (), batches[:1], batches[1:], Silent()).run()
    assert "conv2d" in executed
    assert "conv2d_1" not in executed


@cache
def convolution_of_eight() -> Captured:
    torch.manual_seed(0)
    return capture(nets.loaded(nn.Conv2d(3, 8, 3).eval(), out_shape=("N", 8, 6, 6)))


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.Identity()])
def test_what_an_activation_cuts_does_not_matter(activation: nn.Module) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), activation).eval()
    with torch.no_grad():
        net[0].bias[0] = 100  # every value of this channel is above 6
    (bias,) = fitted(capture(nets.loaded(net, out_shape=("N", 8, 6, 6)))).biases.values()
    assert (bias[0] == 100) == isinstance(activation, nn.ReLU6)
    assert not torch.equal(bias[1:], net[0].bias[1:])


@pytest.mark.parametrize("amax", [1e-30, 0.1, 3.0, 1e30])
def test_quantizing_an_activation_is_what_pytorch_does_bit_by_bit(amax: float) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * amax
    scale = float(torch.tensor(amax, dtype=torch.float32) / 127)
    assert torch.equal(per_tensor(amax)(x), torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127))

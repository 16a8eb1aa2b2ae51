"""P6: bytes through memory, counted by hand and against every choice."""

from __future__ import annotations

import itertools

import nets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, module_path, op_name
from trtpipe.model.products import WEIGHTED
from trtpipe.quantization.payoff import DEPTHWISE, LEAST_GAIN, RIDGE, TRAFFIC, gains_nothing, moves_more, shape_reason
from trtpipe.quantization.policy import Modes
from trtpipe.quantization.precision import Keep
from trtpipe.values import Captured

INT8 = Modes(frozenset({"int8"}))


def captured(network: nn.Module, *shape: int, batch: int | str = 1) -> Captured:
    with torch.no_grad():
        out = network.eval()(torch.zeros(2 if batch == "N" else batch, *shape))
    return capture(nets.loaded(network, (batch, *shape), out_shape=(batch, *out.shape[1:])))


def separable(widths: list[int], group: int) -> nn.Sequential:
    """Pointwise convolutions; before each second one a depthwise one, which stays wide."""
    layers: list[nn.Module] = []
    for k, (i, o) in enumerate(itertools.pairwise(widths)):
        if k % 2 == group:
            layers.append(nn.Conv2d(i, i, 3, padding=1, groups=i))
        layers += [nn.Conv2d(i, o, 1), nn.ReLU()]
    return nn.Sequential(*layers)


def pointwise(graph: Captured) -> list[torch.fx.Node]:
    convolutions = [n for n in calls(graph.graph.graph) if op_name(n) in WEIGHTED]
    return [n for n in convolutions if shape_reason(graph.graph, n) != DEPTHWISE]


def wide_of(graph: Captured) -> set[str]:
    sites = [s for s in graph.sites if s.rule in ("Q1", "Q2")]
    return {module_path(n) for n in moves_more(graph.graph, sites, pointwise(graph))}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(16, 600), min_size=2, max_size=6), st.integers(1, 12), st.integers(0, 1))
def test_no_other_choice_moves_fewer_bytes(widths: list[int], side: int, group: int) -> None:
    """Each choice counted for itself: what every operation and every pass reads and writes, or its work if longer."""
    pairs, pixels = list(itertools.pairwise(widths)), side * side

    def spent(inside: set[int]) -> float:
        total = 0.0
        for k, (i, o) in enumerate(pairs):
            eight, after_wide = k in inside, k % 2 == group or k - 1 not in inside
            from_network = k == 0 and group == 1
            half, byte = -(-i // 8) * 16, -(-i // 16) * 16  # bytes of a pixel read, and of a filter
            written = pixels * -(-o // 8) * 16
            in_half = max((pixels + o) * half + written, pixels * half / 2 * o / RIDGE)
            if not eight:
                total += in_half
                continue
            total += LEAST_GAIN * in_half
            total += max((pixels + o) * byte + written, pixels * byte * o / RIDGE / 2)
            if from_network or not after_wide:
                total -= pixels * (half - byte)  # its producer writes less
            else:
                total += pixels * (half + byte)  # a pass: FP16 read, 8 bits written
        return total

    every = [set(c) for n in range(len(pairs) + 1) for c in itertools.combinations(range(len(pairs)), n)]
    graph = captured(separable(widths, group), widths[0], side, side)
    wide = wide_of(graph)
    inside = {k for k, node in enumerate(pointwise(graph)) if module_path(node) not in wide}
    assert spent(inside) == pytest.approx(min(spent(c) for c in every))


def test_a_network_all_in_8_bits_moves_half_the_bytes() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one, self.two = (nn.Conv2d(i, 32, 3, padding=1) for i in (3, 32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.stem(x))
            return x + self.two(torch.relu(self.one(x)))

    assert wide_of(captured(Residual(), 3, 16, 16)) == set()


@pytest.mark.parametrize(("side", "stays_wide"), [(20, {"1"}), (4, set())])
def test_behind_a_depthwise_convolution_weights_must_outweigh_what_is_read(side: int, stays_wide: set[str]) -> None:
    # 2 bytes more for each of side * side * 96 elements read, 1 byte less for each of 96 * 64 weights: equal at 32
    # pixels. The work, side * side * 96 * 64 / 100, is less than the bytes.
    network = nn.Sequential(nn.Conv2d(96, 96, 3, padding=1, groups=96), nn.Conv2d(96, 64, 1))
    for batch in (1, 8, "N"):
        assert wide_of(captured(network, 96, side, side, batch=batch)) == stays_wide


def test_work_that_outlasts_the_bytes_gains_from_8_bits() -> None:
    # 9 * 256 * 256 MAC a pixel are 5,898 bytes of time; one pixel moves 2 * 512 bytes, and its pass 3 * 256.
    network = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1, groups=256), nn.Conv2d(256, 256, 3, padding=1))
    assert wide_of(captured(network, 256, 40, 40)) == set()


def test_a_kernel_that_stands_anyway_writes_8_bits() -> None:
    for norm, expected in ((nn.LayerNorm(64), set()), (nn.GELU(), {"2"})):
        network = nn.Sequential(nn.Conv1d(64, 64, 1, groups=64), norm, nn.Conv1d(64, 64, 1))
        assert wide_of(captured(network, 64, 64)) == expected


@pytest.mark.parametrize(("channels", "stays_wide"), [(3, {"0"}), (8, {"0"}), (20, set()), (64, set())])
def test_channels_are_padded_to_16_bytes(channels: int, stays_wide: set[str]) -> None:
    """8 in FP16 are 16 in INT8: nothing is saved. 20 are 24 of two bytes, or 32 of one."""
    network = nn.Sequential(nn.Conv2d(channels, 32, 3), nn.Conv2d(32, 32, 3, groups=32))
    assert wide_of(captured(network, channels, 20, 20)) == stays_wide


def test_it_is_a_reason_only_where_something_is_left() -> None:
    first = [nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1)]
    graph = captured(nn.Sequential(*first), 32, 20, 20)
    wide, notes = gains_nothing(graph, "tensorrt", INT8, Keep())
    assert (list(wide.values()), notes) == ([DEPTHWISE, TRAFFIC], ())
    # Without the first nothing would be left: what P6 judges alone is quantized.
    graph = captured(nn.Sequential(*first[1:]), 32, 20, 20)
    wide, notes = gains_nothing(graph, "tensorrt", INT8, Keep())
    assert (list(wide.values()), notes) == ([DEPTHWISE], ())

"""What gains nothing from INT8: each rule against shapes worked out by hand, the choice of P4 against all choices."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import nets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trtpipe.job.job import Job
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, module_path, op_name
from trtpipe.model.products import MATMULS, WEIGHTED
from trtpipe.progress import Silent
from trtpipe.quantization.engine_size import KERNEL_BYTES, makes_larger
from trtpipe.quantization.payoff import (
    ALL_LARGER,
    ATTENTION,
    DEPTHWISE,
    FITTED_TO_MORE,
    LARGER,
    LARGER_THAN_FP16,
    NOTHING_GAINS,
    ONE_ROW,
    ONLY_SIZE,
    SMALL,
    gains_nothing,
    keep_of,
    shape_reason,
)
from trtpipe.quantization.placements import placements
from trtpipe.quantization.policy import Modes, assign, modes_of
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import prepare, quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.values import Captured, Int8Weight, Target


def captured(network: nn.Module, *shape: int) -> Captured:
    with torch.no_grad():
        out = network.eval()(torch.zeros(2, *shape))
    return capture(nets.loaded(network, ("N", *shape), out_shape=("N", *out.shape[1:])))


def reasons(graph: Captured) -> dict[str, str]:
    """The reason of each operation by its module, or by its name where it has none."""
    return {
        module_path(n) or n.name: shape_reason(graph.graph, n)
        for n in calls(graph.graph.graph)
        if op_name(n) in WEIGHTED or op_name(n) in MATMULS
    }


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.thin = nn.Conv2d(32, 20, 1)
        self.odd = nn.Conv2d(20, 7, 1)
        self.up = nn.ConvTranspose2d(7, 32, 2, 2)
        self.squeeze = nn.Conv2d(32, 16, 1)
        self.excite = nn.Conv2d(16, 32, 1)
        self.tokens = nn.Linear(32, 48)
        self.narrow = nn.Linear(48, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.depthwise(self.stem(x)))
        x = self.up(self.odd(self.thin(x)))
        x = x * torch.sigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True))))
        return self.head(self.narrow(self.tokens(x.flatten(2).transpose(1, 2))).mean(1))


def test_each_shape_has_its_reason() -> None:
    assert reasons(captured(Shapes(), 3, 4, 4)) == {
        "stem": "",  # three channels in, but it reads the image: Model Optimizer quantizes it
        "depthwise": DEPTHWISE,
        "grouped": "",  # eight channels a group, a multiple of eight out, 3 by 3
        "thin": "",
        "odd": SMALL,  # seven channels out
        "up": "",  # 32 channels out: Model Optimizer quantizes it
        "squeeze": ONE_ROW,
        "excite": ONE_ROW,
        "tokens": "",
        "narrow": SMALL,  # eight columns
        "head": ONE_ROW,
    }


class Layout(nn.Module):
    """A linear over tokens whose rows are [tokens, N], [N * tokens] or [N], as attention and classifiers have them."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.linear = layout, nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout == "tokens first":
            return self.linear(x.transpose(0, 1)).transpose(0, 1)
        if self.layout == "one axis":
            return self.linear(x.flatten(0, 1)).unflatten(0, (-1, x.shape[1]))
        return self.linear(x.mean(1))


@pytest.mark.parametrize(("layout", "expected"), [("tokens first", ""), ("one axis", ""), ("pooled", ONE_ROW)])
@pytest.mark.parametrize("batch", ["N", 1, 2])
def test_rows_of_a_sample_are_counted_in_every_layout(layout: str, expected: str, batch: int | str) -> None:
    network = Layout(layout).eval()
    with torch.no_grad():
        out = network(torch.zeros(2, 5, 32))
    graph = capture(nets.loaded(network, (batch, 5, 32), out_shape=(batch, *out.shape[1:])))
    assert list(reasons(graph).values()) == [expected]


class Scores(nn.Module):
    """(x x^T) x over tokens of `width` numbers, or of its first rows alone."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x[:, self.rows] @ x.transpose(1, 2)) @ x


@pytest.mark.parametrize(
    ("tokens", "width", "rows", "expected"),
    [
        (20, 32, slice(None), ["", ""]),
        (20, 8, slice(None), [SMALL, SMALL]),  # K of the first, N of the second
        (12, 32, slice(None), [SMALL, SMALL]),  # N of the first, K of the second
        (20, 32, slice(0, 1), [ONE_ROW, ONE_ROW]),
    ],
)
def test_a_matmul_is_judged_by_rows_columns_and_what_is_summed(
    tokens: int, width: int, rows: slice, expected: list[str]
) -> None:
    assert list(reasons(captured(Scores(rows), tokens, width)).values()) == expected


class Attends(nn.Module):
    """Attention of 4 heads over 20 tokens of 16 numbers each, written out or not, with what may be between."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.qkv = form, nn.Linear(64, 192)
        self.drop, self.bias = nn.Dropout(0.1), nn.Parameter(torch.zeros(4, 20, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.form == "fused":
            y = nn.functional.scaled_dot_product_attention(q, k, v, self.bias)
        elif self.form == "classes":  # scores become probabilities, which no matmul reads
            return torch.softmax(q @ k.transpose(-1, -2), -1)
        else:
            y = self.drop(torch.softmax(0.25 * (q @ k.transpose(-1, -2)) + self.bias, -1)) @ v
        return self.qkv(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("form", "expected"),
    [("fused", [ATTENTION, ATTENTION]), ("written out", [ATTENTION, ATTENTION]), ("classes", [""])],
)
def test_attention_stays_out_of_int8_in_every_form(form: str, expected: list[str]) -> None:
    graph = captured(Attends(form), 20, 64)
    found = [shape_reason(graph.graph, n) for n in calls(graph.graph.graph) if op_name(n) in MATMULS]
    assert found == expected
    linears = [shape_reason(graph.graph, n) for n in calls(graph.graph.graph) if op_name(n) == "linear"]
    assert set(linears) == {""}


def chain(widths: list[int], between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Conv2d(i, o, 1), between() if between is not nn.BatchNorm2d else nn.Sigmoid()]
    return nn.Sequential(*layers)


def larger(graph: Captured) -> set[str]:
    sites = [s for s in graph.sites if s.rule in ("Q1", "Q2")]
    nodes = list(dict.fromkeys(s.consumer for s in sites))
    return {module_path(n) for n in makes_larger(graph.graph, sites, nodes)}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=2, max_size=6))
def test_no_other_choice_of_a_chain_makes_a_smaller_engine(widths: list[int]) -> None:
    # In a chain operation k needs the kernel behind k - 1 (its input's, for the first) and the one behind itself.
    saves = [i * o for i, o in itertools.pairwise(widths)]

    def gain(inside: set[int]) -> int:
        kernels = {k - 1 for k in inside} | inside
        return sum(saves[k] for k in inside) - KERNEL_BYTES * len(kernels)

    every = [set(c) for n in range(len(saves) + 1) for c in itertools.combinations(range(len(saves)), n)]
    wide = larger(captured(chain(widths), widths[0], 2, 2))
    assert gain({k for k in range(len(saves)) if str(2 * k) not in wide}) == max(gain(c) for c in every)


def test_rounding_is_free_where_a_kernel_stands_anyway() -> None:
    class Preactivated(nn.Module):
        """norm, relu, conv, norm, relu: the norms cannot be folded, so both ends of the conv have their kernel."""

        def __init__(self, normed: bool) -> None:
            super().__init__()
            self.before, self.after = (nn.BatchNorm2d(64) if normed else nn.Sigmoid() for _ in range(2))
            self.conv = nn.Conv2d(64, 64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.after(torch.relu(self.conv(torch.relu(self.before(x))).sigmoid())))

    assert larger(captured(Preactivated(normed=True), 64, 2, 2)) == set()
    assert larger(captured(Preactivated(normed=False), 64, 2, 2)) == {"conv"}


class Branches(nn.Module):
    """Three convolutions over what one gives, their results beside one another, and one that reads them all."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(32, 64, 1)
        self.branches = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(3))
        self.reader = nn.Conv2d(192, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return torch.relu(self.reader(torch.cat([torch.relu(b(x)) for b in self.branches], 1)))


def test_a_reader_of_a_concat_needs_a_kernel_behind_each_part() -> None:
    enough = 4 * KERNEL_BYTES // 192  # of outputs, for one kernel behind the reader and three behind the parts
    assert "reader" in larger(captured(Branches(enough - 8), 32, 2, 2))
    assert "reader" not in larger(captured(Branches(enough + 8), 32, 2, 2))


class Summed(nn.Module):
    """What several convolutions, and a batch norm where it is `normed`, make of one input, summed and activated."""

    def __init__(self, outputs: int, normed: bool = False) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(outputs, outputs, 1) for _ in range(3))
        self.norm = nn.BatchNorm2d(outputs) if normed else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = self.branches[0](x) + self.branches[1](x) + self.branches[2](x)
        return torch.relu(summed if self.norm is None else summed + self.norm(x))


def test_convolutions_that_are_summed_need_one_kernel() -> None:
    """One behind the three that it sums, beside the one behind what they read; and a batch norm is not another."""
    enough = math.isqrt(2 * KERNEL_BYTES // 3)  # of channels
    for normed in (False, True):
        assert len(larger(captured(Summed(enough - 8, normed), enough - 8, 2, 2))) == 3
        assert larger(captured(Summed(enough + 8, normed), enough + 8, 2, 2)) == set()


def job(precision: dict[str, Any], target: str = "tensorrt_rtx", **build: Any) -> Job:
    return Job.model_validate(
        {
            "name": "j",
            "model": {"factory": "torch.nn:Identity"},
            "inputs": {"x": {"shape": (1, 3, 4, 4)}},
            "outputs": {"y": {}},
            "precision": precision,
            "calibration": {"arrays": "x.npy"},
            "build": {"target": target, **build},
            "check": {"arrays": "x.npy"},
        }
    )


INT8 = Modes(frozenset({"int8"}))
BOTH = {"int8_mode": True, "fp16_mode": True}


def wide(precision: dict[str, Any], target: str = "tensorrt_rtx", **build: Any) -> dict[str, str]:
    """Reasons by module of a network whose first convolution is large, its second small and its third depthwise."""
    network = nn.Sequential(
        nn.Conv2d(600, 600, 1), nn.ReLU(), nn.Conv2d(600, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16)
    )
    graph = captured(network, 600, 4, 4)
    keep = keep_of(job(precision, target, **build), graph)
    assert keep.notes == ()
    modules = {n.name: module_path(n) for n in calls(graph.graph.graph)}
    return {modules[name]: why for name, why in keep.wide.items()}


def test_what_stays_wide_depends_on_what_the_job_allows_and_on_the_target() -> None:
    assert wide(BOTH) == {"2": LARGER, "4": DEPTHWISE}
    assert wide({"int8_mode": True, "bf16_mode": True}) == {"2": LARGER, "4": DEPTHWISE}
    assert wide(BOTH, "tensorrt") == wide(BOTH, "onnxruntime") == {"4": DEPTHWISE}
    assert wide(BOTH, "tensorrt", quantization="implicit") == {}
    assert wide({"int8_mode": True}) == {}
    assert wide({**BOTH, "placement": "all"}) == {}
    assert wide({"fp16_mode": True}) == {}
    # What the job keeps by itself is not judged: with the first gone no kernel stands behind it.
    assert wide({**BOTH, "keep": {"fp16": ("4",)}}) == {"2": LARGER}


def test_a_model_is_corrected_for_what_each_target_has_in_int8() -> None:
    """Fewest operations first; one placement where all targets have the same."""
    network = nn.Sequential(
        nn.Conv2d(600, 600, 1), nn.ReLU(), nn.Conv2d(600, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16)
    )
    graph = captured(network, 600, 4, 4)
    modules = {n.name: module_path(n) for n in calls(graph.graph.graph)}

    def found(graph: Captured, precision: dict[str, Any], target: str = "tensorrt", **build: Any) -> list[Any]:
        return [
            (p.title, sorted(modules[n] for n in p.wide)) for p in placements(job(precision, target, **build), graph)
        ]

    for target in get_args(Target):
        assert found(graph, BOTH, target) == [("TensorRT-RTX", ["2", "4"]), ("TensorRT", ["4"])]
        assert found(graph, {**BOTH, "keep": {"fp16": ("4",)}}, target) == found(graph, BOTH, target)
        assert found(graph, {"int8_mode": True}, target) == [("", [])]
        assert found(graph, {**BOTH, "keep": {"fp16": ("0", "4")}}, target) == [("", ["0", "4"])]
        assert found(graph, {"int8_mode": True, "keep": {"fp32": ("2",)}}, target) == [("", ["2"])]
    assert found(graph, {**BOTH, "placement": "all"}) == [("", [])]
    assert found(graph, BOTH, quantization="implicit") == [("", [])]
    assert found(captured(network[:1], 600, 4, 4), BOTH) == [("", [])]


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt_rtx"])
def test_a_table_whose_corrections_were_fitted_to_more_in_int8_is_said(target: str) -> None:
    """The third, which is depthwise, of a table for INT8 alone; not the second, which is in INT8 for another target."""
    network = nn.Sequential(
        nn.Conv2d(600, 600, 1), nn.ReLU(), nn.Conv2d(600, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16)
    )
    graph = captured(network, 600, 4, 4)
    own = {n.name: Int8Weight(None, None, torch.zeros(1)) for n in calls(graph.graph.graph) if op_name(n) in WEIGHTED}
    *corrected, _ = own
    assert keep_of(job(BOTH, target), replace(graph, int8={n: own[n] for n in corrected})).notes == ()
    (note,) = keep_of(job(BOTH, target), replace(graph, int8=own)).notes
    assert note == FITTED_TO_MORE.format(1)
    for without_a_part in ({"int8_mode": True}, {"fp8_mode": True, "fp16_mode": True}):
        assert FITTED_TO_MORE.format(1) not in keep_of(job(without_a_part, target), replace(graph, int8=own)).notes


def test_a_network_in_which_nothing_gains_is_quantized_all_the_same_and_says_so() -> None:
    graph = captured(chain([16, 16, 16]), 16, 4, 4)
    found, notes = gains_nothing(graph, "tensorrt_rtx", INT8, Keep())
    assert (found, notes) == ({}, (ALL_LARGER.format(modes="INT8", reasons=LARGER),))
    # A conv that is too small, and one row: the second needs kernels of 290 kB and saves 300.
    large = captured(nn.Sequential(nn.Conv2d(3, 20, 1), nn.Flatten(), nn.Linear(500, 600)), 3, 5, 5)
    found, notes = gains_nothing(large, "tensorrt_rtx", INT8, Keep())
    assert notes == (ONLY_SIZE.format(modes="INT8", reasons=f"{SMALL}; {ONE_ROW}"),)
    assert list(found.values()) == [LARGER]
    head = captured(nn.Sequential(nn.Flatten(), nn.Linear(48, 10)), 3, 4, 4)
    nothing = NOTHING_GAINS.format(modes="INT8", reasons=ONE_ROW)
    assert gains_nothing(head, "tensorrt", INT8, Keep()) == ({}, (nothing,))
    # A linear of FP8's own limits on its rows a sample: the same, in its name.
    wider = captured(nn.Sequential(nn.Flatten(), nn.Linear(48, 16)), 3, 4, 4)
    nothing = NOTHING_GAINS.format(modes="FP8", reasons=ONE_ROW)
    assert gains_nothing(wider, "tensorrt", Modes(frozenset({"fp8"})), Keep()) == ({}, (nothing,))
    # The small convolution shares its kernels with a norm and with the linear, whose weights pay for them: of all
    # operations none makes the engine larger, and no reason says so.
    norm = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(256, 2048))
    nothing = NOTHING_GAINS.format(modes="INT8", reasons=ONE_ROW)
    assert gains_nothing(captured(norm, 16, 4, 4), "tensorrt_rtx", INT8, Keep()) == ({}, (nothing,))


class Recurrent(nn.Module):
    """A linear of many rows behind a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.steps, self.head = kind(4, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.steps(x)[0])


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_of_an_engine_with_a_loop_no_size_is_said(kind: type[nn.RNNBase]) -> None:
    """One of GRUs is smaller with its linears in 8 bits, and one of RNNs is larger."""
    graph = captured(Recurrent(kind), 64, 4)
    assert gains_nothing(graph, "tensorrt_rtx", INT8, Keep()) == ({}, ())
    linears = captured(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16)), 64, 4)
    assert "engine is smaller" in gains_nothing(linears, "tensorrt_rtx", INT8, Keep())[1][0]


@pytest.mark.parametrize("number_format", ["int8", "fp8"])
@pytest.mark.parametrize("widths", [[16, 16], [256, 2048, 256], [256, 900, 256], [900, 900], [900, 900, 16], [16, 900]])
def test_what_a_note_says_of_the_engines_size_is_what_the_kernels_and_weights_sum_to(
    widths: list[int], number_format: str
) -> None:
    """A chain of linears on one row, which all gain nothing by their shape; gains in bytes as above."""
    saves = [i * o for i, o in itertools.pairwise(widths)]
    inside = [c for n in range(len(saves) + 1) for c in itertools.combinations(range(len(saves)), n)]
    gains = {c: sum(saves[k] for k in c) - KERNEL_BYTES * len({*c, *(k - 1 for k in c)}) for c in inside}
    best = max(gains, key=lambda c: (gains[c], len(c)))
    network = nn.Sequential(*(x for i, o in itertools.pairwise(widths) for x in (nn.Linear(i, o), nn.ReLU())))
    one = job({f"{number_format}_mode": True, "fp16_mode": True})
    graph = captured(network, widths[0])
    keep = keep_of(one, graph)
    (note,) = keep.notes
    assert ("Without that the engine is smaller" in note) == (not best)
    assert ("those whose weights make the engine smaller" in note) == (0 < len(best) < len(saves)) == bool(keep.wide)
    # No sizes are known of TensorRT's engines.
    (note,) = keep_of(job(one.precision.model_dump(), "tensorrt"), graph).notes
    assert "engine" not in note


class Mixed(nn.Module):
    """A large convolution and two small ones, a linear and attention over tokens, and one row: 8 bits pay for the
    first, and for the linear behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.last = nn.Conv2d(600, 600, 1), nn.Conv2d(600, 32, 1), nn.Conv2d(32, 32, 1)
        self.norm, self.tokens = nn.LayerNorm(32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(self.small(torch.relu(self.large(x))))
        x = self.last(x).flatten(2).transpose(1, 2)
        y = self.tokens(self.norm(x))
        return self.head((torch.softmax(y @ y.transpose(1, 2), -1) @ y).mean(1))


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ({}, {"large": "fp8", "small": LARGER, "last": LARGER, "tokens": "fp8", "head": ONE_ROW, "attention": "fp8"}),
        # A convolution that gains nothing from INT8 gains nothing from FP8: it does not go there instead.
        (
            {"int8_mode": True},
            {"large": "int8", "small": LARGER, "last": LARGER, "tokens": "fp8", "head": ONE_ROW, "attention": "fp8"},
        ),
        # Modules that the job names are not judged.
        (
            {"int8_mode": True, "formats": {"small": "fp8", "head": "int8"}},
            {"large": "int8", "small": "fp8", "last": "int8", "tokens": "fp8", "head": "int8", "attention": "fp8"},
        ),
        # Nothing in 8 bits reads what a 4-bit linear reads, or what it gives.
        (
            {"weights": "nvfp4"},
            {"large": "fp8", "small": LARGER, "last": LARGER, "tokens": "nvfp4", "head": "nvfp4", "attention": "fp8"},
        ),
    ],
)
def test_placement_judges_fp8_as_it_does_int8_but_for_attention(
    precision: dict[str, Any], expected: dict[str, str]
) -> None:
    graph = captured(Mixed(), 600, 5, 5)
    one = job({"fp8_mode": True, "fp16_mode": True, **precision})
    choices = assign(graph.sites, modes_of(one.precision), keep_of(one, graph)).choices
    found = {module_path(n) or "attention": c.format or c.reason.partition(": ")[2] for n, c in choices.items()}
    assert found == expected


def test_the_reason_is_in_the_layers_and_the_table_is_that_of_every_placement() -> None:
    network = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32), nn.ReLU())
    graph = captured(network, 3, 8, 8)
    table = dict.fromkeys(prepare(graph).observers, 1.0)
    keep = keep_of(job(BOTH, "tensorrt"), graph)
    made = quantize(graph, int8=True, half=torch.float16, keep=keep, amax=table, ranges={})
    assert {layer.module: (layer.precision, layer.reason) for layer in made.layers if layer.op == "conv2d"} == {
        "0": ("int8", ""),
        "2": ("fp16", DEPTHWISE),
    }


def plan(graph: Captured, precision: dict[str, Any]) -> bytes:
    """The engine that TensorRT-RTX makes, of made-up thresholds."""
    from trtpipe.trt.isolated import build_isolated

    one, table = job(precision), {key: 1 + k / 7 for k, key in enumerate(prepare(graph).observers)}
    keep = keep_of(one, graph)
    made = quantize(graph, int8=one.precision.int8_mode, half=torch.float16, keep=keep, amax=table, ranges={})
    return build_isolated(to_onnx(made), one.build, progress=Silent(), precision=one.precision).data


FP16 = {"fp16_mode": True}


@pytest.fixture(scope="module")
def engines() -> dict[str, bytes]:
    """Plans of a chain of convolutions, whose first two are large enough to gain from INT8, by placement."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    graph = captured(chain([640, 640, 640, 64, 64, 64]), 640, 4, 4)
    ways = {"fp16": FP16, "auto": BOTH, "all": {**BOTH, "placement": "all"}}
    return {name: plan(graph, precision) for name, precision in ways.items()}


def test_a_concat_of_small_convolutions_makes_no_engine_larger() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    graph = captured(nn.Sequential(chain([640, 640, 32]), Branches(1600)), 640, 4, 4)
    assert len(plan(graph, BOTH)) < min(len(plan(graph, FP16)), len(plan(graph, {**BOTH, "placement": "all"})))


def test_nor_do_sums_of_small_convolutions() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    sums = [Summed(128, normed=True) for _ in range(4)]
    graph = captured(nn.Sequential(*chain([640, 640, 128]), *sums), 640, 4, 4)
    assert len(plan(graph, BOTH)) < len(plan(graph, FP16))


def test_the_int8_engine_is_smaller_than_that_of_fp16_and_of_all_in_int8(engines: dict[str, bytes]) -> None:
    assert len(engines["auto"]) < min(len(engines["fp16"]), len(engines["all"]))


@pytest.mark.parametrize("precision", [{"int8_mode": True}, {"fp8_mode": True}, {**BOTH, "placement": "all"}])
@settings(max_examples=10, deadline=None)
@given(widths=st.lists(st.integers(1, 900), min_size=2, max_size=5))
def test_an_engine_that_is_larger_than_in_fp16_is_said(precision: dict[str, Any], widths: list[int]) -> None:
    """A kernel between each two operations; in FP16 too one casts the input, and one the output."""
    network = nn.Sequential(*(x for i, o in itertools.pairwise(widths) for x in (nn.Linear(i, o), nn.ReLU())))
    added, saved = KERNEL_BYTES * (len(widths) - 2), sum(i * o for i, o in itertools.pairwise(widths))
    graph, one = captured(network, widths[0]), job(precision)
    numbers = {
        "modes": "FP8" if "fp8_mode" in precision else "INT8",
        "added": added / 1e6,
        "saved": saved / 1e6,
        "instead": "precision.placement: auto" if "placement" in precision else "precision.fp16_mode too",
    }
    assert keep_of(one, graph).notes == ((LARGER_THAN_FP16.format(**numbers),) if added > saved else ())
    # No sizes are known of TensorRT's engines, nor what TensorRT places by itself.
    assert keep_of(job(one.precision.model_dump(), "tensorrt"), graph).notes == ()


@pytest.mark.parametrize("width", [64, 640])
def test_what_is_said_of_the_engines_size_is_so(width: int) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    graph, precision = captured(chain([width] * 4), width, 4, 4), {"int8_mode": True}
    larger = len(plan(graph, precision)) > len(plan(graph, FP16))
    assert larger == bool(keep_of(job(precision), graph).notes) == (width == 64)


def test_a_kernel_costs_what_the_installed_tensorrt_rtx_takes_for_it(engines: dict[str, bytes]) -> None:
    # All in INT8 has a kernel more behind each small convolution but the last, where one casts to the output's FP32 in
    # either; the weights of the three are 48 kB smaller.
    more = len(engines["all"]) - len(engines["auto"]) + 640 * 64 + 2 * 64 * 64
    assert more / 2 == pytest.approx(KERNEL_BYTES, rel=0.15)

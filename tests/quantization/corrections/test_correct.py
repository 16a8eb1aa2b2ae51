"""Corrections on networks made to need them, to be harmed by them, and to be nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.data import Source, open_source
from calib.samples import DataSpec, InputSpec
from calib.table import CalibrationTable
from trtpipe.job.sections import CORRECTIONS
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, op_name
from trtpipe.model.products import WEIGHTED
from trtpipe.quantization import rounding
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections import correct as stage
from trtpipe.quantization.corrections import samples as drawn_of
from trtpipe.quantization.corrections import sweep
from trtpipe.quantization.corrections.correct import correct
from trtpipe.quantization.corrections.edits import corrected
from trtpipe.quantization.corrections.guard import Score
from trtpipe.quantization.formats import maxima
from trtpipe.quantization.partial import Partial, roundings
from trtpipe.quantization.placements import EVERYTHING, Placement
from trtpipe.quantization.precision import Keep, ScaleTypes, observe_ranges
from trtpipe.quantization.quantize import quantize
from trtpipe.values import Captured


class Log:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, done: int, total: int | None, unit: str) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)

    def cancelled(self) -> bool:
        return False


def uneven(act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Depthwise behind channels of very different ranges: what equalization is for."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), act(), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), act(),
        nn.Conv2d(16, 8, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    with torch.no_grad():
        ranges = torch.logspace(-2, 0.5, 16)
        net[0].weight.mul_(ranges.view(-1, 1, 1, 1))
        net[0].bias.mul_(ranges)
        net[2].weight.div_(ranges.view(-1, 1, 1, 1))
    return net.eval()


def samples(
    folder: Path, count: int = 64, shape: Sequence[int] = (3, 8, 8), values: np.ndarray | None = None
) -> object:
    x = np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32) if values is None else values
    np.save(folder / "x.npy", x)
    return open_source(DataSpec(arrays=str(folder / "x.npy")), [InputSpec("x", "float32", tuple(shape))])


def made(
    net: nn.Module,
    folder: Path,
    which: Sequence[str] = CORRECTIONS,
    algorithm: str = "auto",
    placements: Sequence[Placement] = (EVERYTHING,),
    **options: object,
) -> tuple[Captured, CalibrationTable, CalibrationTable, Log]:
    shape = options.get("shape", (3, 8, 8))
    captured = capture(nets.loaded(net, ("N", *shape), out_shape=("N", 10)))  # type: ignore[misc]
    source, log = samples(folder, **options), Log()  # type: ignore[arg-type]
    plain = calibrate(
        captured, source, batch_size=8, algorithm=algorithm, percentile=99.99, digests={"graph": "g"}, progress=log,  # type: ignore[arg-type]
    )  # fmt: skip
    table = correct(captured, plain, source, which=which, batch_size=8, progress=log, placements=placements)  # type: ignore[arg-type]
    return captured, plain, table, log


def without(*names: str) -> Placement:
    """INT8 for all operations but these."""
    return Placement("all but " + ", ".join(names), frozenset(names))


def decibels(captured: Captured, table: CalibrationTable, x: torch.Tensor) -> float:
    """SQNR of the Q/DQ program itself."""
    graph = corrected(captured, table.corrections.arrays) if table.corrections else captured
    found = quantize(graph, int8=True, half=None, keep=Keep(), amax=table.amax, ranges={})
    machine, program = Partial(captured.graph), found.program.module()
    signal = noise = 0.0
    with torch.inference_mode():
        for part in x.split(8):
            want, got = machine.finish(0, machine.inputs([part]), {})[0][0], program(part)[0]
            signal, noise = signal + float(want.square().sum()), noise + float((want - got).square().sum())
    return float(10 * np.log10(signal / max(noise, 1e-30)))


def test_equalization_pays_where_channels_are_uneven(tmp_path: Path) -> None:
    captured, plain, table, _ = made(uneven(), tmp_path, ("equalization",))
    (step,) = [s for s in table.corrections.steps if s.name == "equalization"]
    assert step.kept
    x = nets.images(64, 3, 8, 8, seed=9)
    assert decibels(captured, table, x) > decibels(captured, plain, x) + 3


@pytest.mark.parametrize("which", [("rounding", "bias"), CORRECTIONS])
def test_nothing_is_fitted_for_what_will_not_be_in_int8(tmp_path: Path, which: Sequence[str]) -> None:
    captured, plain, everything, _ = made(uneven(), tmp_path, which)
    first, *others = [n.name for n in calls(captured.graph.graph) if op_name(n) in WEIGHTED]
    _, _, table, _ = made(uneven(), tmp_path, which, placements=[without(first)])
    assert table.amax.keys() == everything.amax.keys() == plain.amax.keys()
    fitted = {k for k in table.corrections.arrays if k.startswith(("levels:", "bias:"))}
    weight = next(s.producer.target for s in captured.sites if s.consumer.name == first and s.axis is not None)
    assert f"levels:{weight}" in everything.corrections.arrays
    assert fitted
    assert not fitted & {f"levels:{weight}", f"bias:{first}"}
    _, _, none, log = made(uneven(), tmp_path, which, placements=[without(first, *others)])
    assert none.corrections.lines == ("corrections: no operation will be in INT8; none was made",)
    assert log.notes[-1] == "corrections: no operation will be in INT8; none was made."


def test_behind_what_stays_in_float_the_others_are_fitted_as_if_it_were_not_there(tmp_path: Path) -> None:
    """The same levels as those of a network that begins behind it, calibrated on its outputs."""
    x = np.random.default_rng(0).normal(size=(64, 3, 8, 8)).astype(np.float32)
    _, _, whole, _ = made(uneven(), tmp_path, ("rounding",), placements=[without("conv2d")], values=x)
    with torch.inference_mode():
        behind = torch.cat([uneven()[:2](part) for part in torch.from_numpy(x).split(8)]).numpy()
    _, _, rest, _ = made(uneven()[2:], tmp_path, ("rounding",), values=behind, shape=(16, 8, 8))
    levels, others = (
        [v for k, v in sorted(t.corrections.arrays.items()) if k.startswith("levels:")] for t in (whole, rest)
    )
    assert [v.shape for v in levels] == [v.shape for v in others]
    assert len(levels) == 3
    for one, other in zip(levels, others, strict=True):
        assert np.mean(one == other) > 0.98


def test_what_is_corrected_for_a_placement_is_not_changed_for_a_later_one(tmp_path: Path) -> None:
    """What has fewer operations in INT8 gets the levels, biases and thresholds that it would have by itself, and what
    the others get gains where all are in INT8."""
    fewer = without("conv2d", "conv2d_1")
    captured, _, alone, _ = made(uneven(), tmp_path, placements=[fewer])
    _, _, both, _ = made(uneven(), tmp_path, placements=[fewer, EVERYTHING])
    fixed = {k: v for k, v in alone.corrections.arrays.items() if k.startswith(("levels:", "steps:", "bias:"))}
    assert any(k.startswith("levels:") for k in fixed)
    assert both.corrections.arrays.keys() > alone.corrections.arrays.keys()
    assert all(np.array_equal(v, both.corrections.arrays[k]) for k, v in fixed.items())
    groups = {s.group for s in fewer.of(captured).sites if s.axis is None}
    assert [both.amax[g] for g in groups] == pytest.approx([alone.amax[g] for g in groups], rel=1e-6)
    details = [s.detail for s in both.corrections.steps if s.name == "rounding"]
    assert ["what all but conv2d, conv2d_1 has" in d for d in details] == [True, False]

    guard = stage.Guard(captured, [[x] for x in nets.images(64, 3, 8, 8, seed=9).split(8)])

    def score(table: CalibrationTable, placement: Placement) -> float:
        return guard.measured(placement.of(corrected(captured, table.corrections.arrays)), table.amax).decibels

    assert score(both, fewer) > score(alone, fewer) - 0.1
    assert score(both, EVERYTHING) > score(alone, EVERYTHING) + 1


@pytest.mark.parametrize(("at", "wide"), [(0, ["conv2d"]), (1, ["conv2d", "conv2d_1", "conv2d_2"])])
def test_a_step_that_gains_in_one_placement_and_loses_in_another_is_taken_back(
    at: int, wide: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scaling, which the graphs of all placements have: for the first one, and for the second."""
    placements, rightly = [without(*wide), Placement("all", frozenset())], stage.Guard.measured
    noise = iter(1e6**k for k in range(40))

    def other(self: stage.Guard, captured: Captured, amax: Any) -> Score:
        score = rightly(self, captured, amax)
        everything = any(s.consumer.name == "conv2d" for s in captured.sites)
        return replace(score, noise=score.noise * next(noise)) if everything is (at == 0) else score

    monkeypatch.setattr(stage.Guard, "measured", other)
    _, _, table, _ = made(uneven(), tmp_path, ("equalization",), placements=placements)
    step = table.corrections.steps[-1]
    assert (step.name, step.kept) == ("equalization", False)
    assert step.after_db > step.before_db + 0.05
    of_one = re.escape(f", with what {placements[at].title} has in INT8; ")
    assert re.search(of_one + r"in the mean of the samples [+-]\d+\.\d dB; ", step.detail)
    assert step.detail.endswith(f" dB with what {placements[1 - at].title} has")


def test_a_step_that_does_not_gain_is_measured_in_its_own_placement_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None gains: each measurement has as much noise as the one before, or more."""
    few, measured, rightly = without("conv2d"), list[bool](), stage.Guard.measured

    def worse(self: stage.Guard, captured: Captured, amax: Any) -> Score:
        measured.append(any(s.consumer.name == "conv2d" for s in captured.sites))
        score = rightly(self, captured, amax)
        return replace(score, noise=score.noise * 10.0 ** len(measured))

    monkeypatch.setattr(stage.Guard, "measured", worse)
    _, _, table, _ = made(
        uneven(), tmp_path, ("rounding",), algorithm="minmax", placements=[few, Placement("all", frozenset())]
    )
    assert [s.kept for s in table.corrections.steps] == [False, False]
    assert measured == [False, True, False, True]  # as it is, in both; then a step in each


def test_of_two_scalings_the_one_that_loses_nowhere_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, of what a ReLU6 cuts too, is made to lose in the placement that has nothing of it in INT8."""
    net = uneven()
    net[3] = nn.ReLU6()
    head = without("conv2d", "conv2d_1", "conv2d_2")
    rightly, calls_of_head = stage.Guard.measured, iter(range(100))

    def measured(self: stage.Guard, captured: Captured, amax: Any) -> Score:
        score = rightly(self, captured, amax)
        of_all = any(s.consumer.name == "conv2d" for s in captured.sites)
        return score if of_all or next(calls_of_head) != 3 else replace(score, noise=score.noise * 1e6)

    monkeypatch.setattr(stage.Guard, "measured", measured)
    placements = [head, Placement("all", frozenset())]
    _, _, table, _ = made(net, tmp_path, ("equalization",), algorithm="minmax", placements=placements)
    (step,) = table.corrections.steps
    assert (step.kept, step.detail) == (True, "1 groups of channels, with what all has in INT8")


def test_clips_are_equalized_below_their_bound(tmp_path: Path) -> None:
    captured, plain, table, _ = made(uneven(nn.ReLU6), tmp_path, ("equalization",))
    x = nets.images(64, 3, 8, 8, seed=9)
    assert decibels(captured, table, x) > decibels(captured, plain, x) + 1


def test_rounding_pays_where_inputs_are_correlated(tmp_path: Path) -> None:
    """Inputs that are all the same number: each one's rounding error can be made up for by the others."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).eval()
    rng = np.random.default_rng(1)

    def values(count: int) -> np.ndarray:
        return (rng.uniform(1, 2, (count, 1, 1, 1)) * np.ones((1, 3, 8, 8))).astype(np.float32)

    captured, plain, table, _ = made(net, tmp_path, ("rounding",), values=values(64))
    assert [s.kept for s in table.corrections.steps if s.name == "rounding"] == [True]
    x = torch.from_numpy(values(64))
    assert decibels(captured, table, x) > decibels(captured, plain, x) + 1


@pytest.mark.parametrize("step", ["equalization", "bias", "rounding"])
def test_a_step_that_harms_is_taken_back(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is made to do harm; the guard must see it."""
    if step == "equalization":  # the wrong way round: ranges move further apart
        right = stage.equalize
        monkeypatch.setattr(stage, "equalize", lambda g, d, v: {k: 1 / a for k, a in right(g, d, v).items()})
    elif step == "rounding":
        monkeypatch.setattr(rounding, "second_order", lambda ws, s, m: [torch.zeros_like(w) for w in ws])
        errors = iter(np.linspace(1.0, 0.0, 1000))  # the operation's own error says that all is well
        monkeypatch.setattr(
            sweep.Sweep, "_errors", lambda self, place, *a: torch.full(place.wanted[0].shape[1:2], next(errors))
        )
    else:
        biases = sweep.Fitted.bias_arrays
        monkeypatch.setattr(sweep.Fitted, "bias_arrays", lambda fitted: {k: b + 1 for k, b in biases(fitted).items()})
    _, plain, table, _ = made(uneven(), tmp_path, (step,))
    steps = {s.name: s.kept for s in table.corrections.steps}
    assert steps[step] is False
    assert not table.corrections.arrays
    assert table.amax == plain.amax or "ranges" in steps


def test_one_and_the_same_sample_does_no_harm(tmp_path: Path) -> None:
    captured, plain, table, _ = made(uneven(), tmp_path, values=np.zeros((64, 3, 8, 8), np.float32))
    x = torch.zeros(8, 3, 8, 8)
    assert decibels(captured, table, x) > decibels(captured, plain, x) - 0.1


def test_copies_of_what_a_step_was_fitted_on_do_not_judge_it(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(20, 3, 8, 8)).astype(np.float32)[np.arange(64) % 20]
    source = samples(tmp_path, values=values)
    drawn = drawn_of.drawn(capture(nets.loaded(uneven(), ("N", 3, 8, 8), out_shape=("N", 10))), source)
    kinds = [{row.numpy().tobytes() for (x,) in part for row in x} for part in (drawn.fit, drawn.local, drawn.judge)]
    assert sum(map(len, kinds)) == len(set().union(*kinds)) == 20
    _, _, table, _ = made(uneven(), tmp_path, values=np.repeat(values[:4], 16, 0))
    assert table.corrections.lines == ("corrections: need at least 16 calibration samples that differ; none was made",)


def test_few_samples_and_outputs_that_say_nothing_are_left_alone(tmp_path: Path) -> None:
    _, plain, table, log = made(uneven(), tmp_path, count=8)
    few = "corrections: need at least 16 calibration samples that differ; none was made"
    assert (table.amax, table.corrections.lines, table.corrections.arrays) == (plain.amax, (few,), {})
    assert f"{few}." in log.notes
    table.save(tmp_path / "few.json")
    kept = CalibrationTable.load(tmp_path / "few.json", histograms=True)
    assert kept.corrections.lines == (few,)
    assert kept.digest == table.digest
    assert CalibrationTable.merge([kept]).corrections is None
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).eval()
    with torch.no_grad():
        net[1].weight.zero_()
        net[1].bias.zero_()
    _, plain, table, log = made(net, tmp_path)
    said = "corrections: need a finite floating-point output that is not zero; none was made"
    assert (table.amax, table.corrections.lines) == (plain.amax, (said,))
    assert f"{said}." in log.notes


def _plain() -> list[nn.Module]:
    return [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)]


def _clipped() -> list[nn.Module]:
    """An inverted residual's layers, their channels of random ranges."""
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6()]
    nn.init.uniform_(layers[1].weight, 0.01, 20)
    return [*layers, nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(144, 10)]


def _normed() -> list[nn.Module]:
    norm = nn.LayerNorm(24)
    nn.init.uniform_(norm.weight, 0.01, 20)
    tokens = [nn.Flatten(), nn.Unflatten(1, (8, 24)), norm, nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 4)]
    return [*tokens, nn.Softmax(-1), nn.Flatten(), nn.Linear(32, 10)]


def _dead() -> list[nn.Module]:
    """Half of the channels are zero everywhere, one is a constant."""
    layers = _plain()
    with torch.no_grad():
        layers[0].weight[:5].zero_()
        layers[0].bias[:5] = torch.tensor([0.0, 0.0, 0.0, -1.0, 50.0])
    return layers


@pytest.mark.parametrize("layers", [_plain, _clipped, _normed, _dead])
@pytest.mark.parametrize("seed", range(2))
def test_untrained_networks_are_not_worse_than_with_their_maxima(
    layers: Callable[[], list[nn.Module]], seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(*layers()).eval()
    captured, _, table, _ = made(net, tmp_path)
    _, plain, _, _ = made(net, tmp_path, (), algorithm="minmax")
    x = nets.images(128, 3, 8, 8, seed=50 + seed)
    # The guard judges by 16 samples. In dB their gains scatter by 1.5 to 4 here, so that their mean is 0.4 to 0.9 off.
    assert decibels(captured, table, x) > decibels(captured, plain, x) - 0.5


def test_the_same_data_give_the_same_table(tmp_path: Path) -> None:
    tables = [made(uneven(), tmp_path)[2] for _ in range(2)]
    assert tables[0].digest == tables[1].digest


def test_the_graph_in_parts_computes_what_the_qdq_program_does(tmp_path: Path) -> None:
    captured, _, table, _ = made(uneven(), tmp_path)
    graph, x = corrected(captured, table.corrections.arrays), nets.images(8, 3, 8, 8)
    assert graph.int8
    machine = Partial(graph.graph)
    changed = roundings(graph.sites, table.amax, ScaleTypes(), graph.int8)
    parts = machine.finish(0, machine.inputs([x]), changed)[0][0]
    found = quantize(graph, int8=True, half=None, keep=Keep(), amax=table.amax, ranges={})
    with torch.inference_mode():
        torch.testing.assert_close(found.program.module()(x)[0], parts, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
def test_corrected_levels_are_the_stored_ones_in_every_precision(half: torch.dtype | None, tmp_path: Path) -> None:
    captured, _, table, _ = made(uneven(), tmp_path, ("rounding",))
    arrays = table.corrections.arrays
    wanted = {tuple(a.reshape(-1)) for k, a in arrays.items() if k.startswith("levels:")}
    assert wanted
    found = quantize(corrected(captured, arrays), int8=True, half=half, keep=Keep(), amax=table.amax, ranges={})
    constants = [*found.program.state_dict.values(), *found.program.constants.values()]
    assert wanted <= {tuple(v.reshape(-1).numpy()) for v in constants if v.dtype == torch.int8}


def test_a_kept_operation_has_its_own_weight_and_bias(tmp_path: Path) -> None:
    captured, _, table, _ = made(uneven(), tmp_path, ("rounding", "bias"))
    arrays = table.corrections.arrays
    assert any(k.startswith("levels:") and k.endswith("7.weight") for k in arrays)
    graph, own = corrected(captured, arrays), dict(uneven().named_parameters())["7.weight"]

    def holds(keep: Keep) -> bool:
        found = quantize(graph, int8=True, half=None, keep=keep, amax=table.amax, ranges={})
        return any(v.shape == own.shape and torch.equal(v, own) for v in found.program.state_dict.values())

    assert holds(Keep(fp32=("7",)))
    assert not holds(Keep())


def test_corrections_of_another_graph_are_refused(tmp_path: Path) -> None:
    from calib.errors import CalibError

    captured = capture(nets.loaded(uneven(), out_shape=("N", 10)))
    with pytest.raises(CalibError, match=r"corrections: scale:0:other is not of this model's graph"):
        corrected(captured, {"scale:0:other": np.ones(3, np.float32)})


@pytest.mark.parametrize("algorithm", ["auto", "entropy_2"])
def test_fp8_gets_the_exact_maxima_of_the_corrected_model(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The table of a corrected model is another pass's, and has to hold its maxima: whether the guard, by whose samples
    # equalization may gain or lose next to another algorithm's thresholds, keeps it is another matter.
    for rule in ("beats", "surely_beats"):
        monkeypatch.setattr(Score, rule, lambda *scores: True)
    monkeypatch.setattr(stage, "MOST_LOSS_DB", math.inf)
    captured, _, table, _ = made(uneven(), tmp_path, algorithm=algorithm)
    assert any(k.startswith("scale:") for k in table.corrections.arrays)
    graph = corrected(captured, table.corrections.arrays)
    largest = observe_ranges(graph, [[torch.from_numpy(np.load(tmp_path / "x.npy"))]])
    seen: dict[str, float] = {}
    for site in graph.sites:
        if site.axis is None:
            seen[site.group] = max(seen.get(site.group, 0.0), largest[site.producer.name])
    assert maxima(table) == pytest.approx(seen, rel=1e-5)


class TiedEinsum(nn.Module):
    """A parameter that two products of activations read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(nets.images(10, 16)), nn.Linear(16, 10)
        self.c = nn.Conv2d(3, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.c(x).mean((2, 3))
        return self.head(torch.einsum("nc,kc->nk", z, self.table) @ self.table)


def test_a_constant_that_is_quantized_like_an_activation(tmp_path: Path) -> None:
    captured, _, table, _ = made(TiedEinsum(), tmp_path)
    assert decibels(captured, table, nets.images(16, 3, 8, 8)) > 10


@pytest.mark.parametrize("kept", [("equalization",), ("equalization", "rounding")])
def test_a_scaling_that_all_samples_speak_against_is_taken_back(
    kept: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scalings are tried with thresholds of the first samples; what is kept has to gain with those of all."""
    right = stage.calibrate
    monkeypatch.setattr(drawn_of, "MOST_SAMPLES", 64)

    def wider(captured: Captured, source: Source, **options: object) -> CalibrationTable:
        table = right(captured, source, **options)  # type: ignore[arg-type]
        return table.corrected({k: 50 * v for k, v in table.amax.items()}, table.corrections)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "calibrate", wider)
    _, plain, table, _ = made(uneven(), tmp_path, kept, algorithm="minmax", count=80)
    first = table.corrections.steps[0]
    assert not first.kept
    assert first.after_db < first.before_db
    assert first.detail.endswith("; with thresholds of all samples")
    assert not [k for k in table.corrections.arrays if k.startswith("scale")]
    if kept == ("equalization",):
        assert table.amax == plain.amax
        assert not table.corrections.arrays
    else:  # what follows is fitted to the graph as it was, and goes on from its score
        assert table.corrections.steps[1].before_db == first.before_db


@pytest.mark.parametrize("copies", [0, 3])
def test_a_scaling_is_calibrated_with_all_samples_and_no_oftener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """Where it was judged by all of them its thresholds are theirs; copies judge nothing, and count."""
    values = np.random.default_rng(0).normal(size=(64, 3, 8, 8)).astype(np.float32)
    values = np.concatenate([values, values[:copies]])
    right, passes = stage.calibrate, []

    def counted(captured: Captured, source: Source, **options: object) -> CalibrationTable:
        passes.append(source.sample_count)
        return right(captured, source, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "calibrate", counted)
    captured, _, table, _ = made(uneven(), tmp_path, ("equalization",), algorithm="minmax", values=values)
    assert [s.kept for s in table.corrections.steps] == [True]
    assert passes == ([67] if copies else [])
    scaled = corrected(captured, table.corrections.arrays)
    source = samples(tmp_path, values=values)
    again = right(scaled, source, batch_size=8, algorithm="minmax", percentile=99.99, digests={}, progress=Log())
    assert table.amax == again.amax
    assert table.audit == again.audit


def test_levels_and_biases_are_fitted_to_the_thresholds_that_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Levels and biases that were fitted to others than the table's would make up for what is not there."""
    judge = stage._Corrector._judged

    def without_thresholds(self: stage._Corrector, name: str, *rest: Any) -> bool:
        return name != "thresholds" and judge(self, name, *rest)

    _, plain, wanted, _ = made(uneven(), tmp_path, ("rounding", "bias"), algorithm="minmax")
    monkeypatch.setattr(stage._Corrector, "_judged", without_thresholds)
    _, _, found, _ = made(uneven(), tmp_path, ("thresholds", "rounding", "bias"), algorithm="minmax")
    assert found.amax == wanted.amax == plain.amax
    assert wanted.corrections.arrays
    assert found.corrections.arrays.keys() == wanted.corrections.arrays.keys()
    assert all(np.array_equal(a, found.corrections.arrays[k]) for k, a in wanted.corrections.arrays.items())

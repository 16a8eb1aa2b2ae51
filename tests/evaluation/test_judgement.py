"""The job's own metrics: the forms of a function, figures and their drops, limits."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from calib.types import Array
from trtpipe.errors import InputError
from trtpipe.evaluation.check import measure
from trtpipe.evaluation.intervals import (
    ALL_NUMBERS,
    LEAST_RESAMPLED,
    binomial_interval,
    bootstrap_interval,
    paired_interval,
)
from trtpipe.evaluation.judgement import Judge, Judgement
from trtpipe.evaluation.judges import judge
from trtpipe.evaluation.limits import METRIC_OF_LIMIT, OWN_LIMITS, bounds, doubtful, judged
from trtpipe.evaluation.metrics import sqnr_db
from trtpipe.evaluation.standard import SHARE_METRICS, STANDARD, coco_map
from trtpipe.job.job import BOXED, COCO_OUTPUTS
from trtpipe.job.limits import Limits, MetricLimits, OwnMetric
from trtpipe.model.labels import Boxes, Labels
from trtpipe.quantization.search import shortfall

RNG = np.random.default_rng(3)
ONES = np.ones((4, 3), np.float32)


def named(function: Any, monkeypatch: pytest.MonkeyPatch) -> OwnMetric:
    """`function` as a job names it."""
    module = ModuleType("mine")
    module.metric = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    return OwnMetric(function="mine:metric")


def test_a_function_returns_a_number_one_a_sample_or_rows_with_their_total(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([1.0, 2.0, np.nan, 6.0])
    forms = {
        "number": (lambda outputs, labels, ids: 3.0, 3.0),
        "samples": (lambda outputs, labels, ids: values, 3.0),  # a NaN does not count
        "list": (lambda outputs, labels, ids: [np.ones((4, 2)), lambda rows: rows.sum()], 8.0),
        "rows": (lambda outputs, labels, ids: (np.ones((4, 2)), lambda rows: rows.sum()), 8.0),
    }
    for function, expected in forms.values():
        made = judge("m", named(function, monkeypatch), labelled=False).figure({"y": ONES}, None, tuple("abcd"))
        assert made.value == expected
    assert made.interval() == (-math.inf, math.inf)  # of 4 samples


def returning(returned: object, monkeypatch: pytest.MonkeyPatch) -> Judge:
    return judge("m", named(lambda outputs, labels, ids: returned, monkeypatch), labelled=False)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.uint8, np.bool_])
def test_figures_are_taken_in_float64_whatever_is_returned(
    dtype: type[np.generic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean of float16 is rounded to 11 bits, and a difference of uint8 is never negative."""
    ones, ids = np.ones((12, 1)), tuple("abcdefghijkl")
    rows = (np.random.default_rng(0).random(12) * 100 + 1000 * (dtype == np.float16)).astype(dtype)
    rows[0] = 0  # so that booleans are no constant
    metric = named(lambda outputs, labels, ids: rows * outputs["y"][:, 0].astype(dtype), monkeypatch)
    made = judge("m", metric, labelled=False)
    mean = float(Fraction(sum(map(Fraction, rows.astype(np.float64).tolist())), 12))
    assert made.figure({"y": ones}, None, ids).value == mean
    judgement = Judgement((made,), None, ids, {"y": ones * 0})
    (drop,) = (m for m in judgement.measure({"y": ones})[0] if m.name == "m_drop")
    assert drop.value == -mean
    assert drop.interval is not None
    assert -float(rows.max()) <= drop.interval[0] <= drop.value <= drop.interval[1] <= -float(rows.min())


def test_masked_numbers_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error over the valid pixels of a sample that has none."""
    rows = np.ma.masked_less(np.array([1.0, -100, 3, -100]), 0)
    for returned in (rows, rows.mean(), rows.astype(np.float32), rows.astype(np.int64)):
        assert returning(returned, monkeypatch).figure({"y": ONES}, None, tuple("abcd")).value == 2
    judgement = Judgement((returning(rows, monkeypatch),), None, tuple("abcd"), {"y": ONES})
    assert judgement.says_nothing() == ("m: 2 of 4 samples have no number in the baseline (NaN) and do not count",)
    nothing = np.ma.masked_array([1.0], mask=[True]).mean()
    for returned in (nothing, (np.ones((4, 2)), lambda rows: nothing)):
        assert np.isnan(returning(returned, monkeypatch).figure({"y": ONES}, None, tuple("abcd")).value)


def test_a_tensor_is_what_its_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that requires grad, as a learned metric returns it, was called a bug in trtpipe."""
    tensor = torch.ones(4, requires_grad=True) * 3
    for returned in (tensor, tensor.mean(), (tensor, lambda rows: rows.mean())):
        assert returning(returned, monkeypatch).figure({"y": ONES}, None, tuple("abcd")).value == 3


class Unwilling:
    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    "returned",
    [Unwilling(), [Unwilling()] * 4, (Unwilling(), np.mean), torch.ones(4, dtype=torch.bfloat16),
     torch.ones(4, device="meta"), torch.ones(4).to_sparse(), [torch.ones((), requires_grad=True)] * 4],
    ids=["object", "objects", "rows", "bfloat16", "meta", "sparse", "tensors"],
)  # fmt: skip
def test_what_cannot_be_made_an_array_is_the_functions_fault(returned: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^check\.metrics\.m: mine:metric raised "):
        returning(returned, monkeypatch).figure({"y": ONES}, None, tuple("abcd"))


@pytest.mark.parametrize(
    ("returned", "got"),
    [(np.ones(3), "ndarray [3]"), ("much", "str"), (1 + 2j, "complex"), (None, "NoneType"),
     (np.ones(4, np.complex64), "complex64 [4]"), (np.ones((4, 2)), "ndarray [4, 2]"),
     ((np.ones(3), sum), "a pair of rows, ndarray [3]"),
     ((np.ones(4), 1), "tuple"), ([np.ones(4), 1], "list"), ((1, 2, 3), "tuple [3]")],
)  # fmt: skip
def test_what_is_no_figure(returned: object, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = judge("m", named(lambda outputs, labels, ids: returned, monkeypatch), labelled=False)
    with pytest.raises(InputError) as caught:
        made.figure({"y": ONES}, None, tuple("abcd"))
    assert str(caught.value) == (
        "check.metrics.m: must return a number, one number for each of 4 samples, or a pair of rows [S, ...] and a "
        f"function of rows that gives a number (got {got})."
    )


class Kept:
    """As a metric of torchmetrics without `reset()`."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, outputs: Mapping[str, Array], labels: object, ids: object) -> float:
        self.seen += outputs["y"].ravel().tolist()
        return float(np.mean(self.seen))


def test_a_metric_that_keeps_what_it_was_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figure of what was executed is mixed with the baseline's."""
    drawn = np.random.default_rng(0)
    ids, baseline = tuple("abcd"), {"y": ONES}
    for function, got in (
        (Kept(), "1 of the baseline's, and 0.666667"),
        (lambda outputs, labels, ids: float(drawn.random()), "0.636962 of the baseline's, and 0.0409735"),
    ):
        judgement = Judgement((judge("m", named(function, monkeypatch), labelled=False),), None, ids, baseline)
        with pytest.raises(InputError) as caught:
            judgement.measure({"y": 0 * ONES})
        assert str(caught.value) == (
            f"check.metrics.m: must give the same for the same outputs (got {got} of these after it was called with "
            "others). Does it keep what it was given, as a metric of torchmetrics does without reset(), or draw at "
            "random?"
        )
    rounded = iter((0.5, 0.75, 0.5 + 1e-9))
    steady = judge("m", named(lambda outputs, labels, ids: next(rounded), monkeypatch), labelled=False)
    metrics, _ = Judgement((steady,), None, ids, baseline).measure({"y": 0 * ONES})
    assert [m.value for m in metrics] == [0.5, 0.75, -0.25]


@pytest.mark.parametrize("returned", [np.ones(2), "much", 1j, [1.0]])
def test_a_function_of_rows_that_gives_no_number(returned: object, monkeypatch: pytest.MonkeyPatch) -> None:
    made = judge(
        "m", named(lambda outputs, labels, ids: (np.ones((4, 2)), lambda rows: returned), monkeypatch), labelled=False
    )
    with pytest.raises(InputError, match=r"check\.metrics\.m: the function of rows must return a number \(got"):
        made.figure({"y": ONES}, None, tuple("abcd"))


def test_what_a_job_names_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(metric: OwnMetric, labelled: bool = True) -> str:
        with pytest.raises(InputError) as caught:
            judge("m", metric, labelled=labelled).figure({"y": ONES}, None, tuple("abcd"))
        return str(caught.value)

    def broken(outputs: object, labels: object, ids: object) -> float:
        raise ValueError("no")

    assert refused(OwnMetric(function="psnr", args={"reach": 1})) == (
        "check.metrics.m: the function must take (outputs, labels, ids) and args (got psnr: got an unexpected keyword "
        "argument 'reach'). Correct its arguments."
    )
    assert refused(OwnMetric(function="psnr", args={"against": "me"})) == (
        "check.metrics.m.args.against: must be labels or baseline (got me)."
    )
    for function, name, value, why in (
        ("miou", "ignore", [0, 255], "Input should be a valid integer (got [0, 255])"),
        ("miou", "classes", [4], "Input should be a valid integer (got [4])"),
        ("psnr", "data_range", "1", "Input should be a valid number (got '1')"),
        ("top5", "k", 0, "Input should be greater than or equal to 1 (got 0)"),
        ("coco_map", "scores", 3, "Input should be a valid string (got 3)"),
        ("coco_map", "categories", ["a"], "0: Input should be a valid integer (got ['a'])"),
    ):
        said = f"check.metrics.m.args.{name}: {why}. Correct it."
        assert refused(OwnMetric(function=function, args={name: value})) == said
    assert refused(OwnMetric(function="coco_map"), labelled=False) == (
        "check.metrics.m: coco_map needs labels. Give check.labels."
    )
    assert refused(OwnMetric(function="coco_map", args={"against": "baseline"})) == (
        "check.metrics.m.args.against: must be labels (got baseline)."
    )
    assert re.match(r"check\.metrics\.m: mine:metric raised ValueError: no\n", refused(named(broken, monkeypatch)))
    assert refused(OwnMetric(function="nowhere_at_all:f")).startswith(
        "check.metrics.m.function: must name a module that can be imported"
    )


def test_the_bootstrap_is_scipys() -> None:
    a = RNG.normal(size=60)
    b = a + RNG.normal(0.1, 0.2, 60)
    ours = bootstrap_interval(lambda chosen: float((a[chosen] - b[chosen]).mean()), 60)
    theirs = stats.bootstrap(
        (a, b), lambda x, y: (x - y).mean(), paired=True, vectorized=False, method="percentile", n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.01)
    assert ours == bootstrap_interval(lambda chosen: float((a[chosen] - b[chosen]).mean()), 60)
    assert bootstrap_interval(lambda chosen: 1.0, LEAST_RESAMPLED - 1) == (-math.inf, math.inf)
    assert bootstrap_interval(lambda chosen: 1.0, LEAST_RESAMPLED) == (1.0, 1.0)
    assert bootstrap_interval(lambda chosen: math.nan, LEAST_RESAMPLED) == ALL_NUMBERS


def recall(right: Any, defects: int) -> Any:
    """The share of defects that were found, over rows of both: none in a draw without a defect."""
    return lambda outputs, labels, ids: (
        np.stack([right(outputs), np.arange(len(ids)) < defects], 1).astype(float),
        lambda rows: (rows[:, 0] * rows[:, 1]).sum() / rows[:, 1].sum() if rows[:, 1].any() else math.nan,
    )


@pytest.mark.parametrize(("defects", "passed"), [(1, False), (3, False), (40, True)])
def test_a_figure_of_a_few_samples_among_many_is_not_sure(
    defects: int, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws without any of them have no number: leaving those out made the interval one of no width."""
    ids, ones = tuple(map(str, range(300))), {"y": np.ones((300, 1))}
    own = judge("m", named(recall(lambda outputs: outputs["y"][:, 0] > 0, defects), monkeypatch), labelled=False)
    limits = Limits(confident=True, metrics={"m": MetricLimits(min=0.9, drop_max=0.1)})
    figures = [judged(m, limits) for m in Judgement((own,), None, ids, ones).measure(ones)[0]]
    assert [m.passed for m in figures if m.name in ("m_engine", "m_drop")] == [passed, passed]
    half = {"y": np.where(np.arange(300) % 2, 1.0, np.nan)[:, None]}
    each = judge("m", named(lambda outputs, labels, ids: outputs["y"][:, 0], monkeypatch), labelled=False)
    some = Judgement((each,), None, ids, half)
    assert some.counted == {"m_engine": 150, "m_drop": 150}
    sharp = Limits(metrics={"m": MetricLimits(drop_max=0.001)})
    (line,) = doubtful([judged(m, sharp) for m in some.measure(half)[0]], 300, sharp, some.counted)
    assert line.endswith(
        "150 samples are too few to be sure of it (95 % interval -0.02497 to 0.02497; about 3838 would settle it)"
    )


def test_a_metric_of_ones_and_zeros_is_a_share_with_the_exact_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all samples agree, resampling them gives an interval without width."""
    right = np.array([1, 1, 1, 1, 0, np.nan])
    made = {"y": np.array([1.0, 0, 0, 1, 1, 1])[:, None]}
    ids = tuple("abcdef")
    metric = named(lambda outputs, labels, ids: outputs["y"][:, 0] * np.where(np.isnan(right), np.nan, 1), monkeypatch)
    for larger, (lost, won) in ((True, (2, 1)), (False, (1, 2))):
        own = replace(judge("m", metric, labelled=False), larger_is_better=larger)
        figures = {m.name: m for m in Judgement((own,), None, ids, {"y": right[:, None]}).measure(made)[0]}
        assert figures["m_engine"].interval == binomial_interval(3, 5)
        assert figures["m_drop"].interval == paired_interval(lost, won, 5)
    scores = np.eye(4)
    top = judge("t", OwnMetric(function="top5", args={"k": 1}), labelled=True)
    (engine, *_) = (
        m for m in Judgement((top,), np.arange(4), ids[:4], {"y": scores}).measure({"y": scores})[0]
        if m.name == "t_engine"
    )  # fmt: skip
    assert engine.interval == binomial_interval(4, 4)
    for few in (1, 4):
        confident = Limits(confident=True, metrics={"t": MetricLimits(min=0.9)})
        assert judged(replace(engine, interval=binomial_interval(few, few)), confident).passed is False


@pytest.mark.parametrize(("function", "value"), [("cosine", 1.0), ("mae", 0.0)])
def test_a_built_in_measure_of_ones_or_zeros_is_no_share(
    function: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callable that gives the same numbers is one."""
    ids, rows = tuple(map(str, range(20))), {"y": RNG.random((20, 4))}
    built_in = judge("m", OwnMetric(function=function), labelled=False)
    own = judge("m", named(lambda outputs, labels, ids: np.full(len(ids), value), monkeypatch), labelled=False)
    for metric, interval in ((built_in, (value, value)), (own, binomial_interval(20 * int(value), 20))):
        figures = {m.name: m for m in Judgement((metric,), None, ids, rows).measure(rows)[0]}
        assert (figures["m_engine"].value, figures["m_engine"].interval) == (value, interval)


def test_of_a_few_samples_no_figure_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(confident=True, metrics={"m": MetricLimits(max=1.0)})
    for samples, passed in ((1, False), (LEAST_RESAMPLED - 1, False), (LEAST_RESAMPLED, True)):
        metric = named(lambda outputs, labels, ids: outputs["y"][:, 0], monkeypatch)
        own = replace(judge("m", metric, labelled=False), larger_is_better=False)
        rows = {"y": np.linspace(0.1, 0.2, samples)[:, None]}
        figures = Judgement((own,), None, tuple(map(str, range(samples))), rows).measure(rows)[0]
        (engine,) = (judged(m, limits) for m in figures if m.name == "m_engine")
        assert engine.passed is passed
        assert (engine.interval_text == "unknown") is not passed
        said = doubtful([replace(engine, passed=None)], samples, limits)
        assert said == (() if passed else (
            f"y.m_engine: {engine.value:.4g} meets the limit 1, and {samples} samples are too few to be sure of it "
            "(95 % interval unknown; it takes 10 that count, or more)",
        ))  # fmt: skip


def judgement(metric: OwnMetric, labels: Labels, reference: dict[str, Any], name: str = "m") -> Judgement:
    """One metric over labels."""
    ids = tuple(map(str, range(len(reference["y"]))))
    return Judgement((judge(name, metric, labelled=labels is not None),), labels, ids, reference)


@pytest.mark.parametrize("wrong", range(1, 100))
def test_a_drop_passes_exactly_where_it_meets_its_limit(wrong: int) -> None:
    """29 of 100 lost are 0.29, though 1 - 0.71 of binary numbers is more."""
    scores, labels = np.tile([0.0, 1.0, 0.0], (100, 1)), np.ones(100, np.int64)
    worse = np.where(np.arange(100)[:, None] < wrong, [1.0, 0.0, 0.0], scores)
    made = judgement(OwnMetric(function="top5", args={"k": 1}), labels, {"y": scores})
    (drop,) = [m for m in made.measure({"y": worse})[0] if m.name == "m_drop"]
    met, missed = (Limits(metrics={"m": MetricLimits(drop_max=n / 100)}) for n in (wrong, wrong - 1))
    assert (judged(drop, met).passed, judged(drop, missed).passed) == (True, False)


def test_figures_of_both_and_the_drop_with_a_paired_interval() -> None:
    labels = RNG.normal(size=(50, 4))
    reference, outputs = {"y": labels + 0.1}, {"y": labels + 0.3}
    made = judgement(OwnMetric(function="mae"), labels, reference)
    (before, after, drop), problems = made.measure(outputs)
    assert not problems
    assert [m.name for m in (before, after, drop)] == ["m_baseline", "m_engine", "m_drop"]
    assert (before.value, after.value, drop.value) == pytest.approx((0.1, 0.3, 0.2))  # lower is better: 0.2 worse
    assert drop.interval == pytest.approx((0.2, 0.2))
    (first, *_), _ = made.first(10, {"y": reference["y"][:10]}).measure({"y": outputs["y"][:10]})
    assert first.value == pytest.approx(0.1)
    drop = judgement(OwnMetric(function="psnr"), labels, reference).measure(outputs)[0][2]
    assert drop.value == pytest.approx(20 * math.log10(3))
    same = judgement(OwnMetric(function="psnr"), labels, {"y": labels})
    assert same.measure({"y": labels})[0][2].value == 0  # both infinite


def by_sample(outputs: dict[str, Any], labels: Labels, ids: tuple[str, ...]) -> Any:
    return outputs["y"][:, 0]


def by_set(outputs: dict[str, Any], labels: Labels, ids: tuple[str, ...]) -> float:
    return float(outputs["y"].mean())


@pytest.mark.parametrize("larger", [True, False])
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
@pytest.mark.parametrize("where", ["both", "before", "after"])
def test_one_infinite_sample_does_not_hide_what_others_lose(where: str, infinity: float, larger: bool) -> None:
    """A PSNR is infinite wherever an image is exact."""
    before, after = np.arange(24.0)[:, None] + 10, np.arange(24.0)[:, None] + (9 if larger else 11)
    if where != "after":
        before[3] = infinity
    if where != "before":
        after[3] = infinity
    metric = OwnMetric(function=f"{__name__}:by_sample", better="higher" if larger else "lower")
    made = judgement(metric, None, {"y": before})
    metrics, problems = made.measure({"y": after})
    drop = next(m for m in metrics if m.name == "m_drop")
    assert problems == []
    if where == "both":
        assert drop.value == pytest.approx(1)
        assert all(math.isfinite(m.value) for m in metrics)
    else:
        assert drop.value == (infinity if larger == (where == "before") else -infinity)
    said = "m: 1 of 24 samples are infinite in the baseline, and count only where what was executed has another figure"
    assert made.says_nothing() == (() if where == "after" else (said,))
    for limit in (-100.0, 0.0, 100.0):  # none of them ends in an error
        bound = Limits(metrics={"m": MetricLimits(min=limit, max=limit, drop_max=abs(limit))})
        doubtful([judged(m, bound) for m in metrics], 24, bound)


def test_a_figure_that_is_infinite_is_said() -> None:
    whole = judgement(OwnMetric(function=f"{__name__}:by_set"), None, {"y": np.full((4, 1), math.inf)})
    assert whole.says_nothing() == ("m: is infinite in the baseline, so its drop says only whether it still is",)
    each = judgement(OwnMetric(function=f"{__name__}:by_sample"), None, {"y": np.full((4, 1), math.inf)})
    assert [m.value for m in each.measure({"y": np.full((4, 1), math.inf)})[0]] == [math.inf, math.inf, 0]


def test_without_labels_a_built_in_metric_is_against_the_baseline() -> None:
    scores = RNG.normal(size=(4, 3, 5, 5)).astype(np.float32)
    made = judgement(OwnMetric(function="miou"), None, {"y": scores})
    metrics, _ = made.measure({"y": scores})
    assert [(m.name, m.value) for m in metrics] == [("m_engine", 1.0)]
    limits = Limits(metrics={"m": MetricLimits(drop_max=0.1, min=0.9)})
    text = "check.limits.metrics.m.drop_max cannot be judged: m is against the baseline, and a drop needs check.labels"
    assert made.unjudgeable(limits) == {"metrics.m.drop_max": text}
    judged, problems = measure({"y": scores}, {"y": scores}, None, limits, (), made)
    assert problems == [text]
    assert {m.name: m.passed for m in judged if m.limit is not None} == {"m_engine": True}
    with pytest.raises(InputError, match=r"check\.metrics\.m: needs an output \[S, C, H, W\]"):
        judgement(OwnMetric(function="miou"), None, {"y": ONES}).measure({"y": ONES})


#: By hand: a name that `SHARE_METRICS` lacks would take its own cases away.
SHARES = ("top5", "miou", "coco_map")


def test_every_metric_that_is_a_share_of_what_is_right_is_one():
    """Those of images lie between 0 and 1 as well, or in decibels: none of them is 0 where nothing is right."""
    assert set(SHARES) == set(SHARE_METRICS) == set(STANDARD) - {"psnr", "ssim", "mae", "cosine"}


ALSO_BOXES = ", and are boxes in pixels of the input"
CORNERS = np.tile([[1.0, 1, 9, 9]], (4, 1, 1))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("function", SHARES)
def test_a_baseline_by_which_nothing_is_right_is_said(function: str, right: bool) -> None:
    """Every drop from 0 is within any limit."""
    if function == "coco_map":  # a box in shares of the image, not pixels
        reference = {"boxes": CORNERS if right else CORNERS / 10, "scores": np.ones((4, 1)), "labels": np.ones((4, 1))}
        labels: Labels = (Boxes(CORNERS[0], np.array([1]), np.array([False])),) * 4
    else:
        reference = {"y": np.eye(6)[[int(not right)] * 4]}
        labels = np.zeros(4, np.int64)
        if function == "miou":
            reference, labels = {"y": reference["y"][:, :2, None, None]}, labels[:, None, None]
    args = {"k": 1} if function == "top5" else {}
    known = Judgement(
        (judge("m", OwnMetric(function=function, args=args), labelled=True),), labels, ("a",) * 4, reference
    )
    assert known.says_nothing() == (
        ()
        if right
        else (
            "m: the baseline itself has 0, so the figure and its drop say nothing. Do check.labels and the outputs "
            f"number classes alike{ALSO_BOXES if function == 'coco_map' else ''}?",
        )
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("function", SHARES)
def test_a_baseline_that_fits_the_labels_of_other_samples_as_well_is_said(function: str, own: bool) -> None:
    """Its figure is above 0, and would be without any answer of its own: one that all samples share, or luck."""
    kinds, args = np.arange(8), {"k": 1} if function == "top5" else {}
    if function == "coco_map":
        corners = np.tile([[10.0, 10, 30, 30]], (8, 1, 1)) + (20 * (kinds % 2) if own else 0 * kinds)[:, None, None]
        reference = {"boxes": corners, "scores": np.ones((8, 1)), "labels": np.ones((8, 1))}
        labels: Labels = tuple(
            Boxes(np.array([place]), np.array([1]), np.array([False]))
            for place in (corners[:, 0] if own else np.array([[11.0, 10, 31, 30], [9, 10, 29, 30]] * 4))
        )
    elif function == "miou":  # a background, and the class of a corner
        masks = np.zeros((8, 6, 6), np.int64)
        masks[:, 4:] = (kinds % 3 + 1)[:, None, None]
        reference = {"y": np.eye(4)[masks].transpose(0, 3, 1, 2)}
        labels = masks if own else np.where(masks == 0, 0, masks % 3 + 1)
    else:
        reference = {"y": np.eye(8)}
        labels = kinds if own else np.concatenate([kinds[:1], np.roll(kinds[1:], 1)])
    metric = judge("m", OwnMetric(function=function, args=args), labelled=True)
    said = Judgement((metric,), labels, tuple("abcdefgh"), reference).says_nothing()
    figures = {"top5": "0.125, and 0", "miou": "0.25, and 0.5", "coco_map": "0.9, and 0.9"}
    assert said == (
        ()
        if own
        else (
            f"m: the baseline itself has {figures[function]} by the labels of other samples, so the figure and its "
            f"drop say nothing. Do check.labels and the outputs number classes alike"
            f"{ALSO_BOXES if function == 'coco_map' else ''}?",
        )
    )


@pytest.mark.parametrize(("values", "args", "said"), [
    ((0, 255), {}, ("m: besides 255, which is ignored, its masks hold class 0 alone. Where 255 is a class too, give "
                    "check.metrics.m.args.ignore another number",)),
    ((0, 1, 255), {}, ()), ((0, 1), {}, ()), ((1, 7), {"ignore": 9}, ()),
    ((1, 7), {"ignore": 7}, ("m: besides 7, which is ignored, its masks hold class 1 alone. Where 7 is a class too, "
                             "give check.metrics.m.args.ignore another number",)),
])  # fmt: skip
def test_masks_of_one_class_beside_what_is_ignored(values: tuple[int, ...], args: Any, said: tuple[str, ...]) -> None:
    """As binary masks are often saved, 0 and 255."""
    labels = np.resize(np.array(values), (2, 4, 4))
    scores = np.eye(8)[np.where(labels == 255, 1, labels)].transpose(0, 3, 1, 2)
    metric = judge("m", OwnMetric(function="miou", args=args), labelled=True)
    assert Judgement((metric,), labels, ("a", "b"), {"y": scores}).says_nothing() == said


def test_the_outputs_that_a_job_has_for_boxes_are_those_of_the_metric() -> None:
    parameters = inspect.signature(coco_map).parameters
    assert {name: parameters[name].default for name in COCO_OUTPUTS} == COCO_OUTPUTS
    assert {name: COCO_OUTPUTS[name] for name in ("scores", "classes")} == BOXED


def test_scores_of_boxes_are_no_class_scores() -> None:
    """The place of the best of K candidates is no class."""
    reference = {"b": CORNERS.repeat(3, 1), "s": RNG.uniform(size=(4, 3)), "k": np.ones((4, 3)), "y": ONES}
    args = {"boxes": "b", "scores": "s", "classes": "k"}
    judges = (judge("m", OwnMetric(function="coco_map", args=args), labelled=True),)
    made = Judgement(
        judges, (Boxes(CORNERS[0], np.array([1]), np.array([False])),) * 4, ("a",) * 4, reference, frozenset("sk")
    )
    found, problems = measure(reference, reference, None, Limits(top1_agreement_min=0.9), (), made)
    assert problems == []
    assert [m.output for m in found if m.name == "top1_agreement"] == ["y"]
    del reference["y"]
    _, problems = measure(reference, reference, None, Limits(top1_agreement_min=0.9), (), made)
    assert problems == [
        "check.limits.top1_agreement_min cannot be judged: it needs an output of one score a class, float [N, 2 or "
        "more]"
    ]


def test_limits_of_metrics_judge() -> None:
    labels = np.zeros((40, 2))
    reference, outputs = {"y": labels + 0.5}, {"y": labels + RNG.uniform(0.5, 0.9, (40, 1))}
    made = judgement(OwnMetric(function="mae"), labels, reference, "off")
    off = float(outputs["y"].mean())

    def passed(**kinds: float) -> dict[str, bool | None]:
        limits = Limits(metrics={"off": MetricLimits(**kinds)})
        judged, problems = measure(reference, outputs, None, limits, (), made)
        assert not problems
        assert (shortfall(judged, limits) <= 0) is all(m.passed is not False for m in judged)
        return {m.name: m.passed for m in judged if m.limit is not None}

    assert passed(max=off + 1e-6) == {"off_engine": True}
    assert passed(max=off - 1e-6) == {"off_engine": False}
    assert passed(min=off - 1e-6) == {"off_engine": True}
    assert passed(min=off + 1e-6) == {"off_engine": False}
    assert passed(drop_max=off - 0.5 + 1e-6, max=1) == {"off_drop": True, "off_engine": True}
    assert passed(drop_max=off - 0.5 - 1e-6) == {"off_drop": False}
    confident = Limits(metrics={"off": MetricLimits(max=off + 1e-6)}, confident=True)
    judged, _ = measure(reference, outputs, None, confident, (), made)
    assert [m.passed for m in judged if m.limit is not None] == [False]
    assert [line[:10] for line in doubtful(judged, 40, confident)] == ["y.off_engi"]


def test_every_limit_that_a_metric_can_have_is_bound() -> None:
    assert set(OWN_LIMITS) == set(MetricLimits.model_fields)
    limits = Limits(cosine_min=0.9, metrics={"m": MetricLimits(min=1, max=2, drop_max=3)})
    assert [b.key for b in bounds(limits)] == list(limits.given)
    assert {b.key for b in bounds(Limits(**dict.fromkeys(METRIC_OF_LIMIT, 0.5)))} == set(METRIC_OF_LIMIT)


def test_a_limit_that_was_not_measured_is_a_problem() -> None:
    limits = Limits(metrics={"m": MetricLimits(min=1)})
    assert measure({"y": ONES}, {"y": ONES}, None, limits)[1] == ["metrics.m.min was not judged"]
    assert shortfall((), limits) == math.inf


def test_nan_is_a_failure() -> None:
    made = Judgement((Judge("m", lambda outputs, labels, ids: math.nan, {}),), None, ("a",), {"y": ONES[:1]})
    limits = Limits(metrics={"m": MetricLimits(min=0)})
    judged, problems = measure({"y": ONES[:1]}, {"y": ONES[:1]}, None, limits, (), made)
    assert problems == ["m_baseline is NaN", "m_engine is NaN", "m_drop is NaN"]
    assert [m.passed for m in judged if m.limit is not None] == [False]


def test_nan_on_the_baseline_ends_the_build() -> None:
    functions = (lambda outputs, labels, ids: math.nan, lambda outputs, labels, ids: 1)
    judges = tuple(Judge(name, f, {}) for name, f in zip(("lost", "good"), functions, strict=True))
    text = (
        "check.metrics: must be numbers on the baseline (got NaN for lost). Correct the function, or give labels "
        "that it can judge by."
    )
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        Judgement(judges, None, ("a",), {"y": ONES[:1]}).require_figures()
    Judgement(judges[1:], None, ("a",), {"y": ONES[:1]}).require_figures()


@pytest.mark.parametrize(
    ("returned", "refused"),
    [(0.5, True), (np.float32(0.5), True), (np.full(12, 0.5), False), ((np.ones((12, 2)), np.mean), False)],
)
@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("limits", [{}, {"m": {"min": 0.1}}, {"m": {"drop_max": 0.1}}])
def test_what_has_no_interval_cannot_be_asked_to_be_sure(
    returned: object, refused: bool, confident: bool, limits: dict[str, Any]
) -> None:
    judges = tuple(Judge(name, lambda outputs, labels, ids: returned, {}) for name in ("m", "of no limit"))
    made = Judgement(judges, None, tuple("abcdefghijkl"), {"y": np.ones((12, 2))})
    found = made.unjudgeable(Limits(cosine_min=0.9, confident=confident, metrics=limits))
    text = "check.limits.confident cannot be judged: m is one number for all samples, and has no interval"
    assert list(found.values()) == ([text] if refused and confident and limits else [])


def test_the_baseline_is_measured_once() -> None:
    """However many trials are judged by it; few samples are another baseline."""
    seen: list[int] = []

    def counting(outputs: dict[str, Any], labels: Labels, ids: tuple[str, ...]) -> float:
        seen.append(len(ids))
        return float(outputs["y"].sum())

    made = Judgement((Judge("m", counting, {}),), None, ("a", "b"), {"y": ONES[:2]})
    made.require_figures()
    for scale in (1, 2, 3):
        (before, after, _), _ = made.measure({"y": scale * ONES[:2]})
        assert after.value == scale * before.value
    assert seen == [2] * 5  # once more, after another's
    made.first(1, {"y": ONES[:1]}).measure({"y": ONES[:1]})
    assert seen == [2] * 5 + [1, 1]


@pytest.mark.parametrize("boxes", [False, True])
def test_a_callable_may_write_into_what_it_is_given(boxes: bool) -> None:
    """Outputs, labels and arguments are what they were: for the other figures, the next metric and the bundle."""

    def spoiling(outputs: dict[str, Any], labels: Any, ids: tuple[str, ...], weights: list[int]) -> float:
        for array in outputs.values():
            array[...] = 0
        for array in (
            [labels] if isinstance(labels, np.ndarray) else [a for b in labels for a in (b.corners, b.classes, b.crowd)]
        ):
            array[...] = 0
        weights.append(1)
        outputs.clear()
        return float(len(weights))

    reference, outputs = {"y": np.ones((2, 3))}, {"y": np.full((2, 3), 2.0)}
    ones = Boxes(np.ones((1, 4)), np.ones(1, np.int64), np.ones(1, bool))
    labels: Any = (ones, ones) if boxes else np.ones(2, np.int64)
    args: dict[str, Any] = {"weights": []}
    made = Judgement((Judge("m", spoiling, args),) * 2, labels, ("a", "b"), reference)
    assert {m.value for m in made.measure(outputs)[0] if not m.name.endswith("drop")} == {1.0}
    assert (reference["y"] == 1).all()
    assert (outputs["y"] == 2).all()
    assert all(np.all(a) for a in ([labels] if not boxes else [ones.corners, ones.classes, ones.crowd]))
    assert args == {"weights": []}


def test_the_digest_is_of_all_that_a_figure_depends_on() -> None:
    labels, reference = np.zeros((2, 2)), {"y": np.zeros((2, 2))}
    box = Boxes(np.zeros((1, 4)), np.zeros(1, np.int64), np.zeros(1, np.bool_))
    moved = Boxes(np.ones((1, 4)), np.zeros(1, np.int64), np.zeros(1, np.bool_))
    made = [
        judgement(OwnMetric(function="mae"), labels, reference),
        judgement(OwnMetric(function="psnr"), labels, reference),
        judgement(OwnMetric(function="psnr", args={"data_range": 2.0}), labels, reference),
        judgement(OwnMetric(function="mae"), labels + 1, reference),
        judgement(OwnMetric(function="mae", args={"against": "baseline"}), labels, reference),
        judgement(OwnMetric(function="coco_map"), (box, box), reference),
        judgement(OwnMetric(function="coco_map"), (box, moved), reference),
    ]
    assert len({m.digest for m in made}) == len(made)
    assert made[0].digest == judgement(OwnMetric(function="mae"), labels, reference).digest


def test_a_sample_counts_on_both_sides_or_not_at_all() -> None:
    """Of one number a sample: NaN in the baseline leaves a sample out, NaN in what was executed alone is a problem."""
    judges = (Judge("own", lambda outputs, labels, ids: outputs["y"][:, 0], {}),)
    nan = math.nan
    reference = {"y": np.array([[1.0], [0.5], [nan], [0.75]])}
    made = Judgement(judges, None, tuple("abcd"), reference)
    metrics, problems = made.measure({"y": np.array([[0.5], [0.5], [9.0], [0.75]])})
    values = {m.name: m.value for m in metrics}
    assert values == {"own_baseline": 0.75, "own_engine": pytest.approx(7 / 12), "own_drop": pytest.approx(1 / 6)}
    assert problems == []
    assert made.says_nothing() == ("own: 1 of 4 samples have no number in the baseline (NaN) and do not count",)
    _, problems = made.measure({"y": np.array([[1.0], [nan], [nan], [nan]])})
    assert problems == ["own is NaN in 2 of 4 samples of what was executed, in which it is a number in the baseline"]


@pytest.mark.parametrize("function", ["mae", "cosine", "psnr"])
def test_built_in_metrics_are_of_samples(function: str) -> None:
    own = OwnMetric(function=function, args={"output": "k"})
    made = judgement(own, np.zeros((6, 3)), {"y": np.ones((6, 3)), "k": np.ones((2, 3))})
    text = (
        "check.metrics.m: output k must have one row a sample (got one a batch, 2 for 6 samples). Name another output, "
        "or give a callable."
    )
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        made.require_figures()


def test_shares_of_no_sample_have_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was executed has numbers only where the baseline has none."""
    rows = {1.0: [1.0, 1.0, math.nan], 0.0: [math.nan, math.nan, 0.0]}
    metric = named(lambda outputs, labels, ids: np.array(rows[float(outputs["y"][0, 0])]), monkeypatch)
    made = judge("m", metric, labelled=False)
    ones, ids = np.ones((3, 1)), tuple("abc")
    metrics, problems = Judgement((made,), None, ids, {"y": ones}).measure({"y": ones * 0})
    assert any("m is NaN in 2 of 3 samples of what was executed" in p for p in problems)
    assert {m.interval for m in metrics if m.name == "m_engine"} == {None}


def test_nothing_lost_is_zero_and_not_minus_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = named(lambda outputs, labels, ids: np.abs(outputs["y"][:, 0]), monkeypatch).model_copy(
        update={"larger_is_better": False}
    )
    ones, ids = np.ones((3, 1)), tuple("abc")
    made = Judgement((judge("m", metric, labelled=False),), None, ids, {"y": ones}).measure({"y": ones})[0]
    (drop,) = (m for m in made if m.name == "m_drop")
    assert str(drop.value) == "0.0"
    assert str(sqnr_db(np.ones((2, 3)), np.zeros((2, 3)))) == "0.0"

"""The job's own metrics: the built-in ones against reference implementations, the forms of a function, limits."""

from __future__ import annotations

import math
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from trtpipe.errors import InputError, MissingError
from trtpipe.evaluation.check import LIMITS, OWN_LIMITS, bounds, doubtful, measure
from trtpipe.evaluation.intervals import bootstrap_interval
from trtpipe.evaluation.judgement import Figure, Judge, Judgement, judge
from trtpipe.evaluation.standard import STANDARD
from trtpipe.job.sections import BUILT_IN_METRICS, Limits, MetricLimits, OwnMetric
from trtpipe.quantization.search import shortfall
from trtpipe.values import Boxes, Labels

RNG = np.random.default_rng(3)


def figure(name: str, outputs: dict[str, Any], labels: Labels, **args: object) -> Figure:
    """A built-in metric of these outputs against labels."""
    samples = len(next(iter(outputs.values())))
    made = judge(name, OwnMetric(function=name, args=args), labelled=True)
    return made.figure(outputs, labels, tuple(map(str, range(samples))))


def named(function: Any, monkeypatch: pytest.MonkeyPatch) -> OwnMetric:
    """`function` as a job names it."""
    module = ModuleType("mine")
    module.metric = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    return OwnMetric(function="mine:metric")


def test_the_names_of_the_job_are_those_that_there_are() -> None:
    assert tuple(BUILT_IN_METRICS) == tuple(STANDARD)


@pytest.mark.parametrize("seed", range(3))
def test_top5_is_torchmetrics(seed: int) -> None:
    from torchmetrics.functional.classification import multiclass_accuracy

    rng = np.random.default_rng(seed)
    scores, labels = rng.normal(size=(40, 9)).astype(np.float32), rng.integers(0, 9, 40)
    expected = multiclass_accuracy(torch.tensor(scores), torch.tensor(labels), 9, average="micro", top_k=5)
    assert figure("top5", {"y": scores}, labels).value == pytest.approx(float(expected), abs=1e-6)
    labels[::4] = -1  # unknown: not counted
    known = labels >= 0
    expected = multiclass_accuracy(
        torch.tensor(scores[known]), torch.tensor(labels[known]), 9, average="micro", top_k=5
    )
    assert figure("top5", {"y": scores}, labels).value == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("form", ["scores", "classes", "logit", "flat logit"])
def test_miou_is_torchmetrics(form: str) -> None:
    from torchmetrics.functional.classification import multiclass_jaccard_index

    many = 5 if form in ("scores", "classes") else 2
    labels = RNG.integers(0, many, (6, 9, 7))
    scores = RNG.normal(size=(6, many, 9, 7)).astype(np.float32)
    found, output = scores.argmax(1), scores
    if form == "classes":
        output = found
    elif form != "scores":
        output = scores[:, :1] if form == "logit" else scores[:, 0]
        found = (scores[:, 0] > 0).astype(np.int64)
    labels[:, 0] = 255
    expected = multiclass_jaccard_index(torch.tensor(found), torch.tensor(labels), many, ignore_index=255)
    args = {"classes": many} if form == "classes" else {}
    assert figure("miou", {"y": output}, labels, **args).value == pytest.approx(float(expected), abs=1e-6)


def test_miou_by_hand() -> None:
    """Class 0: 2 of 3 pixels, class 1: 0 of 1; class 2 is nowhere and does not count."""
    scores = np.zeros((1, 3, 1, 3), np.float32)
    scores[:, 0] = 1
    made = figure("miou", {"y": scores}, np.array([[[0, 0, 1]]]))
    assert made.value == pytest.approx((2 / 3 + 0) / 2)
    assert made.rows is not None
    assert made.rows.tolist() == [[[2, 3], [0, 1], [0, 0]]]


@pytest.mark.parametrize("reach", [1.0, 255.0])
def test_psnr_ssim_mae_and_cosine_are_torchmetrics(reach: float) -> None:
    from torchmetrics.functional import mean_absolute_error
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    a = RNG.uniform(0, reach, (4, 3, 17, 21))
    b = np.clip(a + RNG.normal(0, reach / 20, a.shape), 0, reach)
    left, right = torch.tensor(b), torch.tensor(a)
    outputs, args = {"other": a * 0, "y": b}, {"output": "y"}
    expected = peak_signal_noise_ratio(left, right, data_range=reach)
    # It takes its logarithms in float32.
    assert figure("psnr", outputs, a, data_range=reach, **args).value == pytest.approx(float(expected), rel=1e-6)
    _, windows = structural_similarity_index_measure(left, right, data_range=reach, return_full_image=True)
    expected = windows[..., 5:-5, 5:-5].mean()  # those inside the image, as in the paper; it takes a margin too
    assert figure("ssim", outputs, a, data_range=reach, **args).value == pytest.approx(float(expected), abs=1e-6)
    expected = mean_absolute_error(left, right)
    assert figure("mae", outputs, a, **args).value == pytest.approx(float(expected), abs=1e-6)
    expected = torch.nn.functional.cosine_similarity(left.flatten(1), right.flatten(1)).mean()
    assert figure("cosine", outputs, a, **args).value == pytest.approx(float(expected), abs=1e-6)
    assert figure("psnr", {"y": a}, a).value == math.inf
    assert figure("cosine", {"y": a * 0}, a).value == 0


def scene(seed: int, crowds: bool) -> tuple[dict[str, np.ndarray], tuple[Boxes, ...]]:
    """Images with up to 5 boxes of 3 classes, and detections near them."""
    rng = np.random.default_rng(seed)
    truth, boxes, scores, classes = [], np.zeros((6, 8, 4)), np.zeros((6, 8)), np.zeros((6, 8))
    for i in range(6):
        n = int(rng.integers(0, 5)) if i else 3
        corners = rng.uniform(0, 60, (n, 4))
        corners[:, 2:] = corners[:, :2] + rng.uniform(5, 40, (n, 2))
        kinds = rng.integers(1, 4, n)
        truth.append(Boxes(corners, kinds, crowds & (rng.uniform(size=n) < 0.2)))
        found = np.concatenate([corners + rng.normal(0, 2, corners.shape), rng.uniform(0, 90, (8 - n, 4))])
        found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
        boxes[i], scores[i] = found, rng.uniform(0.05, 1, 8)
        classes[i] = np.concatenate([kinds, rng.integers(1, 5, 8 - n)])
    scores[2, 3:] = 0  # filled up
    return {"boxes": boxes, "scores": scores, "labels": classes}, tuple(truth)


@pytest.mark.parametrize("crowds", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_coco_map_is_torchmetrics(seed: int, crowds: bool) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchmetrics.detection import MeanAveragePrecision

        # Its own thresholds are in float32, which makes 0.5 of recall miss the threshold 0.5.
        recalls, overlaps = np.linspace(0, 1, 101).tolist(), np.linspace(0.5, 0.95, 10).tolist()
        reference = MeanAveragePrecision("xyxy", "bbox", overlaps, recalls, backend="pycocotools")
        outputs, truth = scene(seed, crowds)
        for i, known in enumerate(truth):
            real = outputs["scores"][i] > 0
            found = {name: torch.tensor(values[i][real]) for name, values in outputs.items()}
            found["labels"] = found["labels"].long()
            right = {"boxes": torch.tensor(known.corners), "labels": torch.tensor(known.classes)}
            right["iscrowd"] = torch.tensor(known.crowd).long()
            reference.update([found], [right])
        expected = float(reference.compute()["map"])
    assert 0 < expected < 1
    assert figure("coco_map", outputs, truth).value == pytest.approx(expected, abs=1e-6)


def test_coco_map_by_hand() -> None:
    """Of two boxes one is found exactly, after a false one of more certainty: precision 1/2 up to recall 1/2."""
    boxes = np.array([[[50, 50, 60, 60], [0, 0, 10, 10]]], np.float32)
    truth = (Boxes(np.array([[0, 0, 10, 10], [20, 20, 30, 30.0]]), np.array([1, 1]), np.zeros(2, np.bool_)),)
    outputs = {"boxes": boxes, "scores": np.array([[0.9, 0.8]]), "labels": np.array([[1, 1]])}
    assert figure("coco_map", outputs, truth).value == pytest.approx(0.5 * 51 / 101, abs=1e-6)
    by_class = {"boxes": boxes, "scores": np.array([[[0, 0.9], [0, 0.8]]])}
    assert figure("coco_map", by_class, truth).value == pytest.approx(0.5 * 51 / 101, abs=1e-6)
    assert figure("coco_map", outputs | {"scores": np.zeros((1, 2))}, truth).value == 0
    nothing = (Boxes(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0, np.bool_)),)
    assert math.isnan(figure("coco_map", outputs, nothing).value)


def test_coco_map_without_pycocotools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(
        MissingError, match=r"^check\.metrics: coco_map: pycocotools is not installed\. Run: pip install"
    ):
        figure("coco_map", *scene(0, False))


ONES = np.ones((4, 3), np.float32)


@pytest.mark.parametrize(
    ("name", "outputs", "labels", "args", "message"),
    [
        ("top5", {"y": ONES}, np.zeros((4, 2)), {},
         "needs scores [S, C] and a class for each sample (got [4, 3] and [4, 2])."),
        ("top5", {"y": ONES}, None, {}, "needs labels of one array (got none). See check.labels."),
        ("top5", {"y": ONES}, np.zeros(4), {"output": "z"}, "needs an output z (got y). Name another in args."),
        ("miou", {"y": ONES}, np.zeros((4, 3, 3), np.int64), {},
         "needs an output [S, C, H, W] or [S, H, W] (got [4, 3]). Name it in args: output."),
        ("miou", {"y": np.ones((4, 2, 6, 6))}, np.zeros((4, 3, 3), np.int64), {},
         "needs masks of the output's size, integers [4, 6, 6] (got int64 [4, 3, 3]). Resize the output in the model, "
         "or transform the images to its size."),
        ("miou", {"y": np.ones((1, 2, 2, 2))}, np.array([[[0, 1], [2, 255]]]), {},
         "needs labels from 0 to 1 (got 0 to 2). Number them so, or give `ignore` for pixels of no class."),
        ("psnr", {"y": ONES}, np.zeros(4, np.int64), {},
         "needs labels of the output's shape [4, 3] (got [4]). To compare with the baseline, set args: "
         "{against: baseline}."),
        ("ssim", {"y": np.ones((2, 1, 9, 9))}, np.ones((2, 1, 9, 9)), {},
         "needs images of 11 x 11 pixels or more (got [2, 1, 9, 9])."),
        ("coco_map", {"boxes": ONES}, np.zeros(4), {}, "needs boxes as labels. Give check.labels a .json of COCO."),
        ("coco_map", {"boxes": ONES, "scores": ONES}, (), {},
         "needs boxes [S, K, 4] and scores of the same K (got [4, 3] and [4, 3])."),
    ],
)  # fmt: skip
def test_what_a_metric_cannot_be_made_of(
    name: str, outputs: dict[str, Any], labels: Labels, args: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        figure(name, outputs, labels, **args)
    assert str(caught.value) == f"check.metrics.{name}: {message}"


def test_a_function_returns_a_number_one_a_sample_or_rows_with_their_total(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([1.0, 2.0, np.nan, 6.0])
    forms = {
        "number": (lambda outputs, labels, ids: 3.0, 3.0),
        "samples": (lambda outputs, labels, ids: values, 3.0),  # a NaN does not count
        "rows": (lambda outputs, labels, ids: (np.ones((4, 2)), lambda rows: rows.sum()), 8.0),
    }
    for function, expected in forms.values():
        made = judge("m", named(function, monkeypatch), labelled=False).figure({"y": ONES}, None, tuple("abcd"))
        assert made.value == expected
    assert made.interval() == (8.0, 8.0)


@pytest.mark.parametrize(
    ("returned", "got"),
    [(np.ones(3), "ndarray [3]"), ("much", "str"), (1 + 2j, "complex"), (None, "NoneType"),
     (np.ones((4, 2)), "ndarray [4, 2]"), ((np.ones(3), sum), "a pair"),
     ((np.ones(4), 1), "a pair")],
)  # fmt: skip
def test_what_is_no_figure(returned: object, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = judge("m", named(lambda outputs, labels, ids: returned, monkeypatch), labelled=False)
    with pytest.raises(InputError) as caught:
        made.figure({"y": ONES}, None, tuple("abcd"))
    assert str(caught.value) == (
        "check.metrics.m: must return a number, one number for each of 4 samples, or a pair of rows [S, ...] and a "
        f"function of rows that gives a number (got {got})."
    )


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
    assert refused(OwnMetric(function="coco_map"), labelled=False) == (
        "check.metrics.m: coco_map needs labels. Give check.labels."
    )
    assert refused(OwnMetric(function="coco_map", args={"against": "baseline"})) == (
        "check.metrics.m.args.against: must be labels (got baseline)."
    )
    assert re.match(r"check\.metrics\.m raised ValueError: no\n", refused(named(broken, monkeypatch)))
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
    assert bootstrap_interval(lambda chosen: 1.0, 1) is None
    assert bootstrap_interval(lambda chosen: math.nan, 5) is None


def judgement(metric: OwnMetric, labels: Labels, reference: dict[str, Any], name: str = "m") -> Judgement:
    """One metric over labels."""
    ids = tuple(map(str, range(len(reference["y"]))))
    return Judgement((judge(name, metric, labelled=labels is not None),), labels, ids, reference)


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
    assert {b.key for b in bounds(Limits(**dict.fromkeys(LIMITS, 0.5)))} == set(LIMITS)


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
    assert seen == [2] * 4
    made.first(1, {"y": ONES[:1]}).measure({"y": ONES[:1]})
    assert seen == [2] * 4 + [1, 1]


@pytest.mark.parametrize("boxes", [False, True])
def test_a_callable_may_write_into_what_it_is_given(boxes: bool) -> None:
    """Outputs, labels and arguments are what they were: for the other figures, the next metric and the bundle."""

    def spoiling(outputs: dict[str, Any], labels: Any, ids: tuple[str, ...], weights: list[int]) -> float:
        for array in outputs.values():
            array[...] = 0
        for array in [labels] if isinstance(labels, np.ndarray) else [a for b in labels for a in vars(b).values()]:
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

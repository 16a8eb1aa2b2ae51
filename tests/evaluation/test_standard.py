"""The built-in metrics against reference implementations, and by hand."""

from __future__ import annotations

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trtpipe.errors import InputError, MissingError
from trtpipe.evaluation.judgement import Figure
from trtpipe.evaluation.judges import judge
from trtpipe.evaluation.standard import STANDARD
from trtpipe.job.limits import BUILT_IN_METRICS, OF_OUTPUTS, OwnMetric
from trtpipe.model.labels import Boxes, Labels, labels_of

RNG = np.random.default_rng(3)


def figure(name: str, outputs: dict[str, Any], labels: Labels, **args: object) -> Figure:
    """A built-in metric of these outputs against labels."""
    samples = len(next(iter(outputs.values())))
    made = judge(name, OwnMetric(function=name, args=args), labelled=True)
    return made.figure(outputs, labels, tuple(map(str, range(samples))))


def test_the_names_of_the_job_are_those_that_there_are() -> None:
    assert tuple(BUILT_IN_METRICS) == tuple(STANDARD)
    parameters = [p for function, _ in STANDARD.values() for p in inspect.signature(function).parameters.values()]
    assert {p.name for p in parameters if str(p.annotation).startswith("str")} == set(OF_OUTPUTS)


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


@pytest.mark.parametrize("labels", [[0.0, np.nan, 1.0, 2.5], [True, False, True, True]])
def test_top5_takes_classes_alone(labels: list[float]) -> None:
    message = r"needs classes as integers \(got (float64|bool)\)\. Save them so, -1 where one is unknown"
    with pytest.raises(InputError, match=message):
        figure("top5", {"y": np.ones((4, 9))}, np.array(labels))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.uint64, np.int64])
def test_masks_are_as_wide_as_they_are(kind: type) -> None:
    """The number of a pair of 100 classes is beyond a byte."""
    labels = RNG.integers(0, 100, (4, 16, 16))
    scores = np.eye(100, dtype=np.float32)[labels].transpose(0, 3, 1, 2)
    assert figure("miou", {"y": scores}, labels.astype(kind)).value == 1.0
    scores[:2] = scores[:2, ::-1]
    wide = figure("miou", {"y": scores}, labels).value
    assert figure("miou", {"y": scores}, labels.astype(kind)).value == wide < 1


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


@pytest.mark.parametrize("names", [list(range(6)), [30, 4, 900, 1, 77, 5], [f"id{k}" for k in (3, 1, 2, 9, 0, 5)]])
@pytest.mark.parametrize("seed", range(3))
def test_coco_map_is_that_of_the_file_whatever_the_order_of_samples(
    seed: int, names: list[object], tmp_path: Path
) -> None:
    """By pycocotools itself, on the file: with equal scores in several images, and boxes without an area."""
    import contextlib
    import io

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    outputs, truth = scene(seed, True)
    scores = np.ceil(outputs["scores"] * 4) / 4
    annotations = [
        {"id": 0, "image_id": name, "category_id": int(kind), "iscrowd": int(crowd), "area": 0.0,
         "bbox": [*map(float, box[:2]), *map(float, box[2:] - box[:2])]}
        for name, of in zip(names, truth, strict=True)
        for box, kind, crowd in zip(of.corners, of.classes, of.crowd, strict=True)
    ]  # fmt: skip
    annotations[0]["bbox"][2], annotations[1]["bbox"][3] = 0.0, 0.0
    annotations = [a | {"id": n, "area": a["bbox"][2] * a["bbox"][3]} for n, a in enumerate(annotations, 1)]
    images = [{"id": name, "file_name": f"{k}.png", "width": 200, "height": 200} for k, name in enumerate(names)]
    dataset = {"images": images, "annotations": annotations, "categories": [{"id": c} for c in (1, 2, 3)]}
    (tmp_path / "a.json").write_text(json.dumps(dataset))
    found = [
        {"image_id": name, "category_id": int(kind), "score": float(score),
         "bbox": [*map(float, box[:2]), *map(float, box[2:] - box[:2])]}
        for k, name in enumerate(names)
        for box, kind, score in zip(outputs["boxes"][k], outputs["labels"][k], scores[k], strict=True)
        if score > 0 and kind < 4
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        right = COCO()
        right.dataset = dataset
        right.createIndex()
        judged = COCOeval(right, right.loadRes(found), "bbox")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    for order in (range(6), [3, 0, 5, 2, 4, 1]):
        drawn = list(order)
        labels = labels_of(str(tmp_path / "a.json"), [f"{k}.png" for k in drawn], None)
        in_order = {name: values[drawn] for name, values in (outputs | {"scores": scores}).items()}
        assert figure("coco_map", in_order, labels).value == pytest.approx(float(judged.stats[0]), abs=1e-6)


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


@pytest.mark.parametrize("seed", range(3))
def test_coco_map_goes_by_the_order_of_scores(seed: int) -> None:
    """Logits, with or without a shift, have the mAP of their probabilities: torchmetrics' by the test above."""
    outputs, truth = scene(seed, False)
    scores, expected = outputs["scores"].astype(np.float64), figure("coco_map", outputs, truth).value
    with np.errstate(divide="ignore"):
        logits = np.log(scores / (1 - scores))  # rows that fill up are -inf
    for shift in (-10, -1, 0, -float(logits[0, 0])):  # all negative, some, some, and one of exactly 0
        assert figure("coco_map", outputs | {"scores": logits + shift}, truth).value == expected
    none = {"scores": np.where(scores == 0, np.nan, scores)}
    assert figure("coco_map", outputs | none, truth).value == expected


@pytest.mark.parametrize("columns", [False, True])
def test_coco_map_of_categories_that_are_numbered_otherwise(columns: bool) -> None:
    """Of classes 0 to 4, the last of which is the background, for category_ids 1, 7, 3 and 90: their own figure."""
    outputs, truth = scene(0, False)
    expected = figure("coco_map", outputs, truth).value
    category = np.array([0, 1, 7, 3, 90])  # of what the scene numbers 1 to 4
    truth = tuple(Boxes(t.corners, category[t.classes], t.crowd) for t in truth)
    kinds, scores = outputs["labels"].astype(np.int64) - 1, outputs["scores"]
    given = {"boxes": outputs["boxes"], "scores": scores, "labels": np.where(scores == 0, 4, kinds)}
    if columns:
        given = {"boxes": outputs["boxes"], "scores": np.where(np.arange(5) == kinds[..., None], scores[..., None], 0)}
    assert figure("coco_map", given, truth, categories=[1, 7, 3, 90, -1]).value == pytest.approx(expected, abs=1e-12)


def test_coco_map_without_pycocotools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(
        MissingError, match=r"^check\.metrics: coco_map: pycocotools is not installed\. Run: pip install"
    ):
        figure("coco_map", *scene(0, False))


ONES = np.ones((4, 3), np.float32)
THREE_CLASSES = {"boxes": np.ones((1, 2, 4)), "scores": np.ones((1, 2, 3))}


def of_category(number: int) -> Labels:
    return (Boxes(np.array([[0, 0, 1, 1.0]]), np.array([number]), np.array([False])),)


def test_masks_are_integers_or_booleans_with_or_without_an_axis_of_one() -> None:
    rng = np.random.default_rng(0)
    scores, masks = rng.standard_normal((4, 2, 6, 6)), rng.random((4, 6, 6)) < 0.5
    forms = (masks, masks.astype(np.uint8), masks[:, None], masks[:, None].astype(np.int64))
    made = judge("miou", OwnMetric(function="miou"), labelled=True)
    figures = {made.figure({"y": scores}, m, tuple("abcd")).value for m in forms}
    assert len(figures) == 1


@pytest.mark.parametrize(
    ("name", "outputs", "labels", "args", "message"),
    [
        ("top5", {"y": ONES}, np.zeros((4, 2)), {},
         "needs scores [S, C] and a class for each sample (got [4, 3] and [4, 2])."),
        ("top5", {"y": ONES}, np.full(4, 3), {"k": 1},
         "needs labels below the 3 columns of the scores (got 3). Take another output."),
        ("top5", {"y": ONES}, np.zeros(4), {},
         "needs a k below the 3 classes, with which any answer is right (got 5). Set `k` in args."),
        ("top5", {"y": ONES}, None, {}, "needs labels of one array (got none). See check.labels."),
        ("top5", {"y": ONES}, np.zeros(4), {"output": "z"}, "needs an output z (got y). Name another in args: output."),
        ("miou", {"y": ONES}, np.zeros((4, 3, 3), np.int64), {},
         "needs an output [S, C, H, W] or [S, H, W] (got [4, 3]). Name it in args: output."),
        ("miou", {"y": np.ones((4, 2, 6, 6))}, np.zeros((4, 3, 3), np.int64), {},
         "needs masks of the output's size, integers [4, 6, 6] (got int64 [4, 3, 3]). Resize the output in the model, "
         "or transform the images to its size."),
        ("miou", {"y": np.ones((4, 2, 6, 6))}, np.zeros((4, 6, 6)), {},
         "needs masks of the output's size, integers [4, 6, 6] (got float64 [4, 6, 6]). Give the class of each pixel "
         "as an integer."),
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
        ("coco_map", THREE_CLASSES, of_category(3), {},
         "needs boxes of categories that the model has, 0 to 2, its columns of scores (got category_id 3). Give each "
         "class's category_id in args.categories, in the model's order: [3], with -1 for one that is none."),
        ("coco_map", THREE_CLASSES, of_category(3), {"categories": [0, 1, 2]},
         "needs boxes of categories that the model has, args.categories (got category_id 3). Give each "
         "class's category_id in args.categories, in the model's order: [3], with -1 for one that is none."),
        ("coco_map", THREE_CLASSES, of_category(3), {"categories": [1, 3]},
         "needs a category_id in args.categories for each of 3 columns of scores (got 2)."),
    ],
)  # fmt: skip
def test_what_a_metric_cannot_be_made_of(
    name: str, outputs: dict[str, Any], labels: Labels, args: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        figure(name, outputs, labels, **args)
    assert str(caught.value) == f"check.metrics.{name}: {message}"


@pytest.mark.parametrize("name", [name for name in STANDARD if name != "coco_map"])
def test_which_of_several_outputs_a_metric_took_is_said(name: str) -> None:
    """The first, where none is named: a box, say, before the scores."""
    box, labels = np.ones((4, 3, 2)), np.zeros(4, np.int64)
    took = "took output box, the first, as args.output names none, and "

    def refused(outputs: dict[str, np.ndarray], **args: object) -> str:
        made = judge("m", OwnMetric.model_validate({"function": name, "args": args}), labelled=True)
        with pytest.raises(InputError) as caught:
            made.figure(outputs, labels, tuple("abcd"))
        return str(caught.value)

    alone = refused({"box": box})
    assert alone.startswith("check.metrics.m: needs ")
    assert refused({"box": box, "scores": ONES}) == alone.replace("m: ", f"m: {took}", 1)
    assert refused({"scores": ONES, "box": box}, output="box") == alone

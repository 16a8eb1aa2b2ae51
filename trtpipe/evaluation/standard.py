"""The metrics that are built in: functions of (outputs, labels, ids), like a job's own. No torch.

Each gives a number, one number a sample [S], or (rows [S, ...], total): what is known of each sample, and what makes
the figure of any rows. The last two can be resampled, and so have a confidence interval.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field

from calib.types import Array, JsonObject
from trtpipe.errors import MissingError
from trtpipe.evaluation.metrics import similarity
from trtpipe.model.labels import Labels
from trtpipe.packages import not_installed

_T = TypeVar("_T")
Outputs = Mapping[str, Array]
Rows = tuple[Array, Callable[[Array], float]]
# `judge` holds a job's arguments against these.
Whole = Annotated[int, Field(ge=1)]
Reach = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Unfit(Exception):
    """Outputs, labels or arguments that a metric cannot be made of; the text is what must hold, and what was got."""


def _saying_which(metric: Callable[..., _T]) -> Callable[..., _T]:
    """`metric`, whose refusals say which of several outputs it took where none was named."""

    @functools.wraps(metric)
    def named(
        outputs: Outputs, labels: Labels, ids: Sequence[str], output: str | None = None, *more: Any, **args: Any
    ) -> _T:
        try:
            return metric(outputs, labels, ids, output, *more, **args)
        except Unfit as error:
            if output is not None or len(outputs) == 1:
                raise
            took = f"took output {next(iter(outputs))}, the first, as args.output names none"
            raise Unfit(f"{took}, and {error}") from error

    return named


@_saying_which
def top5(outputs: Outputs, labels: Labels, ids: Sequence[str], output: str | None = None, k: Whole = 5) -> Array:
    """Whether the label is among the `k` largest of the scores [S, C], float64 [S]; NaN where it is unknown (< 0).

    Raises:
        Unfit: the output is no scores, a sample has no class or one beyond them, or `k` are all classes.
    """
    scores, known = _one(outputs, output), _array(labels)
    if scores.ndim != 2 or known.shape != (len(scores),):
        raise Unfit(f"needs scores [S, C] and a class for each sample (got {_shape(scores)} and {_shape(known)})")
    classes = scores.shape[1]
    if k >= classes:
        raise Unfit(f"needs a k below the {classes} classes, with which any answer is right (got {k}). Set `k` in args")
    if known.dtype.kind not in "iu":
        raise Unfit(f"needs classes as integers (got {known.dtype}). Save them so, -1 where one is unknown")
    if (most := int(known.max(initial=0))) >= classes:
        raise Unfit(f"needs labels below the {classes} columns of the scores (got {most}). Take another output")
    best = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :k]
    return np.where(known < 0, np.nan, (best == known[:, None]).any(axis=1).astype(np.float64))


#: What pixels of no class are labelled with, as in the masks of PASCAL VOC and Cityscapes.
IGNORED = 255


@_saying_which
def miou(
    outputs: Outputs,
    labels: Labels,
    ids: Sequence[str],
    output: str | None = None,
    classes: Whole | None = None,
    ignore: int = IGNORED,
) -> Rows:
    """Mean over the classes of intersection over union of all pixels; a class that is in neither does not count.

    The output is scores [S, C, H, W], of which the largest is taken, one logit [S, 1, H, W] or [S, H, W], which is
    class 1 over 0, or classes [S, H, W]. Labels are classes, integers or booleans [S, H, W] or [S, 1, H, W]; pixels
    labelled `ignore` do not count.

    Raises:
        Unfit: output and masks are of other sizes, or a class is beyond those there are.
    """
    scores, truth = _one(outputs, output), _array(labels)
    predicted = class_map(scores)
    truth = truth[:, 0] if truth.ndim == 4 and truth.shape[1] == 1 else truth
    if truth.shape != predicted.shape or truth.dtype.kind not in "biu":
        step = "Resize the output in the model, or transform the images to its size"
        raise Unfit(
            f"needs masks of the output's size, integers {_shape(predicted)} (got {truth.dtype} {_shape(truth)}). "
            + (step if truth.shape != predicted.shape else "Give the class of each pixel as an integer")
        )
    truth = truth.astype(np.int64)  # a pair of classes is counted as one number, which a byte would not hold
    counted = truth != ignore
    channels = scores.shape[1] if scores.ndim == 4 and scores.shape[1] > 1 else 2
    many = classes or (
        channels if scores.dtype.kind == "f" else int(max(predicted.max(), truth[counted].max(initial=0))) + 1
    )
    for what, values in (("labels", truth[counted]), ("classes of the output", predicted)):
        if values.size and not 0 <= int(values.min()) <= int(values.max()) < many:
            raise Unfit(
                f"needs {what} from 0 to {many - 1} (got {int(values.min())} to {int(values.max())}). Number them so, "
                f"or give `ignore` for pixels of no class"
            )
    rows = np.zeros((len(truth), many, 2), np.int64)
    for row, right, guess, pixels in zip(rows, truth, predicted, counted, strict=True):
        pairs = np.bincount(right[pixels] * many + guess[pixels], minlength=many * many).reshape(many, many)
        row[:, 0] = np.diagonal(pairs)
        row[:, 1] = pairs.sum(0) + pairs.sum(1) - np.diagonal(pairs)
    return rows, _mean_iou


def _mean_iou(rows: Array) -> float:
    same, either = rows.sum(axis=0).T
    return float((same[either > 0] / either[either > 0]).mean()) if (either > 0).any() else math.nan


def class_map(output: Array) -> Array:
    """Classes int64 [S, H, W] of a dense output, as `miou` takes it.

    Raises:
        Unfit: it is no dense output.
    """
    if output.ndim == 4 and output.shape[1] > 1:
        return np.asarray(output.argmax(axis=1))
    flat = output[:, 0] if output.ndim == 4 else output
    if flat.ndim != 3:
        raise Unfit(f"needs an output [S, C, H, W] or [S, H, W] (got {_shape(output)}). Name it in args: output")
    return (flat > 0).astype(np.int64) if flat.dtype.kind == "f" else flat.astype(np.int64)


@_saying_which
def psnr(
    outputs: Outputs, labels: Labels, ids: Sequence[str], output: str | None = None, data_range: Reach = 1.0
) -> Rows:
    """Peak signal to noise ratio over all samples, 10 log10(data_range^2 / mean squared error) dB; inf where equal.

    Rows are float64 [S, 2]: the sum of squared errors and the number of values. Output and labels are of one shape.

    Raises:
        Unfit: they are not.
    """
    a, b = _pair(outputs, labels, output)
    off = ((a - b) ** 2).reshape(len(a), -1)
    rows = np.stack([off.sum(axis=1), np.full(len(a), off.shape[1], np.float64)], axis=1)

    def total(rows: Array) -> float:
        squares, count = rows.sum(axis=0)
        return math.inf if squares == 0 else float(10 * np.log10(data_range**2 * count / squares))

    return rows, total


@_saying_which
def ssim(
    outputs: Outputs, labels: Labels, ids: Sequence[str], output: str | None = None, data_range: Reach = 1.0
) -> Array:
    """Structural similarity of each image [S, C, H, W], float64 [S].

    Gaussian windows of 11 x 11 with sigma 1.5 inside the image, K1 0.01, K2 0.03, the mean over windows and channels.

    Source: Wang et al., "Image quality assessment: from error visibility to structural similarity", IEEE Trans. Image
    Processing 13 (2004) 600-612.

    Raises:
        Unfit: output and labels are of other shapes, or smaller than a window.
    """
    a, b = _pair(outputs, labels, output)
    if a.ndim < 3 or min(a.shape[-2:]) < 11:
        raise Unfit(f"needs images of 11 x 11 pixels or more (got {_shape(a)})")
    steady, contrast = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    mean_a, mean_b = _blurred(a), _blurred(b)
    var_a, var_b = _blurred(a * a) - mean_a**2, _blurred(b * b) - mean_b**2
    both = _blurred(a * b) - mean_a * mean_b
    values = (2 * mean_a * mean_b + steady) * (2 * both + contrast)
    values /= (mean_a**2 + mean_b**2 + steady) * (var_a + var_b + contrast)
    return np.asarray(values.reshape(len(a), -1).mean(axis=1))


def _blurred(x: Array) -> Array:
    """Gaussian means over the windows that lie inside, of the last two axes."""
    weights = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    for axis in (-1, -2):
        x = np.lib.stride_tricks.sliding_window_view(x, 11, axis=axis) @ weights
    return x


@_saying_which
def mae(outputs: Outputs, labels: Labels, ids: Sequence[str], output: str | None = None) -> Array:
    """Mean absolute difference of each sample, float64 [S]."""
    a, b = _pair(outputs, labels, output)
    return np.asarray(np.abs(a - b).reshape(len(a), -1).mean(axis=1))


@_saying_which
def cosine(outputs: Outputs, labels: Labels, ids: Sequence[str], output: str | None = None) -> Array:
    """Cosine similarity of each sample's vector, float64 [S]; 0 where one of the two is zero, 1 where both are."""
    a, b = (x.reshape(len(x), -1) for x in _pair(outputs, labels, output))
    return similarity(a, b)


def coco_map(
    outputs: Outputs,
    labels: Labels,
    ids: Sequence[str],
    boxes: str = "boxes",
    scores: str = "scores",
    classes: str = "labels",
    categories: list[int] | None = None,
) -> float:
    """COCO's mean average precision (IoU 0.50 to 0.95, all areas, at most 100 detections an image), by pycocotools.

    The outputs are boxes [S, K, 4] (x0, y0, x1, y1 in pixels of the input), and scores [S, K] with classes [S, K], or
    scores [S, K, C] alone. Only their order counts, so that logits do as well as probabilities. `categories` has the
    category_id of each class of the model, -1 for one that is none (the background); without it, a class is its own.

    Raises:
        MissingError: pycocotools is not installed.
        Unfit: other shapes, labels that are no boxes, or of categories that no class of the model has.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise MissingError(f"check.metrics: coco_map: {not_installed('pycocotools')}") from error
    if isinstance(labels, np.ndarray) or labels is None:
        raise Unfit("needs boxes as labels. Give check.labels a .json of COCO")
    corners, certain, kinds = detections(outputs, boxes, scores, classes, categories)
    columns = _one(outputs, scores).shape[2:]
    known = range(columns[0]) if categories is None and columns else categories
    used = sorted({int(kind) for of in labels for kind in of.classes})
    if known is not None and (others := [kind for kind in used if kind not in known]):
        have = f"0 to {len(known) - 1}, its columns of {scores}" if categories is None else "args.categories"
        raise Unfit(
            f"needs boxes of categories that the model has, {have} (got category_id {others[0]}). Give each class's "
            f"category_id in args.categories, in the model's order: {used[:3]}, with -1 for one that is none"
        )
    # Equal scores of several images count in the order of these.
    places = [of.place for of in labels]
    images = places if len(set(places)) == len(places) else list(range(len(labels)))
    truth: list[JsonObject] = [
        {"id": 0, "image_id": i, "category_id": int(kind), "bbox": _width_height(box), "iscrowd": int(crowd),
         "area": float((box[2] - box[0]) * (box[3] - box[1]))}
        for i, known in zip(images, labels, strict=True)
        for box, kind, crowd in zip(known.corners, known.classes, known.crowd, strict=True)
    ]  # fmt: skip
    answers = [
        {"image_id": images[i], "category_id": int(kinds[i, j]), "bbox": _width_height(corners[i, j]),
         "score": float(certain[i, j])}
        for i, j in zip(*np.nonzero(certain > -np.inf), strict=True)
    ]  # fmt: skip
    if not truth:
        return math.nan
    if not answers:
        return 0.0
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        right = COCO()
        right.dataset = {
            "images": [{"id": i} for i in images],
            "annotations": [{**t, "id": n} for n, t in enumerate(truth, 1)],
            "categories": [{"id": c} for c in used],
        }
        right.createIndex()
        of_known = [d for d in answers if d["category_id"] in used] or answers[:1]
        judged = COCOeval(right, right.loadRes(of_known), "bbox")
        judged.evaluate()
        judged.accumulate()
    precision = judged.eval["precision"][:, :, :, 0, -1]
    return float(precision[precision > -1].mean()) if (precision > -1).any() else math.nan


def detections(
    outputs: Outputs, boxes: str, scores: str, classes: str, categories: Sequence[int] | None = None
) -> tuple[Array, Array, Array]:
    """Corners [S, M, 4], scores float64 [S, M] and classes [S, M] of the outputs of these names, which `coco_map`
    describes; scores are -inf in rows that are no boxes: what fills an image's rows up, or was suppressed.

    Those have a score of -inf or NaN, or of 0 where no score is negative: among logits 0 is a score like any other.

    Raises:
        Unfit: they are of other shapes.
    """
    corners, certain = _one(outputs, boxes, "boxes"), _one(outputs, scores, "scores")
    if corners.ndim != 3 or corners.shape[2] != 4 or certain.shape[:2] != corners.shape[:2]:
        raise Unfit(f"needs boxes [S, K, 4] and scores of the same K (got {_shape(corners)} and {_shape(certain)})")
    certain = certain.astype(np.float64)
    no_box = np.isnan(certain) if is_logits(certain) else np.isnan(certain) | (certain == 0)
    certain = np.where(no_box, -np.inf, certain)
    if certain.ndim == 2:
        return corners, certain, _category_ids(_one(outputs, classes, "classes"), categories)
    many = certain.shape[2]
    if categories is not None and len(categories) != many:
        raise Unfit(
            f"needs a category_id in args.categories for each of {many} columns of {scores} (got {len(categories)})"
        )
    kinds = np.broadcast_to(_category_ids(np.arange(many), categories), certain.shape).reshape(len(certain), -1)
    return np.repeat(corners, many, axis=1), certain.reshape(len(certain), -1), kinds


def _category_ids(classes: Array, categories: Sequence[int] | None) -> Array:
    """int64 of the classes' shape; -1 where `categories` has none."""
    classes = classes.astype(np.int64)
    if categories is None:
        return classes
    inside = (classes >= 0) & (classes < len(categories))
    return np.where(inside, np.array([*categories, -1])[np.where(inside, classes, -1)], -1)


def is_logits(scores: Array) -> bool:
    """Whether scores of boxes, float [...], are on a scale of both signs: a finite one is negative."""
    return bool(((scores < 0) & (scores > -np.inf)).any())


def _width_height(box: Array) -> list[float]:
    x0, y0, x1, y1 = map(float, box)
    return [x0, y0, x1 - x0, y1 - y0]


def _one(outputs: Outputs, name: str | None, given_by: str = "output") -> Array:
    if name is None:
        return next(iter(outputs.values()))
    if name not in outputs:
        raise Unfit(f"needs an output {name} (got {', '.join(outputs)}). Name another in args: {given_by}")
    return outputs[name]


def _array(labels: Labels) -> Array:
    if not isinstance(labels, np.ndarray):
        raise Unfit(f"needs labels of one array (got {'boxes' if labels else 'none'}). See check.labels")
    return labels


def _pair(outputs: Outputs, labels: Labels, name: str | None) -> tuple[Array, Array]:
    output, right = _one(outputs, name), _array(labels)
    if output.shape == (*right.shape, 1):  # one number a sample, from a file of one column
        right = right[..., None]
    if output.shape != right.shape:
        raise Unfit(
            f"needs labels of the output's shape {_shape(output)} (got {_shape(right)}). To compare with the "
            "baseline, set args: {against: baseline}"
        )
    return output.astype(np.float64), right.astype(np.float64)


def _shape(array: Array) -> str:
    return str(list(array.shape))


#: Metrics from 0 to 1 that are 0 where nothing is right.
SHARE_METRICS = ("top5", "miou", "coco_map")
#: By name, with what makes labels of a baseline's output where there are none; None where nothing does.
STANDARD: Mapping[str, tuple[Callable[..., object], Callable[[Array], Array] | None]] = {
    "top5": (top5, lambda scores: np.asarray(scores.argmax(axis=1))),
    "miou": (miou, class_map),
    "coco_map": (coco_map, None),
    "psnr": (psnr, np.asarray),
    "ssim": (ssim, np.asarray),
    "mae": (mae, np.asarray),
    "cosine": (cosine, np.asarray),
}

"""Detections of one sample drawn on its image: the baseline's, what was executed, and the labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from calib.types import Array
from trtpipe.evaluation.standard import Unfit, detections, is_logits
from trtpipe.report.content import ComparedOutputs, Detections
from trtpipe.report.dense import COLOURS, uri
from trtpipe.report.sample_image import sample_image

#: Longer side of a picture, in pixels; boxes need more than the pixels of a dense output.
_SIDE = 224
#: Boxes drawn of one sample: the most certain, with a score (of logits, their sigmoid) of at least this share of the
#: sample's highest.
_MOST_BOXES, _LEAST_SHARE = 12, 0.3


@dataclass(frozen=True)
class Drawn:
    """The boxes of one sample that are drawn: float [K, 4] and int [K]."""

    corners: Array
    classes: Array


def drawn(compared: ComparedOutputs) -> tuple[tuple[Drawn, Drawn], ...] | None:
    """The baseline's and the executed boxes of each sample; None where the outputs are no detections."""
    of = compared.detections
    if of is None:
        return None
    try:
        both = [
            _comparable(*detections(outputs, of.boxes, of.scores, of.classes, of.categories))
            for outputs in (compared.reference, compared.outputs)
        ]
    except Unfit:  # the check has said so
        return None
    if both[0][0].shape[::2] != both[1][0].shape[::2]:
        return None
    return tuple(
        (_most_certain(*(x[i] for x in both[0])), _most_certain(*(x[i] for x in both[1])))
        for i in range(len(both[0][0]))
    )


def _comparable(corners: Array, scores: Array, classes: Array) -> tuple[Array, Array, Array]:
    """Detections with scores of which shares can be taken."""
    if is_logits(scores):
        return corners, 0.5 * (1 + np.tanh(scores / 2)), classes
    return corners, scores, classes


def _most_certain(corners: Array, scores: Array, classes: Array) -> Drawn:
    order = np.argsort(-scores, kind="stable")[:_MOST_BOXES]
    best = float(scores[order[0]]) if len(order) else 0.0
    kept = order[(scores[order] > 0) & (scores[order] >= _LEAST_SHARE * best)]
    return Drawn(corners[kept].astype(np.float64), classes[kept].astype(np.int64))


def overlap(a: Drawn, b: Drawn) -> float:
    """How well two sets of boxes match, 0 to 1: the mean over the boxes of both of their best intersection over union
    with one of the other's of the same class. 1 where both are empty."""
    if not len(a.corners) and not len(b.corners):
        return 1.0
    if not len(a.corners) or not len(b.corners):
        return 0.0
    low = np.maximum(a.corners[:, None, :2], b.corners[None, :, :2])
    high = np.minimum(a.corners[:, None, 2:], b.corners[None, :, 2:])
    inside = np.clip(high - low, 0, None).prod(-1)
    areas = [np.clip(x.corners[:, 2:] - x.corners[:, :2], 0, None).prod(-1) for x in (a, b)]
    union = areas[0][:, None] + areas[1][None] - inside
    iou = np.divide(inside, union, out=np.zeros_like(inside), where=union > 0)
    iou = np.where(a.classes[:, None] == b.classes[None], iou, 0.0)
    return float(np.concatenate([iou.max(1), iou.max(0)]).mean())


def box_pictures(compared: ComparedOutputs, sample: int, pair: tuple[Drawn, Drawn]) -> tuple[tuple[str, str], ...]:
    """(title, data: URI) of the image with the baseline's boxes, with those executed, and with the labels."""
    of = compared.detections
    assert of is not None
    sets = [("baseline", pair[0]), ("executed", pair[1])]
    if of.truth is not None:
        sets.append(("labels", Drawn(of.truth[sample].corners, of.truth[sample].classes)))
    image = _image(compared, str(compared.ids[sample]), of) or _blank([boxes for _, boxes in sets])
    return tuple((title, _picture(image, boxes)) for title, boxes in sets)


def _image(compared: ComparedOutputs, name: str, of: Detections) -> Image.Image | None:
    """The image that the boxes are in pixels of; None where it is no file that can be read."""
    image = sample_image(compared.images, name)
    if image is None:
        return None
    try:
        for step in of.steps:
            image = step(image)
    except ValueError:
        return None
    return image.convert("RGB")


def _blank(sets: list[Drawn]) -> Image.Image:
    """A grey field that holds all boxes."""
    ends = [boxes.corners[:, 2:].max(0) for boxes in sets if len(boxes.corners)]
    width, height = np.clip(np.nan_to_num(np.max(ends, 0)), 1, 4096).astype(int) if ends else (_SIDE, _SIDE)
    return Image.new("RGB", (int(width) + 1, int(height) + 1), (120, 120, 124))


def _picture(image: Image.Image, boxes: Drawn) -> str:
    scale = _SIDE / max(image.size)
    made = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    draw = ImageDraw.Draw(made)
    for corners, kind in zip(boxes.corners, boxes.classes, strict=True):
        x0, y0, x1, y1 = (float(np.clip(v * scale, -1, _SIDE + 1)) for v in corners)
        colour = tuple(int(c) for c in COLOURS[1 + int(kind) % (len(COLOURS) - 1)])
        draw.rectangle((min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)), outline=colour, width=2)
    return uri(np.asarray(made), _SIDE)

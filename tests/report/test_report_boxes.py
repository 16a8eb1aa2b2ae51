"""Detections drawn on their images: matched by overlap, the worst samples first."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from calib.types import Array
from trtpipe.model.labels import Boxes
from trtpipe.report.boxes import Drawn, box_pictures, drawn, overlap
from trtpipe.report.comparison import confusion, gallery
from trtpipe.report.content import ComparedOutputs, Detections
from trtpipe.report.dense import COLOURS


def boxes(*corners: tuple[float, ...], classes: Any = None) -> Drawn:
    return Drawn(np.array(corners, np.float64).reshape(-1, 4), np.array(classes or [0] * len(corners), np.int64))


def pixels(uri: str) -> Array:
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (boxes(), boxes(), 1.0),
        (boxes((0, 0, 2, 2)), boxes(), 0.0),
        (boxes((0, 0, 2, 2)), boxes((0, 0, 2, 2)), 1.0),
        (boxes((0, 0, 2, 2)), boxes((0, 0, 2, 2), classes=[1]), 0.0),
        (boxes((0, 0, 2, 2)), boxes((1, 0, 3, 2)), 2 / 6),
        # One of two is found again: 1 and 0 of the first, 1 of the second.
        (boxes((0, 0, 2, 2), (5, 5, 7, 7)), boxes((0, 0, 2, 2)), 2 / 3),
        (boxes((0, 0, 0, 0)), boxes((0, 0, 0, 0)), 0.0),
    ],
)
def test_overlap(a: Drawn, b: Drawn, expected: float) -> None:
    assert overlap(a, b) == pytest.approx(expected)
    assert overlap(b, a) == pytest.approx(expected)


def outputs(move: float = 0.0) -> dict[str, Array]:
    """Two samples of three candidates; the second sample's are moved, and the last candidates are uncertain."""
    corners = np.tile(np.array([(2, 2, 10, 10), (12, 12, 20, 20), (0, 0, 30, 30)], np.float32), (2, 1, 1))
    corners[1] += move
    scores = np.tile(np.array([0.9, 0.8, 0.25], np.float32), (2, 1))
    return {"boxes": corners, "scores": scores, "labels": np.tile(np.array([1, 2, 3]), (2, 1))}


def test_the_most_certain_are_drawn_and_the_worst_samples_come_first() -> None:
    compared = ComparedOutputs(outputs(), outputs(3.0), ["a", "b"], detections=Detections("boxes", "scores", "labels"))
    pairs = drawn(compared)
    assert pairs is not None
    assert [len(p.corners) for pair in pairs for p in pair] == [2, 2, 2, 2]  # the third is below a third of the best
    found = gallery(compared, None)
    assert found is not None
    assert (found.by, found.output, [s.id for s in found.shown]) == ("overlap", "boxes", ["b", "a"])
    assert found.shown[1].score == 1.0
    assert [t for t, _ in found.shown[0].pictures] == ["baseline", "executed"]
    assert confusion(compared, None) is None  # scores of candidates are no scores of classes


def test_scores_by_class() -> None:
    """Scores [S, K, C]: a candidate may be drawn in several classes."""
    scores = np.zeros((1, 2, 3), np.float32)
    scores[0, 0, 1], scores[0, 1, 2], scores[0, 1, 0] = 0.9, 0.8, 0.7
    both = {"boxes": np.array([[(0, 0, 2, 2), (3, 3, 5, 5)]], np.float32), "scores": scores}
    pairs = drawn(ComparedOutputs(both, both, ["a"], detections=Detections("boxes", "scores", "labels")))
    assert pairs is not None
    assert pairs[0][0].classes.tolist() == [1, 2, 0]


def test_the_boxes_of_logits_are_those_of_their_probabilities() -> None:
    of = Detections("boxes", "scores", "labels")
    whole = outputs()
    whole["scores"][:, 1] = 0.4
    logits = whole | {"scores": np.log(whole["scores"] / (1 - whole["scores"]))}
    pairs = [drawn(ComparedOutputs(made, made, ["a", "b"], detections=of)) for made in (whole, logits)]
    shown = [[boxes.corners.tolist() for pair in each or () for boxes in pair] for each in pairs]
    assert shown[0] == shown[1]
    assert list(map(len, shown[1])) == [2, 2, 2, 2]


def test_boxes_lie_on_the_image_as_the_network_saw_it(tmp_path: Path) -> None:
    Image.new("RGB", (32, 64), (0, 0, 0)).save(tmp_path / "a.png")
    steps = (ImageOps.flip, lambda image: image.resize((64, 64)))
    truth = (Boxes(np.array([[8.0, 8.0, 56.0, 56.0]]), np.array([4]), np.array([False])),)
    of = Detections("boxes", "scores", "labels", steps, truth)
    compared = ComparedOutputs({}, {}, ["a.png"], None, tmp_path, of)
    made = box_pictures(compared, 0, (boxes((16, 16, 48, 48), classes=[1]), boxes()))
    before, after, right = (pixels(uri) for _, uri in made)
    assert [t for t, _ in made] == ["baseline", "executed", "labels"]
    assert before.shape == (224, 224, 3)
    assert not after.any()
    rows, columns = np.nonzero(before.any(-1))  # 16 to 48 of 64 pixels is 56 to 168 of 224
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (56, 168, 56, 168)
    assert tuple(before[56, 100]) == tuple(COLOURS[2])
    assert tuple(right[28, 100]) == tuple(COLOURS[5])


def test_without_an_image_the_field_holds_every_box() -> None:
    compared = ComparedOutputs({}, {}, ["0"], detections=Detections("boxes", "scores", "labels"))
    made = box_pictures(compared, 0, (boxes((0, 0, 99, 49)), boxes((10, 10, 20, 20))))
    assert pixels(made[0][1]).shape == (112, 224, 3)


def test_outputs_that_are_no_detections_have_no_boxes() -> None:
    flat = {"boxes": np.ones((2, 4), np.float32), "scores": np.ones((2, 3), np.float32)}
    of = Detections("boxes", "scores", "labels")
    assert drawn(ComparedOutputs(flat, flat, ["a", "b"], detections=of)) is None
    assert drawn(ComparedOutputs({}, {}, ["a", "b"], detections=None)) is None

"""Dense outputs as pictures: values or classes, side by side, white where they differ."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from calib.types import Array
from trtpipe.report.comparison import galleries, gallery
from trtpipe.report.content import ComparedOutputs
from trtpipe.report.dense import COLOURS, is_dense, pictures


def pixels(uri: str) -> Array:
    """The picture of a data: URI."""
    kind, _, text = uri.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image)


def shown(reference: Array, output: Array) -> tuple[Array, ...]:
    made = pictures(reference, output)
    assert [title for title, _ in made] == ["baseline", "executed", "difference"]
    return tuple(pixels(uri) for _, uri in made)


def test_one_channel_is_shown_over_the_range_of_both() -> None:
    a = np.linspace(0, 2, 16, dtype=np.float32).reshape(1, 4, 4)
    b = a.copy()
    b[0, 0, 0] = 4
    before, after, off = shown(a, b)
    assert (int(before.min()), int(before.max())) == (0, 127)
    assert (int(after[0, 0]), int(after[-1, -1])) == (255, 127)
    assert (int(off[0, 0]), int(off.sum())) == (255, 255)


@pytest.mark.parametrize("every", [False, True])
def test_what_is_not_finite_is_drawn_too(every: bool) -> None:
    """NaN is black and infinity at the end of the range; all of it is white in the difference, without a warning."""
    a = np.linspace(0, 2, 16, dtype=np.float32).reshape(1, 4, 4)
    b = np.full_like(a, np.nan) if every else a.copy()
    b[0, 0, :3] = np.nan, np.inf, -np.inf
    before, after, off = shown(a, b)
    assert (int(before.min()), int(before.max())) == (0, 255)
    assert after[0, :3].tolist() == [0, 255, 0]
    assert off[0, :3].tolist() == [255, 255, 255]
    assert int(off[1:].min()) == int(off[1:].max()) == (255 if every else 0)
    c = np.full_like(a, np.inf)
    assert [int(x.max()) for x in shown(c, c)] == [255, 255, 255]


@pytest.mark.parametrize("form", ["scores", "integers", "integers of one channel"])
def test_classes_have_colours_and_are_white_where_they_differ(form: str) -> None:
    classes = np.arange(16).reshape(4, 4) % 5
    other = classes.copy()
    other[1, 2] = 4 - other[1, 2]
    made: list[Array] = []
    for x in (classes, other):
        made.append({"scores": np.eye(5)[x].transpose(2, 0, 1), "integers": x}.get(form, x[None]))
    before, after, off = shown(*made)
    assert np.array_equal(before, COLOURS[classes])
    assert np.array_equal(after, COLOURS[other])
    assert np.array_equal(off > 0, classes != other)


def test_equal_outputs_are_black_and_large_ones_made_small() -> None:
    a = np.ones((3, 300, 200))
    _, _, off = shown(a, a)
    assert off.shape == (112, 75)
    assert not off.any()


@pytest.mark.parametrize(
    ("shape", "dense"),
    [((2, 3, 8, 8), True), ((2, 8, 8), True), ((2, 10), False), ((2, 256, 3), False), ((0, 3, 8, 8), False)],
)
def test_what_is_dense(shape: tuple[int, ...], dense: bool) -> None:
    assert is_dense(np.zeros(shape)) is dense


def test_the_gallery_has_the_worst_samples_first_with_their_pictures() -> None:
    reference = np.random.default_rng(0).normal(size=(5, 4, 6, 6)).astype(np.float32)
    outputs = reference.copy()
    outputs[3] *= -1
    outputs[1, 0] = 0
    found = gallery(ComparedOutputs({"y": reference}, {"y": outputs}, tuple("abcde")), None)
    assert found is not None
    assert [s.id for s in found.shown[:2]] == ["d", "b"]
    assert all(len(s.pictures) == 3 for s in found.shown)
    beside = ComparedOutputs(
        {"scores": reference[:, :, 0, 0], "y": reference, "same": reference, **{f"z{i}": reference for i in range(3)}},
        {"scores": reference[:, :, 0, 0], "y": outputs, "same": reference, **{f"z{i}": reference for i in range(3)}},
        tuple("abcde"),
    )
    shown, more = galleries(beside, None)
    assert [g.output for g in shown] == ["scores", "y", "same", "z0"]
    assert [bool(g.shown[0].pictures) for g in shown] == [False, True, True, True]
    assert [s.id for s in shown[1].shown[:2]] == ["d", "b"]
    assert more == ("z1", "z2")
    flat = reference.reshape(5, -1)[:, :1]
    few = gallery(ComparedOutputs({"y": flat}, {"y": flat}, tuple("abcde")), None)
    assert few is None or not few.shown[0].pictures

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import report_sample as samples
from PIL import ExifTags, Image

from trtpipe.report.boxes import Drawn, box_pictures
from trtpipe.report.comparison import class_output, confusion, gallery, image_uri
from trtpipe.report.content import ComparedOutputs, Detections
from trtpipe.report.sample_image import IMAGE_SIDE


def test_confusion_counts_labels_against_what_was_executed(tmp_path: Path) -> None:
    compared = samples.content(tmp_path).compared
    assert compared is not None
    found = confusion(compared, samples.CLASSES)
    assert found is not None
    # labels 0 0 0 1 1 2 2, the last unknown; executed 0 0 1 1 1 1 2
    assert found.counts.tolist() == [[2, 1, 0], [0, 2, 0], [0, 1, 1]]
    assert (found.rows, found.others, found.names) == ("label", 0, samples.CLASSES)


def test_without_labels_the_rows_are_the_baselines_classes() -> None:
    found = confusion(ComparedOutputs({"y": samples.REFERENCE}, {"y": samples.FOUND}, [""] * 8), None)
    assert found is not None
    assert found.rows == "baseline"
    assert found.names == ("0", "1", "2")
    assert found.counts.tolist() == [[2, 1, 0], [0, 3, 0], [0, 0, 2]]


def test_a_label_beyond_the_classes_is_of_no_row() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 3])
    found = confusion(ComparedOutputs({"y": samples.REFERENCE}, {"y": samples.FOUND}, [""] * 8, labels), None)
    assert found is not None
    assert (found.rows, found.counts.tolist(), found.others) == ("label", [[2, 1, 0], [0, 2, 0], [0, 1, 1]], 0)


def test_of_many_classes_those_with_errors_are_shown() -> None:
    reference = np.eye(40, dtype=np.float32)
    executed = reference.copy()
    executed[30] = reference[31]
    found = confusion(ComparedOutputs({"y": reference}, {"y": executed}, [""] * 40), None)
    assert found is not None
    assert found.counts.shape == (12, 12)
    assert {"30", "31"} <= set(found.names)
    assert found.others == 40 - int(found.counts.sum())


def test_the_gallery_begins_with_what_differs_then_the_closest_calls(tmp_path: Path) -> None:
    compared = samples.content(tmp_path).compared
    assert compared is not None
    found = gallery(compared, samples.CLASSES)
    assert found is not None
    assert (found.differing, found.samples, found.by) == (1, 8, "margin")
    first, second = found.shown[:2]
    assert (first.id, first.baseline, first.executed, first.differs) == ("cat/2.png", "cat", "dog", True)
    assert (second.id, second.score, second.label) == ("cat/7.png", 0.25, None)
    assert first.image is not None


def test_outputs_that_are_no_classes_are_ranked_by_similarity() -> None:
    reference = np.ones((3, 2, 2), np.float32)
    executed = reference.copy()
    executed[1] = [[1, 1], [1, -1]]
    found = gallery(ComparedOutputs({"map": reference}, {"map": executed}, ["a", "b", "c"]), None)
    assert found is not None
    assert (found.by, found.output, found.shown[0].id, found.shown[0].score) == ("cosine", "map", "b", 0.5)
    assert confusion(ComparedOutputs({"map": reference}, {"map": executed}, ["a", "b", "c"]), None) is None


def test_what_a_model_sorts_is_no_classes() -> None:
    values = {"v": samples.REFERENCE, "y": samples.REFERENCE}
    found = {"v": samples.FOUND, "y": samples.FOUND}
    both = ComparedOutputs(values, found, [""] * 8, unranked=("v",))
    assert class_output(both) == "y"
    assert confusion(ComparedOutputs(values, found, [""] * 8, unranked=("v", "y")), None) is None


def test_the_classes_shown_are_those_that_the_labels_number() -> None:
    """A coordinate that comes first has no column for each label."""
    box = np.zeros((8, 2), np.float32)
    values, found = {"box": box, "y": samples.REFERENCE}, {"box": box, "y": samples.FOUND}
    last = samples.REFERENCE.shape[1] - 1
    labels = np.array([last, *[0] * 7])
    assert class_output(ComparedOutputs(values, found, [""] * 8, labels)) == "y"
    assert class_output(ComparedOutputs(values, found, [""] * 8)) == "box"


def test_numbers_have_no_least_similar_sample() -> None:
    """One number has no direction but its sign, so that their similarity is one figure of all samples."""
    reference, executed = np.arange(1.0, 9.0), np.arange(1.0, 9.0)
    executed[7] += 5
    maps = np.ones((8, 2, 2), np.float32)
    turned = maps.copy()
    turned[3, 0] = -1
    ids = list("abcdefgh")
    assert gallery(ComparedOutputs({"y": reference}, {"y": executed}, ids), None) is None
    both = ComparedOutputs({"y": reference, "m": maps}, {"y": executed, "m": turned}, ids)
    found = gallery(both, None)
    assert found is not None
    assert (found.output, found.shown[0].id) == ("m", "d")


def test_nothing_to_pair_is_nothing_to_show() -> None:
    compared = ComparedOutputs({"y": np.ones((2, 3), np.float32)}, {"z": np.ones((2, 3), np.float32)}, ["a", "b"])
    assert gallery(compared, None) is None
    assert confusion(compared, None) is None


def test_images_are_small_and_inside_the_page(tmp_path: Path) -> None:
    Image.new("RGBA", (1000, 500), (200, 10, 10, 128)).save(tmp_path / "big.png")
    uri = image_uri(tmp_path, "big.png")
    assert uri is not None
    kind, _, data = uri.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (IMAGE_SIDE, IMAGE_SIDE // 2)
    (tmp_path / "no.png").write_text("no image")
    assert image_uri(tmp_path, "no.png") is None
    assert image_uri(tmp_path, "missing.png") is None
    assert image_uri(None, "big.png") is None


def test_images_lie_as_the_network_got_them(tmp_path: Path) -> None:
    """Whatever a file says of how it is turned: dense outputs and boxes beside it are of the stored pixels."""
    stored = Image.new("RGB", (60, 40))
    stored.paste((255, 255, 255), (0, 0, 60, 20))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    stored.save(tmp_path / "a.png", exif=exif)
    uri = image_uri(tmp_path, "a.png")
    assert uri is not None
    detections = Detections("boxes", "scores", "labels")
    nothing = Drawn(np.zeros((0, 4)), np.zeros(0, np.int64))
    boxed = ComparedOutputs({}, {}, ["a.png"], None, tmp_path, detections)
    for shown in (uri, box_pictures(boxed, 0, (nothing, nothing))[0][1]):
        with Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))) as image:
            pixels = np.asarray(image.convert("L"))
        rows, columns = pixels.shape
        assert rows < columns
        assert pixels[: rows // 2 - 8].min() > 250
        assert pixels[rows // 2 + 8 :].max() < 5

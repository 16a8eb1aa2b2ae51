"""Labels number the model's classes, by name, whatever the folders of the check are; what cannot be is said."""
# ruff: noqa: E501  (whole messages)

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from safetensors.numpy import save_file

from calib.data import Source
from calib.errors import CalibError
from calib.samples import InputSpec, Sample
from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.job.limits import OwnMetric
from trtpipe.job.load import read_job
from trtpipe.job.sections import Data, Transform
from trtpipe.model.data import _orders_differ, open_check, turned, with_labels
from trtpipe.model.labels import classes_of, labels_of, names_classes
from trtpipe.values import LoadedModel, TensorSpec

CLASSES = ("bird", "cat", "dog", "fish", "horse")


def folders(root: Path, names: tuple[str, ...]) -> Path:
    """One image for each class; its brightness is the class's place in CLASSES."""
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (20 * len(name),) * 3).save(root / name / f"{name}.png")
    return root


def job(tmp: Path, check: tuple[str, ...], calib: tuple[str, ...] = (), labels: str | None = None) -> Job:
    folders(tmp / "check", check)
    text: dict[str, Any] = {
        "name": "labels",
        "model": {"factory": "torch.nn:Identity"},
        "inputs": {"x": {"shape": [1, 3, 4, 4]}},
        "outputs": {"y": {}},
        "build": {"target": "onnxruntime"},
        "check": {"images": "check", "transform": {"resize": [4, 4]}, "limits": {"cosine_min": 0.9}},
    }
    if calib:
        folders(tmp / "calib", calib)
        text |= {"calibration": {"images": "calib", "transform": {"resize": [4, 4]}}, "precision": {"int8_mode": True}}
    if labels is not None:
        (tmp / "classes.txt").write_text(labels)
        text["check"]["labels"] = "classes.txt"
    (tmp / "job.yaml").write_text(json.dumps(text))
    return read_job(tmp / "job.yaml")


def opened(made: Job, check: dict[str, Any]) -> Any:
    return open_check(made.model_copy(update={"check": made.check.model_copy(update=check)}))


def model(count: int = 5, own: tuple[str, ...] | None = None) -> LoadedModel:
    return LoadedModel(None, (), (TensorSpec("y", "float32", (1, count)),), "", "", classes=own)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["masks", "b.json", "two.csv"])
def test_labels_that_nothing_would_read_are_refused(tmp_path: Path, name: str) -> None:
    made = job(tmp_path, ("cat", "dog"), labels="cat\ndog")
    if name == "masks":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("cat/cat.png,0.5,1\ndog/dog.png,1,2\n")
    check = made.check.model_copy(update={"labels": str(tmp_path / name)})
    with pytest.raises(InputError) as caught:
        open_check(made.model_copy(update={"check": check}))
    assert str(caught.value) == (
        "check.labels: must name classes, or one class an image, where the job has no check.metrics (got "
        f"{name}: masks, boxes or numbers, which metrics alone read). Add check.metrics, or take check.labels out."
    )


@pytest.mark.parametrize("name", ["masks", "b.json", "two.csv", None])
@pytest.mark.parametrize("scenes", [("a", "b"), tuple("abcdefg")])
def test_folders_of_samples_that_are_labelled_otherwise_are_no_classes(
    tmp_path: Path, name: str | None, scenes: tuple[str, ...]
) -> None:
    """A data set of detection is in folders of scenes, more or fewer than the candidates of a sample."""
    made = job(tmp_path, scenes)
    if name == "masks":
        (tmp_path / name).mkdir()
    elif name is not None:
        (tmp_path / name).write_text("".join(f"{s}/{s}.png,0.5,1\n" for s in scenes))
    metric = OwnMetric(function="coco_map", args={"scores": "y"})
    labels = None if name is None else str(tmp_path / name)
    check = made.check.model_copy(update={"labels": labels, "metrics": {"map": metric}})
    made = made.model_copy(update={"check": check})
    source, notes = with_labels(made, model(5), open_check(made))
    assert notes == ()
    assert name is None or source.labels is None


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_samples_that_are_labelled_twice(tmp_path: Path, suffix: str) -> None:
    """By their own file and by another: one of the two would count without a word."""
    made = job(tmp_path, ("cat",))
    x, own = np.zeros((4, 3, 4, 4), np.float32), np.array([0, 1, 2, 3])
    np.savez(tmp_path / "check.npz", x=x, labels=own)
    save_file({"x": x, "labels": own}, tmp_path / "check.safetensors")
    np.save(tmp_path / "y.npy", own)
    of = {"images": None, "transform": None, "arrays": str(tmp_path / f"check{suffix}")}
    assert sorted(opened(made, of).labels) == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"check.labels: must be left out where the samples have labels of their own"):
        opened(made, of | {"labels": str(tmp_path / "y.npy")})


def test_a_row_of_one_whole_number_is_a_class(tmp_path: Path) -> None:
    """Labels as Keras has them, [S, 1]; of a row of one float, and of two numbers, the row is the label."""
    own = np.array([[0], [1], [2], [3]])
    np.save(tmp_path / "y.npy", own)
    ids = [f"x[{k}]" for k in (3, 0)]
    assert np.array_equal(labels_of(str(tmp_path / "y.npy"), ids, None), [3, 0])
    assert classes_of(str(tmp_path / "y.npy"), ids) == {"x[3]": 3, "x[0]": 0}
    for other in (own.astype(np.float32), np.hstack([own, own])):
        np.save(tmp_path / "y.npy", other)
        assert np.array_equal(labels_of(str(tmp_path / "y.npy"), ids, None), other[[3, 0]])
        assert classes_of(str(tmp_path / "y.npy"), ids) is None


def test_what_a_model_sorts_does_not_number_classes(tmp_path: Path) -> None:
    """The five largest of twenty scores come first; labels go to 19."""
    np.savez(tmp_path / "check.npz", x=np.zeros((4, 3, 4, 4), np.float32), labels=np.array([0, 19, 7, 3]))
    made = job(tmp_path, ("cat", "dog"))
    check = made.check.model_copy(update={"images": None, "transform": None, "arrays": str(tmp_path / "check.npz")})
    source = open_check(made.model_copy(update={"check": check}))
    best = TensorSpec("v", "float32", (1, 5), classes=False)
    loaded = replace(model(20), outputs=(best, *model(20).outputs))
    labels = with_labels(made, loaded, source)[0].labels
    assert labels is not None
    assert max(labels) == 19
    with pytest.raises(InputError, match=r"check: labels must be from 0 to 4, the model's classes"):
        with_labels(made, replace(loaded, outputs=(replace(best, classes=True),)), source)


@pytest.mark.parametrize("first", [True, False], ids=["box first", "logits first"])
@pytest.mark.parametrize("said", ["arrays", "check.labels", "the model", "calibration", "check", "numbers", "csv"])
def test_labels_are_about_the_output_that_has_a_column_for_each(tmp_path: Path, first: bool, said: str) -> None:
    """In whatever order the network returns a box and its scores."""
    box, logits = TensorSpec("box", "float32", (1, 4)), TensorSpec("logits", "float32", (1, 6))
    names = ("ant", "bee", "cat", "dog", "eel", "fox")
    loaded = LoadedModel(
        None,  # type: ignore[arg-type]
        (), (box, logits) if first else (logits, box), "", "", classes=names if said == "the model" else None,
    )  # fmt: skip
    folders = {"check": names, "numbers": ("0", "5"), "csv": ("all",)}.get(said, ("bee", "fox"))
    listed = "\n".join(names) if said == "check.labels" else None
    made = job(tmp_path, folders, calib=names if said == "calibration" else (), labels=listed)
    if said == "arrays":
        np.savez(tmp_path / "check.npz", x=np.zeros((2, 3, 4, 4), np.float32), labels=np.array([1, 5]))
        of: dict[str, Any] = {"images": None, "transform": None, "arrays": str(tmp_path / "check.npz")}
        made = made.model_copy(update={"check": made.check.model_copy(update=of)})
    if said == "csv":
        (tmp_path / "of.csv").write_text("all/all.png,5\n")
        made = made.model_copy(update={"check": made.check.model_copy(update={"labels": str(tmp_path / "of.csv")})})
    source, notes = with_labels(made, loaded, open_check(made))
    assert notes == ()
    assert source.labels is not None
    wanted = {"check": [0, 1, 2, 3, 4, 5], "numbers": [0, 5], "csv": [5]}.get(said, [1, 5])
    assert sorted(map(int, source.labels)) == wanted


def numbered(made: Job, loaded: LoadedModel) -> dict[str, int]:
    """Label by folder."""
    source, _ = with_labels(made, loaded, open_check(made))
    assert source.labels is not None
    return {i.partition("/")[0]: int(label) for i, label in zip(source.ids, source.labels, strict=True)}


SOME = {"cat": 1, "horse": 4}


def refusal(made: Job, classes: int) -> str:
    """The message by which the labels of a job's samples are refused, for a model of so many classes."""
    with pytest.raises(InputError) as caught:
        with_labels(made, model(classes), open_check(made))
    return str(caught.value)


@pytest.mark.parametrize("by", ["check.labels", "the model's own list", "the calibration folders"])
def test_labels_are_places_in_the_models_classes(tmp_path: Path, by: str) -> None:
    text = "\n".join(CLASSES) + "\n" if by == "check.labels" else None
    made = job(tmp_path, ("cat", "horse"), CLASSES if by == "the calibration folders" else (), text)
    assert numbered(made, model(own=CLASSES if by == "the model's own list" else None)) == SOME


def test_folders_are_the_classes_where_they_are_as_many_or_numbers(tmp_path: Path) -> None:
    assert numbered(job(tmp_path / "a", CLASSES), model()) == {c: k for k, c in enumerate(CLASSES)}
    assert numbered(job(tmp_path / "b", ("0", "3", "7")), model(10)) == {"0": 0, "3": 3, "7": 7}


def test_folders_that_say_nothing_are_no_labels_and_are_said(tmp_path: Path) -> None:
    made = job(tmp_path, ("cat", "horse"))
    source, notes = with_labels(made, model(), open_check(made))
    assert source.labels is None
    assert source.sample_count == 2
    assert notes == (
        "check.images: 2 class folders say nothing of 5 classes of the model, so no accuracy was measured. Name the "
        "classes in check.labels, one a line, in the order of the model's outputs",
    )


def test_a_list_of_classes_that_nothing_lies_in_is_said(tmp_path: Path) -> None:
    made = job(tmp_path, ("cat", "horse"), (), "\n".join(CLASSES) + "\n")
    folder = Path(str(made.check.images))
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        path.rename(folder / f"{path.parent.name}-{path.name}")
    for empty in [p for p in folder.iterdir() if p.is_dir()]:
        empty.rmdir()
    _, (note,) = with_labels(made, model(), open_check(made))
    assert note.startswith("check.labels: names classes, and the images lie in no class folders, so that nothing has ")


@pytest.mark.parametrize("suffix", [".csv", ".CSV"])
def test_a_suffix_may_be_in_capitals(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"labels{suffix}").write_text("name,label\na,2\nb,0\n")
    assert not names_classes(str(tmp_path / f"labels{suffix}"))
    assert classes_of(str(tmp_path / f"labels{suffix}"), ["a", "b"]) == {"a": 2, "b": 0}


@pytest.mark.parametrize(
    ("check", "calib", "labels", "count", "message"),
    [
        (("cat", "cow"), CLASSES, None, 5, "check.images: every class folder must be a class of the model "
         "(got cow, which is none). The model's classes, by calibration.images: bird, cat, dog, fish, horse. Rename the folders, or name the "
         "classes in check.labels."),
        (("cat",), (), "cat\ndog\n", 5, "check.labels: must name the model's 5 classes (got 2). Name one class a line in "
         "check.labels, in the order of the model's outputs; images whose folders are no classes belong in one folder."),
        (tuple("abcdefghi"), (), None, 5, "check.images: must name the model's 5 classes (got 9). Name one class a line "
         "in check.labels, in the order of the model's outputs; images whose folders are no classes belong in one folder."),
        (("cat", "cow"), (), "\n".join(CLASSES), 5, "check.images: every class folder must be a class of the model "
         "(got cow, which is none). The model's classes, by check.labels: bird, cat, dog, fish, horse. Rename the folders, or name the "
         "classes in check.labels."),
    ],
)  # fmt: skip
def test_unknown_or_too_many_classes_are_errors(
    tmp_path: Path, check: tuple[str, ...], calib: tuple[str, ...], labels: str | None, count: int, message: str
) -> None:
    made = job(tmp_path, check, calib, labels)
    assert refusal(made, count) == message


class Listed:
    """Samples of given classes, without files."""

    recipe, sequential, whole, root = "", False, True, ""

    def __init__(self, names: tuple[str, ...], of: tuple[int, ...]) -> None:
        self.classes, self.labels, self.ids = names, of, tuple(map(str, range(len(of))))

    def load(self, at: int) -> Sample:
        return {"x": np.zeros(1, np.float32)}

    def content(self, at: int) -> str:
        return str(at)


def test_samples_without_class_names_cannot_be_numbered() -> None:
    listed = Listed(("a",), (0,))
    listed.classes = None  # type: ignore[assignment]
    with pytest.raises(CalibError) as caught:
        Source(listed, [InputSpec("x", "float32", (1,))], range(1)).numbered_by(["a"])
    assert str(caught.value) == ("labels: the samples have no class names. Give images in one folder for each class.")


def test_a_class_in_another_unicode_form_is_said_to_be_that() -> None:
    listed = Listed((unicodedata.normalize("NFD", "\u00e9t\u00e9"),), (0,))
    with pytest.raises(CalibError, match=r"^labels: every class folder must be .* another Unicode form of it"):
        Source(listed, [InputSpec("x", "float32", (1,))], range(1)).numbered_by(["ant", "\u00e9t\u00e9"])


@settings(max_examples=50)
@given(data=st.data(), names=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8, unique=True))
def test_every_sample_keeps_its_class_whatever_the_order_of_names(data: st.DataObject, names: list[str]) -> None:
    have = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    of = tuple(data.draw(st.lists(st.integers(0, len(have) - 1), min_size=1, max_size=9)))
    source = Source(Listed(tuple(have), of), [InputSpec("x", "float32", (1,))], range(len(of)))
    found = source.numbered_by(names)
    assert found.labels is not None
    assert [names[k] for k in found.labels] == [have[k] for k in of]
    assert found.classes == tuple(names)
    batch = next(found.batches(len(of)))
    assert batch.labels is not None
    assert batch.labels.tolist() == found.labels.tolist()
    assert found.digest == source.digest


@pytest.mark.parametrize("wrong", [5, -2])
def test_numbers_beyond_the_models_classes_are_an_error(tmp_path: Path, wrong: int) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 4), np.float32), labels=np.array([-1, 1, wrong]))
    text = {
        "name": "labels",
        "model": {"factory": "torch.nn:Identity"},
        "inputs": {"x": {"shape": [1, 4]}},
        "outputs": {"y": {}},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npz"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(text))
    made = read_job(tmp_path / "job.yaml")
    with pytest.raises(InputError) as caught:
        with_labels(made, model(5), open_check(made))
    assert str(caught.value) == (
        f"check: labels must be from 0 to 4, the model's classes, or -1 where unknown (got {wrong}). Number them from 0 in the "
        "order of the model's outputs."
    )


@pytest.mark.parametrize(
    ("check", "calib", "labels", "count", "message"),
    [
        (("cat",), (), "cat\ndog\ncat\nfish\nhorse\n", 5, "check.labels: must name each class that has a folder once (got "
         "cat more than once). Make the names differ, and rename the folders like them."),
        (("cat",), (), "\n\n", 5, "check.labels: must name the model's classes, one a line (got an empty file)."),
        (tuple(map(str, range(12))), (), None, 12, "check.images: the order of the class folders must be plain (got "
         "numbers, whose order as text, 0, 1, 10, 11, is another than by value). Name the classes in check.labels, one a "
         "line, in the order of the model's outputs."),
        (("1", "10", "2"), (), None, 20, "check.images: the order of the class folders must be plain (got numbers, whose "
         "order as text, 1, 10, 2, is another than by value). Name the classes in check.labels, one a line, in the order of "
         "the model's outputs."),
        (("3", "10"), tuple(map(str, range(1, 11))), None, 10, "calibration.images: the order of the class folders must "
         "be plain (got numbers, whose order as text, 1, 10, 2, 3, is another than by value). Name the classes in "
         "check.labels, one a line, in the order of the model's outputs."),
    ],
)  # fmt: skip
def test_names_that_could_mean_two_classes_are_refused(
    tmp_path: Path, check: tuple[str, ...], calib: tuple[str, ...], labels: str | None, count: int, message: str
) -> None:
    made = job(tmp_path, check, calib, labels)
    assert refusal(made, count) == message


def test_names_of_classes_without_a_folder_may_be_there_twice(tmp_path: Path) -> None:
    """ImageNet has two cranes."""
    made = job(tmp_path, ("cat",), labels="\ufeffbird\ncat\ncrane\ncrane\nhorse\n")
    assert numbered(made, model()) == {"cat": 1}


@given(digits=st.integers(1, 3), count=st.integers(2, 30))
@settings(max_examples=20, deadline=None)
def test_numbered_folders_are_ambiguous_where_text_and_value_sort_otherwise(digits: int, count: int) -> None:
    names = tuple(sorted(f"{k:0{digits}d}" for k in range(count)))
    assert _orders_differ(names) is (count > 10**digits)


def test_that_no_exif_orientation_is_applied_is_said(tmp_path: Path) -> None:
    names = {"a.jpg": 6, "b.jpg": 1, "c.jpg": None, "d.png": 3, "e.webp": 8}
    for name, orientation in names.items():
        exif = Image.Exif()
        if orientation is not None:
            exif[ExifTags.Base.Orientation] = orientation
        Image.new("RGB", (8, 4)).save(tmp_path / name, exif=exif)
    (tmp_path / "f.jpg").write_text("no image")
    Image.new("RGB", (8, 4)).save(tmp_path / "g.jpg", exif=b"Exif\0\0II*\0\xff\xff")  # no directory follows
    ids = [*names, "f.jpg", "g.jpg", "absent.jpg"]
    data = Data(images=str(tmp_path))
    assert turned(data, None, ids) == (
        "check.images: 3 of 8 images have an EXIF orientation (a.jpg), which is not applied: the network gets the "
        "pixels as they are stored, and masks and boxes must lie on those. Where it was trained on upright pictures, "
        "save them upright",
    )
    assert turned(data, Transform(resize=8), ["b.jpg", "c.jpg"]) == ()
    assert turned(data, Transform(callable="mine:upright"), ids) == ()
    assert turned(Data(arrays="x.npy"), None, ["x[0]"]) == ()

"""`check.labels` of samples: masks, boxes of COCO, rows of a .csv and a .npy, moved like the images."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from calib.data import open_source
from calib.images import geometry
from calib.samples import DataSpec, InputSpec, TransformSpec
from trtpipe.errors import InputError
from trtpipe.job.sections import Transform
from trtpipe.model.labels import Boxes, classes_of, labels_of, names_classes, require_rows

IDS = ("cat/a.png", "b.jpg")


def masks(folder: Path, size: tuple[int, int] = (6, 4)) -> Path:
    """A mask for each of IDS: class 0 on the left half and the place of the sample, from 1, on the right."""
    (folder / "cat").mkdir(parents=True)
    for k, name in enumerate(("cat/a.png", "b.png"), 1):
        pixels = np.zeros(size[::-1], np.uint8)
        pixels[:, size[0] // 2 :] = k
        Image.fromarray(pixels).save(folder / name)
    return folder


def test_masks_are_found_by_name_and_keep_their_classes(tmp_path: Path) -> None:
    found = labels_of(str(masks(tmp_path / "masks")), IDS, None)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (np.int64, (2, 4, 6))
    assert found[1, 0].tolist() == [0, 0, 0, 2, 2, 2]
    moved = labels_of(str(tmp_path / "masks"), IDS, Transform(resize=(8, 12), center_crop=(4, 6)))
    assert isinstance(moved, np.ndarray)
    assert moved[0, 0].tolist() == [0, 0, 0, 1, 1, 1]  # nearest: no class between 0 and 1
    palette = Image.fromarray(np.full((4, 6), 3, np.uint8)).convert("P")
    palette.save(tmp_path / "masks" / "cat" / "a.png")
    found = labels_of(str(tmp_path / "masks"), IDS, None)
    assert isinstance(found, np.ndarray)
    assert set(np.unique(found[0])) == {int(np.asarray(palette)[0, 0])}


@pytest.mark.parametrize("values", [["a", "b"], np.zeros(2, "M8[s]"), np.zeros(2, complex), np.zeros(2, "i4,f4")])
def test_labels_that_are_no_numbers_are_refused(tmp_path: Path, values: Any) -> None:
    array = np.asarray(values)
    np.save(tmp_path / "l.npy", array)
    with pytest.raises(InputError) as caught:
        labels_of(str(tmp_path / "l.npy"), ("x.npy[0]", "x.npy[1]"), None)
    assert str(caught.value) == (
        f"check.labels: {tmp_path}/l.npy: must be a readable .npy of plain numbers (got dtype {array.dtype}). "
        "Save them as numbers."
    )


def test_masks_that_lost_something_are_refused(tmp_path: Path) -> None:
    """JPEG blurs numbers of classes into others; whatever the name says."""
    folder = masks(tmp_path / "masks")
    Image.open(folder / "b.png").save(folder / "b.jpg")
    (folder / "b.png").unlink()
    message = r"b\.jpg: must be saved without loss \(got JPEG, which changes numbers of classes\)\. Save it as PNG\."
    with pytest.raises(InputError, match=message):
        labels_of(str(folder), IDS, None)


def coco(path: Path, boxes: dict[str, list[tuple[float, ...]]], size: tuple[int, int] = (100, 60)) -> Path:
    """Annotations of class 7 in images of one size."""
    images = [{"id": 10 + k, "file_name": n, "width": size[0], "height": size[1]} for k, n in enumerate(boxes)]
    annotations = [
        {"id": 1, "image_id": 10 + k, "category_id": 7, "bbox": list(box), "iscrowd": int(box[0] == 0)}
        for k, of in enumerate(boxes.values())
        for box in of
    ]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path


def boxes_of(path: Path, ids: tuple[str, ...] = IDS, transform: Transform | None = None) -> tuple[Boxes, ...]:
    found = labels_of(str(path), ids, transform)
    assert isinstance(found, tuple)
    return found


def test_boxes_of_coco_are_found_by_file_name(tmp_path: Path) -> None:
    path = coco(tmp_path / "a.json", {"b.jpg": [(1, 2, 10, 20), (0, 0, 5, 5)], "a.png": []})
    empty, two = boxes_of(path)
    assert empty.corners.shape == (0, 4)
    assert two.corners.tolist() == [[1, 2, 11, 22], [0, 0, 5, 5]]
    assert (two.classes.tolist(), two.crowd.tolist()) == ([7, 7], [False, True])


def test_boxes_by_hand_after_a_resize_and_a_crop(tmp_path: Path) -> None:
    """100 x 60 to 50 x 30, then the middle 20 x 20: 15 pixels off on the left, 5 above."""
    path = coco(tmp_path / "a.json", {"b.jpg": [(40, 20, 20, 20), (2, 2, 10, 10)]})
    (found,) = boxes_of(path, ("b.jpg",), Transform(resize=30, center_crop=20))
    assert found.corners.tolist() == [[5, 5, 15, 15]]  # the other was cropped away


@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(st.integers(20, 60), st.integers(20, 60)),
    resize=st.sampled_from((None, 24, (30, 18), (18, 40))),
    crop=st.sampled_from((None, 16, (21, 13), 50)),
)
def test_boxes_move_as_pixels_do(
    tmp_path_factory: pytest.TempPathFactory, size: tuple[int, int], resize: Any, crop: Any
) -> None:
    """The box of a bright rectangle is that of its pixels after the same transforms."""
    path = tmp_path_factory.mktemp("coco") / "a.json"
    x, y, w, h = size[0] // 4, size[1] // 3, size[0] // 2, size[1] // 2
    image = Image.new("L", size)
    image.paste(255, (x, y, x + w, y + h))
    for step in geometry(TransformSpec(resize=resize, center_crop=crop, interpolation="nearest")):
        image = step(image)
    rows, columns = np.nonzero(np.asarray(image))
    coco(path, {"b.jpg": [(x, y, w, h)]}, size)
    (found,) = boxes_of(path, ("b.jpg",), Transform(resize=resize, center_crop=crop))
    expected = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert found.corners[0] == pytest.approx(expected, abs=1.01 * max(1, 40 / min(size)))


PICTURE = (96, 64)


def test_boxes_over_the_edge_are_cut_by_a_crop_alone(tmp_path: Path) -> None:
    """Labels are pycocotools' as they are; what a crop takes away cannot be found."""
    path = coco(tmp_path / "a.json", {"b.jpg": [(-4, 50, 20, 20)]})
    assert boxes_of(path, ("b.jpg",))[0].corners.tolist() == [[-4, 50, 16, 70]]
    assert boxes_of(path, ("b.jpg",), Transform(resize=(30, 50)))[0].corners.tolist() == [[-2, 25, 8, 35]]
    assert boxes_of(path, ("b.jpg",), Transform(center_crop=(60, 80)))[0].corners.tolist() == [[0, 50, 6, 60]]


SIZES = ((96, 64), (48, 32), (64, 64), (64, 96), (77, 77), (95, 64))


@pytest.mark.parametrize("transform", [None, Transform(resize=32), Transform(center_crop=16), Transform(resize=(8, 8))])
@pytest.mark.parametrize("size", SIZES)
def test_masks_of_another_geometry_than_their_picture_are_refused(
    tmp_path: Path, size: tuple[int, int], transform: Transform | None
) -> None:
    """A mask is accepted exactly where the steps leave it on its picture."""
    Image.new("RGB", PICTURE).save(tmp_path / "b.jpg")
    (tmp_path / "m").mkdir()
    Image.new("L", size).save(tmp_path / "m" / "b.png")
    crop_counts = transform is not None and transform.resize is None
    like = size == PICTURE if crop_counts else size in ((96, 64), (48, 32), (95, 64))
    if like:
        labels_of(str(tmp_path / "m"), ("b.jpg",), transform, str(tmp_path))
        return
    with pytest.raises(InputError) as caught:
        labels_of(str(tmp_path / "m"), ("b.jpg",), transform, str(tmp_path))
    assert str(caught.value) == (
        f"check.labels: {tmp_path}/m/b.png: must be as large as its picture b.jpg, 96 x 64 (got {size[0]} x "
        f"{size[1]}). Make the masks of the pictures that are checked."
    )


def test_a_list_of_pictures_is_no_labels(tmp_path: Path) -> None:
    path = coco(tmp_path / "a.json", {name: [] for name in IDS})
    with pytest.raises(InputError) as caught:
        labels_of(str(path), IDS, None)
    assert str(caught.value) == (
        f"check.labels: {path}: must hold annotations (got none for {len(IDS)} images). Files that only list pictures, "
        "as of COCO's test images, are no labels."
    )
    one = {name: [(1, 1, 2, 2)] * (name == IDS[0]) for name in IDS}
    assert [len(boxes.classes) for boxes in boxes_of(coco(tmp_path / "b.json", one))] == [1, *[0] * (len(IDS) - 1)]


@pytest.mark.parametrize("size", SIZES)
def test_boxes_of_another_picture_are_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", PICTURE).save(tmp_path / "b.jpg")
    path = coco(tmp_path / "a.json", {"b.jpg": [(1, 1, 9, 9)]}, size)
    if size == PICTURE:
        labels_of(str(path), ("b.jpg",), None, str(tmp_path))
        return
    with pytest.raises(InputError) as caught:
        labels_of(str(path), ("b.jpg",), None, str(tmp_path))
    assert str(caught.value) == (
        f"check.labels: {path}: must give the size of b.jpg, 96 x 64 (got width {size[0]}, height {size[1]}). Its "
        "boxes are of another picture: take the annotations of the pictures that are checked."
    )


def test_rows_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name,class\nb.jpg,2\ncat/a.png,-1\nother.png,5\n")
    found = labels_of(str(path), IDS, None)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.tolist()) == (np.int64, [-1, 2])
    assert classes_of(str(path), IDS) == {"cat/a.png": -1, "b.jpg": 2}
    path.write_text("b.jpg,2.5,1\ncat/a.png,3,4\n")
    found = labels_of(str(path), IDS, None)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[3, 4], [2.5, 1]]
    assert classes_of(str(path), IDS) is None
    path.write_text("b.jpg,2.5\ncat/a.png,3\n")
    found = labels_of(str(path), IDS, None)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [3, 2.5]


@given(value=st.floats(-1e9, 1e9), form=st.sampled_from(["{!r}", "{:e}", "{:.3f}", "{:.0e}"]))
def test_only_whole_numbers_are_classes(tmp_path_factory: pytest.TempPathFactory, value: float, form: str) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    text = form.format(value)
    path.write_text(f"b.jpg,{text}\ncat/a.png,1\n")
    found = labels_of(str(path), IDS, None)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.tolist()) == (np.float64, [1, float(text)])
    assert classes_of(str(path), IDS) is None


def test_rows_of_a_npy_are_those_of_the_samples_places(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12).reshape(4, 3))
    found = labels_of(str(tmp_path / "a.npy"), ("x.npy[3]", "x.npy[0]"), None)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[9, 10, 11], [0, 1, 2]]
    assert classes_of(str(tmp_path / "a.npy"), ("x.npy[3]", "x.npy[0]")) is None


@pytest.mark.parametrize(("dtype", "classes"), [("int64", True), ("uint8", True), ("float32", False), ("bool", False)])
def test_one_whole_number_a_row_of_a_npy_is_a_class(tmp_path: Path, dtype: str, classes: bool) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 0, 1, 2]).astype(dtype))
    found = classes_of(str(tmp_path / "a.npy"), ("x.npy[3]", "x.npy[0]"))
    assert found == ({"x.npy[3]": 2, "x.npy[0]": 3} if classes else None)


@pytest.mark.parametrize("kind", ["csv", "masks", "coco"])
def test_a_sample_that_is_labelled_twice_is_refused(tmp_path: Path, kind: str) -> None:
    path, twice = tmp_path / f"a.{kind}", "b.jpg"
    if kind == "csv":
        path.write_text("name,class\nb.jpg,1\ncat/a.png,2\nb.jpg,3\n")
    elif kind == "masks":
        twice = "b"
        for name in ("b.png", "b.jpg", "cat/a.png"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4)).save(path / name)
    else:
        path = coco(tmp_path / "a.json", {"b.jpg": [], "cat/a.png": []})
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {"images": [*data["images"], {**data["images"][0], "id": 99}]}))
    with pytest.raises(InputError) as caught:
        labels_of(str(path), IDS, None)
    assert str(caught.value) == f"check.labels: {path}: must label each sample once (got {twice} twice). Remove one."


def coco_text(**changed: Any) -> bytes:
    """A file of COCO whose parts have these values changed; None takes one away."""
    whole = {
        "images": {"id": 1, "file_name": "b.jpg", "width": 2, "height": 2},
        "annotations": {"id": 7, "image_id": 1, "bbox": [0, 0, 1, 1], "category_id": 1},
    }
    return json.dumps({
        part: change if isinstance(change := changed.get(part, {}), (str, int)) else [
            {k: v for k, v in (item | one).items() if v is not None}
            for one in (change if isinstance(change, list) else [change])
        ]
        for part, item in whole.items()
    }).encode()  # fmt: skip


NOT_COCO = [
    ("images", {"id": None}, "images.0.id: Field required"),
    ("images", {"width": 0}, "images.0.width: Input should be greater than 0"),
    ("images", {"file_name": 7}, "images.0.file_name: Input should be a valid string"),
    ("images", "b.jpg", "images: Input should be a valid tuple"),
    ("annotations", {"bbox": [0, 0, 1]}, "annotations.0.bbox.3: Field required"),
    ("annotations", {"bbox": [0, 0, -1, 1]},
     "annotations.0.bbox.2: Input should be greater than or equal to 0"),
    ("annotations", {"bbox": "0 0 1 1"}, "annotations.0.bbox: Input should be a valid tuple"),
    ("annotations", {"bbox": [0, 0, 1, "wide"]},
     "annotations.0.bbox.3: Input should be a valid number"),
    ("annotations", {"bbox": ["0", 0, 1, 1]}, "annotations.0.bbox.0: Input should be a valid number"),
    ("annotations", {"bbox": [0, True, 1, 1]}, "annotations.0.bbox.1: Input should be a valid number"),
    ("annotations", {"category_id": None}, "annotations.0.category_id: Field required"),
    ("annotations", {"category_id": 1.5}, "annotations.0.category_id: Input should be a valid integer"),
    *(("annotations", {"iscrowd": odd}, f"annotations.0.iscrowd: {said}") for odd, said in
      (("yes", "Input should be False, True, 0 or 1"), (2, "Input should be False, True, 0 or 1"))),
    ("annotations", {"category_id": True}, "annotations.0.category_id: Input should be a valid integer"),
    ("annotations", {"category_id": 2**63},
     "annotations.0.category_id: Input should be less than or equal to 9223372036854775807"),
    ("annotations", 4, "annotations: Input should be a valid tuple"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m", {}, "must hold a mask for each image, named like it (got none for cat/a.png)."),
        ("m", {"cat/a.png": "RGB", "b.png": "L"},
         "/cat/a.png: must be a mask of one channel (got mode RGB). Save it with one channel or a palette; a pixel's "
         "value is its class."),
        ("m", {"cat/a.png": "L", "b.png": (3, 3)},
         "must give masks of one size (got (3, 3), (4, 4)). Set transform.center_crop, or resize: [height, width]."),
        ("m", {"cat/a.png": b"", "b.png": "L"}, "/cat/a.png: must be a readable image (got cannot identify image file"),
        ("a.json", b"{}", "must be annotations of COCO: images (id, file_name, width, height), annotations (image_id, "
         "bbox, category_id) (got images: Field required). COCO's object detection files are so."),
        *(("a.json", coco_text(**{where: change}), f"category_id) (got {got}). COCO's object detection files are so.")
          for where, change, got in NOT_COCO),
        ("a.json", b"[", "category_id) (got Expecting value: line 1 column 2 (char 1))."),
        ("a.json", b"[]", "category_id) (got Input should be an object of JSON)."),
        ("a.json", coco_text(images=[{"file_name": "cat/a.png"}, {"file_name": "b.jpg"}]),
         "must give each image an id of its own (got 1 twice). Number them anew."),
        ("a.json", b'{"images": [], "annotations": []}',
         "must list each image, its file_name as below check.images (got none for cat/a.png)."),
        ("a.json", b'{"images": [{"id": 1, "file_name": "b.jpg", "width": 2, "height": 2}], "annotations": '
         b'[{"id": 7, "image_id": 4242, "bbox": [0, 0, 1, 1], "category_id": 1}]}',
         "must list the image of each annotation (got none of id 4242). Leave its annotations out with it, or list "
         "it."),
        ("a.csv", b"b.jpg,1\n", "must have a line for each sample (got none for cat/a.png). The first column is a "
         "sample's name, as below check.images."),
        ("a.csv", b"b.jpg,1\ncat/a.png,cat\n",
         "must hold numbers for each sample (got 'cat' for cat/a.png). Number classes from 0."),
        ("a.csv", b"b.jpg,1\ncat/a.png\n",
         "must hold numbers for each sample (got '' for cat/a.png). Number classes from 0."),
        ("a.csv", b"b.jpg,dog\ncat/a.png,cat\n",  # no heading: it names a sample
         "must hold numbers for each sample (got 'cat' for cat/a.png). Number classes from 0."),
        ("a.csv", b"b.jpg,1\ncat/a.png,1,2\n",
         "must hold as many numbers for each sample, 2 (got '1' for b.jpg). Fill the line."),
        *(("a.csv", f"b.jpg,1\ncat/a.png,{number}\n".encode(),
           f"must hold whole numbers within int64 (got {number} for cat/a.png). Number classes from 0.")
          for number in (2**63, -(2**63) - 1, 10**300)),
        ("a.csv", b"b.jpg;1\ncat/a.png;2\n",
         "must be a file of comma-separated values (got ';' between them). Save it with commas."),
        ("a.csv", b"b.jpg,1\n\xff,2\n", "must be a readable file of comma-separated values (got "),
        ("a.npy", b"", "must be a readable .npy of plain numbers (got "),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.mkdir()
        for file, kind in content.items():
            (path / file).parent.mkdir(exist_ok=True)
            if isinstance(kind, bytes):
                (path / file).write_bytes(kind)
            else:
                mode, size = ("L", kind) if isinstance(kind, tuple) else (kind, (4, 4))
                Image.new(mode, size).save(path / file)
    with pytest.raises(InputError) as caught:
        labels_of(str(path), IDS, None)
    text = str(caught.value)
    assert text.startswith("check.labels: ")
    assert (text if message.startswith("/") else text.partition(f"{name}: ")[2]).find(message) >= 0


def test_whole_numbers_are_what_the_file_says(tmp_path: Path) -> None:
    """Read as float64, ids over 2**53 were others."""
    numbers = [2**63 - 1, -(2**63)]
    (tmp_path / "a.csv").write_text("".join(f"{name},{n}\n" for name, n in zip(IDS, numbers, strict=True)))
    labels = labels_of(str(tmp_path / "a.csv"), IDS, None)
    assert isinstance(labels, np.ndarray)
    assert (labels.tolist(), labels.dtype) == (numbers, np.int64)


def test_rows_that_are_too_few(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"a\.npy: must have a row for each sample \(got \[3\], none for x\[3\]\)\."):
        labels_of(str(tmp_path / "a.npy"), ("x[0]", "x[3]"), None)


@pytest.mark.parametrize(("rows", "total", "refused"), [(4, 4, False), (5, 4, True), (3, 4, True), (5, None, False)])
def test_a_row_for_each_sample_and_no_more(tmp_path: Path, rows: int, total: int | None, refused: bool) -> None:
    """More rows are another set's labels, and may be shifted by one."""
    path = str(tmp_path / "a.npy")
    np.save(path, np.zeros(rows, np.int64))
    if not refused:
        return require_rows(path, total)
    with pytest.raises(InputError) as caught:
        require_rows(path, total)
    assert str(caught.value) == (
        f"check.labels: {path}: must have a row for each of the 4 samples (got {rows}). Give the labels of these "
        "samples, -1 where one is unknown."
    )


def test_what_a_callable_does_to_images_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        labels_of(str(masks(tmp_path / "m")), IDS, Transform(callable="net:f"))
    assert str(caught.value).endswith(
        "m: must be for images that trtpipe transforms (got transform.callable net:f). Use resize and center_crop, or "
        "give check.factory with a .npy of labels."
    )


def test_a_text_file_names_classes(tmp_path: Path) -> None:
    assert names_classes("classes.txt")
    assert not any(names_classes(n) for n in ("a.csv", "a.json", "a.npy", str(tmp_path)))


def test_images_in_the_folder_itself_have_no_labels_until_they_are_given(tmp_path: Path) -> None:
    for name in "ab":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    source = open_source(DataSpec(images=str(tmp_path)), [InputSpec("x", "float32", (3, 4, 4))])
    assert set(source.ids) == {"a.png", "b.png"}
    assert source.labels is None
    assert source.classes is None
    labelled = source.labelled({"a.png": 4, "b.png": 2})
    assert labelled.labels is not None
    assert dict(zip(labelled.ids, labelled.labels, strict=True)) == {"a.png": 4, "b.png": 2}
    assert labelled.digest == source.digest


def test_a_list_of_classes_that_is_no_text_is_refused(tmp_path: Path) -> None:
    from trtpipe.model.data import _class_names

    path = tmp_path / "classes.txt"
    path.write_bytes(b"cat\n\xff\n")
    job = SimpleNamespace(check=SimpleNamespace(labels=str(path)))
    with pytest.raises(
        InputError, match=r"^check\.labels: must be a text file in UTF-8 \(got 'utf-8' codec.*Save it as UTF-8\.$"
    ):
        _class_names(job, None, (), 2)  # type: ignore[arg-type]

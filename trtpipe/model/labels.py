"""What is right for each sample of the check, as `check.labels` has it: masks, boxes of COCO, rows of numbers."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from calib.errors import CalibError
from calib.files import open_regular, suffix_of, text_at_most
from calib.folders import images_below
from calib.images import UNREADABLE_IMAGE, geometry
from calib.samples import TransformSpec
from calib.strictjson import first_problem, loads
from calib.types import Array
from trtpipe.errors import InputError

if TYPE_CHECKING:
    from trtpipe.job.sections import Check, Transform


@dataclass(frozen=True)
class Boxes:
    """What is to be found in one image: float64 [K, 4] (x0, y0, x1, y1 in pixels of the input), int64 [K] classes,
    bool [K], whether a box is of many (COCO's crowds), and the image's place among all of its file, by their ids."""

    corners: Array
    classes: Array
    crowd: Array
    place: int = 0


#: What is right for each sample: an array [S, ...] (int64 [S] are classes), boxes, or None where nothing is known.
Labels: TypeAlias = Array | tuple[Boxes, ...] | None


_T = TypeVar("_T")

#: Files that may have one class a sample.
_BY_SAMPLE = (".csv", ".npy")
#: Annotations of COCO's whole train set take 450 MB.
_MOST_BYTES = 1 << 30


def sample_labels(check: Check) -> str | None:
    """The file of `check.labels` that says what is right for each sample; None where it names classes, or there is
    none."""
    return None if check.labels is None or names_classes(check.labels) else check.labels


def names_classes(path: str) -> bool:
    """Whether `check.labels` is a text file that names the model's classes, and says nothing of samples."""
    return not Path(path).is_dir() and suffix_of(path) not in (*_BY_SAMPLE, ".json")


def classes_of(path: str, ids: Sequence[str]) -> Mapping[str, int] | None:
    """The class of each sample in a .csv or .npy of one whole number a sample; None where `path` is anything else.

    Raises:
        InputError: it cannot be read, or lacks a sample.
    """
    if suffix_of(path) not in _BY_SAMPLE:
        return None
    rows = _csv(path, ids) if suffix_of(path) == ".csv" else _rows(path, ids)
    return dict(zip(ids, map(int, rows), strict=True)) if rows.ndim == 1 and rows.dtype.kind in "iu" else None


def labels_of(path: str, ids: Sequence[str], transform: Transform | None, pictures: str | None = None) -> Labels:
    """The labels of the samples `ids`, in their order.

    Args:
        path: a folder of masks, named like the images but for the suffix: int64 [S, H, W]; a .json of COCO: boxes; a
            .csv of a name and numbers a line: [S] or [S, columns]; a .npy [rows, ...]: those of the samples' places,
            [S] where each is one whole number.
        ids: names of the samples, as `Source.ids`.
        transform: what is done to the images; masks and boxes are resized and cropped alike.
        pictures: the folder that the samples are images of, where there is one; masks and boxes have to be of them.

    Raises:
        InputError: it cannot be read, lacks a sample, or was made for a picture of another size.
    """
    if Path(path).is_dir():
        return _masks(Path(path), ids, transform, pictures)
    if suffix_of(path) == ".json":
        return _coco(path, ids, transform, pictures)
    return _csv(path, ids) if suffix_of(path) == ".csv" else _rows(path, ids)


def require_rows(path: str, total: int | None) -> None:
    """Refuse a .npy of labels with another number of rows than there are samples: they would be another set's.

    Args:
        path: `check.labels`.
        total: how many samples there are, drawn or not; None where that is unknown.

    Raises:
        InputError: it has more, or fewer.
    """
    if suffix_of(path) == ".npy" and total is not None and (rows := len(_opened(path))) != total:
        hint = "Give the labels of these samples, -1 where one is unknown."
        raise _fault(path, f"have a row for each of the {total} samples", f"{rows}", hint)


def require_labels(path: str, ids: Sequence[str], transform: Transform | None, pictures: str | None) -> None:
    """What `labels_of` would refuse, as far as the names and headers of masks show it, and all of other files.

    Raises:
        InputError: as `labels_of`.
    """
    if not Path(path).is_dir():
        labels_of(path, ids, transform, pictures)
        return
    for _ in _mask_files(Path(path), ids, _spec(transform, path), pictures, read=False):
        pass


def _fault(path: str | Path, must: str, got: object, hint: str = "") -> InputError:
    return InputError(f"check.labels: {path}: must {must} (got {got}). {hint}".rstrip())


def _once(path: str | Path, labelled: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    """What labels each sample, by its name.

    Raises:
        InputError: a name occurs twice.
    """
    found: dict[str, _T] = {}
    for name, value in labelled:
        if name in found:
            raise _fault(path, "label each sample once", f"{name} twice", "Remove one.")
        found[name] = value
    return found


def _spec(transform: Transform | None, path: str | Path) -> TransformSpec:
    """The geometry alone, which moves masks without mixing classes."""
    if transform is None:
        return TransformSpec()
    if transform.callable is not None:
        hint = "Use resize and center_crop, or give check.factory with a .npy of labels."
        raise _fault(path, "be for images that trtpipe transforms", f"transform.callable {transform.callable}", hint)
    return TransformSpec(resize=transform.resize, center_crop=transform.center_crop, interpolation="nearest")


def _size(pictures: str | None, name: str) -> tuple[int, int] | None:
    """Width and height of a sample's picture, as its file has them; None where the samples are no images."""
    if pictures is None:
        return None
    try:
        with open_regular(Path(pictures, name)) as stream, Image.open(stream) as picture:
            return picture.size
    except UNREADABLE_IMAGE:  # a name that is no UTF-8: `as_text`
        return None


def _lies_on(mask: tuple[int, int], picture: tuple[int, int], spec: TransformSpec) -> bool:
    """Whether a mask shows what its picture shows after the same steps: it is as large, or has the same aspect (to a
    pixel) where no crop counts the pixels of the files themselves."""
    if spec.center_crop is not None and spec.resize is None:
        return mask == picture
    (width, height), (across, down) = mask, picture
    return abs(width * down - height * across) < max(across, down)


def _masks(folder: Path, ids: Sequence[str], transform: Transform | None, pictures: str | None) -> Array:
    spec = _spec(transform, folder)
    steps = geometry(spec)
    masks = []
    mask: Image.Image
    for mask in _mask_files(folder, ids, spec, pictures, read=True):
        for step in steps:
            mask = step(mask)
        masks.append(np.asarray(mask).astype(np.int64))
    if len(shapes := {m.shape for m in masks}) > 1:
        hint = "Set transform.center_crop, or resize: [height, width]."
        raise _fault(folder, "give masks of one size", ", ".join(map(str, sorted(shapes)[:3])), hint)
    return np.stack(masks)


def _mask_files(
    folder: Path, ids: Sequence[str], spec: TransformSpec, pictures: str | None, *, read: bool
) -> Iterator[Image.Image]:
    """The mask of each sample, held against its picture; unless they are `read`, by their names and headers alone."""
    try:
        files = images_below(folder)
    except CalibError as error:
        raise InputError(f"check.labels: {error}") from error
    there = _once(folder, ((p.relative_to(folder).with_suffix("").as_posix(), p) for p in files))
    for name in ids:
        path = there.get(PurePosixPath(name).with_suffix("").as_posix())
        if path is None:
            raise _fault(folder, "hold a mask for each image, named like it", f"none for {name}")
        try:
            with open_regular(path) as stream, Image.open(stream) as opened:
                if read:
                    opened.load()
                mask: Image.Image = opened
        except UNREADABLE_IMAGE as error:
            raise _fault(path, "be a readable image", error) from error
        if opened.format == "JPEG":
            raise _fault(path, "be saved without loss", "JPEG, which changes numbers of classes", "Save it as PNG.")
        if mask.mode not in ("1", "L", "P", "I", "I;16"):
            hint = "Save it with one channel or a palette; a pixel's value is its class."
            raise _fault(path, "be a mask of one channel", f"mode {mask.mode}", hint)
        picture = _size(pictures, name)
        if picture is not None and not _lies_on(mask.size, picture, spec):
            must = f"be as large as its picture {name}, {picture[0]} x {picture[1]}"
            raise _fault(
                path, must, f"{mask.width} x {mask.height}", "Make the masks of the pictures that are checked."
            )
        yield mask


class _CocoImage(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: int | str
    file_name: str
    width: PositiveInt
    height: PositiveInt


_INT64 = np.iinfo(np.int64)
#: The left or upper end of a box, and its width or height, in pixels.
_Place = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Extent = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]


class _CocoAnnotation(BaseModel):
    model_config = ConfigDict(frozen=True)

    image_id: int | str
    bbox: tuple[_Place, _Place, _Extent, _Extent]
    category_id: Annotated[int, Field(strict=True, ge=_INT64.min, le=_INT64.max)]
    iscrowd: Literal[False, True, 0, 1] = False


class _Coco(BaseModel):
    """What is read of COCO's annotations; they hold more."""

    model_config = ConfigDict(frozen=True)

    images: tuple[_CocoImage, ...]
    annotations: tuple[_CocoAnnotation, ...]


def _coco(path: str, ids: Sequence[str], transform: Transform | None, pictures: str | None) -> tuple[Boxes, ...]:
    spec = _spec(transform, path)
    try:
        data = _Coco.model_validate(loads(text_at_most(Path(path), _MOST_BYTES)))
    except (OSError, ValueError, RecursionError, CalibError) as error:
        must = (
            "be annotations of COCO: images (id, file_name, width, height), annotations (image_id, bbox, category_id)"
        )
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise _fault(path, must, why, "COCO's object detection files are so.") from error
    images = _once(path, ((image.file_name, image) for image in data.images))
    by_image: dict[int | str, list[_CocoAnnotation]] = {image.id: [] for image in data.images}
    if len(by_image) < len(images):
        twice = next(i for i, count in Counter(image.id for image in data.images).items() if count > 1)
        raise _fault(path, "give each image an id of its own", f"{twice} twice", "Number them anew.")
    for annotation in data.annotations:
        if annotation.image_id not in by_image:
            hint = "Leave its annotations out with it, or list it."
            raise _fault(path, "list the image of each annotation", f"none of id {annotation.image_id}", hint)
        by_image[annotation.image_id].append(annotation)
    counts = Counter(PurePosixPath(name).name for name in images)
    short = {PurePosixPath(n).name: i for n, i in images.items() if counts[PurePosixPath(n).name] == 1}
    places = {image: place for place, image in enumerate(sorted(by_image, key=lambda i: (isinstance(i, str), i)))}
    result = []
    for name in ids:
        image = images.get(name) or short.get(PurePosixPath(name).name)
        if image is None:
            raise _fault(path, "list each image, its file_name as below check.images", f"none for {name}")
        size, picture = (image.width, image.height), _size(pictures, name)
        if picture is not None and size != picture:
            must = f"give the size of {name}, {picture[0]} x {picture[1]}"
            hint = "Its boxes are of another picture: take the annotations of the pictures that are checked."
            raise _fault(path, must, f"width {size[0]}, height {size[1]}", hint)
        result.append(replace(_boxes(by_image[image.id], size, spec), place=places[image.id]))
    if not data.annotations:
        hint = "Files that only list pictures, as of COCO's test images, are no labels."
        raise _fault(path, "hold annotations", f"none for {len(data.images)} images", hint)
    return tuple(result)


def _boxes(annotations: Sequence[_CocoAnnotation], size: tuple[int, int], spec: TransformSpec) -> Boxes:
    """The annotated boxes after resize and crop; what was cropped away is left out, and nothing else is changed."""
    width, height = size
    corners = np.array([a.bbox for a in annotations], np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    blank = Image.new("1", size)  # the same steps on an image of this size say where its corners go
    for step in geometry(TransformSpec(resize=spec.resize)):
        blank = step(blank)
    corners *= np.tile((blank.width / width, blank.height / height), 2)
    kept: Array = np.ones(len(corners), np.bool_)
    if spec.center_crop is not None:
        whole = (corners[:, 2:] > corners[:, :2]).all(1)  # others are COCO's to judge
        down, across = crop = (spec.center_crop,) * 2 if isinstance(spec.center_crop, int) else spec.center_crop
        corners -= np.tile((_offset(blank.width, across), _offset(blank.height, down)), 2)
        corners = np.clip(corners, 0, np.tile(crop[::-1], 2))
        kept = np.logical_or(~whole, (corners[:, 2:] > corners[:, :2]).all(1))
    classes = np.array([a.category_id for a in annotations], np.int64)
    crowd = np.array([a.iscrowd for a in annotations], np.bool_)
    return Boxes(corners[kept], classes[kept], crowd[kept])


def _offset(size: int, crop: int) -> int:
    """The first pixel that torchvision's CenterCrop takes; a smaller image gets a margin first."""
    return round((size - crop) / 2.0) if size >= crop else -((crop - size) // 2)


def _csv(path: str, ids: Sequence[str]) -> Array:
    try:
        lines = [
            row for row in csv.reader(text_at_most(Path(path), _MOST_BYTES).removeprefix("\ufeff").splitlines()) if row
        ]
    except (OSError, ValueError, csv.Error) as error:
        raise _fault(path, "be a readable file of comma-separated values", error) from error
    if lines and all(len(row) == 1 for row in lines) and (other := re.search(r"[;\t]", lines[0][0])):
        raise _fault(path, "be a file of comma-separated values", f"{other[0]!r} between them", "Save it with commas.")
    if lines and lines[0][0].strip() not in ids and not any(_number(v) is not None for v in lines[0][1:]):
        lines = lines[1:]  # a heading
    by_name = _once(path, ((row[0].strip(), row[1:]) for row in lines))
    if absent := [name for name in ids if name not in by_name]:
        hint = "The first column is a sample's name, as below check.images."
        raise _fault(path, "have a line for each sample", f"none for {absent[0]}", hint)
    values = [[_number(v) for v in by_name[name]] for name in ids]
    for name, row in zip(ids, values, strict=True):
        got = f"{','.join(by_name[name])!r} for {name}"
        if None in row or not row:
            raise _fault(path, "hold numbers for each sample", got, "Number classes from 0.")
        if len(row) != len(values[0]):
            raise _fault(path, f"hold as many numbers for each sample, {len(values[0])}", got, "Fill the line.")
    if len(values[0]) == 1 and all(re.fullmatch(r"\s*[+-]?\d+\s*", by_name[name][0]) for name in ids):
        whole = [int(by_name[name][0]) for name in ids]
        for name, number in zip(ids, whole, strict=True):
            if not _INT64.min <= number <= _INT64.max:
                raise _fault(path, "hold whole numbers within int64", f"{number} for {name}", "Number classes from 0.")
        return np.array(whole, np.int64)
    array = np.array(values, np.float64)
    return array[:, 0] if array.shape[1] == 1 else array


def _number(text: str) -> float | None:
    try:
        number = float(text if "_" not in text else "")  # 1_0 is a number in Python alone
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _rows(path: str, ids: Sequence[str]) -> Array:
    """Sample `file[7]` has row 7; rows of one whole number are classes, [S]."""
    array = _opened(path)
    places = [int(m[1]) for name in ids if (m := re.search(r"\[(\d+)\]$", name))]
    if len(places) != len(ids):
        raise _fault(path, "have a row for each sample", f"{list(array.shape)} for {ids[-1]}")
    if without := [name for name, place in zip(ids, places, strict=True) if place >= len(array)]:
        raise _fault(path, "have a row for each sample", f"{list(array.shape)}, none for {without[0]}")
    rows = np.array(array[places])
    return rows[:, 0] if rows.dtype.kind in "iu" and rows.shape[1:] == (1,) else rows


def _opened(path: str) -> Array:
    """The rows of a .npy, which stay on disk until they are used."""
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _fault(path, "be a readable .npy of plain numbers", error) from error
    if array.dtype.kind not in "biuf":
        raise _fault(path, "be a readable .npy of plain numbers", f"dtype {array.dtype}", "Save them as numbers.")
    return np.atleast_1d(array)

"""The data sections of a job as calib's sources."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import ExifTags, Image

from calib.data import open_source
from calib.errors import CalibError
from calib.files import open_regular, text_at_most
from calib.folders import class_folders
from calib.images import UNREADABLE_IMAGE
from calib.samples import DataSpec, InputSpec, TransformSpec, Varying
from trtpipe.batching import last_label, ranked_output
from trtpipe.errors import InputError
from trtpipe.job.importable import on_path
from trtpipe.model.labels import (
    classes_of,
    names_classes,
    require_labels,
    require_rows,
    sample_labels,
)

if TYPE_CHECKING:
    from calib.data import Source
    from trtpipe.job.job import Job
    from trtpipe.job.sections import Data, Transform
    from trtpipe.values import LoadedModel, TensorSpec

#: A list of class names is never as long.
_MOST_LABELS_BYTES = 16 << 20


def open_calibration(job: Job) -> Source:
    """The samples INT8 ranges are observed on.

    Raises:
        InputError: the job has none, or they are bad.
    """
    calibration = job.require_calibration()
    return _open(job, "calibration", calibration, calibration.transform)


def open_check(job: Job) -> Source:
    """The samples the result is compared on; images are transformed like calibration's unless the job says otherwise.

    A .csv or .npy of one class for each sample labels them, whatever folders they are in.

    Raises:
        InputError: they are bad, or labelled twice.
    """
    return _labelled(job, _open(job, "check", job.check, job.check_transform()))


def _labelled(job: Job, source: Source) -> Source:
    classes = None
    if job.check.labels is not None:
        classes = classes_of(job.check.labels, source.ids)
        require_rows(job.check.labels, source.total_count)
    of_samples = sample_labels(job.check)
    if of_samples is not None and source.labels is not None and source.classes is None:
        raise InputError(
            "check.labels: must be left out where the samples have labels of their own (got "
            f"{Path(of_samples).name} beside them). Take one of the two out."
        )
    if classes is not None:
        try:
            return source.labelled(classes)
        except CalibError as error:
            raise InputError(f"check.labels: {error}") from error
    if of_samples is not None and not job.check.metrics:
        raise InputError(
            "check.labels: must name classes, or one class an image, where the job has no check.metrics (got "
            f"{Path(of_samples).name}: masks, boxes or numbers, which metrics alone read). Add check.metrics, or "
            "take check.labels out."
        )
    if of_samples is not None and source.classes is not None:
        return source.without_labels()  # masks, boxes or numbers are the samples' labels, and folders only hold them
    return source


def with_labels(job: Job, loaded: LoadedModel, source: Source) -> tuple[Source, tuple[str, ...]]:
    """The check samples with labels that number the model's classes, and a note where they have to go without.

    Class folders are found by name in check.labels, else in the model's own list (`classes` of the module), else in
    the folders of calibration.images where those are as many as the model has classes. Without any of them the folders
    are the classes themselves where they are as many, or are numbers below that. Numbers that sort otherwise as text
    than by value are no order.

    Raises:
        InputError: more classes than the model has, a class that the model has not or has twice, or a label beyond
            them.
    """
    scores = {s.name: s.row_shape[0] for s in loaded.outputs if s.scores_classes and s.name not in job.boxed}
    columns = {name: count for name, count in scores.items() if isinstance(count, int)}
    if source.labels is None and columns and job.check.labels and names_classes(job.check.labels):
        return source, (
            "check.labels: names classes, and the images lie in no class folders, so that nothing has a label. Give a "
            ".csv of a name and a class a line, or put them in folders",
        )
    if source.labels is None or not columns:
        return source, ()
    folders = source.classes
    if folders is None:
        count = columns[ranked_output(columns, last_label(source.labels))]
        beyond = [k for k in (int(source.labels.min()), int(source.labels.max())) if not -1 <= k < count]
        if beyond:
            raise InputError(
                f"check: labels must be from 0 to {count - 1}, the model's classes, or -1 where unknown (got "
                f"{beyond[0]}). Number them from 0 in the order of the model's outputs."
            )
        return source, ()
    names, where, count = _class_names(job, loaded, folders, columns)
    if names is not None:
        _require_names(names, where, folders)
    if len(names or folders) > count or (where == "check.labels" and names is not None and len(names) != count):
        raise InputError(
            f"{where}: must name the model's {count} classes (got {len(names or folders)}). "
            "Name one class a line in check.labels, in the order of the model's outputs; images whose folders are no "
            "classes belong in one folder."
        )
    if names is None:
        return source.without_labels(), (
            f"check.images: {len(folders)} class folders say nothing of {count} classes of the model, so no accuracy "
            "was measured. Name the classes in check.labels, one a line, in the order of the model's outputs",
        )
    return _numbered(source, names, where), ()


def turned(data: Data, transform: Transform | None, ids: Sequence[str]) -> tuple[str, ...]:
    """A note where files of the section's images have an EXIF orientation, which is applied by code of the job alone.

    Args:
        data: the section of the job.
        transform: what is done to its images.
        ids: names of the samples, as `Source.ids`.
    """
    if data.images is None or (transform is not None and transform.callable is not None):
        return ()
    names = [name for name in ids if _orientation(Path(data.images, name)) not in (None, 1)]
    if not names:
        return ()
    return (
        f"check.images: {len(names)} of {len(ids)} images have an EXIF orientation ({names[0]}), which is not applied: "
        "the network gets the pixels as they are stored, and masks and boxes must lie on those. Where it was trained "
        "on upright pictures, save them upright",
    )


def _orientation(path: Path) -> int | None:
    """The EXIF orientation that the header of an image file has; Pillow itself turns a TIFF as it reads it."""
    try:
        with open_regular(path) as stream, Image.open(stream) as image:
            exif = Image.Exif()
            exif.load(image.info.get("exif", b""))
            return exif.get(ExifTags.Base.Orientation)
    except (*UNREADABLE_IMAGE, struct.error):
        return None


def require_data(job: Job) -> Source | None:
    """What files, their headers and their names show of the samples of a job, and of the labels of its check.

    Returns:
        The check's samples, unread; None where code of the job makes them.

    Raises:
        InputError: something that `open_calibration`, `open_check` or `with_labels` would refuse.
    """
    if job.calibration is not None and (job.calibration.arrays or job.calibration.images):
        _open(job, "calibration", job.calibration.model_copy(update=_UNREAD), None)
    if job.check.factory is not None:
        return None
    source = _labelled(job, _open(job, "check", job.check.model_copy(update=_UNREAD), None))
    labels = job.check.labels
    if labels is not None and source.classes is not None and names_classes(labels):
        names = _named(labels)
        _require_names(names, "check.labels", source.classes)
        _numbered(source, names, "check.labels")
    elif labels is not None and not names_classes(labels) and job.check.on_bad_sample == "error":
        require_labels(labels, source.ids, job.check_transform(), job.check.images)
    return source


#: Of a section whose samples are not to be read.
_UNREAD = {"workers": 0, "on_bad_sample": "error"}


def _require_names(names: tuple[str, ...], where: str, folders: tuple[str, ...]) -> None:
    """Refuse names that cannot number the class folders."""
    if where == "check.labels" and not names:
        raise InputError("check.labels: must name the model's classes, one a line (got an empty file).")
    if twice := [n for n in folders if names.count(n) > 1]:
        raise InputError(
            f"{where}: must name each class that has a folder once (got {twice[0]} more than once). Make the names "
            "differ, and rename the folders like them."
        )
    ordering = {"calibration.images": names, "check.images": folders}.get(where)
    if ordering is not None and _orders_differ(ordering):
        raise InputError(
            f"{where}: the order of the class folders must be plain (got numbers, whose order as text, "
            f"{', '.join(sorted(ordering)[:4])}, is another than by value). Name the classes in check.labels, one a "
            "line, in the order of the model's outputs."
        )


def _numbered(source: Source, names: tuple[str, ...], where: str) -> Source:
    try:
        return source.numbered_by(names, where)
    except CalibError as error:
        raise InputError(f"check.images: {str(error).removeprefix('labels: ')}") from error


def _named(path: str) -> tuple[str, ...]:
    """The classes that a text file names, one a line."""
    try:
        lines = text_at_most(Path(path), _MOST_LABELS_BYTES).removeprefix("\ufeff").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"check.labels: must be a text file in UTF-8 (got {error}). Save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"check.labels: must be a readable text file (got {error}). Give one class a line.") from error
    return tuple(line.strip() for line in lines if line.strip())


def _class_names(
    job: Job, loaded: LoadedModel, folders: tuple[str, ...], columns: Mapping[str, int]
) -> tuple[tuple[str, ...] | None, str, int]:
    """The model's classes in the order of its outputs, None where nothing says them; the key that does; and how many
    the output of scores that they are about has, of the `columns` of each."""

    def of(many: int) -> int:
        return many if many in columns.values() else columns[ranked_output(columns, many - 1)]

    if job.check.labels is not None and names_classes(job.check.labels):
        named = _named(job.check.labels)
        return named, "check.labels", of(len(named))
    if loaded.classes is not None:
        return loaded.classes, "model.factory", of(len(loaded.classes))
    if job.calibration_images is not None:
        folders_of_calibration = tuple(class_folders(job.calibration_images))
        if len(folders_of_calibration) in columns.values():
            return folders_of_calibration, "calibration.images", len(folders_of_calibration)
    if len(folders) in columns.values():
        return folders, "check.images", len(folders)
    if all(name.isdecimal() for name in folders):
        numbered = {int(name): name for name in folders}
        if max(numbered) < (count := of(max(numbered) + 1)):
            return tuple(numbered.get(k, str(k)) for k in range(count)), "check.images", count
    return None, "check.images", of(len(folders))


def _orders_differ(names: tuple[str, ...]) -> bool:
    """Whether folders sorted as text (torchvision's ImageFolder does so) are in another order than their numbers."""
    return all(n.isdecimal() for n in names) and list(names) == sorted(names) != sorted(names, key=int)


def sample_specs(job: Job) -> tuple[InputSpec, ...]:
    """What a sample of the job has for each input."""

    def varying(spec: TensorSpec, dim: int | str) -> int | Varying:
        return dim if isinstance(dim, int) else Varying(dim, spec.dims[dim].min, spec.dims[dim].max)

    return tuple(InputSpec(s.name, s.dtype, tuple(varying(s, d) for d in s.shape[1:])) for s in job.input_specs())


def _open(job: Job, where: str, data: Data, transform: Transform | None) -> Source:
    spec = DataSpec(
        images=data.images,
        arrays=data.arrays,
        factory=data.factory,
        transform=None if data.images is None else _transform(transform),
        samples=data.samples,
        seed=data.seed,
        workers=data.workers,
        on_bad_sample=data.on_bad_sample,
    )
    try:
        with on_path(job.folder):
            return open_source(spec, sample_specs(job))
    except CalibError as error:
        raise InputError(f"{where}: {error}") from error


def _transform(transform: Transform | None) -> TransformSpec:
    if transform is None:
        return TransformSpec()
    normalize = transform.normalize
    return TransformSpec(
        resize=transform.resize,
        center_crop=transform.center_crop,
        grayscale=transform.grayscale,
        interpolation=transform.interpolation,
        normalize_mean=None if normalize is None else tuple(normalize.mean),
        normalize_std=None if normalize is None else tuple(normalize.std),
        callable=transform.callable,
    )

"""The inputs of `run`: an image, a folder of them or a file of arrays, as batches for a loaded bundle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calib.arrays import ArraySamples, open_arrays
from calib.errors import CalibError
from calib.files import as_text, suffix_of
from calib.folders import images_below
from calib.samples import ARRAY_SUFFIXES, IMAGE_SUFFIXES, InputSpec
from calib.types import Array
from trtpipe.errors import InputError
from trtpipe.runtime.session import Model


@dataclass(frozen=True)
class Feed:
    """Samples in order. `truths` are the classes that a folder's structure, or the labels of a file of arrays, give
    them; None where there is none.

    Exactly one of `paths`, images still to be read, and `arrays`, rows still to be read, is set.
    """

    ids: tuple[str, ...]
    truths: tuple[str | None, ...]
    paths: tuple[Path, ...] | None = None
    arrays: ArraySamples | None = None

    def batches(self, model: Model, size: int) -> Iterator[dict[str, Array]]:
        """The inputs [B, ...] of at most `size` samples at a time by name. Images are read when their batch is due, and
        one of another size begins a batch of its own."""
        name = model.manifest.inputs[0].name
        same: list[Array] = []
        for path in self.paths or ():
            sample = model.preprocess([path])
            if same and same[0].shape != sample.shape:
                yield {name: np.concatenate(same)}
                same = []
            same.append(sample)
            if len(same) == size:
                yield {name: np.concatenate(same)}
                same = []
        if same:
            yield {name: np.concatenate(same)}
        if self.arrays is None:
            return
        for start in range(0, len(self.ids), size):
            rows = [self.arrays.stored(at) for at in range(start, min(start + size, len(self.ids)))]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def open_feed(path: Path, model: Model) -> Feed:
    """The samples in `path`, in the order of their names.

    A folder is read with all below it; where its first level is named like the manifest's classes (an ImageFolder),
    that is each image's truth.

    Raises:
        InputError: nothing there, no image in the folder, a folder in it that cannot be listed, a kind of file that is
            neither image nor array, a file of arrays that is damaged or that `calib.arrays` refuses, or one without a
            sample.
    """
    if path.is_dir():
        return _folder(path, model)
    suffix = suffix_of(path)
    if not path.is_file():
        raise InputError(
            f"{path}: there is no such file or folder. Give an image, a folder of images or an array file."
        )
    if suffix in ARRAY_SUFFIXES:
        return _arrays(path, model)
    if suffix in IMAGE_SUFFIXES:
        return Feed((as_text(path.name),), (None,), paths=(path,))
    kinds = ", ".join((*IMAGE_SUFFIXES, *ARRAY_SUFFIXES))
    raise InputError(f"{path}: must be one of {kinds} (got {suffix or 'no suffix'}). Convert it.")


def _folder(folder: Path, model: Model) -> Feed:
    try:
        paths = tuple(sorted(images_below(folder), key=lambda p: p.relative_to(folder).parts))
    except CalibError as error:
        raise InputError(str(error)) from error
    if not paths:
        raise InputError(f"{folder}: holds no image ({', '.join(IMAGE_SUFFIXES)}). Check the path.")
    names = set(model.manifest.class_names or ())
    relative = [p.relative_to(folder) for p in paths]
    firsts = [as_text(r.parts[0]) if len(r.parts) > 1 else None for r in relative]
    truths = tuple(first if first in names else None for first in firsts)
    return Feed(tuple(as_text(r.as_posix()) for r in relative), truths, paths=paths)


def _arrays(path: Path, model: Model) -> Feed:
    """Arrays as they are stored, whose dtypes have to be the bindings', and so the sizes that those fix; whether the
    others are the engine's is seen when they are run."""

    def size(dim: int | str) -> int | None:
        return dim if isinstance(dim, int) else None

    inputs = [InputSpec(s.name, s.dtype, tuple(map(size, s.shape[1:]))) for s in model.manifest.inputs]
    try:
        samples = open_arrays(str(path), inputs)
    except CalibError as error:
        raise InputError(str(error)) from error
    if not samples.ids:
        raise InputError(f"{path}: must hold one sample or more (got none). Check it.")
    names = model.manifest.class_names or ()
    labels = samples.labels or (-1,) * len(samples.ids)
    truths = tuple(names[k] if 0 <= k < len(names) else None for k in labels)
    return Feed(tuple(as_text(i) for i in samples.ids), truths, arrays=samples)

"""The inputs of `run`: an image, a folder of them or a file of arrays, as batches for a loaded bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from calib.arrays import LABELS
from calib.errors import CalibError
from calib.files import as_text, suffix_of
from calib.folders import images_below
from calib.samples import ARRAY_SUFFIXES, IMAGE_SUFFIXES
from calib.types import Array
from trtpipe.errors import InputError
from trtpipe.runtime.session import Model


@dataclass(frozen=True)
class Feed:
    """Samples in order. `truths` are the classes that a folder's structure, or the labels of a file of arrays, give
    them; None where there is none.

    Exactly one of `paths`, images still to be read, and `arrays`, [S, ...] by input name, is set.
    """

    ids: tuple[str, ...]
    truths: tuple[str | None, ...]
    paths: tuple[Path, ...] | None = None
    arrays: Mapping[str, Array] | None = None

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
        for start in range(0, 0 if self.arrays is None else len(self.ids), size):
            yield {name: np.asarray(a[start : start + size]) for name, a in (self.arrays or {}).items()}


def open_feed(path: Path, model: Model) -> Feed:
    """The samples in `path`, in the order of their names.

    A folder is read with all below it; where its first level is named like the manifest's classes (an ImageFolder),
    that is each image's truth.

    Raises:
        InputError: nothing there, no image in the folder, a folder in it that cannot be listed, a kind of file that is
            neither image nor array, a file of arrays that is damaged, or arrays of unequal length or without a sample.
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
    names = [s.name for s in model.manifest.inputs]
    try:
        if suffix_of(path) == ".safetensors":
            arrays: dict[str, Array] = dict(load_file(path))
        elif suffix_of(path) == ".npy":
            arrays = {names[0]: np.lib.format.open_memmap(path, mode="r")}
        else:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                arrays = {n: archive[n] for n in archive.files}
            if other := [n for n, a in arrays.items() if not isinstance(a, np.ndarray)]:
                raise ValueError(f"{other[0]}, which is no array")
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001  # NumPy, zipfile, zlib and safetensors have a dozen for a damaged file
        raise InputError(
            f"{path}: must be a readable array file without objects (got: {error}). Write it again."
        ) from None
    labels = arrays.pop(LABELS, None) if LABELS not in names else None
    lengths = {a.shape[0] if a.ndim else 0 for a in arrays.values()}
    if len(lengths) != 1 or min(lengths) < 1:
        raise InputError(
            f"{path}: every array must hold the same samples, one or more (got {sorted(lengths)}). Check it."
        )
    ids = tuple(f"{as_text(path.name)}[{i}]" for i in range(lengths.pop()))
    return Feed(ids, _truths(labels, model, len(ids)), arrays=arrays)


def _truths(labels: Array | None, model: Model, samples: int) -> tuple[str | None, ...]:
    """The names of the classes that a file of arrays holds as the check takes them, integers [S]; where the bundle
    knows no such class, None."""
    names = model.manifest.class_names or ()
    if labels is None or labels.shape != (samples,) or labels.dtype.kind not in "iu":
        return (None,) * samples
    return tuple(names[k] if 0 <= k < len(names) else None for k in labels.tolist())

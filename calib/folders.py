"""Folders of pictures: one rule of what is in them, for samples, masks and the keys of the cache.

Links are followed, and what is hidden (its name begins with a dot) is left out. What cannot be listed is an error:
`os.walk` and `rglob` of pathlib leave it out without a word.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from calib.errors import CalibError
from calib.files import as_text, suffix_of
from calib.once import kept
from calib.samples import IMAGE_SUFFIXES, UNREAD_SUFFIXES


class Listing(NamedTuple):
    """What one folder holds: sorted names of folders, of files, and of what is hidden, which is neither.

    A file is whatever is no folder: a pipe, and a picture whose link leads nowhere, too.
    """

    path: Path
    folders: tuple[str, ...]
    files: tuple[str, ...]
    hidden: tuple[str, ...]


def below(folder: str | Path) -> Iterator[Listing]:
    """`folder` and each folder below it, as `os.walk` gives them: a folder before those in it.

    Raises:
        CalibError: one cannot be listed, a link that is named like no picture leads nowhere, or links lead in a circle.
    """
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(Path(folder), frozenset())]
    while waiting:
        path, above = waiting.pop()
        try:
            status = os.stat(path)
            with os.scandir(path) as listed:
                entries = sorted(listed, key=lambda e: e.name)
        except OSError as error:
            raise CalibError(
                f"{path}: must be a readable folder (got {error.strerror}). Make it readable, or remove it."
            ) from error
        here = (status.st_dev, status.st_ino)
        if here in above:
            raise CalibError(f"{path}: leads back to a folder above it, so it has no end. Remove the link.")
        hidden = tuple(e.name for e in entries if e.name.startswith("."))
        is_folder = {e.name: _is_folder(e) for e in entries if not e.name.startswith(".")}
        folders = tuple(name for name, is_one in is_folder.items() if is_one)
        yield Listing(path, folders, tuple(name for name, is_one in is_folder.items() if not is_one), hidden)
        waiting += [(path / name, above | {here}) for name in reversed(folders)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():
        return entry.is_dir()
    try:
        return stat.S_ISDIR(os.stat(entry.path).st_mode)
    except OSError as error:
        if suffix_of(entry.name) in (*IMAGE_SUFFIXES, *UNREAD_SUFFIXES):
            return False  # a bad sample, which whoever opens it names
        raise CalibError(
            f"{entry.path}: must lead to a file or a folder (got {error.strerror}). Repair the link, or remove it."
        ) from error


def class_folders(folder: str | Path) -> dict[str, str]:
    """The folders in `folder` by the class that each names (`as_text`), in the order in which torchvision's ImageFolder
    numbers classes.

    Raises:
        CalibError: as `below`.
    """
    return {as_text(name): name for name in next(below(folder)).folders}


def images_below(folder: str | Path) -> list[Path]:
    """The files of `IMAGE_SUFFIXES` below `folder`, in the order of torchvision's ImageFolder.

    Raises:
        CalibError: as `below`.
    """
    return [p for at in sorted(below(folder), key=lambda at: str(at.path)) for p in images_in(at)]


def images_in(listing: Listing) -> list[Path]:
    """The files of `IMAGE_SUFFIXES` of one folder, sorted."""
    return [listing.path / name for name in listing.files if suffix_of(name) in IMAGE_SUFFIXES]


def has_images(folder: str | Path) -> bool:
    """Whether a file of `IMAGE_SUFFIXES` is anywhere below `folder`.

    Raises:
        CalibError: as `below`.
    """
    return kept(_has_images, Path(folder))


def _has_images(folder: Path) -> bool:
    return any(suffix_of(name) in IMAGE_SUFFIXES for at in below(folder) for name in at.files)


def unread(where: str, folder: str | Path, *, classes: bool) -> tuple[str, ...]:
    """Notes on pictures below `folder` that are not read: those of another kind than `IMAGE_SUFFIXES`, hidden ones
    and, where `classes` says that it is read as one folder for each class, those that lie beside such folders.

    Raises:
        CalibError: as `below`.
    """
    root, listings = Path(folder), list(below(folder))
    other = [at.path / n for at in listings for n in at.files if suffix_of(n) in UNREAD_SUFFIXES]
    dotted = [at.path / n for at in listings for n in at.hidden]
    hidden = [p for p in dotted if suffix_of(p.name) in IMAGE_SUFFIXES or p.is_dir()]
    beside = images_in(listings[0]) if classes and listings[0].folders else []
    notes = (
        (other, f"pictures are of a kind that is not read: convert to one of {', '.join(IMAGE_SUFFIXES)}"),
        (hidden, "pictures or folders are hidden and not read: their names begin with a dot"),
        (
            beside,
            "pictures are beside the class folders and not read: move each into the folder of its class, or these "
            "folders away",
        ),
    )
    return tuple(
        f"{where}: {text} ({len(paths)}, first: {as_text(str(min(paths).relative_to(root)))})."
        for paths, text in notes
        if paths
    )

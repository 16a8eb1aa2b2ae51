"""Whatever reads a folder of pictures has the same files of it, and refuses one that it cannot list."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import shipping
from jobs import good_folder, write
from PIL import Image

import trtpipe
from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from trtpipe.errors import InputError, user_error
from trtpipe.model.labels import labels_of
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.validate import validate
from trtpipe.runtime.inputs import open_feed

INPUTS = (InputSpec("image", "uint8", (3, 8, 8)),)


def save(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = good_folder(tmp_path / "job") / "val"
    save(folder / "0" / "a.png")
    save(folder / "0" / "more" / "b.png")
    (folder / "0" / "link").symlink_to(tmp_path / "elsewhere")
    save(tmp_path / "elsewhere" / "c.png")
    return folder


def samples(folder: Path) -> set[str]:
    return set(open_source(DataSpec(images=str(folder)), INPUTS).ids)


def fed(folder: Path) -> set[str]:
    if not (folder.parent / "bundle").exists():
        shipping.bundle(folder.parent / "bundle")
    with trtpipe.load(folder.parent / "bundle") as model:
        return set(open_feed(folder, model).ids)


@pytest.mark.parametrize(
    "name", ["0/d.png", "0/.d.png", "0/.more/d.png", ".1/d.png", "1/d.png", "0/more/d.PNG", "0/link/d.png"]
)
def test_what_is_a_sample_is_what_is_in_the_key(photos: Path, name: str) -> None:
    """A night would reuse a bundle whose samples have changed, or build one again for what is none."""
    before, key = samples(photos), Digests().folder(photos)
    save(photos / name)
    added = Digests().folder(photos)
    assert samples(photos) - before == ({name} if added != key else set())
    assert fed(photos) == samples(photos)
    save(photos / name, 9)
    assert (Digests().folder(photos) != added) == (name in samples(photos))


READERS: dict[str, Callable[[Path], object]] = {
    "samples": samples,
    "key": lambda folder: Digests().folder(folder),
    "run": fed,
    "masks": lambda folder: labels_of(str(folder), ["0/a.png"], None),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("closed", ["0", "0/more", "0/link"])
def test_a_folder_that_cannot_be_listed_is_refused(
    photos: Path, reader: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out without a word: a check passed on half of its samples."""
    save(photos / "1" / "e.png")
    real = os.scandir

    def scandir(path: str | Path) -> Iterator[os.DirEntry[str]]:  # root may list what others may not
        if os.fspath(path) == str(photos / closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real(path)

    READERS[reader](photos)
    monkeypatch.setattr(os, "scandir", scandir)
    said = f"{photos / closed}: must be a readable folder (got Permission denied). Make it readable, or remove it."
    with pytest.raises(Exception, match="readable folder") as caught:
        READERS[reader](photos)
    assert str(user_error(caught.value)).endswith(said)
    job = write(photos.parent)
    assert re.fullmatch(rf"check(\.images)?: {re.escape(said)}", [p.message for p in validate(job)][-1])


def test_a_picture_that_cannot_be_read_is_named_by_run(photos: Path) -> None:
    (photos / "0" / "gone.png").symlink_to("/annex/gone.png")
    os.mkfifo(photos / "0" / "pipe.png")
    shipping.bundle(photos.parent / "bundle")
    with trtpipe.load(photos.parent / "bundle") as model:
        for name, why in (("gone", "No such file or directory"), ("pipe", "no regular file")):
            with pytest.raises(InputError, match=rf"{name}\.png: must be an image that Pillow reads .*{why}"):
                list(open_feed(photos, model).batches(model, 8))
            (photos / "0" / f"{name}.png").unlink()
        assert sum(len(b["image"]) for b in open_feed(photos, model).batches(model, 8)) == 3

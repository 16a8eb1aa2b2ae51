"""Files that a user names: what they are called, how much of them is read, and how one is written whole."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import BinaryIO

#: How a pointer begins, and what says so and helps.
_LFS = b"version https://git-lfs.github.com/spec/"
LFS_POINTER, FETCH = "the pointer of Git LFS to it", "Fetch it: git lfs pull."


def as_text(name: str) -> str:
    """`name` with each byte that is no UTF-8 (Python holds it as half a surrogate pair) spelt out as `\\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def suffix_of(path: str | PurePath) -> str:
    """The suffix of a file's name, by which its format is told: ".npy" of "A.NPY"; "" where it has none."""
    return PurePath(path).suffix.lower()


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading: a pipe among a user's files would wait for a writer, and a device has no end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a folder, the system says so
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return open(path, "rb")


def unreadable(path: str | Path, error: OSError) -> str:
    """What is wrong with a file that the system does not let us read."""
    step = "Repair the links." if error.errno == errno.ELOOP else "Check its permissions."
    return f"{path}: must be readable (got {error.strerror or error}). {step}"


def read_regular(path: Path) -> bytes:
    """The content of a file, opened by `open_regular`; OSError as there."""
    with open_regular(path) as stream:
        return stream.read()


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what Git has in the place of one that Git LFS stores, where that was not fetched."""
    try:
        with open_regular(path) as stream:
            return stream.read(len(_LFS)) == _LFS
    except OSError:
        return False


def is_torchscript(path: Path) -> bool:
    """Whether a file is what torch.jit.save writes: an archive with code in it."""
    try:
        with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
            return any(name.split("/")[1:2] == ["code"] for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """The content of a file that is never long: what is longer (a device, the wrong file) is not read to its end.

    Args:
        path: the file.
        most_bytes: how long it may be, bytes.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is longer.
    """
    with open_regular(path) as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    return data


def text_at_most(path: Path, most_bytes: int) -> str:
    """The same of a UTF-8 text, each end of a line as a newline; UnicodeDecodeError where it is none."""
    return io.TextIOWrapper(io.BytesIO(read_at_most(path, most_bytes)), encoding="utf-8").read()


@contextmanager
def replacing(path: Path, asked: Path | None = None) -> Iterator[Path]:
    """A hidden sibling for the block to write, which becomes the file at `path` in one step when the block ends: a
    reader sees the whole old file or the whole new one. Where the block raises, nothing is left of it, and an OSError
    names `path`, or the file that was `asked` for, beside which it is written.

    By hand, as libraries of atomic writes open the file themselves, and some writers here want its path.
    """
    sibling = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield sibling
        os.replace(sibling, path)
    except OSError as error:
        if error.filename is not None and Path(os.fsdecode(error.filename)) == sibling:  # no name that anybody gave
            error.filename = str(asked or path)
        raise
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            sibling.unlink()

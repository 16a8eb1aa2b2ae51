"""A directory that is replaced in one step: a reader sees all of the old one or all of the new one.

The new directory is written to a hidden sibling, flushed, and moved into place by one system call. POSIX
has no rename over a directory that is not empty, so an existing one is replaced with Linux's
`renameat2(RENAME_EXCHANGE)`, which swaps the two names at once: whenever the process is killed, the name leads either
to the whole old one or to the whole new one. A file system that cannot exchange (some network ones) gets two renames
instead, old aside and new in; between them the old one has a name that readers and the next writer both look
for. A writer holds a lock on its sibling, which the kernel releases when the process dies: the next write to the same
name removes every sibling that no process holds.

By hand, since libraries of atomic writes replace single files; a directory needs this one system call.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calib.files import replacing
from trtpipe.outputs import naming
from trtpipe.streams import is_stream, open_stream

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def clean_leftovers(destination: Path) -> tuple[str, ...]:
    """Remove what killed writers of `destination` left beside it, by name; a bundle that was set aside moves back."""
    aside = _aside(destination)
    removed = []
    if aside.is_dir():
        if destination.exists():
            shutil.rmtree(aside)
            removed.append(aside.name)
        else:
            os.rename(aside, destination)
    for entry in sorted(destination.parent.glob(f"{_prefix(destination)}*")):
        if entry.is_symlink() or not entry.is_dir():
            continue
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry)
            removed.append(entry.name)
        except BlockingIOError:
            pass  # Its writer lives.
        finally:
            os.close(descriptor)
    return tuple(removed)


def _prefix(destination: Path) -> str:
    return f".{destination.name}.trtpipe-new-"


def _aside(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.trtpipe-old")


def standing(path: Path) -> Path:
    """Where the bundle called `path` is: there, or aside when a writer was killed between two renames."""
    if os.path.lexists(path) or not path.name:
        return path
    return _aside(path) if _aside(path).is_dir() else path


@contextmanager
def sibling(destination: Path) -> Iterator[Path]:
    """A locked, empty, hidden directory beside `destination`; whatever is left of it at the end is removed."""
    while True:
        temporary = destination.with_name(_prefix(destination) + secrets.token_hex(8))
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another writer's clean-up may have come between mkdir and flock.
        if temporary.exists():
            break
        os.close(descriptor)
    try:
        yield temporary
    finally:
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: Path, payload: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with open(path, "xb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """No other process is in here for this folder at the same time; gives the folder's descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def move_into_place(temporary: Path, destination: Path) -> None:
    """Give `temporary` the name `destination`; what had that name is then called `temporary`, or gone."""
    with alone_in(destination.parent) as parent:
        if not destination.exists():
            os.rename(temporary, destination)
        elif not exchange(temporary, destination):
            aside = _aside(destination)
            os.rename(destination, aside)
            os.rename(temporary, destination)
            os.fsync(parent)
            shutil.rmtree(aside)
        os.fsync(parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where kernel, C library or file system cannot.

    Raises:
        OSError: it is refused, for example since one of the names is not there.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file by way of a temporary sibling: it is whole or as it was. Text is written as UTF-8; half a
    surrogate pair (a file name that is no UTF-8 has them) as `\\udcff`.

    What is no regular file (a pipe, a terminal, /dev/null) is written to as it is.

    Raises:
        InputError: it is a pipe that nothing reads.
        OSError: it cannot be written; its filename is `path`.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_stream(path):
            with open(open_stream(path), "wb") as file:
                file.write(data)
            return
        with replacing(path) as sibling:
            sibling.write_bytes(data)

"""Where results go: probed to be writable before work begins, and named when writing fails later."""

from __future__ import annotations

import errno
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from trtpipe.errors import InputError
from trtpipe.streams import is_stream
from trtpipe.values import GOLDEN, MANIFEST

#: Letters of a job's name: it is a folder's, and begins those of hidden ones beside it, which file systems hold to 255.
MOST_NAME = 128
#: Of jobs, and of files in a bundle or in an entry of the cache: no such name leads out of its folder, none is hidden.
PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
PLAIN_NAME_RULE = "begin with a letter or digit and hold only letters, digits, '.', '_' and '-'"
#: Bytes that a hidden sibling's name has beside the name of what it is moved to.
_SIBLING_BYTES = 32
#: What a probe writes: a disk that has not even this left is full.
_PROBE_BYTES = 4096
#: What a commit of SQLite may need: an I/O error of a disk with less is that of a full one, which flushing shows.
_COMMIT_BYTES = 1 << 18


def is_plain(name: str) -> bool:
    """Whether a file of a bundle may be called so: the name leads out of no folder, and every file system takes it."""
    return len(name) <= MOST_NAME and re.fullmatch(PLAIN_NAME, name) is not None


def has_name(path: Path) -> bool:
    """Whether a path ends in a name, beside which another can stand: `.`, `..` and `/` do not."""
    return path.name not in ("", "..")


def cache_folder() -> Path:
    """The user's folder of what can be made again: `$XDG_CACHE_HOME/trtpipe`, or `~/.cache/trtpipe`.

    Source: the XDG Base Directory Specification, by which a relative path is ignored.

    Raises:
        InputError: the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "trtpipe"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise InputError("HOME: must name a folder, as this user has none (got no value). Set HOME or XDG_CACHE_HOME.")
    return Path(home) / ".cache" / "trtpipe"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an OSError of this block name `path` where it names no file, or a temporary one beside it.

    A write to a full disk fails without a name, and one that is made aside with a name that the user never gave.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and (
            not isinstance(error.filename, (str, bytes)) or _beside(Path(os.fsdecode(error.filename)), Path(path))
        ):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _beside(file: Path, path: Path) -> bool:
    """Whether a file is `path`, in it, or what is made aside for it: `.model.onnx.4f` and `model.onnx-journal` are."""
    if not file.is_relative_to(path.parent):
        return False
    first = next(iter(file.relative_to(path.parent).parts), "")
    return re.fullmatch(rf"\.?{re.escape(path.name)}([.-].*)?", first, re.DOTALL) is not None


def open_database(path: Path, patience_s: float) -> sqlite3.Connection:
    """A SQLite file, made where there is none, that commits by a rollback journal, each statement by itself.

    Never by a write-ahead log: its index is a file that is mapped, so that on a full disk a process that touches a page
    without a block dies of SIGBUS. A file that has such a log gets its content and loses it.
    Source: https://sqlite.org/wal.html, "Use of WAL Without Shared-Memory".

    Args:
        path: the file.
        patience_s: how long another program's lock is waited for, seconds.

    Raises:
        sqlite3.Error: it is no database, stays locked, or cannot be opened.
    """
    database = sqlite3.connect(path, timeout=patience_s, isolation_level=None)
    database.execute("PRAGMA locking_mode=EXCLUSIVE")  # the index of a log is then in memory of this process
    database.execute("PRAGMA journal_mode=DELETE").fetchall()
    database.execute("PRAGMA locking_mode=NORMAL").fetchall()
    database.execute("SELECT count(*) FROM sqlite_master").fetchall()  # lets go of the lock
    database.execute("PRAGMA synchronous=NORMAL")
    return database


def tables_of(path: Path, patience_s: float) -> frozenset[str]:
    """The names of the tables of a SQLite file, which stays as it is; arguments and errors are those of
    `open_database`."""
    with closing(sqlite3.connect(path, timeout=patience_s)) as database:
        return frozenset(name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))


@contextmanager
def naming_database(path: Path) -> Iterator[None]:
    """`naming` for SQLite.

    Raises:
        OSError: SQLite's own error for a full, read-only or unreachable disk; its filename is `path`.
    """
    reasons = {
        "disk is full": errno.ENOSPC,
        "readonly database": errno.EROFS,
        "disk I/O error": errno.EIO,
        "unable to open": errno.EACCES,
    }
    try:
        with naming(path):
            yield
    except sqlite3.OperationalError as error:
        for text, code in reasons.items():
            if text in str(error):
                code = errno.ENOSPC if code == errno.EIO and _is_full(path.parent) else code
                code = errno.EISDIR if path.is_dir() else code
                if code == errno.EROFS and not os.statvfs(path.parent).f_flag & os.ST_RDONLY:
                    code = errno.EACCES  # of a file that may not be written
                raise OSError(code, os.strerror(code), str(path)) from error
        raise


def _is_full(folder: Path) -> bool:
    """Whether a file system has less left than SQLite may need to commit."""
    try:
        left = os.statvfs(folder)
    except OSError:
        return False
    return left.f_bavail * left.f_frsize < _COMMIT_BYTES


def require_writable_file(path: Path) -> None:
    """Probe that a file can be written at `path`; leaves nothing behind.

    Raises:
        InputError: it is a pipe or a device, or would be in a bundle.
        OSError: it cannot, as writing it would say.
    """
    if path.is_dir() or not has_name(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if is_stream(path):
        raise InputError(f"{path}: must be a file to be replaced (got a pipe or a device). Choose another place.")
    _require_writable(path, path.parent)


def require_apart(output: Path, *read: Path | None) -> None:
    """Refuse an output that would destroy what the same command reads.

    Args:
        output: the file that is to be written; what is no regular file (a pipe, /dev/null) is never destroyed.
        read: files and folders. In a folder a new file may be written, but none be replaced; that none is written into
            a bundle is seen when the output is probed.

    Raises:
        InputError: it is one of them, or stands in one of them.
    """
    if is_stream(output):
        return
    place = output.resolve()
    for one in read:
        if one is None:
            continue
        inside = one.resolve() in place.parents
        if place == one.resolve() or (inside and output.exists()):
            raise InputError(
                f"{output}: must not be {'in ' if inside else ''}what is read ({one}), which would be destroyed. "
                "Choose another place."
            )


def require_writable_folder(path: Path) -> None:
    """Probe that a folder can be made at `path`, or that files can be written in the existing one.

    Raises:
        InputError: they would be in a bundle.
        OSError: they cannot, as writing them would say.
    """
    _require_writable(path, path)


def require_replaceable_folder(path: Path) -> None:
    """Probe that a folder made beside `path` can be moved there, over one that is there; it is not written into.

    Raises:
        InputError: it would be in a bundle.
        OSError: it cannot, as writing it would say.
    """
    _require_writable(path, path.parent)


def _require_writable(path: Path, folder: Path) -> None:
    """Write a little, and remove it, in `folder` or in the nearest folder above it that there is."""
    try:
        _probe(path, folder)
    except OSError as error:
        # and not the probe's name, or that of a folder above
        raise OSError(error.errno, error.strerror, str(path)) from error


def _probe(path: Path, folder: Path) -> None:
    absent: list[str] = [] if folder == path else [path.name]
    place = folder.absolute()
    while not os.path.lexists(place):
        absent.append(place.name)
        place = place.parent
    if (place / MANIFEST).is_file() and (place / GOLDEN).is_file():  # a file more makes it invalid
        raise InputError(f"{path}: must not be in the bundle {place}. Choose another place.")
    if not place.is_dir():
        os.listdir(place)  # says what stands in the way: a file, a link to nothing, a circle of links
    longest = os.pathconf(place, "PC_NAME_MAX")
    if any(len(os.fsencode(name)) + _SIBLING_BYTES > longest for name in absent):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with _nameless(place) as descriptor:
        os.write(descriptor, bytes(_PROBE_BYTES))


def write_new(path: Path, data: bytes, *, mode: int) -> None:
    """A file with `data` where there is none yet, not even a link: what was put there first is neither written to nor
    read from.

    Args:
        path: in a folder that exists.
        data: what is written.
        mode: who may read it, less what the umask takes away.

    Raises:
        OSError: something has the name, or the file cannot be written; then none is left.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except BaseException:
        path.unlink()
        raise


@contextmanager
def _nameless(folder: Path) -> Iterator[int]:
    """A new file in `folder` that has no name, so that neither a reader nor a killed process finds or leaves one.

    Where a file system knows none (some network ones), the name is gone as soon as the file is open.
    Source: open(2), O_TMPFILE.
    """
    try:
        descriptor = os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        named = folder / f".trtpipe-probe-{secrets.token_hex(8)}"
        descriptor = os.open(named, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(named)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

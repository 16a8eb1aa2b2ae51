"""Questions about files that raise no audit event: whether one is there, how large it is, since when.

A checkpoint that is taken "if it exists", or because it is the newest, decides what is built and may never be opened.
`os.stat` and its like, and the entries of `os.scandir`, raise no audit event, so they are replaced while something is
recorded. Only questions of the job's own code count: what a library asks on the way to opening a file is answered by
the file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from trtpipe.pipeline.cache.paths import is_packages

_ASKING = ("stat", "lstat", "fstat", "access", "readlink")
#: Callers in the standard library that hand on what `stat` says of size and times; others ask what is there.
_STATUS = frozenset({"getsize", "getmtime", "getctime", "stat", "lstat"})
#: Callers there that only ask what is there, by `stat` too.
_PRESENCE = frozenset(
    {"exists", "lexists", "isfile", "isdir", "islink", "ismount", "is_file", "is_dir", "is_symlink", "is_mount"}
    | {"is_fifo", "is_socket", "is_block_device", "is_char_device", "realpath", "resolve", "samefile"}
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep

Tell = Callable[[str, object, int | None], None]


@contextlib.contextmanager
def watched(tell: Tell, is_own: Callable[[str], bool], unheard: AbstractContextManager[object]) -> Iterator[None]:
    """Tell of the questions that are asked inside, and of files opened beside a folder's descriptor.

    Args:
        tell: is given "presence" (is it there, and what), "status" (size, times, rights and owner too), "rights"
            (what this process may do with it), "file" (it is opened to be read) or "write", the path, and the
            descriptor of the folder that the path is relative to, or None. Raises nothing.
        is_own: whether a source file is the job's own.
        unheard: no audit event counts inside: those of a path beside a descriptor do not say so.
    """

    def asking(original: Callable[..., object], name: str) -> Callable[..., object]:
        @functools.wraps(original)
        def asked(*args: object, **kwargs: object) -> object:
            if (kind := _kind(sys._getframe(1), is_own)) is not None:
                beside = kwargs.get("dir_fd")
                tell(
                    kind if "stat" in name else "rights" if name == "access" else "presence",
                    args[0] if args else kwargs.get("path"),
                    beside if isinstance(beside, int) else None,
                )
            return original(*args, **kwargs)

        return asked

    def opening(original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None:
                return original(path, flags, mode)
            tell("write" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "file", path, dir_fd)
            with unheard:
                return original(path, flags, mode, dir_fd=dir_fd)

        return opened

    def listing(original: Callable[..., Iterator[os.DirEntry[str]]]) -> Callable[..., object]:
        @functools.wraps(original)
        def listed(path: object = ".") -> object:
            found = original(path)
            if not _is_asked_by(sys._getframe(1), is_own):  # os.walk and the like ask entries what they are
                return found
            return _Listing(found, functools.partial(tell, "status"), path)

        return listed

    before = {name: getattr(os, name) for name in (*_ASKING, "open", "scandir")}
    made = {name: asking(before[name], name) for name in _ASKING}
    made["open"], made["scandir"] = opening(before["open"]), listing(before["scandir"])
    # pathlib of Python 3.10 keeps functions of its own.
    kept = getattr(pathlib, "_NormalAccessor", None)
    inside = {name: kept.__dict__[name] for name in made if kept is not None and name in kept.__dict__}
    offers = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids)
    for name, function in made.items():
        for offer in offers:  # shutil and others ask these sets what a function can do
            if before[name] in offer:
                offer.add(function)
        setattr(os, name, function)
        if name in inside:
            setattr(kept, name, staticmethod(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(os, name, function)
            if name in inside:
                setattr(kept, name, inside[name])
            for offer in offers:
                offer.discard(made[name])


class _Listing:
    """What os.scandir returns, with entries that tell when their size and times are asked for."""

    def __init__(self, found: Any, tell: Callable[[object, int | None], None], path: object) -> None:
        self._found, self._tell, self._folder = found, tell, path if isinstance(path, int) else None

    def __iter__(self) -> _Listing:
        return self

    def __next__(self) -> _Entry:
        return _Entry(next(self._found), self._tell, self._folder)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the rest."""
        self._found.close()


class _Entry:
    """An os.DirEntry; `folder` is the descriptor that its path is relative to, or None."""

    def __init__(self, entry: Any, tell: Callable[[object, int | None], None], folder: int | None) -> None:
        self._entry, self._tell, self._folder = entry, tell, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> str | bytes:
        path: str | bytes = self._entry.path
        return path

    def __repr__(self) -> str:
        return repr(self._entry)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As of os.DirEntry."""
        self._tell(self._entry.path, self._folder)
        status: os.stat_result = self._entry.stat(follow_symlinks=follow_symlinks)
        return status


def _is_asked_by(frame: FrameType | None, is_own: Callable[[str], bool]) -> bool:
    """Whether the caller itself is code of the job's own; code from a string belongs to whoever runs it."""
    while frame is not None and (source := frame.f_code.co_filename).startswith("<"):
        if source.startswith("<frozen"):
            return False
        frame = frame.f_back
    return frame is not None and not source.startswith(_STDLIB) and is_own(source)


def is_called_by(frame: FrameType | None, is_own: Callable[[str], bool]) -> bool:
    """Whether code of the job's own calls what runs in `frame`, itself or through the standard library."""
    return _kind(frame, is_own) is not None


def _kind(frame: FrameType | None, is_own: Callable[[str], bool]) -> str | None:
    """What the caller wants to know; None when it is no code of the job's own, however it came here."""
    through: set[str] = set()
    while frame is not None and (source := frame.f_code.co_filename).startswith(("<", _STDLIB)):
        if is_packages(source):
            break
        if source.startswith(("<frozen", _STDLIB)):  # code from a string belongs to whoever runs it
            through.add(frame.f_code.co_name)
        frame = frame.f_back
    if frame is not None and not is_own(frame.f_code.co_filename):
        return None
    return "status" if not through or (through & _STATUS and not through & _PRESENCE) else "presence"

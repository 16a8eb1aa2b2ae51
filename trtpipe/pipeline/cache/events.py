"""What the recorder hears: Python's audit events, and what the wrappers of `native`, `probes` and `variables` tell."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from trtpipe.pipeline.cache.callers import is_from_users_code, is_package_import
from trtpipe.pipeline.cache.databases import JOURNALS, attached, path_of_database, trace_connections
from trtpipe.pipeline.cache.native import operators_watched, wrap
from trtpipe.pipeline.cache.paths import FilePath, Stamp, is_own, path_of, stamp_of
from trtpipe.pipeline.cache.probes import is_called_by, watched
from trtpipe.pipeline.cache.shadows import Lookup, lookups_told
from trtpipe.pipeline.cache.variables import variables_watched

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Log(Protocol):
    """Who is told of what is heard."""

    def log(self, kind: str, path: str, stamp: Stamp | None = None) -> None:
        """Add one event."""

    def counts(self, path: str) -> bool:
        """Whether a path is no ingredient already."""


_active: Log | None = None
_installed = False
_busy = threading.local()


class Unheard:
    """Inside, this thread's audit events do not count: it is trtpipe that reads, by whichever library."""

    def __enter__(self) -> None:
        _busy.yes = True

    def __exit__(self, *_: object) -> None:
        _busy.yes = False


@contextlib.contextmanager
def heard_by(log: Log, folder: str) -> Iterator[None]:
    """Tell `log`, and nobody else, what is read inside, in this process and in those forked from it; `folder` is the
    job's."""
    global _active
    _install()
    _active = log
    try:
        with (
            watched(_asked, is_own, Unheard()),
            operators_watched(_operator),
            variables_watched(_variable),
            lookups_told(_looked, folder),
        ):
            yield
    finally:
        _active = None


def _install() -> None:
    """Add the audit hook, once a process, as it cannot be removed. It returns at once while nothing records."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_audit_hook)
        trace_connections(_traced)
        for name in ("torch", "safetensors", "PIL.ImageFont"):  # wrapped before the job's code runs
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    wrap(_named, _started)


def _audit_hook(event: str, args: tuple[object, ...]) -> None:
    """Handle an audit event; this must not raise."""
    recorder = _active
    if recorder is None or event not in _HANDLERS or getattr(_busy, "yes", False):
        return
    if event in _LISTINGS and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in _IMPORTERS:
        return
    if event in _READING and is_package_import():
        return
    with Unheard():
        try:
            _HANDLERS[event](recorder, args)
        except Exception:  # noqa: BLE001  # a hook that raises would fail the user's own call
            recorder.log("program", f"something whose event {event} could not be read")


def _opened(recorder: Log, args: Sequence[object]) -> None:
    path, mode, flags = args[0], args[1], args[2]
    name = path_of(path)
    if name is None:
        return
    writes = isinstance(mode, str) and any(c in mode for c in "wax+")
    reads = not writes or (isinstance(mode, str) and "+" in mode and "w" not in mode)
    if mode is None and isinstance(flags, int):
        writes = bool(flags & _WRITES)  # what is made by opening it has nothing to read
        reads = not writes or (flags & os.O_ACCMODE == os.O_RDWR and not flags & os.O_TRUNC and os.path.exists(name))
    if writes:
        recorder.log("write", name)
    if reads:
        _file(recorder, name)


def _file(recorder: Log, name: str) -> None:
    if name.endswith(".pyc"):
        with contextlib.suppress(ValueError):
            name = importlib.util.source_from_cache(name)
    recorder.log("file", name, stamp_of(name))


def _listed(recorder: Log, args: Sequence[object]) -> None:
    given = "." if args[0] is None else args[0]
    name = path_of(_behind(given) if isinstance(given, int) else given)
    if name is not None:
        recorder.log("folder", name)


def _made(recorder: Log, args: Sequence[object]) -> None:
    if (name := path_of(args[0])) is not None:
        recorder.log("write", name)


def _linked(recorder: Log, args: Sequence[object]) -> None:
    """A file gets one name more: what is read by that is this file."""
    name, made = _pair(args)
    if name is not None:
        _file(recorder, name)
    if made is not None:
        recorder.log("write", made)


def _renamed(recorder: Log, args: Sequence[object]) -> None:
    name, made = _pair(args)
    if name is not None:
        recorder.log("moved", name, stamp_of(name))
    if made is not None:
        recorder.log("write", made)


def _pair(args: Sequence[object]) -> tuple[FilePath | None, FilePath | None]:
    """The paths before and after, of (source, destination, folder of the one, of the other)."""
    source, destination, *folders = args
    first, second = (*folders, None, None)[:2]
    return _beside(source, first), _beside(destination, second)


def _beside(path: object, descriptor: object) -> FilePath | None:
    """`path_of` what may be given relative to an open folder."""
    if isinstance(descriptor, int) and descriptor >= 0 and isinstance(path, (str, os.PathLike)):
        path = os.path.join(_behind(descriptor), path)
    return path_of(path)


def _behind(descriptor: int) -> str:
    """The path of an open folder."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _asked(kind: str, path: object, beside: int | None) -> None:
    """A question that `probes` saw; nothing may be raised from here."""
    recorder = _active
    if recorder is None or getattr(_busy, "yes", False):
        return
    with Unheard():
        try:
            if isinstance(path, int):
                path = _behind(path)
                path = path if os.path.exists(path) else None  # a pipe, or a file without a name
            name = _beside(path, beside)
            if name is not None and kind == "file":
                _file(recorder, name)
            elif name is not None:
                recorder.log(kind, name)
        except Exception:  # noqa: BLE001  # it would fail the user's own call
            recorder.log("program", f"something whose question for {path!r} could not be read")


def _looked(lookup: Lookup) -> None:
    """A module was looked for: of the user's own one, unless it is an ingredient, all places count; where the job's
    code asks for another, or finds none, those that are not of the environment."""
    if _active is None:
        return
    is_users = lookup.found is not None and path_of(lookup.found) is not None and _active.counts(lookup.found)
    for path in lookup.absent if is_users else lookup.own if is_called_by(lookup.frame, is_own) else ():
        _asked("presence", path, None)


def _variable(name: str) -> None:
    if _active is not None:
        _active.log("variable", name)


def _attributes(recorder: Log, args: Sequence[object]) -> None:
    name = path_of(_behind(args[0]) if isinstance(args[0], int) else args[0])
    if name is not None:
        recorder.log("attributes", name)


def _connected(recorder: Log, args: Sequence[object]) -> None:
    address = args[1]
    if isinstance(address, tuple):  # others are sockets of this machine
        recorder.log("network", f"{address[0]}:{address[1]}")


def _ran(recorder: Log, args: Sequence[object]) -> None:
    if is_from_users_code():
        given = args[1] if len(args) > 1 and args[1] else args[0]
        first = given[0] if isinstance(given, (list, tuple)) and given else given
        named = os.path.basename(os.fsdecode(first)) if isinstance(first, (str, bytes, os.PathLike)) else "a program"
        recorder.log("program", named)


def _library(recorder: Log, args: Sequence[object]) -> None:
    name = path_of(args[0])
    if name is not None and os.path.isfile(name):
        _file(recorder, name)
    if is_called_by(sys._getframe(2), is_own):
        recorder.log("library", "the process's own libraries" if args[0] is None else os.path.basename(str(args[0])))


def _imported(recorder: Log, args: Sequence[object]) -> None:
    wrap(_named, _started)
    name = path_of(args[1])
    if name is not None:  # no source: an extension module of the user's own
        _file(recorder, name)
        recorder.log("library", os.path.basename(name))


def _named(path: object) -> None:
    """A file that native code is about to open, or a folder whose files it may."""
    name = None if _active is None else path_of(path)
    if _active is not None and name is not None and os.path.exists(name):
        inside = os.listdir(name) if os.path.isdir(name) else ()
        for file in [os.path.join(name, n) for n in inside] or [name]:
            _file(_active, file)


@contextlib.contextmanager
def _operator(operator: str, text: str) -> Iterator[None]:
    """While an operator of a library runs with this text: a file that it leaves as it was, it has read."""
    recorder, before = _active, stamp_of(text)
    try:
        yield
    finally:
        name = None if recorder is None else path_of(text)
        if recorder is not None and name is not None:
            if stamp_of(text) != before:
                recorder.log("write", name)
            elif before is not None and os.path.isfile(text):
                recorder.log("file", name, before)
            elif is_from_users_code():
                recorder.log("operator", f"{operator} with {text!r}")


def _started(method: str) -> None:
    if _active is not None and is_from_users_code():
        _active.log("process", f"multiprocessing, {method}")


def _database(recorder: Log, args: Sequence[object]) -> None:
    name = path_of(path_of_database(args[0]))
    if name is not None and os.path.isfile(name):
        _file(recorder, name)
        for ending in JOURNALS:
            recorder.log("journal", name + ending)


def _traced(sql: str) -> None:
    """A statement that a connection executes."""
    if _active is not None:
        for path, said in attached(sql):
            if path is None:
                _active.log("operator", f"SQLite's ATTACH with {said}")
            else:
                _database(_active, [path])


_HANDLERS: Mapping[str, Callable[[Log, Sequence[object]], None]] = {
    "open": _opened,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "socket.connect": _connected,
    "subprocess.Popen": _ran,
    "os.system": _ran,
    "os.posix_spawn": _ran,
    "os.link": _linked,
    "os.mkdir": _made,
    "os.rename": _renamed,
    "os.getxattr": _attributes,
    "os.listxattr": _attributes,
    "ctypes.dlopen": _library,
    "sqlite3.connect": _database,
    "import": _imported,
}


_LISTINGS = ("os.listdir", "os.scandir")
_READING = (
    *_LISTINGS,
    "os.getxattr",
    "os.listxattr",
    "open",
    "ctypes.dlopen",
    "sqlite3.connect",
)
#: Packages that list folders to find modules and distributions; importlib's own frozen modules by both of their names.
_IMPORTERS = frozenset(
    {"_frozen_importlib_external", "importlib", "importlib_metadata", "importlib_resources", "pkgutil", "zipimport"}
)

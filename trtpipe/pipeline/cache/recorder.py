"""Records what a job's own code reads while it runs (files, folders, modules) by Python's audit events.

A factory, a transform or a data callable may open anything. CPython raises an audit event for each file opened and each
folder listed through it (PEP 578), in the process itself and in workers forked from it, whose events come through the
same file. Files that libraries open in native code (safetensors, `torch.from_file`, `torch.jit.load`, torchvision's
decoders) raise none; those calls are wrapped (`native`), and so is `os.stat` (`probes`). What native code of other
libraries opens is not seen, nor is what comes over the network or from another process that was not forked; all of that
is noted.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import secrets
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from trtpipe.pipeline.cache.callers import is_from_users_code, is_package_import
from trtpipe.pipeline.cache.native import operators_watched, wrap
from trtpipe.pipeline.cache.paths import FilePath, is_own, path_of
from trtpipe.pipeline.cache.probes import watched
from trtpipe.pipeline.cache.reads import STARTED_IN, Read, Reads
from trtpipe.pipeline.cache.shadows import looked_for
from trtpipe.pipeline.cache.variables import SOME, variables_watched

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Recorder:
    """Records what is read while it is entered, in this process and in those forked from it.

    Entering again inside is allowed. One Recorder at a time records.

    Args:
        folder: of the job file.
        known: files and folders that are ingredients already, and folders of trtpipe itself; they are not recorded.
    """

    def __init__(self, folder: Path | None = None, known: Iterable[str | Path] = ()) -> None:
        self._folder = Path.cwd() if folder is None else folder
        self._known = tuple(os.path.abspath(p) for p in known)
        self._depth = 0
        self._log: int | None = None
        self._added = Reads()
        self._watch = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        global _active
        if self._depth == 0:
            _install()
            if self._log is None:
                self._log = _unnamed_file()
            _active = self
            self._watch.enter_context(watched(_asked, is_own, _Unheard()))
            self._watch.enter_context(operators_watched(_operator))
            self._watch.enter_context(variables_watched(_variable))
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        self._depth -= 1
        if self._depth == 0:
            _active = None
            self._watch.close()

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def add(self, reads: Reads) -> None:
        """Add what was read to make a value that is used again."""
        self._added |= reads

    @contextlib.contextmanager
    def only(self) -> Iterator[Recording]:
        """The reads inside the block alone; they are complete when it ends."""
        part = Recording()
        with self:
            begin = self._size()
        yield part
        part.reads = self._summary(begin)

    @property
    def reads(self) -> Reads:
        """All reads so far."""
        return self._added | self._summary(0)

    def changed(self) -> tuple[str, ...]:
        """Files that were read and have changed since, unless the job's own code wrote them."""
        events = list(self._events(0))
        written = {path for kind, path, *_ in events if kind == "write"}
        first: dict[str, list[int] | None] = {}
        for kind, path, stamp, _ in events:
            if kind == "file" and path not in written:
                first.setdefault(path, stamp)
        return tuple(sorted(p for p, stamp in first.items() if self.counts(p) and _stamp(p) != stamp))

    @property
    def written(self) -> frozenset[str]:
        """What the job's own code wrote: files by the names of their ingredients."""
        paths = {path for kind, path, *_ in self._events(0) if kind == "write"}
        return frozenset(Read("file", self._portable(path)).name for path in paths)

    def log(self, kind: str, path: str, stamp: list[int] | None = None) -> None:
        """Add one event. A line is written in one piece, whichever process writes it."""
        if self._log is not None:
            relative = isinstance(path, FilePath) and path.relative
            os.write(self._log, json.dumps([kind, path, stamp, relative]).encode() + b"\n")

    def _size(self) -> int:
        return 0 if self._log is None else os.fstat(self._log).st_size

    def _events(self, begin: int) -> Iterator[tuple[str, str, list[int] | None, bool]]:
        if self._log is None:
            return
        data = os.pread(self._log, os.fstat(self._log).st_size - begin, begin)
        for line in data.splitlines():
            kind, path, stamp, relative = json.loads(line)
            yield kind, path, stamp, relative

    def _summary(self, begin: int) -> Reads:
        events = list(self._events(begin))
        written = {path for kind, path, *_ in events if kind == "write"}
        items: set[Read] = set()
        notes: list[str] = []
        variables: set[str] = set()
        for kind, path, _, relative in events:
            if kind == "variable":
                variables.add(path)
            elif kind == "network":
                notes.append(f"the job's code opened a network connection ({path}): what came over it is not watched")
            elif kind == "program":
                notes.append(f"the job's code ran {path}: what that program read is not watched")
            elif kind == "operator":
                notes.append(f"the job's code called {path}: what that operator read is not watched")
            elif kind == "process":
                notes.append(f"the job's code started a process ({path}): what that process read is not watched")
            elif kind != "write" and self.counts(path):
                asked = kind not in ("file", "folder")
                if asked and _holds(path, self._folder):  # where the job is; `resolve` asks for each folder above it
                    continue
                if path in written and (asked or not os.path.exists(path)):  # its own
                    continue
                items.add(Read.from_plain([kind, self._portable(path)]))
                items |= {STARTED_IN} if relative else set()
        variables &= {SOME} if SOME in variables else variables  # a copy of the environment asks for each
        return Reads(tuple(sorted(items)), tuple(dict.fromkeys(notes)), tuple(sorted(variables)))

    def counts(self, path: str) -> bool:
        """Whether a path is no ingredient already."""
        return not any(path == k or path.startswith(k + os.sep) for k in self._known)

    def _portable(self, path: str) -> str:
        inside = os.path.relpath(path, self._folder)
        return path if inside.startswith(os.pardir) else inside


def _holds(path: str, inside: Path) -> bool:
    """Whether a folder is another, or is above it."""
    return os.path.join(os.path.abspath(inside), "").startswith(os.path.join(path, ""))


class Recording:
    """What was recorded while it was open."""

    def __init__(self) -> None:
        self.reads = Reads()


_active: Recorder | None = None
_installed = False
_busy = threading.local()


class _Unheard:
    """Inside, this thread's audit events do not count."""

    def __enter__(self) -> None:
        _busy.yes = True

    def __exit__(self, *_: object) -> None:
        _busy.yes = False


def _install() -> None:
    """Add the audit hook, once a process, as it cannot be removed. It returns at once while nothing records."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_audit_hook)
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
    with _Unheard():
        try:
            _HANDLERS[event](recorder, args)
        except Exception:  # noqa: BLE001  # a hook that raises would fail the user's own call
            recorder.log("program", f"something whose event {event} could not be read")


def _opened(recorder: Recorder, args: Sequence[object]) -> None:
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


def _file(recorder: Recorder, name: str) -> None:
    if name.endswith(".pyc"):
        with contextlib.suppress(ValueError):
            name = importlib.util.source_from_cache(name)
    recorder.log("file", name, _stamp(name))
    if name.endswith(".py") and recorder.counts(name):  # where sources that are ingredients are found is known anyhow
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back
        for path in filter(None, map(path_of, looked_for(name, frame))):
            recorder.log("presence", path)


def _listed(recorder: Recorder, args: Sequence[object]) -> None:
    given = "." if args[0] is None else args[0]
    name = path_of(_behind(given) if isinstance(given, int) else given)
    if name is not None:
        recorder.log("folder", name)


def _made(recorder: Recorder, args: Sequence[object]) -> None:
    if (name := path_of(args[0])) is not None:
        recorder.log("write", name)


def _behind(descriptor: int) -> str:
    """The path of an open folder."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _asked(kind: str, path: object, beside: int | None) -> None:
    """A question that `probes` saw; nothing may be raised from here."""
    recorder = _active
    if recorder is None or getattr(_busy, "yes", False):
        return
    with _Unheard():
        try:
            if beside is not None and isinstance(path, (str, os.PathLike)):
                path = os.path.join(_behind(beside), path)
            name = path_of(path)
            if name is not None and kind == "file":
                _file(recorder, name)
            elif name is not None:
                recorder.log(kind, name)
        except Exception:  # noqa: BLE001  # it would fail the user's own call
            recorder.log("program", f"something whose question for {path!r} could not be read")


def _variable(name: str) -> None:
    if _active is not None:
        _active.log("variable", name)


def _attributes(recorder: Recorder, args: Sequence[object]) -> None:
    name = path_of(_behind(args[0]) if isinstance(args[0], int) else args[0])
    if name is not None:
        recorder.log("attributes", name)


def _connected(recorder: Recorder, args: Sequence[object]) -> None:
    address = args[1]
    if isinstance(address, tuple):  # others are sockets of this machine
        recorder.log("network", f"{address[0]}:{address[1]}")


def _ran(recorder: Recorder, args: Sequence[object]) -> None:
    if is_from_users_code():
        given = args[1] if len(args) > 1 and args[1] else args[0]
        first = given[0] if isinstance(given, (list, tuple)) and given else given
        named = os.path.basename(os.fsdecode(first)) if isinstance(first, (str, bytes, os.PathLike)) else "a program"
        recorder.log("program", named)


def _library(recorder: Recorder, args: Sequence[object]) -> None:
    name = path_of(args[0])
    if name is not None and os.path.isfile(name):
        _file(recorder, name)


def _named(path: object) -> None:
    """A file that native code is about to open."""
    name = None if _active is None else path_of(path)
    if _active is not None and name is not None and os.path.exists(name):
        _file(_active, name)


@contextlib.contextmanager
def _operator(operator: str, text: str) -> Iterator[None]:
    """While an operator of a library runs with this text: a file that it leaves as it was, it has read."""
    recorder, before = _active, _stamp(text)
    try:
        yield
    finally:
        name = None if recorder is None else path_of(text)
        if recorder is not None and name is not None:
            if _stamp(text) != before:
                recorder.log("write", name)
            elif before is not None and os.path.isfile(text):
                recorder.log("file", name, before)
            elif is_from_users_code():
                recorder.log("operator", f"{operator} with {text!r}")


def _started(method: str) -> None:
    if _active is not None and is_from_users_code():
        _active.log("process", f"multiprocessing, {method}")


def _database(recorder: Recorder, args: Sequence[object]) -> None:
    given = args[0]
    if isinstance(given, str) and given.startswith("file:"):
        given = urllib.parse.unquote(urllib.parse.urlsplit(given).path)
    _library(recorder, [given])


_HANDLERS: Mapping[str, Callable[[Recorder, Sequence[object]], None]] = {
    "open": _opened,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "socket.connect": _connected,
    "subprocess.Popen": _ran,
    "os.system": _ran,
    "os.posix_spawn": _ran,
    "os.mkdir": _made,
    "os.getxattr": _attributes,
    "os.listxattr": _attributes,
    "ctypes.dlopen": _library,
    "sqlite3.connect": _database,
    "import": lambda recorder, args: wrap(_named, _started),
}


_LISTINGS = ("os.listdir", "os.scandir")
_READING = (*_LISTINGS, "os.getxattr", "os.listxattr", "open", "ctypes.dlopen", "sqlite3.connect")
#: Packages that list folders to find modules and distributions; importlib's own frozen modules by both of their names.
_IMPORTERS = frozenset(
    {"_frozen_importlib_external", "importlib", "importlib_metadata", "importlib_resources", "pkgutil", "zipimport"}
)


def _stamp(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _unnamed_file() -> int:
    name = os.path.join(tempfile.gettempdir(), f"trtpipe-reads-{os.getpid()}-{secrets.token_hex(8)}")
    descriptor = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return descriptor

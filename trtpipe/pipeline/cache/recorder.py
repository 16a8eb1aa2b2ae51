"""What a job's own code reads while it runs: files, folders, modules; recorded by Python's audit events.

A factory, a transform or a data callable may open anything. CPython raises an audit event for each file opened and each
folder listed through it (PEP 578), in the process itself and in workers forked from it, whose events come through the
same file. Files that libraries open in native code (safetensors, `torch.from_file`, `torch.jit.load`, torchvision's
decoders) raise none; those calls are wrapped. What native code of other libraries opens is not seen, nor is what comes
over the network or from another program; the last two are noted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import secrets
import site
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import calib
from trtpipe.job.importable import is_installed
from trtpipe.pipeline.cache.reads import Read, Reads

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Functions that open files in native code, by module: the position of the path among their arguments.
_NATIVE: Mapping[str, Mapping[str, int]] = {
    "safetensors": {"safe_open": 0},
    "torch": {"from_file": 0, "UntypedStorage.from_file": 0},
    "torch._C": {"PyTorchFileReader": 0, "import_ir_module": 1},
    "torchvision.io.image": {"read_file": 0, "read_image": 0, "decode_image": 0},
    "torchvision.io.video": {"read_video": 0},
    "cv2": {"imread": 0},
}


class Recorder:
    """Records what is read while it is entered, in this process and in those forked from it.

    Entering again inside is allowed. One Recorder at a time records.

    Args:
        folder: of the job file.
        known: files and folders whose content is an ingredient anyhow, and folders of trtpipe's own.
    """

    def __init__(self, folder: Path | None = None, known: Iterable[str | Path] = ()) -> None:
        self._folder = Path.cwd() if folder is None else folder
        self._known = tuple(os.path.abspath(p) for p in known)
        self._depth = 0
        self._log: int | None = None
        self._added = Reads()

    def __enter__(self) -> Recorder:
        global _active
        if self._depth == 0:
            _install()
            if self._log is None:
                self._log = _unnamed_file()
            _active = self
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        self._depth -= 1
        if self._depth == 0:
            _active = None

    def close(self) -> None:
        """Let go of the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def add(self, reads: Reads) -> None:
        """Count what was read earlier to make a value that is used again."""
        self._added |= reads

    @contextlib.contextmanager
    def only(self) -> Iterator[Part]:
        """What is recorded inside, by itself."""
        part = Part()
        with self:
            begin = self._size()
        yield part
        part.reads = self._summary(begin)

    @property
    def reads(self) -> Reads:
        """Everything so far."""
        return self._added | self._summary(0)

    def changed(self) -> tuple[str, ...]:
        """Files that were read and have changed since, unless the job's own code wrote them."""
        events = list(self._events(0))
        written = {path for kind, path, _ in events if kind == "write"}
        first: dict[str, list[int] | None] = {}
        for kind, path, stamp in events:
            if kind == "file" and path not in written:
                first.setdefault(path, stamp)
        return tuple(sorted(p for p, stamp in first.items() if self._counts(p) and _stamp(p) != stamp))

    def log(self, kind: str, path: str, stamp: list[int] | None = None) -> None:
        """Add one event. A line is written in one piece, whichever process writes it."""
        if self._log is not None:
            os.write(self._log, json.dumps([kind, path, stamp]).encode() + b"\n")

    def _size(self) -> int:
        return 0 if self._log is None else os.fstat(self._log).st_size

    def _events(self, begin: int) -> Iterator[tuple[str, str, list[int] | None]]:
        if self._log is None:
            return
        data = os.pread(self._log, os.fstat(self._log).st_size - begin, begin)
        for line in data.splitlines():
            kind, path, stamp = json.loads(line)
            yield kind, path, stamp

    def _summary(self, begin: int) -> Reads:
        events = list(self._events(begin))
        written = {path for kind, path, _ in events if kind == "write"}
        items: set[Read] = set()
        notes: list[str] = []
        for kind, path, _ in events:
            if kind == "network":
                notes.append(f"the job's code opened a network connection ({path}): what came over it is not watched")
            elif kind == "program":
                notes.append(f"the job's code ran {path}: what that program read is not watched")
            elif kind in ("file", "folder") and self._counts(path):
                if path in written and not os.path.exists(path):  # a scratch file
                    continue
                items.add(Read("file" if kind == "file" else "folder", self._portable(path)))
        return Reads(tuple(sorted(items)), tuple(dict.fromkeys(notes)))

    def _counts(self, path: str) -> bool:
        return not any(path == k or path.startswith(k + os.sep) for k in self._known)

    def _portable(self, path: str) -> str:
        inside = os.path.relpath(path, self._folder)
        return path if inside.startswith(os.pardir) else inside


class Part:
    """What was recorded while it was open."""

    def __init__(self) -> None:
        self.reads = Reads()


_active: Recorder | None = None
_installed = False
_busy = threading.local()


def _install() -> None:
    """Listen to audit events, which cannot be undone: once for a process. They cost nothing while nobody records."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_heard)
        for name in ("torch", "safetensors"):  # any build loads them; wrapped before the job's code runs
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    _wrap_native()


def _heard(event: str, args: tuple[object, ...]) -> None:
    """An audit event; nothing may be raised from here."""
    recorder = _active
    if recorder is None or event not in _HANDLERS or getattr(_busy, "yes", False):
        return
    if event in _LISTINGS and sys._getframe(1).f_code.co_filename.startswith(_IMPORTERS):
        return
    _busy.yes = True
    try:
        _HANDLERS[event](recorder, args)
    except Exception:  # noqa: BLE001  # a hook that raises would fail the user's own call
        recorder.log("program", f"something whose event {event} could not be read")
    finally:
        _busy.yes = False


def _opened(recorder: Recorder, args: Sequence[object]) -> None:
    path, mode, flags = args[0], args[1], args[2]
    name = _path(path)
    if name is None:
        return
    writes = isinstance(mode, str) and any(c in mode for c in "wax+")
    if mode is None and isinstance(flags, int):
        writes = bool(flags & _WRITES)
    if writes:
        recorder.log("write", name)
    if not writes or (isinstance(mode, str) and "+" in mode and "w" not in mode):
        _file(recorder, name)


def _file(recorder: Recorder, name: str) -> None:
    if name.endswith(".zip") and name in sys.path:
        return
    if name.endswith(".pyc"):
        with contextlib.suppress(ValueError):
            name = importlib.util.source_from_cache(name)
    recorder.log("file", name, _stamp(name))


def _listed(recorder: Recorder, args: Sequence[object]) -> None:
    name = _path("." if args[0] is None else args[0])
    if name is not None:
        recorder.log("folder", name)


def _connected(recorder: Recorder, args: Sequence[object]) -> None:
    address = args[1]
    if isinstance(address, tuple):  # others are sockets of this machine
        recorder.log("network", f"{address[0]}:{address[1]}")


def _ran(recorder: Recorder, args: Sequence[object]) -> None:
    if _from_users_code():
        given = args[1] if len(args) > 1 and args[1] else args[0]
        first = given[0] if isinstance(given, (list, tuple)) and given else given
        named = os.path.basename(os.fsdecode(first)) if isinstance(first, (str, bytes, os.PathLike)) else "a program"
        recorder.log("program", named)


def _library(recorder: Recorder, args: Sequence[object]) -> None:
    name = _path(args[0])
    if name is not None and os.path.isfile(name):
        _file(recorder, name)


_HANDLERS: Mapping[str, Callable[[Recorder, Sequence[object]], None]] = {
    "open": _opened,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "socket.connect": _connected,
    "subprocess.Popen": _ran,
    "os.system": _ran,
    "os.posix_spawn": _ran,
    "ctypes.dlopen": _library,
    "sqlite3.connect": _library,
    "import": lambda recorder, args: _wrap_native(),
}


_LISTINGS = ("os.listdir", "os.scandir")
#: Code that lists folders to find modules.
_IMPORTERS = ("<frozen importlib", "<frozen zipimport", os.path.join(sysconfig.get_paths()["stdlib"], "importlib"),
              os.path.join(sysconfig.get_paths()["stdlib"], "pkgutil.py"))  # fmt: skip


def _path(value: object) -> str | None:
    """An absolute path, its links not followed; None for what is no path, or none of the user's."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        return None
    path = os.path.abspath(os.fsdecode(value))
    if (path + os.sep).startswith(_SYSTEM) or "/site-packages/" in path or "/dist-packages/" in path:
        return None
    return path


def _own_folders() -> tuple[str, ...]:
    """Where Python's own files, installed packages and the system's are: versions stand for them."""
    paths = sysconfig.get_paths()
    folders = [paths[n] for n in ("stdlib", "platstdlib", "purelib", "platlib")] + [site.getusersitepackages()]
    folders += [str(Path(__file__).parents[2]), str(Path(calib.__file__).parent)]
    folders += ["/proc", "/sys", "/dev", "/etc", "/run", "/lib", "/usr/lib", "/usr/share/zoneinfo", "/usr/share/locale"]
    return tuple(f + os.sep for f in {*folders, *map(os.path.realpath, folders)})


_SYSTEM = _own_folders()


def _stamp(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _from_users_code() -> bool:
    """Whether a function of the user's own is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_SYSTEM)) and not is_installed(name):
            return True
        frame = frame.f_back
    return False


def _unnamed_file() -> int:
    name = os.path.join(tempfile.gettempdir(), f"trtpipe-reads-{os.getpid()}-{secrets.token_hex(8)}")
    descriptor = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return descriptor


def _not_loaded(module: str) -> bool:
    """Whether a module is not imported, or is just being imported."""
    return module not in sys.modules or getattr(sys.modules[module].__spec__, "_initializing", False)


def _wrap_native() -> None:
    """Wrap functions that open files in native code, in the modules that are loaded by now, and wherever else a module
    holds the same function."""
    for module, functions in _NATIVE.items():
        if _not_loaded(module) or (module.startswith("torch.") and _not_loaded("torch")):  # it documents itself
            continue
        for dotted, position in functions.items():
            holder: object = sys.modules[module]
            *outer, name = dotted.split(".")
            for part in outer:
                holder = getattr(holder, part, None)
            original = getattr(holder, name, None)
            if original is None or getattr(original, "_trtpipe_records", False):
                continue
            wrapped = (
                _recorded_type(original, position) if isinstance(original, type) else _recorded(original, position)
            )
            if outer:
                setattr(holder, name, staticmethod(wrapped))
                continue
            for other in list(sys.modules.values()):
                if getattr(other, "__dict__", {}).get(name) is original:
                    setattr(other, name, wrapped)


def _record(position: int, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    recorder = _active
    if recorder is not None:
        given = args[position] if len(args) > position else next(iter(kwargs.values()), None)
        name = _path(given)
        if name is not None and os.path.exists(name):
            _file(recorder, name)


def _recorded(function: Callable[..., object], position: int) -> Callable[..., object]:
    @functools.wraps(function, updated=())
    def wrapped(*args: object, **kwargs: object) -> object:
        _record(position, args, kwargs)
        return function(*args, **kwargs)

    wrapped._trtpipe_records = True  # type: ignore[attr-defined]
    return wrapped


def _recorded_type(wrapped: type, position: int) -> type:
    """A type that makes instances of `wrapped`, of which they are instances too, and says so."""

    class Recorded(type):
        _trtpipe_records = True

        def __call__(cls, *args: object, **kwargs: object) -> object:
            _record(position, args, kwargs)
            return wrapped(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, wrapped)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, wrapped)

        def __getattr__(cls, name: str) -> object:
            return getattr(wrapped, name)

    return Recorded(wrapped.__name__, (), {"__module__": wrapped.__module__, "__doc__": wrapped.__doc__})

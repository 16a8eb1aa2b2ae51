"""Records what a job's own code reads while it runs (files, folders, modules) by Python's audit events.

A factory, a transform or a data callable may open anything. CPython raises an audit event for each file opened and each
folder listed through it (PEP 578), in the process itself and in workers forked from it, whose events come through the
same file. Files that libraries open in native code (safetensors, `torch.from_file`, `torch.jit.load`, torchvision's
decoders, Pillow's fonts and colour profiles, SQLite) raise none; those calls are wrapped (`native`, `databases`), and
so is `os.stat` (`probes`). What native code of other libraries opens is not seen, nor is what comes over the network or
from another process that was not forked; all of that is noted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType

from trtpipe.pipeline.cache.events import heard_by
from trtpipe.pipeline.cache.paths import FilePath, Stamp, stamp_of
from trtpipe.pipeline.cache.reads import STARTED_IN, Read, Reads
from trtpipe.pipeline.cache.sources import SOME

#: What happened that may have read something, by kind of event: what stands between "the job's code" and "is not
#: watched".
_UNSEEN = {
    "network": "opened a network connection ({}): what came over it",
    "program": "ran {}: what that program read",
    "operator": "called {}: what that operator read",
    "process": "started a process ({}): what that process read",
    "library": "loaded {}: what its native code reads",
}


@dataclass(frozen=True)
class Heard:
    """All that a recorder was told, each thing once, and since when, in ns by the clock of files."""

    lines: bytes
    began: int


class Recorder:
    """Records what is read while it is entered, in this process and in those forked from it.

    Entering again inside is allowed. One Recorder at a time records.

    Args:
        folder: of the job file.
        known: files and folders that are ingredients already, and folders of trtpipe itself; they are not recorded.
        earlier: what the same code was heard to read before, in this process. It counts as read again: packages keep
            what they have read (`linecache`, an `lru_cache`), and nothing is opened then.
    """

    def __init__(
        self, folder: Path | None = None, known: Iterable[str | Path] = (), earlier: Heard | None = None
    ) -> None:
        self._earlier = earlier
        self._folder = Path.cwd() if folder is None else folder
        self._known = tuple(os.path.abspath(p) for p in known)
        self._depth = 0
        self._log: int | None = None
        self._process = os.getpid()
        self._fault: OSError | None = None
        self._began = 0
        self._added = Reads()
        self._watch = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        if self._depth == 0:
            if self._log is None:
                self._log = _unnamed_file()
                self._began = os.fstat(self._log).st_ctime_ns  # by the clock of files, which is behind time.time_ns
                if self._earlier is not None:
                    with open(self._log, "ab", closefd=False) as stream:
                        stream.write(self._earlier.lines)
                    self._began = self._earlier.began
            self._watch.enter_context(heard_by(self, str(self._folder)))
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
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

    @property
    def heard(self) -> Heard | None:
        """What another recorder may go on from; None where nothing was recorded."""
        if self._log is None:
            return self._earlier
        data = os.pread(self._log, self._size(), 0)
        return Heard(b"".join(dict.fromkeys(data.splitlines(keepends=True))), self._began)

    def changed(self) -> tuple[str, ...]:
        """Files that were read and have changed since, unless the job's own code wrote them, or they came and went."""
        events = list(self._events(0))
        written = {path for kind, path, *_ in events if kind == "write"}
        first: dict[str, Stamp | None] = {}
        for kind, path, stamp, _ in events:
            if kind == "file" and path not in written:
                read = path if stamp is None or not self._is_gone(path, stamp) else stamp.real
                first.setdefault(read, stamp)
        return tuple(
            sorted(
                path
                for path, stamp in first.items()
                if self.counts(path)
                and not (stamp_of(path) is None if stamp is None else stamp.is_of(path) or self._is_gone(path, stamp))
            )
        )

    @property
    def written(self) -> frozenset[str]:
        """What the job's own code wrote: files by the names of their ingredients."""
        paths = {path for kind, path, *_ in self._events(0) if kind == "write"}
        return frozenset(Read("file", self._portable(path)).name for path in paths)

    def log(self, kind: str, path: str, stamp: Stamp | None = None) -> None:
        """Add one event. A line is written in one piece, whichever process writes it."""
        if self._log is not None:
            relative = isinstance(path, FilePath) and path.relative
            plain = None if stamp is None else astuple(stamp)
            try:
                os.write(self._log, json.dumps([kind, path, plain, relative]).encode() + b"\n")
            except OSError as error:
                if os.getpid() != self._process:  # this one would never hear of it
                    raise
                self._fault = error  # of no file that the code opens, which would be blamed

    def _is_gone(self, path: str, stamp: Stamp) -> bool:
        """Whether what was read came to be there while this recorded, and is there no more: scratch of the job's code
        or of a program that it ran, whoever wrote, moved or linked it, and nothing that could be compared."""
        return stamp.since >= self._began and not os.path.lexists(path)

    def _size(self) -> int:
        return 0 if self._log is None else os.fstat(self._log).st_size

    def _events(self, begin: int) -> Iterator[tuple[str, str, Stamp | None, bool]]:
        if self._log is None:
            return
        if self._fault is not None:
            raise OSError(self._fault.errno, self._fault.strerror, _WHERE)
        data = os.pread(self._log, os.fstat(self._log).st_size - begin, begin)
        for line in data.splitlines():
            kind, path, stamp, relative = json.loads(line)
            yield kind, path, None if stamp is None else Stamp(*stamp), relative

    def _summary(self, begin: int) -> Reads:
        events = list(self._events(begin))
        written = {path for kind, path, *_ in events if kind == "write"}
        items: set[Read] = set()
        notes: list[str] = []
        variables: set[str] = set()
        for kind, path, stamp, relative in events:
            if kind == "variable":
                variables.add(path)
            elif kind in _UNSEEN:
                notes.append(f"the job's code {_UNSEEN[kind].format(path)} is not watched")
            elif kind == "moved":
                if stamp is not None and stamp.is_of(path) and self.counts(path):  # it is back: its other name was read
                    items.add(Read("file", self._portable(path)))
            elif kind != "write" and self.counts(path):
                asked = kind not in ("file", "folder")
                if asked and _holds(path, self._folder):  # where the job is; `resolve` asks for each folder above it
                    continue
                if path in written and (asked or not os.path.exists(path)):  # its own
                    continue
                if stamp is not None and self._is_gone(path, stamp):
                    if self._is_gone(stamp.real, stamp) or not self.counts(stamp.real):
                        continue
                    path = stamp.real
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


#: What a fault of the log is about.
_WHERE = "the record of what the job's code reads"


def _unnamed_file() -> int:
    """Of memory, which no disk limits; of the temporary folder where a system has no such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("trtpipe-reads")
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        return descriptor
    name = os.path.join(tempfile.gettempdir(), f"trtpipe-reads-{os.getpid()}-{secrets.token_hex(8)}")
    descriptor = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return descriptor

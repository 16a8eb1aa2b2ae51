"""The build cache: results of stages by key, on disk, for any number of processes at once.

    <root>/<kind>/<first two of key>/<key>/   entry.json (facts, sizes and digests) and the files
    <root>/locks/                             one lock file a key, held while its result is made
    <root>/new/                               entries being written
    <root>/digests.sqlite                     see `digests`

An entry is written aside and renamed, so it is whole or absent; every file is checked against its digest when it is
read, and a damaged entry is noted, removed and counts as absent. `limit_bytes` is held by evicting what was used
longest ago. With a store (any fsspec address) an entry that is missing here is looked for there, and a new one goes
there too.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from filelock import FileLock, Timeout
from pydantic import ByteSize, TypeAdapter, ValidationError

from calib.types import JsonMapping, JsonObject
from trtpipe.errors import Cancelled, InputError, MissingError
from trtpipe.outputs import is_plain, naming
from trtpipe.pipeline.cache.digests import DIGESTS
from trtpipe.pipeline.cache.kinds import BUILT, READS
from trtpipe.pipeline.cache.remote import ENTRY, DamagedEntry, head_of

if TYPE_CHECKING:
    from trtpipe.pipeline.cache.remote import Store

T = TypeVar("T")

SCHEMA = 1
DEFAULT_LIMIT_BYTES = 20_000_000_000
#: Kinds that record earlier builds; they are small and never evicted for size.
RECORDS = (BUILT, READS)
#: Kinds that are found with `force` too.
ALWAYS_FOUND = (READS,)
#: Seconds after which the remains of a killed writer are removed.
_STALE_S = 3600.0
_LOCK_POLL_S = 0.05


@dataclass(frozen=True)
class Entry:
    """One result: `facts` is its JSON, `files` maps name to (bytes, SHA-256)."""

    path: Path
    facts: JsonMapping
    files: Mapping[str, tuple[int, str]]

    def read(self, name: str) -> bytes:
        """The content of a file, checked.

        Raises:
            DamagedEntry: it differs from what was put.
        """
        size, sha256 = self.files[name]
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise DamagedEntry(str(self.path)) from error
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedEntry(str(self.path))
        return data


class Busy(Exception):
    """Another process is making the same result."""


class Cache:
    """A folder of entries.

    Args:
        root: the folder; it is made.
        store: where entries are shared beyond this machine.
        cancelled: asked while waiting for another process.
        force: find no result, and replace existing entries.
        note: is told when the store cannot be reached, without which this cache then goes on, and of damaged entries.
    """

    def __init__(
        self,
        root: Path,
        store: Store | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        force: bool = False,
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._note, self._noted = note, set[str]()
        self.root, self._store, self._cancelled, self._force = root, store, cancelled, force
        for folder in (root / "locks", root / "new"):
            folder.mkdir(parents=True, exist_ok=True)

    def replacing(self) -> Cache:
        """The same with `force`."""
        other = copy.copy(self)
        other._force = True
        return other

    @property
    def digests_path(self) -> Path:
        """The table of `digests.Digests`."""
        return self.root / DIGESTS

    def get(self, kind: str, key: str) -> Entry | None:
        """The entry, here or in the store; None when there is none. It counts as used now."""
        if self._force and kind not in ALWAYS_FOUND:
            return None
        path = self._path(kind, key)
        entry = _read(path, kind, key)
        if entry is None:
            if (path / ENTRY).exists():
                self.discard(kind, key, damaged=True)
            fetched = self._shared(lambda store: store.get(f"{kind}/{key[:2]}/{key}"))
            if fetched is not None:
                self._write(path, fetched)
                entry = _read(path, kind, key)
        if entry is not None:
            with contextlib.suppress(OSError):
                os.utime(path / ENTRY)
        return entry

    def put(self, kind: str, key: str, facts: JsonObject, files: Mapping[str, bytes]) -> Entry:
        """Keep a result. Where another process was first, its entry stays."""
        entries = {n: (len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items()}
        head = {"schema": SCHEMA, "kind": kind, "key": key, "facts": dict(facts), "files": entries}
        content = {**files, ENTRY: json.dumps(head, indent=1).encode()}
        path = self._path(kind, key)
        if self._force:
            self.discard(kind, key)
        self._write(path, content)
        self._shared(lambda store: store.put(f"{kind}/{key[:2]}/{key}", content, last=ENTRY))
        return Entry(path, facts, entries)

    def _shared(self, use: Callable[[Store], T]) -> T | None:
        """What the store gives; None without one."""
        if self._store is None:
            return None
        try:
            return use(self._store)
        except MissingError as error:
            self._store = None
            self._note(f"{error} Going on without it.")
            return None
        except DamagedEntry as error:
            self._note_damage("the store", str(error))
            return None

    def discard(self, kind: str, key: str, *, damaged: bool = False) -> None:
        """Remove an entry here; one that is not there is no error. That it is `damaged` is noted."""
        if damaged:
            self._note_damage("the cache", str(self._path(kind, key)))
        _remove(self._path(kind, key), self.root / "new")

    def _note_damage(self, where: str, entry: str) -> None:
        if entry not in self._noted:  # one of a store is looked for again once the lock is held
            self._noted.add(entry)
            self._note(f"{where} holds an entry that is not what was put there ({entry}): it is made again")

    @contextlib.contextmanager
    def lock(
        self, kind: str, key: str, waiting: Callable[[], None] = lambda: None, *, wait: bool = True
    ) -> Iterator[None]:
        """A block that one process at a time runs for this key; the lock of a killed process is released.

        Raises:
            Cancelled: the user interrupted while another process held it.
            Busy: another process holds it, and `wait` is false.
        """
        lock = FileLock(self.root / "locks" / f"{kind}-{key}.lock")
        reported = False
        while True:
            try:
                lock.acquire(timeout=_LOCK_POLL_S, poll_interval=_LOCK_POLL_S / 2)
                break
            except Timeout:
                if not wait:
                    raise Busy(key) from None
                if self._cancelled():
                    raise Cancelled("interrupted while another process builds the same") from None
                if not reported:
                    waiting()
                reported = True
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[tuple[float, int, Path]]:
        """(last used, bytes, path) of every entry, the one used longest ago first."""
        listed = []
        for kind in self.root.iterdir():
            if kind.name in ("locks", "new") or not kind.is_dir():
                continue
            for head in kind.glob(f"*/*/{ENTRY}"):
                with contextlib.suppress(OSError):
                    sizes = sum(f.stat().st_size for f in head.parent.iterdir())
                    listed.append((head.stat().st_mtime, sizes, head.parent))
        return sorted(listed)

    def trim(self, limit_bytes: int) -> tuple[str, ...]:
        """Evict what was used longest ago until the rest is within the limit; `kind/key` of what went.

        Entries whose lock is held stay, and so do records.
        """
        self._clean()
        entries = self.entries()
        total = sum(size for _, size, _ in entries)
        evicted = []
        for _, size, path in entries:
            kind, key = path.parent.parent.name, path.name
            if total <= limit_bytes:
                break
            if kind in RECORDS:
                continue
            lock = FileLock(self.root / "locks" / f"{kind}-{key}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                _remove(path, self.root / "new")
                total -= size
                evicted.append(f"{kind}/{key}")
            finally:
                lock.release()
        return tuple(evicted)

    def _path(self, kind: str, key: str) -> Path:
        return self.root / kind / key[:2] / key

    def _write(self, path: Path, content: Mapping[str, bytes]) -> None:
        with naming(self.root):
            self._write_aside(path, content)

    def _write_aside(self, path: Path, content: Mapping[str, bytes]) -> None:
        """Write a folder under another name and rename it: by hand as `atomic.sibling`, all remains in one place, since
        libraries of atomic writes replace single files."""
        temporary = self.root / "new" / f"{os.getpid()}-{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            for name, data in content.items():
                if not is_plain(name):
                    raise InputError(f"cache: a file's name must be plain (got {name!r}).")
                (temporary / name).write_bytes(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(temporary, path)
            except OSError:
                if _read(path, path.parent.parent.name, path.name) is None:  # half an entry of an older trtpipe
                    _remove(path, self.root / "new")
                    os.rename(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _clean(self) -> None:
        """Remove the remains of killed writers."""
        for leftover in (self.root / "new").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _STALE_S:
                    shutil.rmtree(leftover, ignore_errors=True)


def parse_bytes(text: str, where: str) -> int:
    """`20GB`, `500 MB` or a plain number of bytes; 1 kB is 1,000 bytes, 1 KiB 1,024.

    Raises:
        InputError: it is none of these.
    """
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InputError(f"{where}: must be a size like 20GB (got {text!r}).") from None


def _read(path: Path, kind: str, key: str) -> Entry | None:
    try:
        head = head_of((path / ENTRY).read_bytes())
        if head is None or (head.schema, head.kind, head.key) != (SCHEMA, kind, key):
            return None
        if any((path / name).stat().st_size != size for name, (size, _) in head.files.items()):
            return None
        return Entry(path, head.facts, head.files)
    except OSError:
        return None


def _remove(path: Path, aside: Path) -> None:
    """Rename an entry away in one step, then delete its files."""
    gone = aside / f"gone-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)

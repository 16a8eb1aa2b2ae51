"""What a job's own code read: the record, kept from night to night, and the present values."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from calib.types import JsonMapping
from trtpipe.jsontext import json_digest
from trtpipe.pipeline.cache.kinds import READS

if TYPE_CHECKING:
    from trtpipe.pipeline.cache.digests import Digests
    from trtpipe.pipeline.cache.store import Cache

ABSENT = "absent"
#: How many runs that came to their end are recorded of the same code.
_MOST = 8
#: Packages with native code that opens no file unseen: through Python, or by functions that the recorder wraps.
WATCHED = frozenset({"PIL", "numpy", "safetensors", "torch", "torchao", "torchvision", "yaml"})


Kind = Literal["file", "journal", "folder", "presence", "status", "rights", "attributes", "place"]
#: What the ingredient of each kind is called.
NAMES: Mapping[Kind, str] = {
    "file": "read", "journal": "journal", "folder": "listing", "presence": "presence", "status": "status",
    "rights": "rights", "attributes": "attributes", "place": "place",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Read:
    """A file that was opened, a folder that was listed (the names in it, and what each is), a database's file of what
    is not in it yet ("journal"; an empty one is none), or a path that was only asked for: whether it is there
    ("presence"), its size, times, rights and owner too ("status"), what this process may do with it ("rights"), or its
    extended attributes ("attributes"). `path` is relative to the job's folder, or absolute.

    "place" is the current folder, where one of these was named from it: elsewhere the same code reads other files.
    """

    kind: Kind
    path: str

    @property
    def name(self) -> str:
        """The name of this ingredient."""
        return f"{NAMES[self.kind]} {self.path}"

    def value(self, folder: Path, digests: Digests) -> str:
        """Its present value: a digest, with the target of links; "absent" where nothing is there."""
        path = os.path.join(folder, self.path)
        try:
            if self.kind == "place":
                return os.path.relpath(os.getcwd(), folder)
            if self.kind == "folder":
                with os.scandir(path) as found:
                    listed = [[e.name, _what(e.path)] for e in found if e.name != "__pycache__"]
                return json_digest(sorted(listed))
            if self.kind == "journal" and not os.path.getsize(path):  # as good as none
                return ABSENT
            if self.kind == "attributes":
                named = [[n, os.getxattr(path, n).hex()] for n in sorted(os.listxattr(path))]
                return json_digest(named)
            if self.kind in ("presence", "status", "rights"):
                return self._asked(path, folder)
            if not os.path.isfile(path):
                return "a folder" if os.path.isdir(path) else "no plain file" if os.path.exists(path) else ABSENT
            real = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
            plain = os.path.relpath(path, folder)
            return digests.file(path) + ("" if real == plain else f" at {real}")
        except OSError:
            return ABSENT

    def _asked(self, path: str, folder: Path) -> str:
        if not os.path.lexists(path):
            return ABSENT
        what = _what(path)
        real = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
        what += "" if real == os.path.relpath(path, folder) else f" at {real}"
        if self.kind == "presence" or not os.path.exists(path):
            return what
        if self.kind == "rights":
            return f"{what}, {[os.access(path, mode) for mode in (os.R_OK, os.W_OK, os.X_OK)]}"
        status = os.stat(path)
        owner = f"{stat.filemode(status.st_mode)} of {status.st_uid}:{status.st_gid}"
        return f"{what}, {status.st_size} bytes of {status.st_mtime_ns}, {owner}"

    @staticmethod
    def from_plain(raw: Sequence[str]) -> Read:
        """What `Reads.to_plain` made plain.

        Raises:
            ValueError: it is no such thing.
        """
        given, path = raw
        for kind in NAMES:
            if kind == given:
                return Read(kind, path)
        raise ValueError(f"kind must be {', '.join(NAMES)} (got {given!r})")


def _what(path: str) -> str:
    """What is there, with the word "link" where it is one."""
    what = "a folder" if os.path.isdir(path) else "a file" if os.path.exists(path) else "a broken link"
    return f"a link to {what}" if os.path.islink(path) and os.path.exists(path) else what


#: That code named a path from the current folder.
STARTED_IN = Read("place", ".")


@dataclass(frozen=True)
class Reads:
    """All that was read, notes on reads that were not recorded, and the names of environment variables that were."""

    items: tuple[Read, ...] = ()
    notes: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def __or__(self, other: Reads) -> Reads:
        return Reads(
            tuple(sorted({*self.items, *other.items})),
            tuple(dict.fromkeys((*self.notes, *other.notes))),
            tuple(sorted({*self.variables, *other.variables})),
        )

    def alike(self, one: str, other: str) -> bool:
        """Whether code that read this of a job in the folder `one` would of one in `other`: paths outside the folder,
        which are absolute, are the same from both."""
        outside = {i.path for i in self.items if os.path.isabs(i.path)}
        return all(os.path.normpath(os.path.join(other, os.path.relpath(path, one))) == path for path in outside)

    def modules(self, folder: Path) -> tuple[str, ...]:
        """Absolute paths of the Python sources among the files: of modules that are imported by name, too."""
        files = (i.path for i in self.items if i.kind == "file" and i.path.endswith(".py"))
        return tuple(os.path.join(folder, path) for path in files)

    def values(self, folder: Path, digests: Digests) -> dict[str, str]:
        """Their values now, by the ingredients' names."""
        return {item.name: item.value(folder, digests) for item in self.items}

    def without_scratch(self, read_now: Reads) -> Reads:
        """Without what is gone from the folder of temporary files, unless it was looked for this time.

        What is absent elsewhere stays: a stage that is not made again, or a module that this process has imported
        before, does not look for it again, and it counts once it is there.
        """
        scratch = os.path.join(tempfile.gettempdir(), "")  # what is beside the job is given relative to it
        outside = {i for i in self.items if i.path.startswith(scratch) and not os.path.lexists(i.path)}
        kept = (i for i in self.items if i not in outside or i in read_now.items)
        return Reads(tuple(kept), self.notes, self.variables)

    def to_plain(self) -> dict[str, list[list[str]] | list[str]]:
        """In JSON's own types."""
        items = [[i.kind, i.path] for i in self.items]
        return {"items": items, "notes": list(self.notes), "variables": list(self.variables)}

    @staticmethod
    def from_plain(raw: JsonMapping) -> Reads:
        """The reads of `to_plain`."""
        items = tuple(Read.from_plain(item) for item in raw["items"])
        return Reads(items, tuple(raw["notes"]), tuple(raw["variables"]))


def recall(cache: Cache, key: str, folder: Path) -> tuple[Reads, ...]:
    """What the code of a job with this key, in this folder, reads as far as the cache knows: when it last ran, then
    what differed in earlier runs that came to their end, the latest first.

    What it read elsewhere of outside its folder is no record for here: from here it may read another file by the same
    words (`__file__`, the current folder). It is one where both are the same file.
    """
    here = os.path.abspath(folder)
    fitting = (reads for where, reads in _records(cache, key) if reads.alike(where, here))
    return tuple(dict.fromkeys(fitting)) or (Reads(),)


def _records(cache: Cache, key: str) -> tuple[tuple[str, Reads], ...]:
    """The last run's, then those of runs that came to their end, each with the job's folder."""
    entry = cache.get(READS, key)
    if entry is not None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return tuple((str(raw["folder"]), Reads.from_plain(raw)) for raw in entry.facts["records"])
    return ()


def remember(cache: Cache, key: str, reads: Reads, folder: Path, *, ended: bool = False) -> None:
    """Store the reads for the next run; `ended` is whether the code ran to its end: they are then all that it read."""
    last, now = _records(cache, key)[1:], (os.path.abspath(folder), reads)
    records = [now, *dict.fromkeys((now, *last) if ended else last)][: 1 + _MOST]
    facts = {"records": [{"folder": where, **read.to_plain()} for where, read in records]}
    entry = cache.get(READS, key)
    if entry is None or dict(entry.facts) != facts:
        cache.discard(READS, key)
        cache.put(READS, key, facts, {})

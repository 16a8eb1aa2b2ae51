"""What a job's own code read: the record of it, kept from night to night, and what it holds now."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from calib.types import JsonObject

if TYPE_CHECKING:
    from trtpipe.pipeline.cache.digests import Digests
    from trtpipe.pipeline.cache.store import Cache

ABSENT = "absent"
_KIND = "reads"
#: Packages whose native code opens files that nobody sees.
UNSEEN = ("av", "decord", "h5py", "lmdb", "netCDF4", "pyarrow", "rasterio", "soundfile", "tables", "tensorflow")


@dataclass(frozen=True, order=True)
class Read:
    """A file that was opened or a folder that was listed; `path` is relative to the job's folder, or absolute."""

    kind: Literal["file", "folder"]
    path: str

    @property
    def name(self) -> str:
        """Of the ingredient that it is."""
        return f"read {self.path}" if self.kind == "file" else f"listing {self.path}"

    def value(self, folder: Path, digests: Digests) -> str:
        """What it holds now: a digest, with the place that links lead to; "absent" for what is not there."""
        path = os.path.join(folder, self.path)
        try:
            if self.kind == "folder":
                names = sorted(n for n in os.listdir(path) if n != "__pycache__")
                return hashlib.sha256("\n".join(names).encode()).hexdigest()
            if not os.path.isfile(path):
                return "a folder" if os.path.isdir(path) else "no plain file" if os.path.exists(path) else ABSENT
            real = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
            plain = os.path.relpath(path, folder)
            return digests.file(path) + ("" if real == plain else f" at {real}")
        except OSError:
            return ABSENT


@dataclass(frozen=True)
class Reads:
    """All that was read, and notes on what could not be seen."""

    items: tuple[Read, ...] = ()
    notes: tuple[str, ...] = ()

    def __or__(self, other: Reads) -> Reads:
        return Reads(tuple(sorted({*self.items, *other.items})), tuple(dict.fromkeys((*self.notes, *other.notes))))

    def values(self, folder: Path, digests: Digests) -> dict[str, str]:
        """Their values now, by the ingredients' names."""
        return {item.name: item.value(folder, digests) for item in self.items}

    def present(self, folder: Path, read_now: Reads) -> Reads:
        """Without what is absent by now, unless it was looked for this time."""
        there = (i for i in self.items if i in read_now.items or os.path.lexists(os.path.join(folder, i.path)))
        return Reads(tuple(there), self.notes)

    def to_plain(self) -> dict[str, list[list[str]] | list[str]]:
        """In JSON's own types."""
        return {"items": [[i.kind, i.path] for i in self.items], "notes": list(self.notes)}

    @staticmethod
    def from_plain(raw: JsonObject) -> Reads:
        """What `to_plain` made plain."""
        return Reads(tuple(Read(kind, path) for kind, path in raw["items"]), tuple(raw["notes"]))


def recall(cache: Cache, key: str) -> Reads:
    """What the code of a job with this key read when it last ran, as far as the cache knows."""
    entry = cache.get(_KIND, key)
    if entry is not None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return Reads.from_plain(entry.facts)
    return Reads()


def remember(cache: Cache, key: str, reads: Reads) -> None:
    """Keep it for the next time."""
    facts = reads.to_plain()
    entry = cache.get(_KIND, key)
    if entry is None or dict(entry.facts) != facts:
        cache.discard(_KIND, key)
        cache.put(_KIND, key, facts, {})

"""SHA-256 of files, remembered with their `stat`, so that an unchanged file is not read again.

A file whose size, times, inode and device are those remembered is taken to be unchanged; anything else is read. A file
changed within the last two seconds is never remembered: another write could leave the same times. What is remembered is
a SQLite table that any number of processes may use; a damaged one is thrown away.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
import time
from pathlib import Path

from calib.files import as_text
from calib.folders import below
from trtpipe.outputs import open_database

#: What the table is called where a cache keeps it.
DIGESTS = "digests.sqlite"
#: So many rows are written at once, as each transaction waits for the disk.
_ROWS = 1_000
#: Younger changes than this are not remembered, nanoseconds.
RACY_NS = 2_000_000_000
_SCHEMA = """CREATE TABLE IF NOT EXISTS digests (
    path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, inode INTEGER, device INTEGER,
    sha256 TEXT NOT NULL) WITHOUT ROWID"""


class Digests:
    """Content digests of files. One object examines each file once; make a new one to see later changes.

    Args:
        path: the table; None remembers nothing from one object to the next.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._seen: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._table = None if path is None else _opened(path)
        self._new: list[tuple[object, ...]] = []
        #: How many files were read, because they were new or had changed.
        self.read = 0

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remember what is new, and close the table."""
        if self._table is not None:
            self._store()
            self._table.close()
            self._table = None

    def file(self, path: str | Path) -> str:
        """SHA-256 hex of a file's content; of a pipe, a socket or a device, which have none that stays, its kind.

        Raises:
            OSError: it cannot be read.
        """
        path = os.fspath(path)
        if path not in self._seen:
            self._seen[path] = self._of(path)
        return self._seen[path]

    def folder(self, path: str | Path) -> str:
        """SHA-256 hex of the names and contents of every file under a folder, and of its folders: an empty one is a
        class too. Hidden ones are left out, as they are no samples.

        Raises:
            CalibError: a folder in it cannot be listed.
            OSError: a file in it cannot be read.
        """
        root = os.fspath(path)
        if root not in self._folders:
            lines = []
            for folder in below(root):
                inside = os.path.relpath(folder.path, root)
                lines.append(f"{inside}/")
                lines += [f"{inside}/{name}\0{self.file(folder.path / name)}" for name in folder.files]
            self._folders[root] = hashlib.sha256(
                "\n".join(sorted(lines)).encode("utf-8", "surrogateescape")
            ).hexdigest()
        return self._folders[root]

    def _of(self, path: str) -> str:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for a writer, and a device has no end
            return f"no file: {stat.S_IFMT(status.st_mode):o}"
        facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
        known = self._row(path)
        if known is not None and known[:5] == facts:
            return str(known[5])
        now = time.time_ns()
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest() if _HAS_FILE_DIGEST else _digest(stream)
        self.read += 1
        if now - max(status.st_mtime_ns, status.st_ctime_ns) > RACY_NS:
            self._new.append((as_text(path), *facts, digest))
            if len(self._new) == _ROWS:
                self._store()
        return digest

    def _row(self, path: str) -> tuple[object, ...] | None:
        if self._table is None:
            return None
        query = "SELECT size, mtime_ns, ctime_ns, inode, device, sha256 FROM digests WHERE path = ?"
        with contextlib.suppress(sqlite3.Error):
            row: tuple[object, ...] | None = self._table.execute(query, (as_text(path),)).fetchone()
            return row
        return None

    def _store(self) -> None:
        """Write what is new in one transaction, so that no lock is held while a file is read."""
        rows, self._new = self._new, []
        if self._table is None or not rows:
            return
        try:
            self._table.execute("BEGIN IMMEDIATE")
            self._table.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._table.execute("COMMIT")
        except sqlite3.Error:  # it is only a memory: the files will be read again
            with contextlib.suppress(sqlite3.Error):
                self._table.execute("ROLLBACK")


_HAS_FILE_DIGEST = hasattr(hashlib, "file_digest")  # Python 3.11


def _digest(stream: object) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):  # type: ignore[attr-defined]
        digest.update(block)
    return digest.hexdigest()


def _opened(path: Path) -> sqlite3.Connection | None:
    """The table; a file that is no database is replaced. None where none can be had (a full or read-only disk)."""
    for again in (True, False):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            table = open_database(path, 30)
            table.execute(_SCHEMA)
            return table
        except sqlite3.OperationalError:
            return None
        except sqlite3.DatabaseError:
            if again:
                for leftover in (path, *path.parent.glob(path.name + "-*")):
                    leftover.unlink(missing_ok=True)
    return None

"""Every night in one SQLite file: what was built, from what, how good and how fast.

One transaction for each result: a killed process loses at most the job that it was building.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from calib.types import JsonObject
from trtpipe.atomic import alone_in
from trtpipe.errors import InputError
from trtpipe.nightly.outcome import THERE, JobOutcome
from trtpipe.nightly.task import from_plain, plain
from trtpipe.outputs import naming_database, open_database, tables_of
from trtpipe.streams import require_no_stream

#: Raised when the tables change; an older trtpipe then refuses the file instead of damaging it.
TABLES_VERSION = 1
#: How long another program's lock is waited for, seconds.
LOCKED_S = 60
#: The latest green results of a job that a night is compared with.
GREENS = 10
_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, began TEXT NOT NULL, ended TEXT, state TEXT NOT NULL, arguments TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    run INTEGER NOT NULL REFERENCES runs(id), name TEXT NOT NULL, recorded TEXT NOT NULL, outcome TEXT NOT NULL,
    green INTEGER NOT NULL, key TEXT NOT NULL, fingerprint TEXT NOT NULL, parts TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS results_by_name ON results (name, run);
"""


@dataclass(frozen=True)
class Past:
    """One job in one earlier run. `parts` are its ingredients."""

    run: int
    recorded: str
    green: bool
    parts: Mapping[str, str]
    outcome: JobOutcome


class History:
    """The file at `path`; it is made when it is not there. `was_empty`: it was there, without a byte.

    Raises:
        InputError: it is not a history, is damaged, stays locked, or is one of a newer trtpipe.
        OSError: it cannot be read or written. Both are so of every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        require_no_stream(path)
        with self._file_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            with alone_in(path.parent):  # else one that another night is making would be empty
                self.was_empty = path.exists() and not path.stat().st_size
                if path.exists():
                    self._require_own()
                self._db = open_database(path, LOCKED_S)
                self._prepare()

    @contextlib.contextmanager
    def _file_errors(self) -> Iterator[None]:
        """What SQLite finds wrong with the file, at whatever query, and rows that trtpipe did not write."""
        try:
            with naming_database(self.path):
                yield
        except sqlite3.ProgrammingError:  # a mistake of this module
            raise
        except (sqlite3.Error, _Unreadable) as error:
            if "locked" in str(error):
                raise InputError(
                    f"{self.path}: another program has locked the history for over {LOCKED_S} s. End that program, or "
                    "choose another --history."
                ) from error
            if "not a database" in str(error):  # it does not begin as one of SQLite's
                raise InputError(
                    f"{self.path}: must be a history of trtpipe (got: {error}). Choose another --history."
                ) from error
            raise InputError(
                f"{self.path}: the history is damaged ({error}). Put a copy of it in its place, or choose another "
                "--history, which begins without earlier nights."
            ) from error

    def _require_own(self) -> None:
        """Refuse another program's database as it is: opening one as a history changes how it commits."""
        if others := sorted(tables_of(self.path, LOCKED_S) - {"runs", "results"}):
            raise InputError(
                f"{self.path}: must be a history of trtpipe (got a database with the table {others[0]!r}). Choose "
                "another --history."
            )

    def _prepare(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > TABLES_VERSION:
            raise InputError(
                f"{self.path}: must be a history of version {TABLES_VERSION} (got {version}). Update trtpipe."
            )
        if version < TABLES_VERSION:
            self._db.executescript(_TABLES)
            self._db.execute(f"PRAGMA user_version={TABLES_VERSION}")

    def _execute(self, query: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        with self._file_errors():
            return self._db.execute(query, tuple(values))

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """All rows: SQLite reads the file as they are fetched."""
        with self._file_errors():
            return self._db.execute(query, tuple(values)).fetchall()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Everything recorded in here is one transaction."""
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite itself rolls back when the disk is full
                self._db.execute("ROLLBACK")
            raise
        self._execute("COMMIT")

    def begin(self, arguments: JsonObject) -> int:
        """A new run's number."""
        row = self._execute(
            "INSERT INTO runs (began, state, arguments) VALUES (?, 'running', ?)", (now(), json.dumps(dict(arguments)))
        )
        assert row.lastrowid is not None
        return row.lastrowid

    def unfinished(self) -> tuple[int, JsonObject] | None:
        """The latest run and its arguments, when it did not come to its end."""
        rows = self._rows("SELECT id, state, arguments FROM runs ORDER BY id DESC LIMIT 1")
        if not rows or rows[0][1] == "done":
            return None
        with self._file_errors(), _readable():
            return rows[0][0], dict(json.loads(rows[0][2]))

    def reopen(self, run: int) -> None:
        """Go on with a run."""
        self._execute("UPDATE runs SET state = 'running', ended = NULL WHERE id = ?", (run,))

    def end(self, run: int, state: str) -> None:
        """A run came to its end: `done`, or `interrupted`."""
        self._execute("UPDATE runs SET state = ?, ended = ? WHERE id = ?", (state, now(), run))

    def forget(self, run: int) -> None:
        """A run that never began; its number is the next one's."""
        self._execute("DELETE FROM runs WHERE id = ?", (run,))

    def began(self, run: int) -> str:
        """When a run began, UTC."""
        return str(self._rows("SELECT began FROM runs WHERE id = ?", (run,))[0][0])

    def record(self, run: int, outcome: JobOutcome, parts: Mapping[str, str], *, green: bool) -> None:
        """One job's result in a run; recording it again replaces it."""
        values = (run, outcome.name, now(), outcome.outcome, int(green), outcome.key, outcome.fingerprint)
        self._execute(
            "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, json.dumps(dict(parts)), json.dumps(plain(outcome))),
        )

    def of_run(self, run: int) -> dict[str, Past]:
        """Every result of a run by job name."""
        return {p.outcome.name: p for p in self._select("run = ? ORDER BY name", (run,))}

    def latest(self, before_run: int | None) -> dict[str, Past]:
        """The latest result with a bundle of every job, before a run; of all runs for None."""
        where = (
            f"outcome IN {THERE} AND run = (SELECT max(run) FROM results AS r "
            f"WHERE r.name = results.name AND r.run < coalesce(?, r.run + 1) AND r.outcome IN {THERE})"
        )
        return {p.outcome.name: p for p in self._select(where, (before_run,))}

    def greens(self, before_run: int | None) -> dict[str, tuple[Past, ...]]:
        """The latest `GREENS` green results of every job before a run, the latest first; of all runs for None."""
        return self._ranked("green = 1 AND run < coalesce(?, run + 1)", before_run, GREENS)

    def recent(self, last_run: int) -> dict[str, tuple[Past, ...]]:
        """The latest 30 results of every job up to a run, the earliest first."""
        return {name: rows[::-1] for name, rows in self._ranked("run <= ?", last_run, 30).items()}

    def _ranked(self, where: str, run: int | None, count: int) -> dict[str, tuple[Past, ...]]:
        query = (
            f"SELECT {_COLUMNS} FROM (SELECT *, row_number() OVER (PARTITION BY name ORDER BY run DESC) AS place "
            f"FROM results WHERE {where}) WHERE place <= ? ORDER BY name, run DESC"
        )
        by_job: dict[str, list[Past]] = {}
        for past in self._pasts(query, (run, count)):
            by_job.setdefault(past.outcome.name, []).append(past)
        return {name: tuple(rows) for name, rows in by_job.items()}

    def gone(self, before_run: int, names: Collection[str], files: Collection[Path]) -> tuple[str, ...]:
        """Jobs of the run before that are none any more, each with why: a file that is gone, or holds no job so named.

        Args:
            before_run: a run.
            names: its jobs.
            files: those that could be read.
        """
        before = self.latest(before_run)
        latest = max((past.run for past in before.values()), default=0)
        lost = {name: p.outcome.file for name, p in before.items() if p.run == latest and name not in names}
        then, read = self._files(latest) if lost else (), {Path(os.path.abspath(file)) for file in files}
        why: list[str] = []
        for name, shown in sorted(lost.items()):
            parts = Path(shown).parts  # from where that run was
            file = next((f for f in then if f.parts[-len(parts) :] == parts), None)
            if file is not None and (file in read or not file.exists()):
                why.append(f"{name} ({shown} {'has no job of that name' if file in read else 'is gone'})")
        return tuple(why)

    def _files(self, run: int) -> tuple[Path, ...]:
        """The absolute paths of a run's job files."""
        with self._file_errors(), _readable():
            ((arguments,),) = self._rows("SELECT arguments FROM runs WHERE id = ?", (run,))
            return tuple(map(Path, json.loads(arguments)["jobs"]))

    def of_job(self, name: str) -> tuple[Past, ...]:
        """Every result of a job, the earliest first."""
        return tuple(self._select("name = ? ORDER BY run", (name,)))

    def names(self) -> tuple[str, ...]:
        """Every job that has a past."""
        return tuple(row[0] for row in self._rows("SELECT DISTINCT name FROM results ORDER BY name"))

    def _select(self, where: str, values: Sequence[object]) -> list[Past]:
        return self._pasts(f"SELECT {_COLUMNS} FROM results WHERE {where}", values)

    def _pasts(self, query: str, values: Sequence[object]) -> list[Past]:
        rows = self._rows(query, values)
        with self._file_errors(), _readable():
            return [_past(row) for row in rows]


_COLUMNS = "run, recorded, green, parts, data"


class _Unreadable(Exception):
    """A row holds something else than trtpipe writes."""


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise _Unreadable(f"a row that trtpipe cannot read: {type(error).__name__}: {error}") from error


def _past(row: Sequence[Any]) -> Past:
    return Past(row[0], row[1], bool(row[2]), json.loads(row[3]), from_plain(json.loads(row[4])))


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

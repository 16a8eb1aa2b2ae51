"""What a night is asked to do, and what its parts may expect of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trtpipe.bundle.format import Sign
from trtpipe.job.job import Job
from trtpipe.nightly.regressions import LIMITS, Limit
from trtpipe.nightly.task import Task
from trtpipe.pipeline.cache.keys import Ingredients
from trtpipe.pipeline.cache.store import DEFAULT_LIMIT_BYTES


@dataclass(frozen=True)
class Options:
    """What `trtpipe nightly` was asked for: see its help. `accept` are globs over names of jobs."""

    jobs: tuple[Path, ...]
    out: Path
    cache: Path
    history: Path
    store: str = ""
    overrides: tuple[str, ...] = ()
    workers: int | None = None
    scheduler: str = ""
    memory_bytes: int | None = None
    cache_limit_bytes: int = DEFAULT_LIMIT_BYTES
    force: bool = False
    resume: bool = False
    repeat: int = 0
    accept: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=lambda: dict(LIMITS))
    sign: Sign | None = None

    def arguments(self) -> dict[str, Any]:
        """What a resumed run must have in common with this one."""
        return {"jobs": [str(p.resolve()) for p in self.jobs], "overrides": list(self.overrides)}


@dataclass(frozen=True)
class Planned:
    """A job that can be read, and what it is made of."""

    job: Job
    file: Path
    ingredients: Ingredients
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the job."""
        return self.job.name

    def task(self, options: Options) -> Task:
        """What a worker is told."""
        return Task(
            name=self.job.name,
            file=str(self.file),
            job=self.job.model_dump(mode="json", exclude_defaults=True),
            folder=str(self.job.folder),
            text=self.job.text,
            key=self.ingredients.key,
            parts=dict(self.ingredients.parts),
            out=str(options.out.resolve()),
            cache=str(options.cache.resolve()),
            store=options.store,
            force=options.force,
            repeat=options.repeat,
            reasons=self.reasons,
        )


class Watcher(Protocol):
    """Who looks on while the jobs run; `console` shows it."""

    def planned(self, names: Sequence[str]) -> None:
        """These jobs are part of tonight."""

    def state(self, name: str, state: str, detail: str = "") -> None:
        """A job is `waiting`, `running`, `built`, `reused`, `failed`, `error` or `cancelled`."""

    def note(self, message: str) -> None:
        """Something the reader should know now."""

    def cancelled(self) -> bool:
        """Whether the user has asked to stop."""


class Executor(Protocol):
    """Where tasks are run."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Who runs them, for the report."""

    def run(self, tasks: Sequence[Task], watcher: Watcher, finished: Callable[[Task, Mapping[str, Any]], None]) -> None:
        """Run every task; `finished` is called with each one's plain outcome.

        Raises:
            Cancelled: the user stopped it; tasks that were not finished have not been reported.
        """


class Unwatched:
    """A Watcher that shows nothing and never stops."""

    def planned(self, names: Sequence[str]) -> None:
        """Ignore it."""

    def state(self, name: str, state: str, detail: str = "") -> None:
        """Ignore it."""

    def note(self, message: str) -> None:
        """Ignore it."""

    def cancelled(self) -> bool:
        """Never."""
        return False

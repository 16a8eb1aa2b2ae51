"""The options of a night, and the protocols between its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from calib.types import JsonObject
from trtpipe.bundle.format import Sign
from trtpipe.errors import InputError, either
from trtpipe.job.job import Job
from trtpipe.nightly.outcome import State
from trtpipe.nightly.regressions import LIMITS, Limit
from trtpipe.nightly.task import BuildTask, RepeatTask, Task
from trtpipe.pipeline.cache.databases import JOURNALS
from trtpipe.pipeline.cache.keys import Ingredients
from trtpipe.pipeline.cache.store import DEFAULT_LIMIT_BYTES
from trtpipe.quantization.diagnose import DIAGNOSE_SECONDS

#: What a night writes beside its bundles: its report, as JSON, text and a page, and a folder of its workers' output.
JSON_REPORT, TEXT_REPORT, PAGE, LOGS = "nightly.json", "nightly.txt", "nightly.html", ".nightly"
HISTORY = "history.sqlite"

#: What a resumed run does as the one that was stopped, and how it is asked for.
REMEMBERED: Mapping[str, str] = {
    "jobs": "JOB", "overrides": "--set", "force": "--force", "repeat": "--repeat", "accept": "--accept",
    "limits": "--limit", "store": "--store", "diagnose_seconds": "--diagnose",
}  # fmt: skip

#: What a run of --repeat is not given: it builds here, looks for differences, and is no release.
NOT_REPEATED = ("scheduler", "sign")


@dataclass(frozen=True)
class Options:
    """What `trtpipe nightly` was asked for: see its help. `accept` are globs over names of jobs.

    `credentials` is the folder of `trtpipe keygen --fleet` that has this machine's certificate; `insecure` allows a
    fleet without TLS. `notes` are what is to be said of how the jobs were found.
    """

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
    diagnose_seconds: float = DIAGNOSE_SECONDS
    credentials: Path | None = None
    insecure: bool = False
    notes: tuple[str, ...] = ()

    def arguments(self) -> JsonObject:
        """What a run that resumes this one does again: the options of `REMEMBERED`, as JSON."""
        return {
            "jobs": [os.path.abspath(p) for p in self.jobs],  # resolved, a link in a circle would be an error
            "overrides": list(self.overrides),
            "force": self.force,
            "repeat": self.repeat,
            "accept": list(self.accept),
            "limits": {name: asdict(limit) for name, limit in self.limits.items()},
            "store": self.store,
            "diagnose_seconds": self.diagnose_seconds,
        }

    def resuming(self, arguments: JsonObject) -> Options:
        """These, with what the run that is gone on with was asked for.

        Args:
            arguments: of that run, as `arguments` gives them; what is missing was not asked for.

        Raises:
            InputError: another was asked for now, or cannot be with an option of that run.
        """
        unasked = Options((), self.out, self.cache, self.history).arguments()
        before, now = {**unasked, **arguments}, self.arguments()
        if others := [REMEMBERED[name] for name in REMEMBERED if now[name] not in (unasked[name], before[name])]:
            raise InputError(
                "--resume: jobs and options must be those of the run that was stopped (got others in "
                f"{', '.join(others)}). Leave them out, or --resume."
            )
        if before["repeat"] and any(getattr(self, name) for name in NOT_REPEATED):
            named = either([f"--{name}" for name in NOT_REPEATED])
            raise InputError(
                f"--resume: the run that was stopped must not be one of --repeat where {named} is given. "
                "Leave these out."
            )
        return replace(
            self,
            jobs=tuple(map(Path, before["jobs"])),
            overrides=tuple(before["overrides"]),
            force=before["force"],
            repeat=before["repeat"],
            accept=tuple(before["accept"]),
            limits={name: Limit(**limit) for name, limit in before["limits"].items()},
            store=before["store"],
            diagnose_seconds=before["diagnose_seconds"],
        )


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

    def task(self, options: Options) -> BuildTask | RepeatTask:
        """The work for a worker."""
        out, cache = str(options.out.resolve()), str(options.cache.resolve())
        about = (self.job.name, str(self.file), self.ingredients.key, out, cache, False, self.reasons)
        seconds = options.diagnose_seconds
        if options.repeat:
            return RepeatTask(*about, job=self.job, diagnose_seconds=seconds, times=options.repeat)
        return BuildTask(
            *about,
            job=self.job,
            diagnose_seconds=seconds,
            parts=dict(self.ingredients.parts),
            store=options.store,
            force=options.force,
        )


class Watcher(Protocol):
    """Progress callbacks for a set of jobs; `cli.watching` shows them."""

    def planned(self, names: Sequence[str]) -> None:
        """These jobs are part of tonight."""

    def state(self, name: str, state: State, detail: str = "") -> None:
        """What a job does now, or came to."""

    def note(self, message: str) -> None:
        """Something the reader should know now."""

    def cancelled(self) -> bool:
        """Whether the user has asked to stop."""


class TaskExecutor(Protocol):
    """Where tasks are run."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Who runs them, for the report."""

    def run(self, tasks: Sequence[Task], watcher: Watcher, finished: Callable[[Task, JsonObject], None]) -> None:
        """Run every task, until the user stops it; `finished` is called with the plain outcome of each that ended."""


class Unwatched:
    """A Watcher that shows nothing and never stops."""

    def planned(self, names: Sequence[str]) -> None:
        """Ignore it."""

    def state(self, name: str, state: State, detail: str = "") -> None:
        """Ignore it."""

    def note(self, message: str) -> None:
        """Ignore it."""

    def cancelled(self) -> bool:
        """Never."""
        return False


def own_files(options: Options) -> frozenset[Path]:
    """What a night writes beside its bundles: the report and the history, with SQLite's files beside it."""
    reports = [options.out / name for name in (JSON_REPORT, TEXT_REPORT, PAGE)]
    history = [options.history.with_name(options.history.name + end) for end in ("", *JOURNALS, "-shm")]
    return frozenset([*reports, *history])

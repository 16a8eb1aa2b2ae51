"""A resumed run does what the stopped one was asked for: all options that decide what is built and how it is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nights
import pytest

from trtpipe.errors import InputError
from trtpipe.nightly import run as running
from trtpipe.nightly.options import REMEMBERED, Options, Unwatched
from trtpipe.nightly.outcome import JobOutcome
from trtpipe.nightly.regressions import LIMITS, Limit
from trtpipe.nightly.task import BuildTask, RepeatTask, plain

JOBS = ("a", "b", "c")
#: Another value than the default of each option that a resumed run takes over.
OTHERS: dict[str, Any] = {
    "jobs": (Path("/jobs/m.yaml"),),
    "overrides": ("check.batch_size=2",),
    "force": True,
    "repeat": 3,
    "accept": ("m*",),
    "limits": {**LIMITS, "cosine": Limit(True, 0.5)},
    "store": "file:///store",
    "diagnose_seconds": 1.5,
}
#: Where a run is made, by whom, and what it leaves there: of the command that resumes, not of the one that was stopped.
OF_THIS_CALL = {
    "out", "cache", "history", "workers", "scheduler", "memory_bytes", "cache_limit_bytes", "resume", "sign",
    "credentials", "insecure", "notes",
}  # fmt: skip


def unasked(**given: Any) -> Options:
    return Options((), Path("out"), Path("cache"), Path("history"), **given)


def test_every_option_is_taken_over_or_of_the_call_that_resumes() -> None:
    names = {f.name for f in dataclasses.fields(Options)}
    assert set(OTHERS) == set(REMEMBERED) == set(unasked().arguments()) == names - OF_THIS_CALL


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_given_again_is_as_it_was(name: str) -> None:
    stopped = dataclasses.replace(unasked(), **{name: OTHERS[name]})
    resumed = unasked(workers=3).resuming(stopped.arguments())
    assert getattr(resumed, name) == OTHERS[name]
    assert resumed.workers == 3
    assert stopped.resuming(stopped.arguments()) == stopped
    assert unasked().resuming({"jobs": [], "overrides": []}) == unasked()  # as an earlier trtpipe recorded it


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_given_otherwise_is_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        dataclasses.replace(unasked(), **{name: OTHERS[name]}).resuming(unasked().arguments())
    assert str(error.value) == (
        "--resume: jobs and options must be those of the run that was stopped (got others in "
        f"{REMEMBERED[name]}). Leave them out, or --resume."
    )


def test_a_repeated_run_is_not_gone_on_with_by_a_fleet() -> None:
    with pytest.raises(InputError) as error:
        unasked(scheduler="tcp://localhost:8786").resuming(unasked(repeat=2).arguments())
    assert str(error.value) == (
        "--resume: the run that was stopped must not be one of --repeat where --scheduler or --sign is given. "
        "Leave these out."
    )


class OneAlone:
    """Ends the first of its tasks alone, as a night that is stopped does; `asked` are all that it was given."""

    workers = ("one",)

    def __init__(self, asked: list[BuildTask | RepeatTask]) -> None:
        self.asked = asked

    def run(self, tasks: Iterable[Any], watcher: object, finished: Callable[..., None]) -> None:
        self.asked += tasks
        task = self.asked[0]
        finished(task, plain(JobOutcome(task.name, task.file, "built", key=task.key)))


@pytest.mark.parametrize("asked", [{"force": True}, {"repeat": 2}])
def test_what_was_done_stays_done_and_the_rest_is_built_as_it_was_asked_for(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = nights.make_world(tmp_path / "jobs")
    jobs = tuple(nights.write_job(folder, name) for name in JOBS)
    options = Options(jobs, tmp_path / "out", tmp_path / "cache", tmp_path / "history.sqlite", workers=0)
    running.nightly(options, Unwatched())
    stopped: list[BuildTask | RepeatTask] = []
    monkeypatch.setattr(running, "_local", lambda options: OneAlone(stopped))
    assert running.nightly(dataclasses.replace(options, **asked), Unwatched()).interrupted
    assert [t.name for t in stopped] == list(JOBS)
    rest: list[BuildTask | RepeatTask] = []
    monkeypatch.setattr(running, "_local", lambda options: OneAlone(rest))
    report = running.nightly(dataclasses.replace(options, jobs=(), resume=True), Unwatched())
    assert report.resumed
    assert [t.name for t in rest] == list(JOBS[1:])
    assert [t.reasons for t in rest] == [t.reasons for t in stopped[1:]]
    assert [type(t) for t in rest] == [type(t) for t in stopped[1:]]
    assert all(getattr(t, "force", False) == asked.get("force", False) for t in rest)

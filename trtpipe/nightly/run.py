"""A night: many jobs, rebuilt where something changed, each result recorded and held against the past.

Planning looks at files, versions and devices and imports no torch, so a night without changes is over in a moment.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from calib.files import as_text
from calib.once import read_once
from calib.types import JsonObject
from trtpipe.bundle.format import require_place
from trtpipe.errors import Cancelled, InputError, TrtpipeError, user_error
from trtpipe.evaluation.limits import DROP_SUFFIX
from trtpipe.job.job import Job
from trtpipe.job.load import JobErrors, read_jobs, same_name
from trtpipe.nightly.execute import is_whole, put_back
from trtpipe.nightly.fleet import Fleet
from trtpipe.nightly.history import History
from trtpipe.nightly.local import Local
from trtpipe.nightly.options import LOGS, Options, Planned, TaskExecutor, Unwatched, Watcher, own_files
from trtpipe.nightly.outcome import JobOutcome, NightlyReport, stopped, worst_first
from trtpipe.nightly.regressions import LIMITS, compare, declared_normal
from trtpipe.nightly.signing import sign_green
from trtpipe.nightly.task import GONE, MANIFEST_SHA256, UNKEPT, from_plain, recorded
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import Machine, environment, this_machine
from trtpipe.pipeline.cache.keys import Ingredients, Survey, with_reads
from trtpipe.pipeline.cache.kinds import BUILT, BUNDLE
from trtpipe.pipeline.cache.remote import Store
from trtpipe.pipeline.cache.store import Cache
from trtpipe.pipeline.validate import judge
from trtpipe.trt import driver

FIRST, FORCED = "first build", "--force"


def nightly(options: Options, watcher: Watcher) -> NightlyReport:
    """One night.

    Raises:
        InputError: nothing can be started: no job, a bad history or cache, a scheduler that is not there.
    """
    began = time.perf_counter()
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        watcher.note(message)

    for note in options.notes:
        say(note)
    Cache(options.cache)  # or says why it cannot be, before there is a history
    with History(options.history) as history:
        if history.was_empty:
            say(f"{options.history} held nothing: this history begins anew")
        run, resumed, options = _begin(history, options, say)
        try:
            cache = Cache(options.cache, _store(options), note=say)
            with (
                Digests(cache.digests_path) as digests,
                _Night(options, watcher, cache, history, run, digests, said) as night,
            ):
                night.over(resumed)
        except TrtpipeError as error:
            if not (resumed or isinstance(error, Cancelled) or history.of_run(run)):
                history.forget(run)  # it was refused before a job began: nothing is to be gone on with
            raise
        signed = () if options.sign is None else sign_green(night.outcomes, options.sign)
        history.end(run, "interrupted" if stopped(night.outcomes.values()) else "done")
        evicted = cache.trim(options.cache_limit_bytes)
        entries = cache.entries()
        return NightlyReport(
            run=run,
            began=history.began(run),
            seconds=time.perf_counter() - began,
            outcomes=tuple(sorted(night.outcomes.values(), key=worst_first)),
            resumed=resumed,
            environment=environment(),
            workers=night.workers,
            cache_bytes=sum(size for _, size, _ in entries),
            cache_entries=len(entries),
            evicted=evicted,
            notes=(*said, *signed),
        )


def explain(options: Options) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[JobOutcome, ...]]:
    """Every job's name with what would be built and why; empty reasons where the bundle would be reused. After them the
    outcomes of those that cannot be planned or built here, or whose bundle has no place: errors, as of a night."""
    cache = Cache(options.cache, _store(options))
    with (
        History(options.history) as history,
        Digests(cache.digests_path) as digests,
        _Night(options, Unwatched(), cache, history, None, digests, []) as night,
    ):
        found = [(p, night.found(p, explaining=True)) for p in night.plan()]
        night.buildable([p for p, standing in found if standing is None])
        errors = night.outcomes
        return tuple((p.name, () if o else p.reasons) for p, o in found if p.name not in errors), tuple(errors.values())


class _Night:
    """The state of one run, None for one that is only planned; `notes` are the report's, and grow."""

    def __init__(
        self,
        options: Options,
        watcher: Watcher,
        cache: Cache,
        history: History,
        run: int | None,
        digests: Digests,
        notes: list[str],
    ) -> None:
        self.options, self.watcher, self.cache, self.history, self.run = options, watcher, cache, history, run
        self.digests, self.notes = digests, notes
        self._fleet = None
        if options.scheduler:
            kept_in = cache.replacing() if options.force else cache
            self._fleet = Fleet(options.scheduler, kept_in, options.credentials, insecure=options.insecure)
            self.notes += self._fleet.notes
        self._here = Survey(digests, this_machine(digests)) if self._fleet is None else None
        self.outcomes: dict[str, JobOutcome] = {}
        self.workers: tuple[str, ...] = ()
        self._latest = history.latest(run)
        self._greens = history.greens(run)
        self._planned: dict[str, Planned] = {}
        self._surveys: list[tuple[Machine, Survey]] = []

    def __enter__(self) -> _Night:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def over(self, resumed: bool) -> None:
        """Do everything."""
        assert self.run is not None
        planned = self.plan()
        if tagged := [p.name for p in planned if p.job.worker and self._fleet is None]:
            self.notes.append(f"worker: not used without --scheduler, by {', '.join(tagged)}: built on this machine")
        names = [*self.outcomes, *(p.name for p in planned)]
        if not names:
            raise InputError("JOB: no job was given. Name a job file, or a folder of them.")
        for glob in self.options.accept:
            if not fnmatch.filter(names, glob):
                raise InputError(f"--accept: must fit the name of a job (got {glob!r}; the jobs: {', '.join(names)}).")
        self._require_judged(planned)
        if gone := self.history.gone(self.run, names, {p.file for p in planned}):
            self.notes.append(f"no job any more, and built no more: {', '.join(gone)}")
        self.watcher.planned(names)
        earlier = self.history.of_run(self.run) if resumed else {}
        todo: list[Planned] = []
        ended = list(self.outcomes.values())
        for p in planned:
            self._planned[p.name] = p
            before = earlier.get(p.name)
            done = before is not None and (before.outcome.key, before.outcome.outcome) == (p.ingredients.key, "built")
            outcome = self.found(p, before.outcome if before is not None and done else None)
            if outcome is None:
                todo.append(p)
                continue
            ended.append(outcome)
        with self.history.together():
            for outcome in ended:
                self._record(outcome)
        if todo:
            self._build(todo)

    def _require_judged(self, planned: Sequence[Planned]) -> None:
        """A limit of what a metric loses names a metric of a job; a job that cannot be read may be the one."""
        figures = {f"{metric}{DROP_SUFFIX}" for p in planned for metric in p.job.check.metrics}
        for name in self.options.limits:
            if name not in LIMITS and name not in figures and not self.outcomes:
                has = f"the jobs have {', '.join(sorted(figures))}" if figures else "no job has check.metrics"
                raise InputError(f"--limit: must name a metric of a job (got {name!r}; {has}).")

    def _parts_of(self, outcome: JobOutcome) -> Mapping[str, str]:
        """What the outcome was made of; building a job may have shown that its code reads more than was known."""
        planned = self._planned.get(outcome.name)
        if planned is None:
            return {}
        if outcome.key in ("", planned.ingredients.key):
            return planned.ingredients.parts
        with Digests(self.cache.digests_path) as digests:
            survey = Survey(digests, self._survey(planned.job).machine)
            return with_reads(survey, planned.job, self.cache)[0].parts

    def plan(self) -> list[Planned]:
        """Every job that can be read; the others already have an outcome."""
        planned: dict[str, Planned] = {}
        for file in self.options.jobs:
            try:
                jobs = read_jobs(file, self.options.overrides)
            except (TrtpipeError, OSError) as error:
                if (refused := user_error(error)) is None:
                    raise
                self._broken(file.name, file, refused)
                continue
            for job in jobs:
                if job.name in planned:
                    first = planned[job.name].file
                    self._broken(f"{job.name} ({file.name})", file, same_name(file, first, job.name))
                    continue
                if self.options.out / job.name in own_files(self.options):
                    taken = f"{file}: name: must not be that of a file of the night (got {job.name!r}). Rename the job."
                    self._broken(job.name, file, InputError(taken))
                    continue
                try:
                    ingredients = self._ingredients(job)
                except TrtpipeError as error:
                    self._broken(job.name, file, error)
                    continue
                planned[job.name] = Planned(job, file, ingredients, self._reasons(job.name, ingredients))
        return list(planned.values())

    def _ingredients(self, job: Job) -> Ingredients:
        past = self._latest.get(job.name)
        return with_reads(self._survey(job), job, self.cache, {} if past is None else past.parts)[0]

    def _survey(self, job: Job) -> Survey:
        """The machine that is to build a job.

        Raises:
            MissingError: no worker of the fleet matches.
        """
        if self._here is not None:
            return self._here
        assert self._fleet is not None
        machine = self._fleet.machine_for(job)
        for known, survey in self._surveys:
            if known == machine:
                return survey
        survey = Survey(self.digests, machine)
        self._surveys.append((machine, survey))
        return survey

    def found(self, planned: Planned, done: JobOutcome | None = None, *, explaining: bool = False) -> JobOutcome | None:
        """The outcome of a job with nothing to build: `done`, as it was when this run was stopped, what stands, or the
        error where something is in the bundle's place; with `explaining` nothing is put there."""
        if self.options.repeat or (self.options.force and done is None):
            return done
        try:
            standing = self._standing(planned, explaining)
        except (TrtpipeError, OSError) as error:
            if (refused := user_error(error)) is None:
                raise
            self._broken(planned.name, planned.file, refused)
            return self.outcomes[planned.name]
        return None if standing is None else done or standing

    def _standing(self, planned: Planned, explaining: bool) -> JobOutcome | None:
        """The outcome of a job that needs no build: its bundle is whole where it belongs, or is put there.

        Raises:
            InputError, OSError: something stands in its way there.
        """
        key, target = planned.ingredients.key, self.options.out / planned.name
        record = self.cache.get(BUILT, key)
        if explaining:
            require_place(target)
        if record is None:
            return None
        if not is_whole(target, str(record.facts.get(MANIFEST_SHA256)), self.digests):
            was = self._standing_instead(planned, target)
            if explaining:
                if self.cache.get(BUNDLE, key) is None:
                    return None
            elif put_back(self.cache, key, target):
                note = f"{planned.name}: its bundle in {self.options.out} {was}, and was put back from the cache"
                self.notes.append(note)
            else:
                return None
        return recorded(record.facts, planned.name, str(planned.file), target)

    def _standing_instead(self, planned: Planned, target: Path) -> str:
        """What is where a job's bundle belongs, in words: nothing, that of an earlier night, or neither."""
        if not os.path.lexists(target):
            return "was missing"
        past = self._latest.get(planned.name)
        record = None if past is None else self.cache.get(BUILT, past.outcome.key)
        if record is not None and is_whole(target, str(record.facts.get(MANIFEST_SHA256)), self.digests):
            return "was built of other inputs"
        return "was not the one that was built"

    def _reasons(self, name: str, ingredients: Ingredients) -> tuple[str, ...]:
        past = self._latest.get(name)
        if self.options.force:
            return (FORCED,)
        if self.options.repeat:
            return (f"--repeat {self.options.repeat}",)
        if past is None:
            return (FIRST,)
        return ingredients.reasons(past.parts) or (GONE if past.outcome.drift is None else UNKEPT,)

    def _broken(self, name: str, file: Path, error: TrtpipeError) -> None:
        name, where, said = map(as_text, (name, str(file), str(error)))  # a file's name may be any bytes
        self.outcomes[name] = JobOutcome(name, where, "error", error.exit_code, said)

    def _build(self, todo: Sequence[Planned]) -> None:
        """Run what can be built; whatever has no outcome then was cancelled."""
        able = self.buildable(todo)
        for p in todo:
            if p.name in self.outcomes:
                self._record(self.outcomes[p.name])
        tasks = [p.task(self.options) for p in able]
        for task in tasks:
            self.watcher.state(task.name, "waiting", "; ".join(task.reasons))
        if not tasks:
            return
        executor = self._fleet or _local(self.options)
        self.workers = executor.workers
        executor.run(tasks, self.watcher, lambda task, raw: self._finished(raw))
        for t in tasks:
            if t.name not in self.outcomes:
                code = Cancelled.exit_code
                self._record(JobOutcome(t.name, t.file, "cancelled", code, key=t.key, reasons=t.reasons))

    def buildable(self, todo: Sequence[Planned]) -> list[Planned]:
        """Those that `validate` has nothing against on this machine; a fleet's workers judge for themselves. The others
        have an outcome then."""
        if self.options.scheduler:
            return list(todo)
        buildable = []
        with read_once():
            judged = {
                job.name: problems
                for file in dict.fromkeys(p.file for p in todo)
                for job, problems in judge(file, self.options.overrides)
                if job is not None
            }
        for p in todo:
            if problems := judged.get(p.name, ()):
                self._broken(p.name, p.file, JobErrors(problems))
            else:
                buildable.append(p)
        return buildable

    def _finished(self, raw: JsonObject) -> None:
        """The end of one task; of what several say of a store, the first one's reason is told."""
        known = tuple(note.partition(" (")[0] for note in self.notes)
        self.notes += [note for note in raw.get("said", ()) if not note.startswith(known)]
        self._record(from_plain(raw))

    def _record(self, outcome: JobOutcome) -> None:
        greens = [p.outcome for p in self._greens.get(outcome.name, ())]
        if not self.options.repeat:
            comparisons, lines = compare(outcome, greens, self.options.limits)
            if lines and any(fnmatch.fnmatch(outcome.name, g) for g in self.options.accept):
                outcome, lines = declared_normal(outcome, lines)
            outcome = dataclasses.replace(outcome, comparisons=comparisons, regressions=lines)
        self.outcomes[outcome.name] = outcome
        if outcome.outcome != "cancelled":
            parts = self._parts_of(outcome)
            assert self.run is not None
            self.history.record(self.run, outcome, parts, green=outcome.green and not self.options.repeat)
        detail = [*outcome.regressions, *outcome.error.splitlines()[:1]] or list(outcome.reasons)
        self.watcher.state(outcome.name, outcome.standing, "; ".join(detail))


def _begin(history: History, options: Options, say: Callable[[str], None]) -> tuple[int, bool, Options]:
    """The run's number, whether it goes on with one, and the options it then has."""
    unfinished = history.unfinished() if options.resume else None
    if unfinished is None:
        if options.resume and not options.jobs:
            raise InputError("--resume: no run of this history was stopped before its end. Name the jobs of a new one.")
        if options.resume:
            say("--resume: no run was stopped before its end; this is a new one")
        return history.begin(options.arguments()), False, options
    run, arguments = unfinished
    resuming = options.resuming(arguments)
    history.reopen(run)
    return run, True, resuming


def _local(options: Options) -> TaskExecutor:
    return Local(options.workers, options.memory_bytes, driver.probe(), options.out / LOGS)


def _store(options: Options) -> Store | None:
    return Store(options.store) if options.store else None

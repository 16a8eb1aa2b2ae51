"""One job of a night, in whichever process it runs: built unless the cache has it. What came of it is plain data."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtpipe.cache import Busy, Cache, DamagedEntry, Entry
from trtpipe.digests import Digests
from trtpipe.errors import Cancelled, InputError, TrtpipeError
from trtpipe.ingredients import Survey, is_installed, stage_keys, this_machine
from trtpipe.job import Job
from trtpipe.nightly_report import JobOutcome
from trtpipe.values import Metric

if TYPE_CHECKING:
    from trtpipe.bundle import Bundle
    from trtpipe.progress import Reporter
    from trtpipe.rebuild import Memory

#: Outcome of a job that another process is building right now.
BUSY = "busy"
_NEVER = ("trtpipe", "calib", "__main__", "__mp_main__")


@dataclass(frozen=True)
class Task:
    """What a worker needs to know of a job. Plain data: it goes through pipes and networks.

    `job` is its model dump, `folder` that of its file, `parts` and `key` what the planner found it to be made of.
    `wait` is whether to wait for another process that builds the same. `repeat` > 0 builds that many times without the
    cache instead. With `kit`, "make" writes the job's kit to `out`, and "finish" makes a bundle of the one in `folder`.
    """

    name: str
    file: str
    job: Mapping[str, Any]
    folder: str
    text: str
    key: str
    parts: Mapping[str, str]
    out: str
    cache: str
    store: str = ""
    force: bool = False
    wait: bool = False
    repeat: int = 0
    kit: Literal["", "make", "finish"] = ""
    reasons: tuple[str, ...] = ()
    attempts: tuple[str, ...] = field(default=())

    def load(self) -> Job:
        """The job itself."""
        return Job.model_validate(dict(self.job)).read_from(Path(self.folder), self.text)


def execute(task: Task, reporter: Reporter, memory: Memory) -> dict[str, Any]:
    """Build the job unless its bundle is in the cache, and say what came of it.

    Returns:
        The fields of a JobOutcome as plain data; `{"outcome": "busy"}` when another process is building it.

    Raises:
        Cancelled: the user stopped it. Every other user error is in what is returned.
    """
    try:
        return plain(_execute(task, reporter, memory))
    except Busy:
        return {"outcome": BUSY}
    except Cancelled:
        raise
    except TrtpipeError as error:
        return failure(task, str(error), error.exit_code)
    except ModuleNotFoundError as error:
        return failure(task, f"{error.name}: must be installed (got nothing). Install it in this environment.", 3)
    except Exception as error:  # noqa: BLE001  # a bug costs one job of the night, and its place is said
        import traceback

        where = "".join(traceback.format_exception(error)[-3:]).strip()
        return failure(task, f"this is a bug in trtpipe, please report it:\n{where}", 70)


def failure(task: Task, message: str, exit_code: int) -> dict[str, Any]:
    """A job that ended without a bundle."""
    return plain(JobOutcome(task.name, task.file, "error", exit_code, message, reasons=task.reasons, key=task.key)) | {
        "attempts": list(task.attempts)
    }


def _execute(task: Task, reporter: Reporter, memory: Memory) -> JobOutcome:
    if task.kit == "finish":
        return _finish(task, reporter)
    job = task.load()
    _forget_modules(Path(task.folder), memory.folder)
    memory.folder = Path(task.folder)
    if task.repeat:
        from trtpipe.drift import repeat

        return repeat(task, job, reporter)
    if task.kit == "make":
        from trtpipe.kit_line import write_kit

        kit = write_kit(job, Path(task.out), reporter).bundle
        return JobOutcome(task.name, task.file, "built", key=task.key, bundle=str(kit.path))
    cache = _cache(task, reporter)
    with cache.lock("built", task.key, wait=task.wait):
        return _kept(task, cache) or _build(task, job, cache, reporter, memory)


def _kept(task: Task, cache: Cache) -> JobOutcome | None:
    """The outcome that the cache holds, its bundle put in place; None where it holds none that is whole."""
    record = cache.get("built", task.key)
    if record is None:
        return None
    try:
        return _reused(task, cache, record)
    except (DamagedEntry, InputError):
        cache.discard("built", task.key)
        return None


def _cache(task: Task, reporter: Reporter) -> Cache:
    from trtpipe.store import Store

    store = Store(task.store) if task.store else None
    return Cache(Path(task.cache), store, reporter.cancelled, force=task.force)


def _finish(task: Task, reporter: Reporter) -> JobOutcome:
    """The kit in the task's folder as a bundle; needs neither torch nor the job's data."""
    from trtpipe.kit_line import finish_kit

    cache = _cache(task, reporter)
    with cache.lock("built", task.key, wait=task.wait):
        if (kept := _kept(task, cache)) is not None:
            return kept
        built = finish_kit(Path(task.folder, task.name), Path(task.out), reporter)
        outcome = dataclasses.replace(of_bundle(task, built.bundle), seconds=dict(built.seconds))
        keep(cache, task.key, outcome, built.bundle.contents())
        return outcome


def _build(task: Task, job: Job, cache: Cache, reporter: Reporter, memory: Memory) -> JobOutcome:
    from trtpipe.rebuild import rebuild

    with Digests(cache.digests_path) as digests:
        machine = this_machine(digests)
        ingredients = Survey(digests, machine).ingredients(job)
    if ingredients.key != task.key:
        moved = "; ".join(ingredients.changes(task.parts))
        raise InputError(f"{task.name}: must stay as it was when it was planned (got: {moved}). Run again.")
    done = rebuild(job, Path(task.out), reporter, cache, stage_keys(job, ingredients), memory)
    with Digests(cache.digests_path) as digests:
        after = Survey(digests, machine).ingredients(job)
    outcome = of_bundle(task, done.built.bundle)
    outcome = dataclasses.replace(
        outcome, seconds=dict(done.built.seconds), stages_reused=done.reused, notes=(*outcome.notes, *ingredients.notes)
    )
    if after.key != ingredients.key:
        moved = "; ".join(after.changes(ingredients.parts))
        raise InputError(f"{task.name}: must stay as it is while it is built (got: {moved}). Run again.")
    keep(cache, task.key, outcome, done.built.bundle.contents())
    return outcome


def keep(cache: Cache, key: str, outcome: JobOutcome, files: Mapping[str, bytes]) -> None:
    """Put a bundle, and what is known of it, into the cache."""
    cache.put("bundle", key, {}, files)
    facts = plain(outcome) | {"manifest_sha256": hashlib.sha256(files["manifest.json"]).hexdigest()}
    cache.put("built", key, {k: v for k, v in facts.items() if k not in ("reasons", "attempts", "bundle")}, {})


def _reused(task: Task, cache: Cache, record: Entry) -> JobOutcome:
    """The bundle of the cache put where the job wants it."""
    from trtpipe.bundle import place

    entry = cache.get("bundle", task.key)
    if entry is None:
        raise InputError(f"{task.name}: its bundle is no longer in the cache")
    place(Path(task.out, task.name), {n: entry.read(n) for n in entry.files}, where=entry.path)
    return recorded(record.facts, task)


def recorded(facts: Mapping[str, Any], task: Task) -> JobOutcome:
    """What the cache knows of a job built earlier, as tonight's outcome."""
    known = {k: v for k, v in facts.items() if k != "manifest_sha256"}
    known |= {"outcome": "reused", "name": task.name, "file": task.file, "bundle": str(Path(task.out, task.name))}
    return from_plain(known | {"stages_reused": [], "attempts": list(task.attempts)})


def of_bundle(task: Task, bundle: Bundle) -> JobOutcome:
    """What a bundle says of itself."""
    manifest = bundle.manifest
    report, engine = manifest.check, manifest.engine
    assert report is not None
    assert engine is not None
    entry = manifest.files[engine.file]
    return JobOutcome(
        name=task.name,
        file=task.file,
        outcome="built",
        exit_code=0 if report.passed else 1,
        reasons=task.reasons,
        key=task.key,
        fingerprint=manifest.fingerprint,
        bundle=str(bundle.path),
        engine_sha256=entry.sha256,
        size_bytes=entry.size,
        target=engine.target,
        executed=report.executed,
        runner=report.runner,
        samples=report.samples,
        metrics=report.metrics,
        problems=report.problems,
        where=f"process {os.getpid()}",
        attempts=task.attempts,
        notes=manifest.notes,
    )


def plain(outcome: JobOutcome) -> dict[str, Any]:
    """Its fields in JSON's own types; NaN and infinities as `float()` reads them back."""
    return _jsonable(dataclasses.asdict(outcome))  # type: ignore[no-any-return]


def from_plain(raw: Mapping[str, Any]) -> JobOutcome:
    """The outcome that `plain` wrote; comparisons are made anew each night."""
    from trtpipe.nightly_report import Drift

    known = {f.name for f in dataclasses.fields(JobOutcome)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known}
    values["metrics"] = tuple(_metric(m) for m in raw.get("metrics", ()))
    drift = raw.get("drift")
    values["drift"] = None if drift is None else Drift(tuple(drift["engines"]), drift["max_abs"], tuple(drift["notes"]))
    return JobOutcome(**{**values, "comparisons": (), "regressions": ()})


def _metric(raw: Mapping[str, Any]) -> Metric:
    interval = raw.get("interval")
    limit = raw.get("limit")
    return Metric(
        raw["name"],
        raw["output"],
        float(raw["value"]),
        None if limit is None else float(limit),
        raw["passed"],
        None if interval is None else (float(interval[0]), float(interval[1])),
    )


def _jsonable(value: Any) -> Any:
    import math

    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _forget_modules(folder: Path, before: Path | None) -> None:
    """Let `model.py` beside this job not be the `model.py` beside an earlier one: one process runs many jobs.

    What stands in the folder of the job before goes, and whatever this folder has a module of the same name for.
    """
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if not isinstance(origin, str) or top in _NEVER or is_installed(origin):
            continue
        inside = before is not None and before != folder and origin.startswith(str(before) + os.sep)
        shadows = not origin.startswith(str(folder) + os.sep) and (
            (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        )
        if inside or shadows:
            del sys.modules[name]

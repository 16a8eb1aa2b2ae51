"""One job of a night, in whichever process it runs: built unless the cache has it. What came of it is plain data."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.bundle.format import place
from trtpipe.errors import Cancelled, InputError, user_error
from trtpipe.job.job import Job
from trtpipe.nightly.drift import repeat
from trtpipe.nightly.outcome import JobOutcome
from trtpipe.nightly.task import Task, failure, of_bundle, plain, recorded
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.keys import Survey, is_installed, stage_keys, this_machine
from trtpipe.pipeline.cache.remote import Store
from trtpipe.pipeline.cache.store import Busy, Cache, DamagedEntry, Entry
from trtpipe.pipeline.cached import rebuild
from trtpipe.pipeline.kit import finish_kit, write_kit

if TYPE_CHECKING:
    from trtpipe.pipeline.cached import Memory
    from trtpipe.progress import Reporter

#: Outcome of a job that another process is building right now.
BUSY = "busy"
_NEVER = ("trtpipe", "calib", "__main__", "__mp_main__")


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
    except ModuleNotFoundError as error:
        return failure(task, f"{error.name}: must be installed (got nothing). Install it in this environment.", 3)
    except Exception as error:  # noqa: BLE001  # a bug costs one job of the night, and its place is said
        if (shown := user_error(error)) is not None:
            return failure(task, str(shown), shown.exit_code)
        where = "".join(traceback.format_exception(error)[-3:]).strip()
        return failure(task, f"this is a bug in trtpipe, please report it:\n{where}", 70)


def _execute(task: Task, reporter: Reporter, memory: Memory) -> JobOutcome:
    if task.kit == "finish":
        return _finish(task, reporter)
    job = task.load()
    _forget_modules(Path(task.folder), memory.folder)
    memory.folder = Path(task.folder)
    if task.repeat:
        return repeat(task, job, reporter)
    if task.kit == "make":
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
    store = Store(task.store) if task.store else None
    return Cache(Path(task.cache), store, reporter.cancelled, force=task.force)


def _finish(task: Task, reporter: Reporter) -> JobOutcome:
    """The kit in the task's folder as a bundle; needs neither torch nor the job's data."""
    cache = _cache(task, reporter)
    with cache.lock("built", task.key, wait=task.wait):
        if (kept := _kept(task, cache)) is not None:
            return kept
        built = finish_kit(Path(task.folder, task.name), Path(task.out), reporter)
        outcome = dataclasses.replace(of_bundle(task, built.bundle), seconds=dict(built.seconds))
        keep(cache, task.key, outcome, built.bundle.contents())
        return outcome


def _build(task: Task, job: Job, cache: Cache, reporter: Reporter, memory: Memory) -> JobOutcome:
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
    entry = cache.get("bundle", task.key)
    if entry is None:
        raise InputError(f"{task.name}: its bundle is no longer in the cache")
    place(Path(task.out, task.name), {n: entry.read(n) for n in entry.files}, where=entry.path)
    return recorded(record.facts, task)


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

"""One job of a night, in whichever process it runs: built unless the cache has it. Its outcome is plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import os
import stat
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.strictjson import loads
from calib.types import JsonObject
from trtpipe.bundle.format import SIGNATURE_BYTES, place, require_place
from trtpipe.bundle.manifest import SIGNATURE
from trtpipe.errors import BUG, Cancelled, InputError, user_error
from trtpipe.nightly.drift import repeat
from trtpipe.nightly.options import LOGS
from trtpipe.nightly.outcome import JobOutcome
from trtpipe.nightly.task import (
    MANIFEST_SHA256,
    BuildTask,
    FinishTask,
    JobTask,
    KitTask,
    RepeatTask,
    Task,
    failure,
    of_bundle,
    plain,
    recorded,
)
from trtpipe.pipeline.apart import code_of
from trtpipe.pipeline.build import build
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import this_machine
from trtpipe.pipeline.cache.keys import Ingredients, Survey, code_key, modules, stage_keys, with_reads
from trtpipe.pipeline.cache.kinds import BUILT, BUNDLE
from trtpipe.pipeline.cache.reads import Reads, remember
from trtpipe.pipeline.cache.recorder import Recorder
from trtpipe.pipeline.cache.remote import DamagedEntry, Store
from trtpipe.pipeline.cache.store import Busy, Cache
from trtpipe.pipeline.cached import CachedResults
from trtpipe.pipeline.kit import finish_kit, write_kit
from trtpipe.pipeline.own_modules import own_file
from trtpipe.values import MANIFEST

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.pipeline.cache.keys import StageKeys
    from trtpipe.pipeline.cached import Memory
    from trtpipe.progress import Reporter

#: Outcome of a job that another process is building right now.
BUSY = "busy"


def execute(task: Task, reporter: Reporter, memory: Memory) -> JsonObject:
    """Build the job unless its bundle is in the cache, and return its outcome.

    Returns:
        The fields of a JobOutcome as plain data; `{"outcome": "busy"}` when another process is building it. With what
        the job's code read, under "reads": see `record_reads`; and what the night has to know of its cache, "said".

    Raises:
        Cancelled: the user stopped it. Every other user error is in the outcome.
    """
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        reporter.note(message)

    return _outcome(task, reporter, memory, say) | {"said": said}


def _outcome(task: Task, reporter: Reporter, memory: Memory, say: Callable[[str], None]) -> JsonObject:
    try:
        outcome, reads = _execute(task, reporter, memory, say)
        return plain(outcome) | ({} if reads is None else {"reads": reads})
    except Busy:
        return {"outcome": BUSY}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a bug costs one job of the night; its place is reported
        shown = user_error(error)
        if isinstance(shown, Cancelled):
            raise shown from None
        if shown is not None:
            return failure(task, str(shown), shown.exit_code)
        where = "".join(traceback.format_exception(error)[-3:]).strip()
        return failure(task, f"this is a bug in trtpipe, please report it:\n{where}", BUG)


def record_reads(cache: Cache, raw: JsonObject, folder: Path) -> None:
    """Store in this cache what a worker with another cache recorded that the code of a job, here in `folder`, read."""
    reads = raw.get("reads")
    if reads is not None:
        remember(cache, reads["code"], Reads.from_plain(reads), folder, ended=True)


def _execute(
    task: Task, reporter: Reporter, memory: Memory, say: Callable[[str], None]
) -> tuple[JobOutcome, JsonObject | None]:
    if isinstance(task, FinishTask):
        return _finish(task, reporter, _cache(task, reporter, say)), None
    if isinstance(task, BuildTask):
        return _build(task, reporter, memory, _cache(task, reporter, say))
    assert isinstance(task, JobTask)
    with _fresh_modules(task.job, "", memory):
        if isinstance(task, RepeatTask):
            return repeat(task, reporter), None
        assert isinstance(task, KitTask)
        seconds, release = task.diagnose_seconds, task.release or None
        kit = write_kit(task.job, Path(task.out), reporter, release=release, diagnose_seconds=seconds).bundle
        return JobOutcome(task.name, task.file, "built", key=task.key, bundle=str(kit.path)), None


def _kept(task: Task, cache: Cache, key: str) -> JobOutcome | None:
    """The outcome that the cache holds, its bundle put in place; None where it holds none that is whole."""
    record = cache.get(BUILT, key)
    if record is None:
        return None
    target = Path(task.out, task.name)
    if not put_back(cache, key, target):
        cache.discard(BUILT, key)
        return None
    return recorded(record.facts, task.name, task.file, target, task.attempts)


def _cache(task: BuildTask | FinishTask, reporter: Reporter, say: Callable[[str], None]) -> Cache:
    store = Store(task.store) if task.store else None
    return Cache(Path(task.cache), store, reporter.cancelled, force=task.force, note=say)


def _finish(task: FinishTask, reporter: Reporter, cache: Cache) -> JobOutcome:
    """A kit as a bundle; needs neither torch nor the job's data."""
    with cache.lock(BUILT, task.key, wait=task.wait):
        if (kept := _kept(task, cache, task.key)) is not None:
            return kept
        built = finish_kit(Path(task.kits, task.name), Path(task.out), reporter)
        outcome = dataclasses.replace(of_bundle(task, built.bundle), seconds=dict(built.seconds))
        keep(cache, task.key, outcome, built.bundle.contents())
        return outcome


def _build(task: BuildTask, reporter: Reporter, memory: Memory, cache: Cache) -> tuple[JobOutcome, JsonObject]:
    """The job's bundle, built unless the cache has it; and what its code read."""
    job = task.job
    planned = Ingredients(task.parts).unread
    with cache.lock(BUILT, planned.key, wait=task.wait):
        with Digests(cache.digests_path) as digests:
            machine = this_machine(digests)
            survey = Survey(digests, machine)
            ingredients, reads = with_reads(survey, job, cache, task.parts)
            code = code_key(ingredients)
        if moved := _moved(task.parts, ingredients):
            raise InputError(f"{task.name}: inputs changed since planning ({moved}). Run again.")
        if (kept := _kept(task, cache, ingredients.key)) is not None:
            return kept, {"code": code, **reads.to_plain()}
        out = Path(task.out)
        same = code_of(job)
        known_paths = _known(job, survey, cache.root, out / task.name, out / LOGS)
        recorder = Recorder(job.folder, known_paths, memory.heard.get(same))
        path = tuple(sys.path)

        def now(*, ended: bool = False) -> tuple[Ingredients, Reads]:
            """The ingredients as the files are now, with all that has been read so far, and that."""
            read = recorder.reads
            known = (reads | read).without_scratch(read)
            remember(cache, code, known, job.folder or Path.cwd(), ended=ended)
            with Digests(cache.digests_path) as digests, _searching(path):
                return Survey(digests, machine).ingredients(job, known), known

        def keys_now() -> StageKeys | None:
            latest, _ = now()
            moved = recorder.changed() or _moved(ingredients.parts, latest, recorder.written)
            return None if moved else stage_keys(job, latest)

        try:
            keys = stage_keys(job, ingredients)
            results = CachedResults(cache, keys, memory, reporter, recorder, keys_now)
            with _fresh_modules(job, keys.model, memory), _searching(path):
                built = build(job, Path(task.out), reporter, diagnose_seconds=task.diagnose_seconds, results=results)
            latest, known = now(ended=True)
            changed = [_shown(job, path) for path in recorder.changed()]
            written = recorder.written
        finally:
            memory.heard[same] = recorder.heard
            recorder.close()
        if moved := "; ".join([*filter(None, [_moved(ingredients.parts, latest, written)]), *changed]):
            raise InputError(f"{task.name}: inputs changed while it was built ({moved}). Run again.")
        memory.rename(keys.model, stage_keys(job, latest).model)
        outcome = dataclasses.replace(
            of_bundle(task, built.bundle),
            key=latest.key,
            seconds=dict(built.seconds),
            stages_reused=tuple(results.reused),
        )
        outcome = dataclasses.replace(outcome, notes=tuple(dict.fromkeys((*outcome.notes, *latest.notes))))
        keep(cache, latest.key, outcome, built.bundle.contents())
        return outcome, {"code": code, **known.to_plain()}


def _moved(before: Mapping[str, str], now: Ingredients, written: Collection[str] = ()) -> str:
    """What has changed of all that was known before; what was not known to be read, or was written by the job's own
    code, is no change. Empty for nothing."""
    return "; ".join(now.moved_since(before, written))


def _shown(job: Job, path: str) -> str:
    inside = os.path.relpath(path, job.folder or Path.cwd())
    return f"{path if inside.startswith(os.pardir) else inside} changed after it was read"


def _known(job: Job, survey: Survey, *folders: Path) -> list[Path]:
    """Paths that need no watching: files and folders that are ingredients already, and folders that trtpipe writes."""
    return [*survey.files(job), *(f.resolve() for f in folders)]


def keep(cache: Cache, key: str, outcome: JobOutcome, files: Mapping[str, bytes]) -> None:
    """Put a bundle, and what is known of it, into the cache."""
    cache.put(BUNDLE, key, {}, files)
    facts = plain(outcome) | {MANIFEST_SHA256: hashlib.sha256(files[MANIFEST]).hexdigest()}
    cache.put(BUILT, key, {k: v for k, v in facts.items() if k not in ("reasons", "attempts", "bundle")}, {})


def is_whole(bundle: Path, manifest_sha256: str, digests: Digests) -> bool:
    """Whether a bundle is, to the byte, the one recorded, and its signature one that is read.

    Args:
        bundle: its directory.
        manifest_sha256: of the manifest that was recorded, in hex.
        digests: of files; those that `stat` says are unchanged are not read.
    """
    try:
        present = set(os.listdir(bundle)) - {MANIFEST}
        if not all(stat.S_ISREG(os.lstat(bundle / n).st_mode) for n in (MANIFEST, *present)):
            return False  # a link to the same bytes is no part of a bundle
        if digests.file(bundle / MANIFEST) != manifest_sha256:
            return False
        manifest: Any = loads((bundle / MANIFEST).read_bytes())
        listed = manifest["files"]
        if SIGNATURE in present and os.lstat(bundle / SIGNATURE).st_size != SIGNATURE_BYTES:
            return False
        listed_here = present - {SIGNATURE} == set(listed)
        return listed_here and all(digests.file(bundle / n) == f["sha256"] for n, f in listed.items())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def put_back(cache: Cache, key: str, target: Path) -> bool:
    """Put the bundle of the cache at `target`; False where the cache holds none that is whole, and then none at all.

    Raises:
        InputError, OSError: nothing can be put at `target`; what the cache holds is as it was.
    """
    entry = cache.get(BUNDLE, key)
    if entry is None:
        return False
    require_place(target)
    try:
        place(target, {n: entry.read(n) for n in entry.files}, where=entry.path)
    except (DamagedEntry, InputError):
        cache.discard(BUNDLE, key, damaged=True)
        return False
    return True


@contextlib.contextmanager
def _searching(path: Collection[str]) -> Iterator[None]:
    """Modules are found in the folders of `path`; what the job's code adds to `sys.path` within ends with it.

    A module found there is seen when it is read: as one of the job's sources it would be found after the job only.
    """
    before = sys.path[:]
    sys.path[:] = path
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _fresh_modules(job: Job, model_key: str, memory: Memory) -> Iterator[None]:
    """The job's own modules are loaded as they are on disk now, in a process that may have run other jobs.

    What the job before loaded is forgotten, and so are the modules that this job's callables name: `model.py` beside
    one job is not the `model.py` beside another, and what is not loaded anew is not seen to be read. Modules of a model
    that the two share stay.
    """
    folder = job.folder or Path.cwd()
    named = {name for target in job.callables.values() for name in modules(target.partition(":")[0], folder)}
    stale = memory.stale_modules(model_key)
    for name in sorted(stale | (named if stale == memory.modules else frozenset())):
        if own_file(name) is not None:
            del sys.modules[name]
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        yield
    finally:
        memory.modules = frozenset(set(sys.modules) - before) | (memory.modules - stale)

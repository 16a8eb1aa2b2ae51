"""A worker's task for one job, and its outcome, both also as plain data for pipes and networks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calib.types import JsonMapping, JsonObject
from trtpipe.errors import FAILED, SUCCESS, ExitCode
from trtpipe.job.job import Job
from trtpipe.jsontext import plain_object
from trtpipe.nightly.outcome import Drift, JobOutcome
from trtpipe.quantization.diagnose import DIAGNOSE_SECONDS
from trtpipe.values import Metric

if TYPE_CHECKING:
    from trtpipe.bundle.format import Bundle

#: Why a job is built again that was green before.
GONE = "its bundle is no longer in the cache, or is damaged there"
#: The fact beside an outcome in the cache: the SHA-256 of its bundle's manifest.
MANIFEST_SHA256 = "manifest_sha256"
UNKEPT = "--repeat builds without the cache, and left none there"


@dataclass(frozen=True)
class Task:
    """A job's work for a worker.

    Attributes:
        name, file: of the job.
        key: digest of everything that decides the result, when the job was planned.
        out: the folder that the result goes to, under the job's name.
        cache: the folder of the build cache.
        wait: wait for another process that builds the same, instead of coming back to it later.
        reasons: why it is built.
        attempts: what went wrong on workers before.
    """

    name: str
    file: str
    key: str
    out: str
    cache: str
    wait: bool = False
    reasons: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobTask(Task):
    """A task that takes the job itself; `diagnose_seconds` as of `pipeline.build`."""

    job: Job = dataclasses.field(kw_only=True)
    diagnose_seconds: float = DIAGNOSE_SECONDS


@dataclass(frozen=True)
class BuildTask(JobTask):
    """Build the job's bundle, or take it from the cache.

    Attributes:
        parts: digests of what decides the bundle, by name, when the job was planned: see `cache.keys.Ingredients`.
        store: address of the shared cache; empty: none.
        force: take nothing from the cache.
    """

    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    store: str = ""
    force: bool = False


@dataclass(frozen=True)
class RepeatTask(JobTask):
    """Build the job's bundle `times` times without the cache, and compare."""

    times: int = 2


@dataclass(frozen=True)
class KitTask(JobTask):
    """Write the job's kit for a device whose TensorRT has this `release`, like "8.6.1"; empty for any from 10 on."""

    release: str = ""


@dataclass(frozen=True)
class FinishTask(Task):
    """Make the bundle of the job's kit, `kits`/`name`, or take it from the cache.

    Attributes:
        store, force: as of a BuildTask.
    """

    kits: str = ""
    store: str = ""
    force: bool = False


_KINDS: Mapping[str, type[Task]] = {t.__name__: t for t in (BuildTask, RepeatTask, KitTask, FinishTask)}


def task_to_plain(task: Task) -> JsonObject:
    """A task in JSON's own types."""
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    if isinstance(task, JobTask):
        job = task.job
        fields["job"] = {
            "sections": job.model_dump(mode="json", exclude_unset=True),  # `unused` is of what was given
            "folder": str(job.folder),
            "text": job.text,
        }
    return {"kind": type(task).__name__, **plain_object(fields)}


def task_from_plain(raw: JsonObject) -> Task:
    """The task that `task_to_plain` made plain."""
    fields: JsonObject = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k != "kind"}
    if job := fields.get("job"):
        fields["job"] = Job.model_validate(job["sections"]).read_from(Path(job["folder"]), job["text"])
    return _KINDS[raw["kind"]](**fields)


def failure(task: Task, message: str, exit_code: ExitCode) -> JsonObject:
    """A job that ended without a bundle."""
    return plain(JobOutcome(task.name, task.file, "error", exit_code, message, reasons=task.reasons, key=task.key)) | {
        "attempts": list(task.attempts)
    }


def recorded(facts: JsonMapping, name: str, file: str, bundle: Path, attempts: tuple[str, ...] = ()) -> JobOutcome:
    """What the cache knows of a job built earlier, as tonight's outcome; its bundle is put back at `bundle`."""
    known = {k: v for k, v in facts.items() if k != MANIFEST_SHA256}
    known |= {"outcome": "reused", "name": name, "file": file, "bundle": str(bundle)}
    return from_plain(known | {"stages_reused": [], "attempts": list(attempts)})


def of_bundle(task: Task, bundle: Bundle) -> JobOutcome:
    """The outcome of a job from the manifest of its bundle."""
    manifest = bundle.manifest
    report, engine = manifest.check, manifest.engine
    assert report is not None
    assert engine is not None
    entry = manifest.files[engine.file]
    return JobOutcome(
        name=task.name,
        file=task.file,
        outcome="built",
        exit_code=SUCCESS if report.passed else FAILED,
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


def plain(outcome: JobOutcome) -> JsonObject:
    """Its fields in JSON's own types; NaN and infinities as `float()` reads them back."""
    return plain_object(outcome)


def from_plain(raw: JsonObject) -> JobOutcome:
    """The outcome that `plain` wrote; comparisons are made anew each night."""
    known = {f.name for f in dataclasses.fields(JobOutcome)}
    values: JsonObject = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known}
    values["metrics"] = tuple(_metric(m) for m in raw.get("metrics", ()))
    drift = raw.get("drift")
    values["drift"] = None if drift is None else Drift(tuple(drift["engines"]), drift["max_abs"], tuple(drift["notes"]))
    return JobOutcome(**{**values, "comparisons": ()})


def _metric(raw: JsonObject) -> Metric:
    interval = raw.get("interval")
    limit = raw.get("limit")
    return Metric(
        raw["name"],
        raw["output"],
        float(raw["value"]),
        None if limit is None else float(limit),
        raw["passed"],
        None if interval is None else (float(interval[0]), float(interval[1])),
        raw.get("larger_is_better"),
    )

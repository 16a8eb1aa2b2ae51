"""A job of a night as plain data for a worker, and what came of it as plain data on the way back."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtpipe.job.job import Job
from trtpipe.nightly.outcome import Drift, JobOutcome
from trtpipe.values import Metric

if TYPE_CHECKING:
    from trtpipe.bundle.format import Bundle


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


def failure(task: Task, message: str, exit_code: int) -> dict[str, Any]:
    """A job that ended without a bundle."""
    return plain(JobOutcome(task.name, task.file, "error", exit_code, message, reasons=task.reasons, key=task.key)) | {
        "attempts": list(task.attempts)
    }


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
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

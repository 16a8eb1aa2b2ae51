"""A job down the whole line to its bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtpipe.bundle.format import Bundle, Sign
from trtpipe.bundle.manifest import REPORT
from trtpipe.notebook import page_html
from trtpipe.pipeline.assemble import Parts, assemble, shared_scales
from trtpipe.pipeline.bench import bench_front
from trtpipe.pipeline.measure import Evidence, explained, judged_speed, plan_of, timed
from trtpipe.pipeline.stages import Front, Stages, calibrate, check, compile_engine, prepare, quantize
from trtpipe.pipeline.tune import tune_from
from trtpipe.quantization.diagnose import is_about_numbers
from trtpipe.report.tune_page import verdict
from trtpipe.values import CheckReport, Engine

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter


@dataclass(frozen=True)
class Built:
    """A finished build: the bundle on disk, its check, and the seconds of each stage."""

    bundle: Bundle
    report: CheckReport
    seconds: Mapping[str, float] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """The bundle's report, or its check where it has none, for a notebook."""
        if REPORT in self.bundle.manifest.files:
            return page_html(self.bundle.read(REPORT).decode())
        return self.report._repr_html_()


def build(job: Job, out: Path, reporter: Reporter, *, sign: Sign | None = None) -> Built:
    """Take `job` down the whole line and write `out/<name>`, signed by `sign` (`signing.signer`) if that is given.

    The bundle is written whether or not the check passes, and signed only if it does; `Built.report.passed` says which.

    Raises:
        TrtpipeError: with the exit code of what went wrong; nothing is then written.
    """
    stages = Stages(reporter)
    front = prepare(job, stages)
    table = calibrate(job, front, stages)
    quantized = quantize(job, front, table, stages)
    engine = compile_engine(job, front.loaded, quantized, stages)
    found: dict[str, np.ndarray[Any, Any]] = {}
    report = check(
        job, front, engine, stages, made_of=lambda: (front.loaded, quantized), table=table, keep=found.update
    )
    if table is not None and is_about_numbers(report) and job.check.on_fail == "tune":
        job, table, how = retuned(job, front, table, out, stages)
        quantized = quantize(job, front, table, stages)
        engine = compile_engine(job, front.loaded, quantized, stages)
        made_of = (front.loaded, quantized)
        report = check(job, front, engine, stages, made_of=lambda: made_of, table=table, keep=found.update)
        report = replace(report, notes=(*report.notes, how))
    report, evidence = gather(job, front, table, engine, report, stages)
    scales = {} if table is None else shared_scales(front.captured)
    parts = Parts(front, table, scales, quantized, engine, report, found, evidence)
    bundle = assemble(job, out, parts, stages, sign=sign)
    return Built(bundle, report, stages.seconds)


def retuned(
    job: Job, front: Front, table: CalibrationTable, out: Path, stages: Stages
) -> tuple[Job, CalibrationTable, str]:
    """The job that `tune` finds (the closest when none meets the limits), its table, and a line that says so."""
    found = tune_from(job, front, table, out, stages)
    algorithm = found.tuned.best.candidate.algorithm
    if algorithm != table.algorithm:
        table = table.recomputed(algorithm)
    return found.job, table, f"check.on_fail: tune: {verdict(found.tuned, job.check.limits)}"


def gather(
    job: Job, front: Front, table: CalibrationTable | None, engine: Engine, report: CheckReport, stages: Stages
) -> tuple[CheckReport, Evidence]:
    """The check's report with speed and blame added, and what they come from.

    The engine is timed wherever it was executed. Sensitivity is measured where the check fails over numbers, or where
    `check.sensitivity` asks for it; the modes where `check.bench` does.
    """
    report = judged_speed(job, front, engine, report, stages)
    report, latencies = timed(front, engine, report, stages)
    report, sensitivity = explained(job, front, table, report, stages)
    bench = bench_front(job, front, table, {"engine": lambda: plan_of(engine)}, stages) if job.check.bench else None
    return report, Evidence(sensitivity, latencies, bench)

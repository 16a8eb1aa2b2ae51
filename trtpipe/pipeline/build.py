"""A job through all stages to its bundle."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.bundle.format import Bundle, Sign, require_place
from trtpipe.bundle.manifest import REPORT
from trtpipe.errors import InputError
from trtpipe.notebook import page_html
from trtpipe.pipeline.assemble import Checked, assemble
from trtpipe.pipeline.bench import bench_prepared
from trtpipe.pipeline.collector import seldom_collected
from trtpipe.pipeline.judged import Judged
from trtpipe.pipeline.measure import Evidence, diagnosis_wanted, explained, judged_speed, plan_of, timed
from trtpipe.pipeline.own_modules import with_own_modules
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.results import Results
from trtpipe.pipeline.stages import build_engine, calibrate, check, check_graph, prepare, recalibrated
from trtpipe.pipeline.tune import fitted_to, tune_from
from trtpipe.quantization.diagnose import DIAGNOSE_SECONDS, is_about_numbers
from trtpipe.report.tune_page import after_search, verdict
from trtpipe.values import CheckReport

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.pipeline.beside import Watched
    from trtpipe.pipeline.lowered import Lowered
    from trtpipe.progress import Reporter


@dataclass(frozen=True)
class Built:
    """A finished build: the bundle on disk, its check, and the seconds of each stage."""

    bundle: Bundle
    report: CheckReport
    seconds: Mapping[str, float] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """The bundle's report, or its check where it has none or is no longer there, for a notebook."""
        if REPORT in self.bundle.manifest.files:
            with suppress(InputError, OSError):
                return page_html(self.bundle.read(REPORT).decode())
        return self.report._repr_html_()


@seldom_collected()
@with_own_modules
def build(
    job: Job,
    out: Path,
    reporter: Reporter,
    *,
    sign: Sign | None = None,
    diagnose_seconds: float = DIAGNOSE_SECONDS,
    results: Results | None = None,
) -> Built:
    """Take `job` through all stages and write `out/<name>`, signed by `sign` (`signing.signer`) if that is given.

    The bundle is written whether or not the check passes, and signed only if it does; `Built.report.passed` says which.
    What is only measured to explain the result (sensitivities, the modes of `check.bench`) is measured after that, and
    the bundle is replaced by one that has it: who interrupts it keeps the first.

    Args:
        job: the job.
        out: the folder of bundles.
        reporter: receives the stages.
        sign: signs the manifest.
        diagnose_seconds: time limit for finding the modules that make a check fail; 0: they are not looked for, unless
            the job asks for sensitivities.
        results: results of stages that need not be computed.

    Raises:
        TrtpipeError: with the exit code of what went wrong; before the check, nothing is then written.
    """
    require_place(out / job.name)
    stages = Stages(reporter, nullcontext if results is None else results.recording)
    prepared = prepare(job, stages, results)
    found: Judged | None = None

    def meanwhile(lowered: Lowered, watched: Watched) -> None:
        nonlocal found
        found = check_graph(job, prepared, lowered, stages, require=job.check.require, watched=watched)

    compiled = build_engine(job, prepared, lambda: calibrate(job, prepared, stages), stages, results, meanwhile)
    found = found or check(job, prepared, compiled, stages)
    report, tried = found.report, ""
    if better := retuned(job, prepared, compiled.lowered.table, report, out, stages):
        job, tuned, how, tried = better
        compiled = build_engine(job, prepared, lambda: tuned, stages)
        found = check(job, prepared, compiled, stages)
        report = replace(found.report, notes=(*found.report.notes, how))
    report = judged_speed(job, prepared, compiled.engine, report, stages)
    report, latencies_ms = timed(prepared, compiled.engine, report, stages)
    checked = Checked(compiled, prepared, replace(found, report=report))
    evidence = Evidence(latencies_ms=latencies_ms)
    bundle = assemble(job, out, checked, evidence, stages, sign=sign)
    wanted = diagnosis_wanted(job, report, diagnose_seconds, always=job.check.sensitivity)
    if wanted or job.check.bench:
        if not report.passed:
            stages.note(f"check FAILED: {reason(report)}; bundle: {bundle.path}")
        table = compiled.lowered.table
        report, sensitivity = explained(
            job, prepared, table, report, stages, diagnose_seconds, always=job.check.sensitivity, tried=tried
        )
        bench = None
        if job.check.bench:
            bench = bench_prepared(job, prepared, table, {"engine": lambda: plan_of(compiled.engine)}, stages)
        evidence = replace(evidence, sensitivity=sensitivity, bench=bench)
        bundle = assemble(job, out, replace(checked, judged=replace(found, report=report)), evidence, stages, sign=sign)
    return Built(bundle, report, stages.seconds)


def retuned(
    job: Job, prepared: PreparedJob, table: CalibrationTable | None, report: CheckReport, out: Path, stages: Stages
) -> tuple[Job, CalibrationTable | None, str, str] | None:
    """After a failed check, the job that `tune` finds (the closest when none meets the limits), its table, a line that
    says so, and what to do where the check fails still; None where the job asks for no search, or the failure is none
    that one could mend."""
    if not (job.places_qdq and is_about_numbers(report, job.check.limits) and job.check.on_fail == "tune"):
        return None
    result = tune_from(job, prepared, table, out, stages)
    if table is not None:  # trials that were taken up have made none
        made = result.tables.get(fitted_to(result.job, result.tuned.best.candidate.algorithm, prepared))
        table = made or recalibrated(result.job, prepared, table, job, stages)
    return result.job, table, f"check.on_fail: tune: {verdict(result.tuned)}", after_search(result.tuned)


def reason(report: CheckReport) -> str:
    """Why a check failed, in one line."""
    return "; ".join(report.why)

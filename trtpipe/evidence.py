"""What a build measures beside its check: which modules INT8 costs most, the engine's latency, and every other mode."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trtpipe.diagnose import blame, diagnose, is_about_numbers
from trtpipe.speed import HYBRID
from trtpipe.values import CheckReport, Engine, Metric

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.bench import Bench
    from trtpipe.job import Job
    from trtpipe.pipeline import Front, Stages
    from trtpipe.ranking import Sensitivity

#: Executions of the engine that are timed, after as many that are not.
ROUNDS, WARM_UP = 200, 10


@dataclass(frozen=True)
class Evidence:
    """What was measured; what was not is None or empty.

    `latencies_ms` are of the engine alone, one batch of the `opt` shapes each, by the GPU's clock, data on the GPU.
    """

    sensitivity: Sensitivity | None = None
    latencies_ms: tuple[float, ...] = ()
    bench: Bench | None = None


def gather(
    job: Job, front: Front, table: CalibrationTable | None, engine: Engine, report: CheckReport, stages: Stages
) -> tuple[CheckReport, Evidence]:
    """The check's report with speed and blame added, and what they come from.

    The engine is timed wherever it was executed. Sensitivity is measured where the check fails over numbers, or where
    `check.sensitivity` asks for it; the modes where `check.bench` does.
    """
    from trtpipe.bench_line import bench_front, judged_speed, plan_of

    report = judged_speed(job, front, engine, report, stages)
    report, latencies = timed(front, engine, report, stages)
    report, sensitivity = explained(job, front, table, report, stages)
    bench = bench_front(job, front, table, {"engine": lambda: plan_of(engine)}, stages) if job.check.bench else None
    return report, Evidence(sensitivity, latencies, bench)


def explained(
    job: Job, front: Front, table: CalibrationTable | None, report: CheckReport, stages: Stages
) -> tuple[CheckReport, Sensitivity | None]:
    """The sensitivity of an INT8 job; a failed report has one problem more, the worst modules with their lines."""
    failed = not report.passed and is_about_numbers(report)
    if table is None or not (failed or job.check.sensitivity):
        return report, None
    with stages("diagnose") as progress:
        found = diagnose(job, front.captured, front.check_source, table.amax, progress)
    if failed:
        half = "fp16" if job.precision.fp16_mode else None
        report = replace(report, problems=(*report.problems, blame(found, half)))
    return report, found


def timed(front: Front, engine: Engine, report: CheckReport, stages: Stages) -> tuple[CheckReport, tuple[float, ...]]:
    """The latency of an engine that was executed, its median among the report's figures as `latency_ms`."""
    if report.executed != "engine":
        return report, ()
    if engine.fallback:
        return replace(report, notes=(*report.notes, f"latency_ms: not measured: {HYBRID}")), ()
    with stages("speed"):
        found = latencies(front, engine)
    metric = Metric("latency_ms", front.loaded.outputs[0].name, statistics.median(found))
    return replace(report, metrics=(*report.metrics, metric)), found


def latencies(front: Front, engine: Engine) -> tuple[float, ...]:
    """Milliseconds of `ROUNDS` executions of the engine on one batch of check samples; a GPU must be here."""
    from trtpipe.bench_line import first_batch
    from trtpipe.pipeline import engine_settings
    from trtpipe.trt.timing import open_timed

    inputs = first_batch(front)
    runner: Any = open_timed(engine.data, cuda_graph=False, **engine_settings(engine))
    for _ in range(WARM_UP):
        runner.run(inputs)
    return tuple(runner.milliseconds(inputs, transfers=False) for _ in range(ROUNDS))

"""What a build measures besides its check: the modules with the largest INT8 error, and the engine's latency."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from calib.types import Array
from trtpipe.batching import Batching
from trtpipe.evaluation.bench import WARM_UP, Bench, BenchData
from trtpipe.evaluation.speedup import HYBRID_LATENCY, judge_speedup, measure_speedup
from trtpipe.job.sections import NOT_QUANTIZED
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.stages import compile_engine, narrow_of, quantize
from trtpipe.quantization.diagnose import blame, diagnose, failed_outputs, is_about_numbers
from trtpipe.quantization.ranking import Sensitivity
from trtpipe.runtime.executor import RunnerSettings, not_executed_here, settings_of
from trtpipe.trt.timing import TimedEngine
from trtpipe.values import CheckReport, Engine, Metric, TensorSpec

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job

#: Executions of the engine that are timed.
_ROUNDS = 200
#: Check samples that are read at a time.
_READ_AT_ONCE = 32


@dataclass(frozen=True)
class Evidence:
    """What was measured; what was not is None or empty.

    `latencies_ms` are of the engine alone, a batch of at most the `opt` size each, by the GPU's clock, data on the GPU.
    """

    sensitivity: Sensitivity | None = None
    latencies_ms: tuple[float, ...] = ()
    bench: Bench | None = None


def diagnosis_wanted(job: Job, report: CheckReport, seconds: float, *, always: bool) -> bool:
    """Whether sensitivities are to be measured: `always` of a quantized job, or where it failed over numbers."""
    return job.places_qdq and (always or (_failed(job, report) and seconds > 0))


def explained(
    job: Job,
    prepared: PreparedJob,
    table: CalibrationTable | None,
    report: CheckReport,
    stages: Stages,
    seconds: float,
    *,
    always: bool,
    tried: str = "",
) -> tuple[CheckReport, Sensitivity | None]:
    """The sensitivities, where they are wanted; a failed report has one problem more, the worst modules with their
    lines and what to do. `seconds` bounds what a failed check takes; those that are `always` wanted are measured in
    full. `tried`: what came of a search, as `blame` takes it."""
    if not diagnosis_wanted(job, report, seconds, always=always):
        return report, None
    with stages("diagnose") as progress:
        began = time.perf_counter()
        after, narrow = prepared.corrected(table), narrow_of(job, prepared, table)
        ranges = after.needed_ranges(job.precision)
        within = None if always else seconds - (time.perf_counter() - began)
        amax, samples = {} if table is None else table.amax, prepared.check_source
        diagnosis = diagnose(job, after.captured, samples, amax, progress, ranges, narrow, within, prepared.device)
    if _failed(job, report):
        said = blame(diagnosis, job.precision.half, failed_outputs(report), tried)
        report = replace(report, problems=(*report.problems, said))
    return report, diagnosis


def _failed(job: Job, report: CheckReport) -> bool:
    """Whether modules can be to blame: not where all that is missing is samples enough to be sure."""
    return not report.passed and is_about_numbers(report, job.check.limits)


def timed(
    prepared: PreparedJob, engine: Engine, report: CheckReport, stages: Stages
) -> tuple[CheckReport, tuple[float, ...]]:
    """The latency of an engine that was executed, its median among the report's figures as `latency_ms`."""
    if report.executed != "engine":
        return report, ()
    if engine.fallback:
        return replace(report, notes=(*report.notes, HYBRID_LATENCY)), ()
    with stages("speed"):
        times = latencies(prepared, engine)
    metric = Metric("latency_ms", prepared.outputs[0].name, statistics.median(times))
    return replace(report, metrics=(*report.metrics, metric)), times


def latencies(prepared: PreparedJob, engine: Engine) -> tuple[float, ...]:
    """Milliseconds of `_ROUNDS` executions of the engine on one batch of check samples; a GPU must be here."""
    inputs = first_batch(prepared)
    with TimedEngine(engine.data, **settings_of(engine)) as runner:
        for _ in range(WARM_UP):
            runner.run(inputs)
        return tuple(runner.milliseconds(inputs, transfers=False) for _ in range(_ROUNDS))


@dataclass(frozen=True)
class TimedPlan:
    """A serialized engine, how its runner is opened, and whether it is a hybrid module.

    `misfit` is why this machine does not execute it; empty where it does.
    """

    data: bytes
    settings: RunnerSettings
    hybrid: bool = False
    misfit: str = ""


def plan_of(engine: Engine) -> TimedPlan:
    """An engine that a build made, as it is timed here."""
    return TimedPlan(engine.data, settings_of(engine), bool(engine.fallback), not_executed_here(engine))


def first_batch(prepared: PreparedJob) -> Mapping[str, Array]:
    """The first check samples, as one batch [B, ...] of at most the `opt` size, by input."""
    arrays, labels = check_samples(prepared, prepared.inputs[0].at("opt")[0])
    data = batched(arrays, labels, prepared.inputs, prepared.outputs)
    return next(iter(data.batches()))


def check_samples(prepared: PreparedJob, most: int) -> tuple[dict[str, Array], Array | None]:
    """The first check samples, at most `most`, [S, ...] by input, and their labels, int64 [S]."""
    parts: dict[str, list[Array]] = {}
    source, first = prepared.check_source, prepared.first_check_batch
    batches: Iterator[Mapping[str, Array]] = (batch.arrays for batch in source.batches(_READ_AT_ONCE))
    if len(next(iter(first.values()))) >= min(most, source.sample_count):
        batches = iter([first])  # has them already
    for arrays in itertools.islice(batches, math.ceil(most / _READ_AT_ONCE)):
        for name, array in arrays.items():
            parts.setdefault(name, []).append(array)
    found = {n: np.concatenate(a)[:most] for n, a in parts.items()}
    labels = prepared.baseline.labels
    return found, None if labels is None else labels[: len(next(iter(found.values())))]


def batched(
    arrays: Mapping[str, Array],
    labels: Array | None,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    reference: Mapping[str, Array] | None = None,
    size: int | None = None,
) -> BenchData:
    """Batches of one size alone, so that nothing is compiled twice; what does not fill a batch is left out.

    Args:
        arrays: all samples, [S, ...] by input.
        labels: int64 [S], -1 where unknown, or None.
        inputs: of the model.
        outputs: likewise.
        reference: the baseline's rows of all samples, [S, ...] of any dtype by output, where they are known.
        size: of a batch; when absent the largest up to `opt` that the samples fill. The last of fewer samples is
            repeated.
    """
    total = len(next(iter(arrays.values())))
    low, opt = inputs[0].at("min")[0], inputs[0].at("opt")[0]
    batch = size or max(low, min(opt, total))
    order = np.arange(total // batch * batch) if total >= batch else np.minimum(np.arange(batch), total - 1)
    chosen = {n: np.ascontiguousarray(a[order]) for n, a in arrays.items()}

    def batches() -> Iterator[dict[str, Array]]:
        return ({n: a[k : k + batch] for n, a in chosen.items()} for k in range(0, len(order), batch))

    how = Batching(inputs, outputs, batch)
    rows = {n: a[: len(order) // batch] if n in how.whole else a[order] for n, a in (reference or {}).items()}
    return BenchData(batches, rows, None if labels is None else labels[order], how)


def judged_speed(job: Job, prepared: PreparedJob, engine: Engine, report: CheckReport, stages: Stages) -> CheckReport:
    """`report` with `check.limits.speedup_over_fp16_min` judged: the FP16 engine is built too, and both are timed."""
    limit = job.check.limits.speedup_over_fp16_min
    if limit is None:
        return report
    if report.executed != "engine":
        return judge_speedup(report, None, limit)
    keep = job.precision.keep.model_copy(update={"fp16": (), "bf16": ()})
    update = {**NOT_QUANTIZED, "fp16_mode": True, "bf16_mode": False, "keep": keep}
    by_fp16 = job.build.model_copy(update={"quantization": "explicit"})  # nothing is quantized
    plain = job.model_copy(update={"precision": job.precision.model_copy(update=update), "build": by_fp16})
    other = compile_engine(plain, prepared, quantize(plain, prepared, None, stages), stages)
    with (
        stages("speed"),
        TimedEngine(engine.data, **settings_of(engine)) as int8,
        TimedEngine(other.data, **settings_of(other)) as fp16,
    ):
        measured = measure_speedup(int8, fp16, first_batch(prepared))
    return judge_speedup(report, measured, limit)

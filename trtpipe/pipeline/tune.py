"""`trtpipe tune`: the stages from quantization on, run for many candidates from one calibration table."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from calib.algorithms import ALGORITHMS
from trtpipe.batching import joined
from trtpipe.bundle.manifest import UNRECORDED
from trtpipe.errors import InputError
from trtpipe.evaluation.check import measure
from trtpipe.evaluation.judgement import Judgement
from trtpipe.evaluation.speedup import HYBRID_LATENCY
from trtpipe.job.dump import job_text
from trtpipe.outputs import MOST_NAME
from trtpipe.packages import versions
from trtpipe.pipeline.cache.environment import BUILDERS, ROUTE_PACKAGES
from trtpipe.pipeline.controls import graph_and_control
from trtpipe.pipeline.judged import batching, compared
from trtpipe.pipeline.measure import latencies
from trtpipe.pipeline.own_modules import sources, with_own_modules
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.stages import (
    calibrate,
    compile_engine,
    narrow_of,
    prepare,
    quantize,
    recalibrated,
)
from trtpipe.quantization.diagnose import diagnose, first_samples
from trtpipe.quantization.search import EVALUATIONS, Candidate, Laboratory, Preview, Trial, Tuned, search, shortfall
from trtpipe.quantization.trials import Trials
from trtpipe.routes.onnx import lowered_for, onnx_of
from trtpipe.runtime.executor import not_executed_here
from trtpipe.trt import driver

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter
    from trtpipe.quantization.placements import Placement
    from trtpipe.quantization.quantize import Narrow
    from trtpipe.quantization.ranking import Sensitivity
    from trtpipe.values import Quantized

    #: An algorithm, and what is in INT8.
    _FittedTo = tuple[str, tuple[Placement, ...]]

#: What the name of a tuned job ends in.
TUNED = "-tuned"


@dataclass(frozen=True)
class TunedJob:
    """The best job found, how it was found, where the trials are, and the tables that were made for them, by
    algorithm."""

    job: Job
    tuned: Tuned
    trials: Path
    seconds: Mapping[str, float]
    tables: Mapping[_FittedTo, CalibrationTable | None]


@with_own_modules
def tune(job: Job, out: Path, reporter: Reporter, *, evaluations: int = EVALUATIONS) -> TunedJob:
    """The job with as little as possible out of its number formats that meets its limits, or comes closest, named
    `<name>-tuned`.

    Every trial is in `out/<name>.trials.json` as soon as it is done; another run over the same job and data takes them
    up. Trials run the Q/DQ graph that the engine is compiled from in ONNX Runtime, on all check samples.

    Args:
        job: has `check.limits`.
        out: a folder, made where it is missing.
        reporter: receives the stages.
        evaluations: the most trials, 1 and up.

    Raises:
        InputError: the job quantizes nothing, or sets no limit.
    """
    _require_tunable(job)
    stages = Stages(reporter)
    prepared = prepare(job, stages)
    table = calibrate(job, prepared, stages)
    tuned = tune_from(job, prepared, table, out, stages, evaluations=evaluations)
    return replace(tuned, job=renamed(tuned.job))


def tune_from(
    job: Job,
    prepared: PreparedJob,
    table: CalibrationTable | None,
    out: Path,
    stages: Stages,
    *,
    evaluations: int = EVALUATIONS,
) -> TunedJob:
    """`tune` of a job that a build has prepared and calibrated.

    Raises:
        InputError: the job quantizes nothing, or not by Q/DQ, or sets no limit.
    """
    _require_tunable(job)
    bench = _Bench(job, prepared, table, stages)
    trials = Trials.open(out / f"{job.name}.trials.json", bench.key())
    if _own_metrics(job):  # their sources are in the key, and what they read is not
        trials.require_repeats(bench.evaluate)
    with stages("tune") as progress:
        for note in trials.notes:
            progress.note(note)
        result = search(
            Laboratory(
                lambda c: trials.trial(c, bench.evaluate),
                bench.preview,
                lambda algorithm: trials.ranking(algorithm, bench.rank),
                bench.algorithms,
            ),
            evaluations,
        )
    return TunedJob(chosen(job, result.best.candidate), result, trials.path, stages.seconds, bench.tables)


def _require_tunable(job: Job) -> None:
    """Refuse, by an InputError, a job of which there is nothing to search."""
    if not job.precision.quantized:
        raise InputError("tune: the job turns on no mode that quantizes. Set precision.int8_mode or fp8_mode.")
    if not job.places_qdq:
        raise InputError(
            "tune: build.quantization must be explicit, where trtpipe places the Q/DQ (got implicit). Leave it out."
        )
    if not job.check.limits.given:
        raise InputError("tune: check.limits sets no accuracy budget. Add one, like accuracy_drop_max: 0.01.")


def _own_metrics(job: Job) -> tuple[str, ...]:
    """The callables of the job's metrics that are not trtpipe's."""
    return tuple(m.function for m in job.check.metrics.values() if not m.built_in)


def chosen(job: Job, candidate: Candidate) -> Job:
    """The job with a candidate's modules kept and its calibration algorithm."""
    keep, half = job.precision.keep, job.precision.half or "fp16"
    update = {"fp32": keep.fp32 + candidate.fp32, half: getattr(keep, half) + candidate.half}
    moved = dict.fromkeys(candidate.fp8, "fp8") | dict.fromkeys(candidate.int8, "int8")
    formats = {g: f for g, f in job.precision.formats.items() if g not in moved} | moved  # the last that fits decides
    precision = job.precision.model_copy(update={"keep": keep.model_copy(update=update), "formats": formats})
    calibration = job.calibration
    made = calibration is not None and calibration.table is not None  # by the table's own algorithm and percentile
    if calibration is not None and not made and candidate.algorithm != calibration.algorithm:
        defaults = {"percentile": type(calibration).model_fields["percentile"].default}
        calibration = calibration.model_copy(update={"algorithm": candidate.algorithm, **defaults})
    changed = job.model_copy(update={"precision": precision, "calibration": calibration})
    return changed if job.folder is None else changed.read_from(job.folder, job_text(changed, job.folder))


def fitted_to(job: Job, algorithm: str, prepared: PreparedJob) -> _FittedTo:
    """What the corrections of a job are fitted to: an algorithm's thresholds, and what is in INT8."""
    from trtpipe.quantization.placements import placements

    return algorithm, placements(job, prepared.captured)


def renamed(job: Job) -> Job:
    """The job as `<name>-tuned`, a long name cut to fit: it and the one that it was made of can be built from one
    folder, and in one night."""
    most = MOST_NAME - len(TUNED)
    name = job.name[:most] + TUNED
    changed = job.model_copy(update={"name": name if name != job.name else job.name[: most - 1] + TUNED})
    return changed if job.folder is None else changed.read_from(job.folder, job_text(changed, job.folder))


class _Bench:
    """The functions that the search calls, from the stages of a build; their results are kept."""

    def __init__(self, job: Job, prepared: PreparedJob, table: CalibrationTable | None, stages: Stages) -> None:
        self.job, self.stages, self.table = job, stages, table
        self._plain, self.prepared = prepared, prepared.corrected(table)
        self.first = _algorithm(job, table)
        self._recomputed: dict[str, Mapping[str, float]] = {}
        self.tables: dict[_FittedTo, CalibrationTable | None] = {fitted_to(job, self.first, prepared): table}
        counted = table is not None and table.histograms is not None
        counted = counted and (job.calibration is None or job.calibration.table is None)
        tried = {self.first, *([] if table is None else [table.algorithm])}
        others = [a for a in ALGORITHMS if a not in tried] if counted and job.precision.int8_mode else []
        self.algorithms = (self.first, *others)
        self._macs: dict[str, int] = {}
        self._judgement: Judgement | None = None  # of the samples of `preview`
        self._narrow = narrow_of(job, prepared, table)

    def calibrated(self, job: Job, algorithm: str) -> CalibrationTable | None:
        """The table that a build of the trial's job makes."""
        if self.table is None:
            return None
        if (known := fitted_to(job, algorithm, self._plain)) not in self.tables:
            self.tables[known] = recalibrated(job, self._plain, self.table, self.job, self.stages)
        return self.tables[known]

    def amax(self, algorithm: str) -> Mapping[str, float]:
        """INT8's thresholds under one algorithm, for previews: from the first one's histograms and corrections."""
        if self.table is None:
            return {}
        if algorithm == self.first:
            return self.table.amax
        if algorithm not in self._recomputed:
            self._recomputed[algorithm] = self.table.recomputed(algorithm).amax
        return self._recomputed[algorithm]

    def key(self) -> dict[str, str]:
        """Digests of all that a trial depends on."""
        job = self.job
        outputs = hashlib.sha256()
        for given in (self.prepared.baseline.outputs, *self.prepared.corner_outputs):
            for name, array in sorted(given.items()):
                outputs.update(f"{name} {array.shape}".encode() + array.tobytes())
        labels = self.prepared.baseline.labels
        return {
            "graph": self.prepared.captured.digest,
            "calibration": self.calibration(),
            "check data": self.prepared.check_source.digest,
            "baseline": outputs.hexdigest(),
            "labels": "" if labels is None else hashlib.sha256(labels.tobytes()).hexdigest(),
            "precision": job.precision.model_dump_json(),
            "corrections": "fitted to what each trial has in INT8",
            "limits": job.check.limits.model_dump_json(),
            "metrics": self.prepared.judgement.digest,
            "source of the metrics": sources(job, _own_metrics(job)),
            "target": job.build.target,
            **self._timed_by(),
        }

    def _timed_by(self) -> dict[str, str]:
        """What an engine's latency depends on besides; nothing where none is measured."""
        build, devices = self.job.build, driver.probe().devices
        if build.target == "onnxruntime" or not devices:
            return {"devices": ""}
        builder = versions((*BUILDERS[build.target], *ROUTE_PACKAGES[build.route]))
        return {
            "devices": ", ".join(d.name for d in devices),
            "build": build.model_dump_json(exclude=set(UNRECORDED)),
            "builder": ", ".join(f"{name} {version}" for name, version in builder.items()),
        }

    def calibration(self) -> str:
        """The digest of the table; without one, that of the samples that 4-bit weights are fitted to."""
        if self.table is not None:
            return self.table.digest
        return self.prepared.calibration_samples.digest if self.prepared.calibrates else ""

    def narrow(self, job: Job) -> Narrow | None:
        """What a trial's FP8 and 4 bits are quantized by; None without them."""
        from trtpipe.quantization.policy import modes_of

        return None if self._narrow is None else replace(self._narrow, modes=modes_of(job.precision))

    def rank(self, algorithm: str) -> Sensitivity:
        """Sensitivities over the first check samples."""
        with self.stages("sensitivity") as progress:
            return diagnose(
                self.job,
                self.prepared.captured,
                self.prepared.check_source,
                self.amax(algorithm),
                progress,
                self.prepared.needed_ranges(self.job.precision),
                self._narrow,
                device=self.prepared.device,
            )

    def evaluate(self, candidate: Candidate) -> Trial:
        """One candidate down the line to its Q/DQ graph, and that against all check samples and at the declared sizes,
        with the control; where a build refuses it, what that says."""
        job = chosen(self.job, candidate)
        table = self.calibrated(job, candidate.algorithm)
        try:
            quantized = quantize(job, self._plain, table, self.stages)
        except InputError as error:  # a build of the trial's job ends with it
            return Trial(candidate, False, math.inf, (), (str(error),), 0.0, None)
        prepared = self._plain.corrected(table)
        with self.stages(f"trial: {described(candidate)}") as progress:
            model = lowered_for(onnx_of(job, quantized), job.build.target)
            with graph_and_control(model, job.build.target) as (runner, damaged):
                report = compared(job, prepared, runner, "graph", damaged, progress).report
        missed = shortfall(report.metrics, job.check.limits)
        share = self.int8_share(job)
        size, latency = len(model.data), self.latency_ms(job, quantized)
        return Trial(candidate, report.passed, missed, report.metrics, report.problems, share, size, latency)

    def latency_ms(self, job: Job, quantized: Quantized) -> float | None:
        """Median of the engine's executions; None for a hybrid, and where the engine is not executed here."""
        if job.build.target == "onnxruntime" or not driver.probe().devices:
            return None
        engine = compile_engine(job, self.prepared, quantized, self.stages)
        if not_executed_here(engine):
            return None
        if engine.fallback:
            self.stages.note(HYBRID_LATENCY)
            return None
        return statistics.median(latencies(self.prepared, engine))

    def int8_share(self, job: Job) -> float:
        """Share of the network's multiply-accumulates that compute in INT8 or another number format."""
        from trtpipe.model.sites import of_product
        from trtpipe.quantization.partial import Partial
        from trtpipe.quantization.payoff import keep_of
        from trtpipe.quantization.quantize import plan_sites

        captured = self.prepared.captured
        if not self._macs:
            sample = next(first_samples(self.prepared.check_source, batching(self.job, self.prepared), 1))
            machine = Partial(captured.graph)
            machine.finish(0, machine.inputs(sample.inputs), {})
            self._macs.update({node.name: count for node, count in machine.macs_of.items()})
        keep, narrow = keep_of(job, self.prepared.captured), self.narrow(job)
        plan = plan_sites(
            captured, int8=job.precision.int8_mode, keep=keep, modes=None if narrow is None else narrow.modes
        )
        sites = (*plan.int8, *(n.site for n in plan.narrow))
        inside = sum(self._macs[name] for name in {s.consumer.name for s in sites if of_product(s)})
        return inside / max(1, sum(self._macs.values()))

    def preview(self, candidate: Candidate) -> Preview:
        """The first samples through the graph with the candidate's tensors rounded; FP16 is not imitated."""
        from trtpipe.quantization.partial import Partial
        from trtpipe.quantization.payoff import keep_of
        from trtpipe.quantization.precision import half_dtype, scale_types
        from trtpipe.quantization.quantize import plan_sites
        from trtpipe.quantization.sensitivity import planned

        job, prepared = chosen(self.job, candidate), self.prepared
        graph, precision = prepared.captured.graph, job.precision
        narrow, keep = self.narrow(job), keep_of(job, prepared.captured)
        modes = None if narrow is None else narrow.modes
        plan = plan_sites(prepared.captured, int8=precision.int8_mode, keep=keep, modes=modes)
        half = half_dtype(precision.half)
        types = scale_types(graph, half, keep, prepared.needed_ranges(precision))
        changed = planned(prepared.captured, plan, self.amax(candidate.algorithm), types, narrow)
        machine, parts, how = Partial(graph), [], batching(job, prepared)
        count = 0
        for sample in first_samples(prepared.check_source, how):
            outputs, _ = machine.finish(0, machine.inputs(sample.inputs), changed)
            arrays = {s.name: o.numpy() for s, o in zip(how.outputs, outputs, strict=True)}
            parts.append(how.rows(arrays, sample.count))
            count += sample.count
        labels = prepared.baseline.labels
        reference = how.first(prepared.baseline.outputs, count)
        if self._judgement is None:
            self._judgement = prepared.judgement.first(count, reference)
        metrics, problems = measure(
            reference,
            joined(parts),
            None if labels is None else labels[:count],
            job.check.limits,
            how.unranked,
            self._judgement,
        )
        ratios = [m.value for m in metrics if m.name == "sqnr_db"]
        return Preview(
            float("inf") if problems else shortfall(metrics, job.check.limits), min(ratios, default=-float("inf"))
        )


def _algorithm(job: Job, table: CalibrationTable | None) -> str:
    """By what thresholds are chosen, as the job calls it: `auto` may have found the exact maxima to be better. With
    weights alone in 4 bits there are none."""
    if job.calibration is not None and (table is None or job.calibration.table is None):
        return job.calibration.algorithm
    return "no thresholds" if table is None else table.algorithm


def described(candidate: Candidate) -> str:
    """A candidate in a few words."""
    kept = len(candidate.kept)
    return f"{candidate.algorithm}, {kept or 'nothing'} kept"

"""The stages of a prepared job: calibrate, quantize, lower, compile, check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from calib.folders import unread
from calib.table import CalibrationTable, given_table
from trtpipe.evaluation.check import Damaged, Runner
from trtpipe.model.products import MATRIX_PRODUCTS
from trtpipe.pipeline.as_wanted import require_products
from trtpipe.pipeline.beside import Watched, Watching
from trtpipe.pipeline.codecs import COMPILED, LOWERED, TABLE
from trtpipe.pipeline.controls import control, departures, graph_and_control
from trtpipe.pipeline.judged import Judged, check_data, compared
from trtpipe.pipeline.lowered import Compiled, Lowered
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.results import Results, Uncached
from trtpipe.pipeline.tables import (
    digests_of,
    observe,
    older_digests,
    read_table,
    require_transform,
    table_notes,
    verdict_warnings,
)
from trtpipe.progress import EndedEarly
from trtpipe.routes.native import native_calibration
from trtpipe.routes.onnx import compiler, onnx_of
from trtpipe.routes.registry import route
from trtpipe.runtime.device import this_device
from trtpipe.runtime.executor import activation_memory, graph_notes, open_engine
from trtpipe.trt.implicit import NativeCalibration
from trtpipe.values import Engine, Executed, LayerPrecision, LoadedModel, OnnxModel, Quantized

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.progress import Progress
    from trtpipe.quantization.quantize import Narrow


#: Makes the calibration table, None where nothing is calibrated, when it is needed.
Table = Callable[[], CalibrationTable | None]


def prepare(job: Job, stages: Stages, results: Results | None = None) -> PreparedJob:
    """The job with its model, baseline and graph; what `results` holds is loaded only when a later stage needs it."""
    prepared = PreparedJob(job, stages, results)
    _ = prepared.judgement
    if results is None:
        _ = prepared.captured
    return prepared


def calibrate(job: Job, prepared: PreparedJob, stages: Stages) -> CalibrationTable | None:
    """The job's `calibration_table`.

    None when nothing is quantized, or TensorRT is to calibrate by itself (build.quantization: implicit).
    """
    if not job.precision.calibrated:
        return None
    if job.calibration is None:  # read off the graph, at no cost
        return calibration_table(job, prepared, stages)
    if job.build.quantization == "implicit":
        return None
    return prepared.results.on_disk(TABLE, lambda: calibration_table(job, prepared, stages))


def calibration_table(job: Job, prepared: PreparedJob, stages: Stages) -> CalibrationTable:
    """The table read from the file that `calibration` names, or made from its samples; without that section the scales
    that a quantized model came with.

    Raises:
        InputError: the job has no calibration section and quantizes nothing.
    """
    from trtpipe.quantization.given import given_amax

    own = job.calibration is None and job.precision.calibrated
    data = None if own else job.require_calibration()
    captured = prepared.captured
    digests = digests_of(captured)
    if data is None:
        return given_table(given_amax(captured), digests)
    with stages("calibrate") as progress:
        if data.table is not None:
            table = read_table(data, digests, older_digests(captured, prepared.loaded.weights_digest))
            require_transform(job, table)
            return table
        table = observe(job, data, captured, prepared.calibration_samples, digests, progress, prepared.device)
        for note in table_notes(job, table):
            progress.note(note)
        return table


def recalibrated(job: Job, prepared: PreparedJob, table: CalibrationTable, of: Job, stages: Stages) -> CalibrationTable:
    """The table of a job that has another algorithm, or other operations in INT8, than `of`, whose `table` is of the
    same data; a table that was given stays.

    Corrections make up for the thresholds that they were fitted to, and for the noise of what was in INT8, so that they
    are fitted again, as a build of the job does; without any, the histograms of `table` are enough.
    """
    from trtpipe.quantization.placements import placements

    data = job.calibration
    if data is None or data.table is not None:
        return table
    same = data.algorithm == table.algorithm
    if table.corrections is None or not table.corrections.steps:
        return table if same else table.recomputed(data.algorithm)
    if same and placements(job, prepared.captured) == placements(of, prepared.captured):
        return table
    return calibration_table(job, prepared, stages)


def quantize(job: Job, prepared: PreparedJob, table: CalibrationTable | None, stages: Stages) -> Quantized:
    """The captured graph in the job's precisions."""
    from trtpipe.quantization import quantize as stage
    from trtpipe.quantization.payoff import keep_of
    from trtpipe.quantization.precision import half_dtype

    precision, prepared = job.precision, prepared.corrected(table)
    captured = prepared.captured
    with stages("quantize"):
        quantized = stage.quantize(
            captured,
            int8=job.places_int8,
            half=half_dtype(precision.half),
            keep=keep_of(job, prepared.captured),
            amax={} if table is None else table.amax,
            ranges=prepared.needed_ranges(precision),
            narrow=narrow_of(job, prepared, table),
        )
        _require_compilable(job, quantized.layers)
        return quantized


def _require_compilable(job: Job, layers: Iterable[LayerPrecision]) -> None:
    """As `require_products`; the GPUs that a job names are no part of a graph that was kept."""
    require_products(job, (x.module for x in layers if x.op in MATRIX_PRODUCTS and x.precision == "fp32"))


def _fits_weights(job: Job, prepared: PreparedJob) -> bool:
    """Whether weights of 4 bits are fitted to the first calibration samples: where the job names samples."""
    return prepared.calibrates and job.precision.four_bits


def narrow_of(job: Job, prepared: PreparedJob, table: CalibrationTable | None) -> Narrow | None:
    """What FP8 and 4 bits are quantized by, from the table that INT8 uses; None for a job without them."""
    from trtpipe.quantization.formats import maxima
    from trtpipe.quantization.narrow import Statistics
    from trtpipe.quantization.policy import modes_of
    from trtpipe.quantization.quantize import Narrow

    modes = modes_of(job.precision)
    if not modes.narrow:
        return None
    moments = prepared.corrected(table).moments if _fits_weights(job, prepared) else {}
    return Narrow(modes, Statistics({} if table is None else maxima(table), moments))


def lower(job: Job, prepared: PreparedJob, table: Table, stages: Stages, results: Results | None = None) -> Lowered:
    """The graph in the job's precisions as ONNX, taken from `results` or made of `table()`."""

    def make() -> Lowered:
        made = table()
        quantized = quantize(job, prepared, made, stages)
        lowered = lowered_of(prepared, quantized, made, None)
        with stages("export"):
            graph = onnx_of(job, quantized)
            del quantized  # its program holds the graph's weights once more
        return replace(lowered, graph=graph)

    lowered = (results or Uncached()).on_disk(LOWERED, make)
    _require_compilable(job, lowered.layers)
    return lowered


def lowered_of(
    prepared: PreparedJob, quantized: Quantized, table: CalibrationTable | None, graph: OnnxModel | None
) -> Lowered:
    """The data of a quantized graph."""
    return Lowered(
        inputs=prepared.inputs,
        outputs=prepared.captured.outputs,
        weights_digest=prepared.loaded.weights_digest,
        graph_digest=prepared.captured.digest,
        model_notes=(*prepared.loaded.notes, *prepared.captured.notes),
        layers=quantized.layers,
        notes=quantized.notes,
        unmet=quantized.unmet,
        table=table,
        shared_scales={} if table is None else _shared_scales(prepared, quantized),
        graph=graph,
    )


def _shared_scales(prepared: PreparedJob, quantized: Quantized) -> dict[str, str]:
    """A sum, a concat or a pool that does not read INT8 in this job shares no scale in it."""
    from trtpipe.model.sites import of_product

    sites = (s for s in prepared.captured.sites if s.axis is None)
    return {s.key: s.group for s in sites if of_product(s) or s.group in quantized.scales}


def build_engine(
    job: Job,
    prepared: PreparedJob,
    table: Table,
    stages: Stages,
    results: Results | None = None,
    meanwhile: Callable[[Lowered, Watched], None] | None = None,
) -> Compiled:
    """The engine by the job's route with what it was compiled from, taken from `results` or made of `table()`.

    `meanwhile` is called where the engine is compiled by another process and nothing here will execute it: with what it
    is compiled from, and with what makes a Progress that ends when compiling fails.
    """
    kept = results or Uncached()

    def through_onnx() -> Compiled:
        with compiler(job, native_of(job, prepared)) as compiling:
            lowered = lower(job, prepared, table, stages, kept)
            assert lowered.graph is not None
            compiling.start(lowered.graph)
            failed: BaseException | None = None
            if meanwhile is not None and compiling.beside and this_device().compute_capability is None:
                try:
                    meanwhile(lowered, partial(Watching, compiling))
                except EndedEarly as ended:
                    failed = ended.__cause__
            with stages("compile") as progress:
                if failed is not None:
                    raise failed
                return Compiled(lowered, compiling.finish(progress))

    def directly() -> Compiled:
        made = table()
        quantized = quantize(job, prepared, made, stages)
        engine = compile_engine(job, prepared, quantized, stages)
        return Compiled(lowered_of(prepared, quantized, made, engine.graph), engine)

    if job.build.route != "onnx":
        return kept.on_disk(COMPILED, directly)
    if job.build.target == "onnxruntime":  # the graph is the engine
        return through_onnx()
    return kept.on_disk(COMPILED, through_onnx)


def compile_engine(job: Job, prepared: PreparedJob, quantized: Quantized, stages: Stages) -> Engine:
    """The engine, by the job's route."""
    calibration = native_of(job, prepared)
    with stages("compile") as progress:
        engine: Engine = route(job.build.route)(job, prepared.loaded, quantized, progress, calibration)
    return engine


def native_of(job: Job, prepared: PreparedJob) -> NativeCalibration | None:
    """What TensorRT itself calibrates by, with build.quantization implicit; None where it does not."""
    implicit = job.precision.int8_mode and job.build.quantization == "implicit"
    return native_calibration(job, prepared.calibration_samples) if implicit else None


def check_graph(
    job: Job,
    prepared: PreparedJob,
    lowered: Lowered,
    stages: Stages,
    *,
    require: Executed = "graph",
    watched: Watched = lambda progress: progress,
) -> Judged:
    """The graph in the place of its engine, which no machine like this one executes; arguments as of `judged`.

    `watched` wraps the stage's progress.
    """
    graph, target = lowered.graph, job.build.target
    assert graph is not None
    with stages("check") as progress, graph_and_control(graph, target) as (runner, damaged):
        return judged(job, prepared, lowered, runner, "graph", damaged, watched(progress), require=require)


def check(job: Job, prepared: PreparedJob, compiled: Compiled, stages: Stages) -> Judged:
    """The engine (or its graph, where no GPU can run it) against the baseline, with a control.

    Args:
        job: its limits.
        prepared: the check samples and the baseline's outputs on them.
        compiled: the engine and what it was compiled from; its table's doubtful thresholds become warnings.
        stages: receives the stage.
    """
    engine, lowered = compiled.engine, compiled.lowered

    # Made again: kept, it would hold the weights once more while they compile.
    def made_of() -> tuple[LoadedModel, Quantized]:
        return prepared.loaded, quantize(job, prepared, lowered.table, stages)

    with stages("check") as progress:
        runner, executed = open_engine(engine)
        with runner:
            damaged = control(job, engine, executed, made_of, progress, native_of(job, prepared))
            require = job.check.require
            found = judged(job, prepared, lowered, runner, executed, damaged, progress, require=require)
            memory = activation_memory(runner)
        written = () if engine.graph is None else engine.graph.notes
        notes = (*found.report.notes, *written, *graph_notes(engine, executed))
        report = replace(found.report, notes=notes)
        if engine.target == "onnxruntime" and engine.graph is not None and job.places_int8:
            own = departures(engine.graph, check_data(job, prepared), report.golden)
            report = replace(report, warnings=(*report.warnings, *own))
        return replace(found, report=report, device_memory_bytes=memory)


def judged(
    job: Job,
    prepared: PreparedJob,
    lowered: Lowered,
    runner: Runner,
    executed: Executed,
    damaged: Damaged,
    progress: Progress,
    *,
    require: Executed = "graph",
) -> Judged:
    """What `runner` computes, against the baseline on the check samples and at the sizes that the job declares.

    Args:
        job: its limits.
        prepared: the samples, the baseline and the model's outputs at the declared sizes.
        lowered: what `runner` executes, whose table may give warnings.
        runner: is open.
        executed: whether that is the engine or its graph.
        damaged: the control, which has to fail.
        progress: receives the samples.
        require: "engine": a graph is not enough.
    """
    doubts = verdict_warnings(
        lowered, prepared.check_samples, prepared.first_digests if _fits_weights(job, prepared) else ()
    )
    found = compared(job, prepared, runner, executed, damaged, progress, require=require, warnings=doubts)
    unmet = (*job.unused(), *lowered.model_notes, *lowered.unmet, *_unfitted(job, prepared))
    beside = (*prepared.baseline.notes, *unread_notes(job, "calibration", "check"))
    return replace(found, report=replace(found.report, notes=(*unmet, *beside, *found.report.notes)))


def _unfitted(job: Job, prepared: PreparedJob) -> tuple[str, ...]:
    """A note on weights of 4 bits that nothing could be fitted to."""
    if prepared.calibrates or not job.precision.four_bits:
        return ()
    return (
        "weights in 4 bits are rounded to the nearest: the job names no calibration samples to fit them to, and a "
        "table holds none",
    )


def unread_notes(job: Job, *names: str) -> tuple[str, ...]:
    """Notes on pictures in the folders of images of the sections `names` that are none of their samples."""
    sections = {name: getattr(job, name) for name in names}
    folders = {f"{name}.images": data.images for name, data in sections.items() if data is not None and data.images}
    return tuple(note for where, folder in folders.items() for note in unread(where, folder, classes=True))

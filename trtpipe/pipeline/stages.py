"""The stages of a job, from its model to the check of its engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from calib.audit import doubtful_thresholds
from calib.data import overlap
from calib.errors import CalibCancelled, CalibError
from calib.table import CalibrationTable
from trtpipe.batching import Array, Batching
from trtpipe.errors import Cancelled, InputError, TrtpipeError
from trtpipe.evaluation.check import CheckData, Damaged, Executor, check_engine
from trtpipe.evaluation.control import damaged_copy, damaged_program
from trtpipe.model.baseline import record_baseline
from trtpipe.model.capture import capture
from trtpipe.model.data import open_calibration, open_check
from trtpipe.model.load import load_model
from trtpipe.routes.onnx import compile_graph, to_onnx
from trtpipe.routes.registry import route
from trtpipe.runtime.hybrid import HybridRunner
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt import driver
from trtpipe.trt.runtime import EngineRunner
from trtpipe.values import Baseline, Captured, CheckReport, Engine, Executed, LoadedModel, OnnxModel, Quantized, Target

if TYPE_CHECKING:
    import torch

    from calib.data import Source
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Progress, Reporter
    from trtpipe.quantization.quantize import Narrow

#: Samples whose ranges decide what FP16 can hold.
RANGE_SAMPLES = 64


@dataclass(frozen=True)
class Front:
    """What every precision of a job shares: the model, its baseline on the check data, and the captured graph."""

    loaded: LoadedModel
    check_source: Source
    baseline: Baseline
    captured: Captured


class Stages:
    """Names the stages of one build to a Reporter and keeps how long each took, in seconds."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[Progress]:
        """One stage; calib's errors become the user's."""
        began = time.perf_counter()
        with self._reporter.stage(name):
            try:
                yield self._reporter
            except CalibCancelled as error:
                raise Cancelled(str(error)) from error
            except CalibError as error:
                raise InputError(f"{name}: {error}") from error
        self.seconds[name] = time.perf_counter() - began

    def note_of(self, message: str) -> Callable[[], None]:
        """What says `message` to the reader of the log when it is called."""
        return lambda: self._reporter.note(message)


def prepare(job: Job, stages: Stages) -> Front:
    """The model, its baseline and its graph."""
    with stages("model"):
        loaded = load_model(job, job.folder)
    source, baseline = record(job, loaded, stages)
    with stages("capture"):
        captured = capture(loaded)
    return Front(replace(loaded, outputs=captured.outputs), source, baseline, captured)


def record(job: Job, loaded: LoadedModel, stages: Stages) -> tuple[Source, Baseline]:
    """The check samples, and what the model answers on them as TorchScript."""
    with stages("baseline") as progress:
        source = open_check(job)
        baseline = record_baseline(
            loaded,
            source.batches(job.batch_size(job.check)),
            source.sample_count,
            batch_size=job.batch_size(job.check),
            kind=job.model.baseline,
            torchscript=job.model.torchscript,
            progress=progress,
        )
    return source, baseline


def quantizes(job: Job) -> bool:
    """Whether INT8 Q/DQ are placed: with implicit quantization TensorRT calibrates and quantizes by itself."""
    return job.precision.int8_mode and job.build.quantization == "explicit"


def calibrate(job: Job, front: Front, stages: Stages) -> CalibrationTable | None:
    """The job's calibration table, made now or read from `calibration.table`; None when nothing is quantized, or
    TensorRT is to calibrate by itself (build.quantization: implicit)."""
    if not job.precision.calibrated or job.calibration is None:
        return None
    if job.build.quantization == "implicit":
        if job.calibration.table is not None:
            raise InputError(
                "calibration.table: must be left out with build.quantization implicit, where TensorRT names tensors "
                f"(got {job.calibration.table}). Give samples, or use explicit."
            )
        return None
    from trtpipe.quantization import quantize as stage

    digests = {"weights": front.loaded.weights_digest, "graph": front.captured.digest}
    with stages("calibrate") as progress:
        if job.calibration.table is not None:
            table = CalibrationTable.load(job.calibration.table)
            table.require(job.calibration.table, digests, job.calibration.algorithm, job.calibration.percentile)
            return table
        source = open_calibration(job)
        for note in overlap_notes(source, front.check_source):
            progress.note(note)
        return stage.calibrate(
            front.captured,
            source,
            batch_size=job.batch_size(job.calibration),
            algorithm=job.calibration.algorithm,
            percentile=job.calibration.percentile,
            digests=digests,
            progress=progress,
        )


def overlap_notes(calibration: Source, check: Source) -> tuple[str, ...]:
    """A warning when samples stand in both sets: the check then flatters the engine."""
    both = overlap(calibration, check)
    if not both:
        return ()
    return (
        f"{len(both)} of {check.sample_count} check samples were calibrated on too (first: {both[0]}); "
        "the check is the weaker for it",
    )


def quantize(job: Job, front: Front, table: CalibrationTable | None, stages: Stages) -> Quantized:
    """The captured graph in the job's precisions."""
    from trtpipe.quantization import quantize as stage
    from trtpipe.quantization.payoff import keep_of
    from trtpipe.quantization.precision import half_dtype

    precision = job.precision
    with stages("quantize"):
        ranges = observe_ranges(job, front) if precision.fp16_mode else {}
        return stage.quantize(
            front.captured,
            int8=quantizes(job),
            half=half_dtype(precision.fp16_mode, precision.bf16_mode),
            keep=keep_of(job, front.captured),
            amax={} if table is None else table.amax,
            ranges=ranges,
            narrow=narrow_of(job, front, table),
        )


def narrow_of(job: Job, front: Front, table: CalibrationTable | None) -> Narrow | None:
    """What FP8 and 4 bits are quantized by, from the table that INT8 uses; None for a job without them.

    The weights of 4 bits are fitted to the first calibration samples, where the job names samples.
    """
    from trtpipe.quantization.formats import maxima
    from trtpipe.quantization.importance import input_importance
    from trtpipe.quantization.narrow import Statistics
    from trtpipe.quantization.policy import modes_of
    from trtpipe.quantization.quantize import Narrow

    modes = modes_of(job.precision)
    if not modes.narrow:
        return None
    importance = {}
    if (modes.weights or "nvfp4" in modes.on) and calibration_samples(job):
        importance = input_importance(front.captured, first_batches(job, front))
    return Narrow(modes, Statistics({} if table is None else maxima(table), importance))


def observe_ranges(job: Job, front: Front) -> dict[str, float]:
    """Largest |x| of every tensor over the first calibration samples, or check samples where there are none."""
    from trtpipe.quantization import precision

    return precision.observe_ranges(front.captured, first_batches(job, front))


def calibration_samples(job: Job) -> bool:
    """Whether the job names samples to calibrate on, and not a table alone."""
    data = job.calibration
    return data is not None and bool(data.images or data.arrays or data.factory)


def first_batches(job: Job, front: Front) -> Iterator[list[torch.Tensor]]:
    """Inputs in order of the first calibration samples, or check samples where there are none."""
    import torch

    calibrates = calibration_samples(job)
    source = open_calibration(job) if calibrates else front.check_source
    size = job.batch_size(job.calibration if job.calibration is not None and calibrates else job.check)
    names = [s.name for s in front.loaded.inputs]
    for batch in itertools.islice(_pieces(source, front, size), max(1, RANGE_SAMPLES // size)):
        yield [torch.from_numpy(batch[n]) for n in names]


def _pieces(source: Source, front: Front, size: int) -> Iterator[Mapping[str, Any]]:
    how = Batching(front.loaded.inputs, front.captured.outputs, size)
    for batch in source.batches(size):
        for piece, _ in how.pieces(batch.arrays):
            yield piece


def compile_engine(job: Job, loaded: LoadedModel, quantized: Quantized, stages: Stages) -> Engine:
    """The engine, by the job's route."""
    with stages("compile") as progress:
        engine: Engine = route(job.build.route)(job, loaded, quantized, progress)
    return engine


def check(
    job: Job,
    front: Front,
    engine: Engine,
    stages: Stages,
    *,
    made_of: Callable[[], tuple[LoadedModel, Quantized]],
    table: CalibrationTable | None = None,
    keep: Callable[[Mapping[str, Array]], None] | None = None,
) -> CheckReport:
    """The engine (or its graph, where no GPU can run it) against the baseline, with a control.

    Args:
        job: its limits.
        front: the check samples and the baseline's outputs on them.
        engine: what was built.
        stages: is told.
        made_of: the model and the program that the engine was compiled from, asked for where only they can be damaged.
        table: its doubtful thresholds become warnings of the report.
        keep: is given the outputs, as `check_engine` has it.
    """
    with stages("check") as progress:
        runner, executed = open_runner(engine)
        with runner:
            return check_engine(
                runner,
                executed,
                check_data(job, front),
                job.check.limits,
                damaged=control(job, engine, executed, made_of, progress),
                require=job.check.require,
                keep=keep,
                warnings=() if table is None else doubtful_thresholds(table.audit),
                progress=progress,
            )


def open_runner(engine: Engine) -> tuple[EngineRunner | HybridRunner | OrtRunner, Executed]:
    """What executes the engine here, and whether that is the engine or its graph."""
    if engine.target != "onnxruntime" and driver.probe().devices:
        settings = engine_settings(engine)
        if engine.fallback:
            return HybridRunner(engine.data, version_compatible=settings["version_compatible"]), "engine"
        return EngineRunner(engine.data, **settings), "engine"
    if engine.graph is None:
        raise InputError(
            f"check: a {engine.target} engine of this route has no graph to execute (got no GPU either). "
            "Build where its GPU is, or take build.route: onnx."
        )
    return OrtRunner(engine.graph.data, as_written=engine.target != "onnxruntime"), "graph"


def engine_settings(engine: Engine) -> dict[str, Any]:
    """What an `EngineRunner` has to know of the engine beside its bytes."""
    stripped = engine.graph.data if engine.graph is not None and engine.options.get("strip_plan") else None
    return {"version_compatible": bool(engine.options.get("version_compatible")), "refit": stripped}


def control(
    job: Job,
    engine: Engine,
    executed: Executed,
    made_of: Callable[[], tuple[LoadedModel, Quantized]],
    progress: Progress,
) -> Damaged:
    """The control, executed as the check is: where an engine is, an engine is built of the damaged copy by the same
    route, and where that cannot be built its graph stands in, with a note."""
    if engine.graph is not None and (job.build.route == "onnx" or executed == "graph"):
        copy, tensor, how = damaged_copy(engine.graph)
        if executed == "graph":
            return graph_control(copy, tensor, how, engine.target)
        return engine_control(partial(compile_graph, _uncached(job), copy, progress), copy, tensor, how)
    program, loaded, tensor, how = damaged_program(*made_of())
    graph = None if engine.graph is None else to_onnx(program)
    build = partial(route(job.build.route), _uncached(job), loaded, program, progress)
    return engine_control(build, graph, tensor, how)


def _uncached(job: Job) -> Job:
    """The job without its file of TensorRT's calibration, which is not the damaged copy's."""
    return job.model_copy(update={"build": job.build.model_copy(update={"calibration_cache": None})})


def engine_control(build: Callable[[], Engine], graph: OnnxModel | None, tensor: str, how: str) -> Damaged:
    """A damaged copy as an engine; `graph` is what stands in for an engine that cannot be built."""

    @contextmanager
    def opened() -> Iterator[Executor]:
        try:
            engine = build()
        except TrtpipeError as error:
            if graph is None:
                raise
            why = f"no engine could be built of the control: {str(error).splitlines()[0]}"
            with OrtRunner(graph.data, as_written=True) as stand_in:
                yield Executor(stand_in, "graph", why)
            return
        runner, executed = open_runner(engine)
        with runner:
            yield Executor(runner, executed)

    return Damaged(opened, tensor, how)


def graph_control(graph: OnnxModel, tensor: str, how: str, target: Target) -> Damaged:
    """A damaged graph, executed as `open_runner` executes the graph of an engine of `target`."""

    @contextmanager
    def opened() -> Iterator[Executor]:
        with OrtRunner(graph.data, as_written=target != "onnxruntime") as runner:
            yield Executor(runner, "graph")

    return Damaged(opened, tensor, how)


def batching(job: Job, front: Front) -> Batching:
    """How the check samples are run."""
    return Batching(front.loaded.inputs, front.captured.outputs, job.batch_size(job.check))


def check_data(job: Job, front: Front) -> CheckData:
    """The check samples with the baseline's outputs on them."""
    size = job.batch_size(job.check)

    def batches() -> Iterator[Mapping[str, Array]]:
        return (b.arrays for b in front.check_source.batches(size))

    baseline = front.baseline
    return CheckData(batches, baseline.outputs, baseline.labels, len(baseline.ids), batching(job, front))

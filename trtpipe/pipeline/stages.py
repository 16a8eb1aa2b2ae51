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
from trtpipe.errors import BuildError, Cancelled, InputError, MissingError
from trtpipe.evaluation.check import CheckData, Damaged, Executor, check_engine
from trtpipe.evaluation.control import damaged_copy, damaged_program
from trtpipe.model.baseline import record_baseline
from trtpipe.model.capture import capture
from trtpipe.model.data import open_calibration, open_check, with_labels
from trtpipe.model.load import load_model
from trtpipe.routes.onnx import compile_graph, to_onnx
from trtpipe.routes.registry import route
from trtpipe.runtime.executor import graph_as_checked, graph_notes, open_engine
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import Baseline, Captured, CheckReport, Engine, Executed, LoadedModel, OnnxModel, Quantized, Target

if TYPE_CHECKING:
    import torch

    from calib.data import Source
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.job.sections import Calibration
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
        source, notes = with_labels(job, loaded, open_check(job))
        for note in notes:
            progress.note(note)
        baseline = record_baseline(
            loaded,
            source.batches(job.batch_size(job.check)),
            source.sample_count,
            batch_size=job.batch_size(job.check),
            kind=job.model.baseline,
            torchscript=job.model.torchscript,
            progress=progress,
        )
    return source, replace(baseline, notes=(*baseline.notes, *notes))


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
    digests = {"weights": front.loaded.weights_digest, "graph": front.captured.digest}
    with stages("calibrate") as progress:
        if job.calibration.table is not None:
            return read_table(job.calibration, digests)
        source = open_calibration(job)
        for note in overlap_notes(source, front.check_source):
            progress.note(note)
        return observe(job, job.calibration, front.captured, source, digests, progress)


def read_table(calibration: Calibration, digests: Mapping[str, str]) -> CalibrationTable:
    """The table that `calibration.table` names; algorithm auto and corrections true take what it holds.

    Raises:
        calib.CalibError: it belongs to another model, or was made otherwise than the job says.
    """
    assert calibration.table is not None
    table = CalibrationTable.load(calibration.table)
    algorithm = table.algorithm if calibration.algorithm == "auto" else calibration.algorithm
    percentile = table.percentile if calibration.algorithm == "auto" else calibration.percentile
    table.require(calibration.table, digests, algorithm, percentile)
    if table.corrections is not None and calibration.corrections is False:
        raise CalibError(
            f"{calibration.table}: must be without corrections for calibration.corrections: false (got "
            f"{len(table.corrections.steps)} steps). Leave the key out, or calibrate again."
        )
    return table


def observe(
    job: Job,
    calibration: Calibration,
    captured: Captured,
    source: Source,
    digests: Mapping[str, str],
    progress: Progress,
) -> CalibrationTable:
    """The table of one pass over the samples, and with the corrections that the job asks for."""
    from trtpipe.quantization.corrections.correct import STEPS, correct
    from trtpipe.quantization.quantize import calibrate as one_pass

    size = job.batch_size(calibration)
    table = one_pass(
        captured,
        source,
        batch_size=size,
        algorithm=calibration.algorithm,
        percentile=calibration.percentile,
        digests=digests,
        progress=progress,
    )
    which = STEPS if calibration.corrections is True else calibration.corrections or ()
    return correct(captured, table, source, which=which, batch_size=size, progress=progress) if which else table


def corrected(front: Front, table: CalibrationTable | None) -> Front:
    """What is to be quantized: the parts of a build with the table's corrections in the captured graph."""
    if table is None or table.corrections is None or not table.corrections.arrays:
        return front
    from trtpipe.quantization.corrections import edits

    return replace(front, captured=edits.corrected(front.captured, table.corrections.arrays))


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

    precision, front = job.precision, corrected(front, table)
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
        runner, executed = open_engine(engine)
        with runner:
            report = check_engine(
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
        return replace(report, notes=(*report.notes, *graph_notes(engine, executed)))


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
        except (BuildError, InputError, MissingError) as error:
            if graph is None:
                raise
            why = f"no engine could be built of the control: {str(error).splitlines()[0]}"
            with OrtRunner(graph.data, as_written=True) as stand_in:
                yield Executor(stand_in, "graph", why)
            return
        runner, executed = open_engine(engine)
        with runner:
            yield Executor(runner, executed)

    return Damaged(opened, tensor, how)


def graph_control(graph: OnnxModel, tensor: str, how: str, target: Target) -> Damaged:
    """A damaged graph, executed as the graph of an engine of `target` is."""

    @contextmanager
    def opened() -> Iterator[Executor]:
        with graph_as_checked(graph.data, target) as runner:
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

"""The calibration table of a job: read, or made from samples; and what a reader should know of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from calib.audit import data_warnings, doubtful_thresholds
from calib.errors import CalibError
from calib.images import transform_of
from calib.samples import copies
from calib.table import CalibrationTable
from trtpipe.job.sections import CORRECTIONS, GRAPH_CORRECTIONS
from trtpipe.machine import Heap
from trtpipe.report.thresholds import beyond_int8, int8_audit, table_warnings

if TYPE_CHECKING:
    from calib.data import Source
    from trtpipe.job.job import Job
    from trtpipe.job.sections import Calibration
    from trtpipe.pipeline.lowered import Lowered
    from trtpipe.progress import Progress
    from trtpipe.values import Captured

#: Share of the check's samples that may be copies of others without a warning.
MOST_COPIES = 0.1


def digests_of(captured: Captured) -> dict[str, str]:
    """What a table made of this graph belongs to: the weights, and the operations whatever their sizes."""
    from trtpipe.model.graph_digest import operations

    return {"weights": captured.weights, "graph": operations(captured.graph, captured.weights + captured.literals[0])}


def older_digests(captured: Captured, weights: str) -> tuple[dict[str, str], ...]:
    """What tables belonged to before: to all weights, what nothing reads too, and to the graph with the numbers as they
    are given, or to the letter."""
    from trtpipe.model.graph_digest import operations

    all_digits = (
        {"weights": w, "graph": operations(captured.graph, w + captured.literals[1], older=True)}
        for w in (weights, captured.weights)  # an ONNX file may hold more than the network whose table it is
    )
    return *all_digits, {"weights": weights, "graph": captured.digest}


def read_table(
    calibration: Calibration, digests: Mapping[str, str], older: Sequence[Mapping[str, str]] = ()
) -> CalibrationTable:
    """The table that `calibration.table` names, with the histograms beside it where they are its own, which only the
    report draws; algorithm auto and corrections true take what it holds.

    Args:
        calibration: the job's.
        digests: what it has to belong to, as `digests_of` has it.
        older: what a table may have in their place, as `older_digests` has it.

    Raises:
        calib.CalibError: it belongs to another model, or was made otherwise than the job says.
    """
    table = table_as_asked(calibration, histograms=True)
    assert calibration.table is not None
    every = (digests, *older)
    fits = [[table.digests.get(name) == d.get(name) for name in ("weights", "graph")] for d in every]
    digests = every[fits.index(max(fits))]  # of the same weights at least, to say what differs
    try:
        table.require(calibration.table, digests, table.algorithm, table.percentile)
    except CalibError as error:
        if table.changed(digests, table.algorithm, table.percentile) != ("graph",):
            raise
        raise CalibError(
            f"{calibration.table}: must belong to this job (got one for another graph of the same weights: other "
            "operations or constants, or an input that the job declares with another dtype or normalize). Declare it "
            "as the table's job does, or calibrate again."
        ) from error
    return table


def table_as_asked(calibration: Calibration, *, histograms: bool = False) -> CalibrationTable:
    """The table that `calibration.table` names, made as the job says, whatever model it belongs to; with `histograms`,
    those too where the ones beside it are its own.

    Raises:
        calib.CalibError: it is no table, or was made otherwise.
    """
    assert calibration.table is not None
    try:
        table = CalibrationTable.load(calibration.table, histograms=histograms)
    except CalibError:
        if not histograms:
            raise
        return table_as_asked(calibration)
    if calibration.algorithm != "auto":
        table.require(calibration.table, table.digests, calibration.algorithm, calibration.percentile)
    kept = () if table.corrections is None else tuple(s.name for s in table.corrections.steps if s.kept)
    asked = calibration.corrections
    steps = kept if not asked else [name for name in kept if name in CORRECTIONS]  # the ranges are chosen with any
    if asked is not True and (unasked := [name for name in steps if name not in (asked or ())]):
        must = f"hold no corrections but {', '.join(asked)}" if asked else "be without corrections"
        raise CalibError(
            f"{calibration.table}: must {must} for calibration.corrections (got {', '.join(unasked)}). Leave the key "
            "out, or calibrate again."
        )
    return table


def require_transform(job: Job, table: CalibrationTable) -> None:
    """Refuse a job that is given `table` in the place of images and does not say what the check's are made by: without
    the table that is calibration's transform, which the table's images had.

    Raises:
        calib.CalibError: it does not.
    """
    given = transform_of(table.recipe)
    if job.check.images is None or job.check_transform() is not None or not given:
        return
    assert job.calibration is not None
    named = ", ".join(f"{name} {value}" for name, value in given.items())
    raise CalibError(
        f"{job.calibration.table}: must come with check.transform, as the images that it was made of had one (got "
        f"none; theirs: {named}). Give the check's images theirs; {{}} takes them as they are."
    )


def observe(
    job: Job,
    calibration: Calibration,
    captured: Captured,
    source: Source,
    digests: Mapping[str, str],
    progress: Progress,
    device: str,
) -> CalibrationTable:
    """The table of one pass over the samples, and with the corrections that the job asks for."""
    from trtpipe.quantization.calibrate import calibrate as one_pass
    from trtpipe.quantization.corrections.correct import correct
    from trtpipe.quantization.placements import placements

    size, heap = job.batch_size(calibration), Heap()
    table = one_pass(
        captured,
        source,
        batch_size=size,
        algorithm=calibration.algorithm,
        percentile=calibration.percentile,
        digests=digests,
        progress=progress,
        device=device,
    )
    if not job.corrections:
        return table
    heap.settle(garbage=True)  # the batches' activations lie in it
    return correct(
        captured,
        table,
        source,
        which=job.corrections,
        batch_size=size,
        progress=progress,
        placements=placements(job, captured),
    )


def table_notes(job: Job, table: CalibrationTable, lowered: Lowered | None = None) -> tuple[str, ...]:
    """What a reader of the job should know of its table: its warnings, and the corrections in it.

    Thresholds, and corrections but those of the graph, are INT8's alone: a job without INT8 has no notes about them.
    Beside FP8 and 4 bits it is the `lowered` graph that decides which thresholds count, and what corrections gain was
    measured with everything in INT8 that can be.
    """
    from trtpipe.quantization.policy import modes_of

    made = table.corrections
    if not job.precision.int8_mode:
        used = tuple(s for s in made.steps if s.kept and s.name in GRAPH_CORRECTIONS) if made is not None else ()
        lines = () if made is None else replace(made, steps=used).lines
        return (*data_warnings(table.audit), *copies(table.samples), *(f"calibration: {line}" for line in lines))
    mixed = modes_of(job.precision).narrow
    if lowered is not None:
        said = table_warnings(table, beyond_int8(lowered.layers, table, lowered.shared_scales))
    else:
        said = data_warnings(table.audit) if mixed else table.audit.warnings
    lines = () if made is None else made.lines
    said = (*said, *copies(table.samples))
    return (*said, *(f"calibration{', with all in INT8' * mixed}: {line}" for line in lines))


def verdict_warnings(lowered: Lowered, check: Source, fitted_to: Collection[str] = ()) -> tuple[str, ...]:
    """What makes a verdict on `lowered` doubtful: poor thresholds that its INT8 operations read, and check samples that
    its table was made from or its weights of 4 bits were fitted to, which `fitted_to` has the digests of."""
    table = lowered.table
    doubtful: tuple[str, ...] = ()
    if table is not None:
        unclipped = beyond_int8(lowered.layers, table, lowered.shared_scales)
        doubtful = doubtful_thresholds(int8_audit(table, unclipped))
    return (*doubtful, *overlap_warnings(table, check, fitted_to), *copies_warnings(check))


def copies_warnings(check: Source) -> tuple[str, ...]:
    """A warning when over a tenth of the check's samples are copies of others: confidence intervals count each as one
    that was drawn by itself."""
    different = len(set(check.sample_digests))
    copies = check.sample_count - different
    if copies <= MOST_COPIES * check.sample_count:
        return ()
    return (
        f"{copies} of {check.sample_count} check samples are copies of others: they prove what {different} samples "
        "prove, and confidence intervals are narrower than that",
    )


def overlap_warnings(table: CalibrationTable | None, check: Source, fitted_to: Collection[str] = ()) -> tuple[str, ...]:
    """A warning when samples of the check are among those that the table was made from, whatever they were called
    there and whenever that was, or among those of the digests `fitted_to`: the check then flatters the engine."""
    calibrated = {*fitted_to, *(() if table is None else table.samples.values())}
    both = [i for i, d in zip(check.ids, check.sample_digests, strict=True) if d in calibrated] if calibrated else []
    if not both:
        return ()
    return (
        f"{len(both)} of {check.sample_count} check samples were calibrated on too (first: {both[0]}); "
        "the check is the weaker for it",
    )

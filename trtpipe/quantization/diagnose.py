"""Which modules make an INT8 network miss its limits: named with their source lines, and what to do about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trtpipe.batching import Batching, last_label
from trtpipe.errors import titled
from trtpipe.evaluation.limits import is_of_nan, missed_by_both, misses

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from calib.data import Source
    from trtpipe.job.job import Job
    from trtpipe.job.limits import Limits
    from trtpipe.progress import Progress
    from trtpipe.quantization.quantize import Narrow
    from trtpipe.quantization.ranking import ModuleSensitivity, Sensitivity
    from trtpipe.quantization.sensitivity import SampleBatch
    from trtpipe.values import Captured, CheckReport

#: Samples that sensitivities are measured on, and how many are run at a time.
_SAMPLES, MOST_BATCH = 32, 8
#: Bytes that all values of such a batch may take together; larger networks take fewer samples at a time.
BATCH_BYTES = 2 << 30
#: Seconds that the search for the modules that make a check fail may take, unless the user says otherwise.
DIAGNOSE_SECONDS = 60.0
#: How many modules a failed check names.
_NAMED = 3
#: How the line of `blame` begins.
BLAME = "worst quantized modules"


def diagnose(
    job: Job,
    captured: Captured,
    source: Source,
    amax: Mapping[str, float],
    progress: Progress,
    ranges: Mapping[str, float],
    narrow: Narrow | None = None,
    seconds: float | None = None,
    device: str = "cpu",
) -> Sensitivity:
    """The sensitivity of every module that the job quantizes, over the first samples of `source`.

    After `seconds` it returns what was measured by then: fewer samples, and of a large network only the modules that
    are worst by themselves. Samples are then run one at a time, so that one measurement, by which the time can be
    exceeded, takes as little time and memory as it can.
    """
    from trtpipe.quantization.payoff import keep_of
    from trtpipe.quantization.precision import half_dtype
    from trtpipe.quantization.sensitivity import measure_sensitivity

    precision = job.precision
    return measure_sensitivity(
        captured,
        amax,
        first_samples(
            source,
            Batching(captured.inputs, captured.outputs, job.batch_size(job.check)),
            batch=batch_size(captured) if seconds is None else 1,
        ),
        half=half_dtype(precision.half),
        keep=keep_of(job, captured),
        progress=progress,
        ranges=ranges,
        int8=precision.int8_mode,
        narrow=narrow,
        seconds=seconds,
        device=device,
        last_label=last_label(source.labels),
    )


def batch_size(captured: Captured) -> int:
    """How many samples at a time keep within `BATCH_BYTES`."""
    from trtpipe.quantization.partial import value_bytes

    return max(1, min(MOST_BATCH, BATCH_BYTES // max(1, value_bytes(captured.graph))))


def first_samples(
    source: Source, how: Batching, count: int = _SAMPLES, batch: int = MOST_BATCH
) -> Iterator[SampleBatch]:
    """The first `count` samples as tensors, about `batch` at a time; in batches of `how` where an output has no batch
    axis."""
    import torch

    from trtpipe.quantization.sensitivity import SampleBatch

    left = count
    size = how.size if how.whole else min(batch, count)
    for samples in source.batches(size):
        labels = samples.labels
        for piece, real in how.pieces(samples.arrays):
            real = real if how.whole else min(real, left)
            some = None if labels is None else torch.from_numpy(labels[:real])
            labels = None if labels is None else labels[real:]
            yield SampleBatch(tuple(torch.from_numpy(piece[s.name]) for s in how.inputs), real, some)
            left -= real
            if left <= 0:
                return


def is_about_numbers(report: CheckReport, limits: Limits) -> bool:
    """Whether the check failed because of the outputs, and not because there was no engine or no control, because the
    model itself is beyond a limit, or for want of samples."""
    alike = missed_by_both(report.metrics, limits)
    failed = any(misses(m, limits) and m.name not in alike for m in report.metrics)
    return failed or any(map(is_of_nan, report.problems))


def failed_outputs(report: CheckReport) -> frozenset[str]:
    """The outputs that a limit is missed of; none where it is missed of all, or of something else too."""
    outputs = {m.output for m in report.metrics if m.output}
    failed = {m.output for m in report.metrics if m.passed is False}
    return frozenset(failed) if failed < outputs and not any(map(is_of_nan, report.problems)) else frozenset()


def blame(sensitivity: Sensitivity, half: str | None, outputs: Collection[str] = (), tried: str = "") -> str:
    """One line that names the worst modules, at some of the outputs alone where these are given, and what to do.

    Args:
        sensitivity: of the job's graph.
        half: "fp16" or "bf16" where the job may keep a module in it, else None.
        outputs: names of some of the outputs.
        tried: what came of a search, in place of the advice to make one; a sentence, or more.
    """
    modules: Sequence[ModuleSensitivity] = sensitivity.modules
    if outputs:
        modules = sorted((m.at(outputs) for m in modules), key=lambda m: m.sqnr_db)
    if modules[0].sqnr_db == math.inf:  # outputs that are classes or answers, of samples that are far from deciding
        return (
            f"{BLAME}: none. Each of {len(modules)} alone leaves the outputs of the samples that were measured as they "
            f"are. {tried or 'Run `trtpipe tune`.'}"
        )
    named = [
        f"{titled(m.module)} ({m.source or m.op}) {_db(m.sqnr_db)}" for m in modules[:_NAMED] if m.sqnr_db < math.inf
    ]
    median = statistics.median(m.sqnr_db for m in modules)
    first = next((m.module for m in modules if m.module), None)
    which = "the first" if modules[0].module else first
    step = "" if first is None else f" Keep {which} in precision.keep.{half or 'fp32'}, or run `trtpipe tune`."
    step = f" {tried}" if tried else step
    where = f"output {', '.join(sorted(outputs))}" if outputs else "the outputs"
    measured = f"{len(modules)}"
    if sensitivity.left_out:
        measured += f" of {len(modules) + sensitivity.left_out} that there was time for"
    return (
        f"{BLAME}: {', then '.join(named)} at {where} when it alone is quantized "
        f"(the median of {measured}: {_db(median)}).{step}"
    )


def _db(value: float) -> str:
    return f"{value:.1f} dB"


def step_of(said: str) -> str:
    """What a line of `blame` that names modules says to do; empty where it says nothing."""
    return said.rpartition("). ")[2] if "). " in said else ""

"""What is executed, held against the baseline: on every check sample, and at the sizes that the job declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calib.types import Array
from trtpipe.batching import Batching
from trtpipe.evaluation.check import CheckData, Damaged, Runner, check_engine
from trtpipe.evaluation.corners import AtCorner, run_corners, with_corners
from trtpipe.pipeline.prepared import PreparedJob
from trtpipe.values import CheckReport, Executed

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.progress import Progress


@dataclass(frozen=True)
class Judged:
    """The check of an engine, or of the graph that was executed for it, and what came out of that.

    `outputs` are those on every check sample, [S, ...] by name, or [B, ...] where an output has no batch axis.
    `device_memory_bytes` is the engine's `activation_memory`, None of a graph.
    """

    report: CheckReport
    outputs: Mapping[str, Array]
    device_memory_bytes: int | None = None


def compared(
    job: Job,
    prepared: PreparedJob,
    runner: Runner,
    executed: Executed,
    damaged: Damaged,
    progress: Progress,
    *,
    require: Executed = "graph",
    warnings: Sequence[str] = (),
) -> Judged:
    """What `runner` computes, against the baseline on the check samples and at the sizes that the job declares.

    Args:
        job: its limits.
        prepared: the samples, the baseline and the model's outputs at the declared sizes.
        runner: is open.
        executed: whether it executes the engine or its graph.
        damaged: the control, which has to fail.
        progress: receives the samples.
        require: "engine": a graph is not enough.
        warnings: stand before the check's own.
    """
    how, samples = batching(job, prepared), prepared.first_check_batch
    ran: list[AtCorner] = []
    kept: dict[str, Array] = {}

    def given(outputs: Mapping[str, Array]) -> None:
        kept.update(outputs)
        ran.extend(run_corners(runner, how, samples))

    report = check_engine(
        runner,
        executed,
        check_data(job, prepared),
        job.check.limits,
        damaged=damaged,
        require=require,
        keep=given,
        warnings=warnings,
        progress=progress,
    )
    return Judged(with_corners(report, ran, how, samples, prepared.corner_outputs), kept)


def batching(job: Job, prepared: PreparedJob) -> Batching:
    """How the check samples are run."""
    return Batching(prepared.inputs, prepared.outputs, job.batch_size(job.check), job.build.profiles)


def check_data(job: Job, prepared: PreparedJob) -> CheckData:
    """The check samples with the baseline's outputs on them."""
    size = job.batch_size(job.check)

    def batches() -> Iterator[Mapping[str, Array]]:
        return (b.arrays for b in prepared.check_source.batches(size))

    baseline = prepared.baseline
    how, judgement = batching(job, prepared), prepared.judgement
    return CheckData(batches, baseline.outputs, baseline.labels, len(baseline.ids), how, judgement)

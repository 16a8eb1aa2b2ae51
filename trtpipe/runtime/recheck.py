"""A bundle held once more against its golden data, where it is to run: in NumPy, without torch or onnx."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from trtpipe.bundle.golden import Golden
from trtpipe.bundle.manifest import Manifest
from trtpipe.evaluation.check import CheckData, Damaged, check_engine
from trtpipe.job.sections import Limits
from trtpipe.progress import Progress, Silent
from trtpipe.runtime.session import Model, Runner
from trtpipe.values import CheckReport

Array = np.ndarray[Any, Any]

#: Limits on a share of the samples say nothing of fewer than these: one sample of eight is already 12.5 %.
FEWEST_FOR_SHARES = 100
SHARES = ("top1_agreement_min", "accuracy_drop_max")

#: How far below the build's worst cosine a golden sample may be where the job's own limits are all on shares.
_SLACK = 0.01


def recheck(model: Model, progress: Progress | None = None) -> CheckReport:
    """What `model` answers on the bundle's golden inputs, against the baseline's answers and the job's limits.

    The report's notes say which limits a few samples cannot be held against. The control is the build's own, which
    had to fail under the job's limits; without one, each sample is given the answer to another.
    """
    golden = model.bundle.golden()
    limits, notes = golden_limits(model.manifest, golden.samples)
    recorded = model.manifest.check.control if model.manifest.check is not None else None
    size = model.batch[1]

    def batches() -> list[Mapping[str, Array]]:
        starts = range(0, golden.samples, size)
        return [{n: a[start : start + size] for n, a in golden.inputs.items()} for start in starts]

    report = check_engine(
        model.runner,
        model.executed,
        CheckData(batches, golden.outputs, golden.labels),
        model.manifest.inputs,
        limits,
        damaged=None
        if recorded is not None
        else Damaged(_Swapped(model.runner, golden), "every answer", "its neighbour's"),
        control=recorded,
        progress=progress or Silent(),
    )
    return dataclasses.replace(report, notes=(*report.notes, *notes))


def golden_limits(manifest: Manifest, samples: int) -> tuple[Limits, tuple[str, ...]]:
    """The job's limits as far as `samples` samples can be held against them, and what was left out."""
    limits, notes = manifest.limits, []
    if samples < FEWEST_FOR_SHARES:
        dropped = [name for name in SHARES if getattr(limits, name) is not None]
        limits = limits.model_copy(update=dict.fromkeys(dropped))
        notes += [f"{name} is a share of samples, and was not judged on {samples}" for name in dropped]
    judged = [v for k, v in limits.model_dump().items() if v is not None and k != "speedup_over_fp16_min"]
    if not judged and manifest.check is not None:
        worst = [m.value for m in manifest.check.metrics if m.name == "cosine_worst"]
        if worst:
            floor = max(-1.0, min(worst) - _SLACK)
            limits = limits.model_copy(update={"cosine_min": floor})
            notes.append(
                f"no limit of the job can be judged on {samples}: held to the build's worst cosine, {floor:.4g}"
            )
    return limits, tuple(notes)


class _Swapped:
    """Answers each batch with every answer moved to the next sample, or negated where there is one sample only."""

    def __init__(self, runner: Runner, golden: Golden) -> None:
        self.name, self._runner, self._alone = runner.name, runner, golden.samples == 1

    def run(self, inputs: Mapping[str, Array], /) -> Mapping[str, Array]:
        """The wrong outputs."""
        outputs = self._runner.run(inputs)
        return {n: -np.asarray(o) if self._alone or len(o) == 1 else np.roll(o, 1, axis=0) for n, o in outputs.items()}

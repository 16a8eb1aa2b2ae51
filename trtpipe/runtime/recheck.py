"""A bundle checked again on its golden data, on the device: in NumPy, without torch or onnx."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from calib.types import Array
from trtpipe.batching import Batching
from trtpipe.bundle.manifest import Manifest
from trtpipe.evaluation.check import CheckData, Damaged, Executor, check_engine
from trtpipe.figures import OWN
from trtpipe.job.limits import SHARE_LIMITS, Limits
from trtpipe.progress import Silent
from trtpipe.runtime.executor import OpenRunner
from trtpipe.runtime.session import Model
from trtpipe.values import CheckReport

#: Limits on a share of the samples say nothing of fewer than these: one sample of eight is already 12.5 %.
FEWEST_FOR_SHARE_LIMITS = 100

#: How far below the cosine of the build's worst sample a golden sample may be where the job's limits are all on shares.
_SLACK = 0.01
#: The limits on means over the samples, and what each is for some of them that have so many times the error of all.
_OF_MEANS: Mapping[str, Callable[[float, float], float]] = {
    "cosine_min": lambda limit, more: 1 - (1 - limit) * more**2,
    "relative_l2_max": lambda limit, more: limit * more,
    "sqnr_db_min": lambda limit, more: limit - 20 * math.log10(more),
}


def recheck(model: Model) -> CheckReport:
    """The check of `model` on the bundle's golden inputs, against the baseline's outputs, under the job's limits.

    The report's notes say which limits a few samples cannot be held against. The control is the build's own, which
    had to fail under the job's limits; without one, each sample gets the outputs of another.
    """
    golden = model.bundle.golden()
    limits, notes = golden_limits(model.manifest, golden.samples)
    recorded = model.manifest.check.control if model.manifest.check is not None else None
    how = model.batching(golden.batch or model.batch[1])

    def swapped() -> AbstractContextManager[Executor]:
        return nullcontext(Executor(_Swapped(model.runner, how), model.executed))

    report = check_engine(
        model.runner,
        model.executed,
        CheckData(lambda: golden.batches(how.size), golden.outputs, golden.labels, golden.samples, how),
        limits,
        damaged=None if recorded is not None else Damaged(swapped, "every output", "its neighbour's"),
        control=recorded,
        progress=Silent(),
    )
    return dataclasses.replace(report, notes=(*report.notes, *notes))


def golden_limits(manifest: Manifest, samples: int, *, all_of_them: bool = False) -> tuple[Limits, tuple[str, ...]]:
    """The job's limits as far as `samples` samples can be held against them, and what was left out.

    The code and the labels of the job's own metrics are not in a bundle. `all_of_them`: the samples are all that the
    job has, as in a kit.
    """
    limits, notes, worst = manifest.limits, [], _worst(manifest)
    if not all_of_them and (more := _further(manifest)) > 1:
        changed = _of_these(limits, more, worst)
        limits = limits.model_copy(update=changed)
        notes += [
            f"{name} is {getattr(manifest.limits, name):g} of all samples and {value:g} of these {samples}, whose "
            f"outputs were {more:.2f} times as far from the baseline in the build"
            for name, value in changed.items()
        ]
    if samples < FEWEST_FOR_SHARE_LIMITS and not all_of_them:
        dropped = [name for name in SHARE_LIMITS if getattr(limits, name) is not None]
        limits = limits.model_copy(update=dict.fromkeys(dropped))
        notes += [f"{name} is a share of samples, and was not judged on {samples}" for name in dropped]
    notes += [
        f"{key} is of the job's own metric, and was not judged here" for key in limits.given if key.startswith(OWN)
    ]
    limits = limits.model_copy(update={"metrics": {}})
    if not set(limits.given) - {"speedup_over_fp16_min"} and worst is not None:
        floor = max(-1.0, worst - _SLACK)
        limits = limits.model_copy(update={"cosine_worst_min": floor})
        notes.append(
            f"no limit of the job can be judged on {samples}: each held to a cosine of {floor:.4g}, that of the "
            f"build's worst sample less {_SLACK}"
        )
    return limits, tuple(notes)


def _further(manifest: Manifest) -> float:
    """How many times the relative L2 error of all check samples the golden ones had in the build, of the output where
    that is most; 1 where it was not recorded."""
    if manifest.check is None:
        return 1.0
    all_of_them = {m.output: m.value for m in manifest.check.metrics if m.name == "relative_l2"}
    return max((e / all_of_them[n] for n, e in manifest.check.golden.items() if all_of_them.get(n, 0) > 0), default=1.0)


def _worst(manifest: Manifest) -> float | None:
    """The cosine of the build's worst sample, where it was measured; no golden one was further off."""
    measured = () if manifest.check is None else manifest.check.metrics
    return min((m.value for m in measured if m.name == "cosine_worst"), default=None)


def _of_these(limits: Limits, more: float, worst: float | None) -> dict[str, float]:
    """The limits on what is a mean over the samples, by name, where they are others for some with `more` times the
    error of all: what an unchanged engine had left in its check, it has left there. 1 - cosine grows with the square of
    an error; no cosine was below the `worst`."""
    least = -1.0 if worst is None else worst - 1e-6
    given = {name: limit for name, limit in limits.given.items() if name in _OF_MEANS}
    held = {name: _OF_MEANS[name](limit, more) for name, limit in given.items()}
    if "cosine_min" in held:
        held["cosine_min"] = min(given["cosine_min"], max(held["cosine_min"], least))
    others = {name: float(f"{limit:.6g}") for name, limit in held.items()}
    return {name: limit for name, limit in others.items() if limit != given[name]}


class _Swapped:
    """Gives each sample the previous one's outputs; an output of one sample, or of a whole batch, is negated."""

    def __init__(self, runner: OpenRunner, how: Batching) -> None:
        self.name, self._runner = runner.name, runner
        self._axes = {s.name: s.batch_axis for s in how.outputs}

    def run(self, inputs: Mapping[str, Array], /) -> Mapping[str, Array]:
        """The wrong outputs."""
        return {n: self._wrong(np.asarray(o), self._axes.get(n)) for n, o in self._runner.run(inputs).items()}

    @staticmethod
    def _wrong(output: Array, axis: int | None) -> Array:
        if axis is None or output.ndim <= axis or output.shape[axis] == 1:
            return ~output if output.dtype == np.bool_ else -output
        return np.roll(output, 1, axis=axis)

"""The check: an engine, or its graph, against its baseline, with a control that shows it can fail. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trtpipe import metrics
from trtpipe.batches import fitted
from trtpipe.errors import InputError
from trtpipe.job import Limits
from trtpipe.progress import Progress
from trtpipe.values import CheckReport, Control, Executed, Metric, TensorSpec

Array = np.ndarray[Any, Any]

#: Samples that the control is run on: enough for every metric, few enough to cost little.
CONTROL_SAMPLES = 64

#: limit of the job -> (metric, whether larger is better)
LIMITS: Mapping[str, tuple[str, bool]] = {
    "cosine_min": ("cosine", True),
    "max_abs_max": ("max_abs", False),
    "relative_l2_max": ("relative_l2", False),
    "sqnr_db_min": ("sqnr_db", True),
    "top1_agreement_min": ("top1_agreement", True),
    "accuracy_drop_max": ("accuracy_drop", False),
}


class Runner(Protocol):
    """What executes: `trt.runtime.EngineRunner` or `ort.OrtRunner`."""

    name: str

    def run(self, inputs: Mapping[str, Array], /) -> Mapping[str, Array]:
        """Outputs by name for inputs [B, ...] by name."""


@dataclass(frozen=True)
class CheckData:
    """`batches` gives the inputs again each time it is called; `reference` the baseline's outputs on all of them.

    reference: float32 [S, ...] by output name. labels: int64 [S], -1 where unknown, or None.
    """

    batches: Callable[[], Iterable[Mapping[str, Array]]]
    reference: Mapping[str, Array]
    labels: Array | None

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(next(iter(self.reference.values())))

    def first(self, count: int) -> CheckData:
        """The first `count` samples, in whole batches' order."""

        def batches() -> Iterable[Mapping[str, Array]]:
            left = count
            for batch in self.batches():
                size = len(next(iter(batch.values())))
                yield {n: a[:left] for n, a in batch.items()}
                left -= size
                if left <= 0:
                    return

        labels = None if self.labels is None else self.labels[:count]
        return CheckData(batches, {n: a[:count] for n, a in self.reference.items()}, labels)


@dataclass(frozen=True)
class Damaged:
    """A copy of the graph with one tensor damaged, ready to run."""

    runner: Runner
    tensor: str
    how: str


def check_engine(
    runner: Runner,
    executed: Executed,
    data: CheckData,
    inputs: Sequence[TensorSpec],
    limits: Limits,
    *,
    damaged: Damaged | None,
    require: Executed = "graph",
    control: Control | None = None,
    keep: Callable[[Mapping[str, Array]], None] | None = None,
    progress: Progress,
) -> CheckReport:
    """What `runner` answers on `data`, held against the baseline and the job's limits.

    Args:
        runner: executes the engine, or its graph.
        executed: which of the two.
        data: inputs and what the baseline answered.
        inputs: the input bindings; a batch is padded up to their smallest extent and split at their largest.
        limits: those not set are measured and not judged.
        damaged: the control: it must fail under the same limits.
        require: "engine" fails the check when only the graph was executed.
        control: an earlier control, used where no damaged copy can be run here.
        keep: is given what was executed answered on all samples, [S, ...] by output name.
        progress: is told the samples done.

    Raises:
        InputError: neither `damaged` nor `control` is given.
    """
    found, problems = run_all(runner, data, inputs, progress)
    if keep is not None:
        keep(found)
    measured, more = measure(data.reference, found, data.labels, limits)
    problems += more
    if require == "engine" and executed != "engine":
        problems.append("check.require is engine, and no GPU executed it here")
    if damaged is not None:
        few = data.first(CONTROL_SAMPLES)
        answered, wrong = run_all(damaged.runner, few, inputs, None)
        judged, worse = measure(few.reference, answered, few.labels, limits)
        failed = bool(wrong or worse) or any(m.passed is False for m in judged)
        control = Control(damaged.tensor, damaged.how, failed, few.samples)
    if control is None:
        raise InputError(
            "check: must have a control (got none). Give a damaged copy of the graph, or an earlier control."
        )
    if not control.failed:
        problems.append(
            f"the check cannot fail: a copy with {control.damaged} damaged ({control.how}) met every limit too. "
            "Tighten check.limits, or check on data that differ from each other"
        )
    passed = not problems and all(m.passed is not False for m in measured)
    return CheckReport(executed, runner.name, data.samples, measured, control, passed, tuple(problems))


def run_all(
    runner: Runner, data: CheckData, inputs: Sequence[TensorSpec], progress: Progress | None
) -> tuple[dict[str, Array], list[str]]:
    """Every output over all batches, concatenated, and what was wrong with them."""
    parts: dict[str, list[Array]] = {}
    done, total = 0, data.samples
    for batch in data.batches():
        for piece, count in fitted(batch, inputs):
            for name, value in runner.run(piece).items():
                parts.setdefault(name, []).append(np.asarray(value)[:count])
            done += count
            if progress is not None:
                progress.step(done, total, "images")
    if not done or not parts:
        return {}, ["no sample was compared"]
    return {name: np.concatenate(values) for name, values in parts.items()}, []


def measure(
    reference: Mapping[str, Array], found: Mapping[str, Array], labels: Array | None, limits: Limits
) -> tuple[tuple[Metric, ...], list[str]]:
    """Every metric of every output, paired by exact name, judged where there is a limit; and what stands in the way."""
    problems = [f"output {n} is missing from what was executed" for n in reference if n not in found]
    problems += [f"output {n} was executed and has no baseline" for n in found if n not in reference]
    values: list[tuple[str, str, float]] = []
    for name in reference:
        if name not in found:
            continue
        a, b = reference[name], found[name]
        if a.shape != b.shape:
            problems.append(f"output {name} has the shape {b.shape}, its baseline {a.shape}")
        elif not len(a):
            problems.append("no sample was compared")
        elif not (np.isfinite(a).all() and np.isfinite(b).all()):
            which = "the baseline" if not np.isfinite(a).all() else "what was executed"
            problems.append(f"output {name} holds NaN or infinity in {which}")
        else:
            values += [(metric, name, value) for metric, value in _of_output(a, b, labels).items()]
    by_metric = {metric for metric, _, _ in values}
    judged = [_judge(*value, limits) for value in values]
    for limit, (metric, _) in LIMITS.items():
        if getattr(limits, limit) is not None and metric not in by_metric:
            why = "needs labels" if metric == "accuracy_drop" else "needs an output of one score a class"
            problems.append(
                f"check.limits.{limit} could not be judged: it {why}" if not problems else f"{limit} was not judged"
            )
    return tuple(judged), problems


def _of_output(a: Array, b: Array, labels: Array | None) -> dict[str, float]:
    cosines = metrics.cosine(a, b)
    found = {
        "cosine": float(cosines.mean()),
        "cosine_worst": float(cosines.min()),
        "max_abs": metrics.max_abs(a, b),
        "relative_l2": metrics.relative_l2(a, b),
        "sqnr_db": metrics.sqnr_db(a, b),
    }
    if metrics.ranks_classes(a):
        found["top1_agreement"] = metrics.top1_agreement(a, b)
        if labels is not None and (labels >= 0).any():
            found["accuracy_baseline"] = metrics.accuracy(a, labels)
            found["accuracy_engine"] = metrics.accuracy(b, labels)
            found["accuracy_drop"] = found["accuracy_baseline"] - found["accuracy_engine"]
    return found


def _judge(metric: str, output: str, value: float, limits: Limits) -> Metric:
    for name, (of, larger_is_better) in LIMITS.items():
        limit = getattr(limits, name)
        if of == metric and limit is not None:
            good = value >= limit if larger_is_better else value <= limit
            return Metric(metric, output, value, limit, good and not math.isnan(value))
    return Metric(metric, output, value)

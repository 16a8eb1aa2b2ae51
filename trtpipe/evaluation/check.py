"""The check: an engine, or its graph, against its baseline, with a control that shows it can fail. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from trtpipe.batching import fitted
from trtpipe.errors import InputError
from trtpipe.evaluation import intervals as statistics
from trtpipe.evaluation import metrics
from trtpipe.job.sections import Limits
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
        if not failed and undecided(judged, few.samples):
            problems.append(f"the control's {few.samples} samples are too few for the limits to tell anything")
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
    notes = undecided(measured, data.samples)
    return CheckReport(executed, runner.name, data.samples, measured, control, passed, tuple(problems), notes)


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
    values: list[Metric] = []
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
            values += _of_output(name, a, b, labels)
    by_metric = {m.name for m in values}
    judged = [_judge(m, limits) for m in values]
    for limit, (metric, _) in LIMITS.items():
        if getattr(limits, limit) is not None and metric not in by_metric:
            why = "needs labels" if metric == "accuracy_drop" else "needs an output of one score a class"
            problems.append(
                f"check.limits.{limit} could not be judged: it {why}" if not problems else f"{limit} was not judged"
            )
    return tuple(judged), problems


def _of_output(name: str, a: Array, b: Array, labels: Array | None) -> list[Metric]:
    """Every figure of one output; shares of the samples carry their 95 % confidence interval (see `statistics`)."""
    cosines = metrics.cosine(a, b)
    found = [
        Metric("cosine", name, float(cosines.mean())),
        Metric("cosine_worst", name, float(cosines.min())),
        Metric("max_abs", name, metrics.max_abs(a, b)),
        Metric("relative_l2", name, metrics.relative_l2(a, b)),
        Metric("sqnr_db", name, metrics.sqnr_db(a, b)),
    ]
    if metrics.ranks_classes(a):
        agreement = statistics.binomial_interval(metrics.same_class(a, b), len(a))
        found.append(Metric("top1_agreement", name, metrics.top1_agreement(a, b), interval=agreement))
        if labels is not None and (labels >= 0).any():
            pairs = metrics.paired_accuracy(a, b, labels)
            before, after = pairs.accuracies
            drop = statistics.paired_interval(pairs.only_reference, pairs.only_found, pairs.samples)
            found.append(Metric("accuracy_baseline", name, before))
            found.append(Metric("accuracy_engine", name, after))
            found.append(Metric("accuracy_drop", name, pairs.drop, interval=drop))
    return found


def _judge(metric: Metric, limits: Limits) -> Metric:
    """A share of the samples fails its limit when its whole interval does; any other figure when it itself does."""
    for name, (of, larger_is_better) in LIMITS.items():
        limit = getattr(limits, name)
        if of != metric.name or limit is None:
            continue
        if metric.interval is not None:
            passed = not statistics.fails(metric.interval, limit, larger_is_better)
        else:
            passed = metric.value >= limit if larger_is_better else metric.value <= limit
        return replace(metric, limit=limit, passed=passed and not math.isnan(metric.value))
    return metric


def undecided(judged: Sequence[Metric], samples: int) -> tuple[str, ...]:
    """A line for each limit that these samples are too few for: its figure might be on either side."""
    better = dict(LIMITS.values())
    lines = []
    for m in judged:
        if m.limit is None or m.interval is None or statistics.can_tell(m.interval, m.limit, better[m.name]):
            continue
        enough = statistics.samples_to_tell(m.value, m.interval, m.limit, samples)
        more = "no number would" if enough is None else f"about {enough} would be needed"
        lines.append(
            f"{m.output}.{m.name}: {samples} samples are too few to tell whether {m.value:.4g} meets the limit "
            f"{m.limit:g} (95 % interval {m.interval[0]:.4g} to {m.interval[1]:.4g}; {more})"
        )
    return tuple(lines)

"""The check: an engine, or its graph, against its baseline, with a control that shows it can fail. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from calib.types import Array
from trtpipe.batching import KEPT_SAMPLES, Batching, joined, last_label
from trtpipe.errors import InputError
from trtpipe.evaluation import intervals, metrics
from trtpipe.evaluation.judgement import NO_METRICS, Judgement
from trtpipe.evaluation.limits import HOLDS_NAN, bounds, doubtful, judged, missed_by_both, misses
from trtpipe.job.limits import SHARE_LIMITS, Limits
from trtpipe.progress import Progress
from trtpipe.values import CheckReport, Control, Executed, Metric

#: Samples that the control is run on: enough for every metric, few enough to cost little.
CONTROL_SAMPLES = 64

#: Why a check fails that requires the engine itself.
NO_ENGINE_RAN = "check.require is engine, and no GPU executed it here"


class Runner(Protocol):
    """Executes an engine or a graph: an `EngineRunner`, `HybridRunner` or `OrtRunner`."""

    name: str

    def run(self, inputs: Mapping[str, Array], /) -> Mapping[str, Array]:
        """The outputs of one batch by name, for inputs [B, ...] by name."""


@dataclass(frozen=True)
class CheckData:
    """`batches` gives the inputs again each time it is called; `reference` the baseline's outputs on all of them.

    reference: as `Baseline.outputs`. labels: int64 [S], -1 where unknown, or None.
    judgement: the job's own metrics; none where its code is not.
    """

    batches: Callable[[], Iterable[Mapping[str, Array]]]
    reference: Mapping[str, Array]
    labels: Array | None
    samples: int
    batching: Batching
    judgement: Judgement = NO_METRICS

    def first(self, count: int) -> CheckData:
        """The first `count` samples, in whole batches' order; whole batches, where an output has no batch axis."""
        if self.batching.whole:
            count = -(-count // self.batching.size) * self.batching.size
        count = min(count, self.samples)

        def batches() -> Iterable[Mapping[str, Array]]:
            left = count
            for batch in self.batches():
                size = len(next(iter(batch.values())))
                yield {n: a[:left] for n, a in batch.items()}
                left -= size
                if left <= 0:
                    return

        labels = None if self.labels is None else self.labels[:count]
        few = self.batching.first(self.reference, count)
        return CheckData(batches, few, labels, count, self.batching, self.judgement.first(count, few))


@dataclass(frozen=True)
class Executor:
    """A runner, and whether it executes the engine or its graph; `note` is for the reader of the report."""

    runner: Runner
    executed: Executed
    note: str = ""


@dataclass(frozen=True)
class Damaged:
    """A copy with one tensor damaged. `open` makes what executes it; it is released when the context ends."""

    open: Callable[[], AbstractContextManager[Executor]]
    tensor: str
    how: str


def check_engine(
    runner: Runner,
    executed: Executed,
    data: CheckData,
    limits: Limits,
    *,
    damaged: Damaged | None,
    require: Executed = "graph",
    control: Control | None = None,
    keep: Callable[[Mapping[str, Array]], None] | None = None,
    warnings: Sequence[str] = (),
    progress: Progress,
) -> CheckReport:
    """The outputs of `runner` on `data`, compared with the baseline's and judged by the job's limits.

    Args:
        runner: executes the engine, or its graph.
        executed: which of the two.
        data: inputs and the baseline's outputs.
        limits: those not set are measured and not judged.
        damaged: the control: it must fail under the same limits.
        require: "engine" fails the check when only the graph was executed.
        control: an earlier control, used where no damaged copy can be run here.
        keep: receives the outputs on all samples, rows [S, ...] by output name.
        warnings: what is known to be doubtful before anything is compared; they go into the report.
        progress: receives the number of samples done.

    Raises:
        InputError: neither `damaged` nor `control` is given.
    """
    outputs, problems = run_all(runner, data, progress)
    if keep is not None:
        keep(outputs)
    measured, more = measure(data.reference, outputs, data.labels, limits, data.batching.unranked, data.judgement)
    problems += more
    unsure = [m for m in measured if m.passed is False and not misses(m, limits)]
    labelled = {} if data.labels is None else {"accuracy_drop": int((data.labels >= 0).sum())}
    counted = {**labelled, **data.judgement.counted}
    sure = [m for m in measured if m not in unsure]
    notes = [*doubtful(sure, data.samples, limits, counted), *_without_the_labels(data)]
    if require == "engine" and executed != "engine":
        problems.append(NO_ENGINE_RAN)
    if damaged is not None:
        control, note = _control(damaged, data.first(CONTROL_SAMPLES), limits)
        notes += [note] if note else []
    if control is None:
        raise InputError(
            "check: there is no negative control. Give a damaged copy of the graph, or an earlier control."
        )
    if control.executed != executed:
        notes.append(
            f"the control was executed as a {control.executed} ({control.runner or 'where the bundle was made'}), and "
            f"the check as a {executed}: that the check can fail is shown for the {control.executed} alone"
        )
    if not control.failed:
        problems.append(
            f"the check cannot fail: a copy with {control.damaged} damaged ({control.how}) met every limit too. "
            "Tighten check.limits, or check on data that differ from each other"
        )
    problems += [
        f"{name}: the baseline itself is {before.value:g}, so no precision meets the limit. Limit what is lost "
        "(drop_max), or see check.labels"
        for name, before in missed_by_both(measured, limits).items()
    ]
    asked = doubtful(unsure, data.samples, limits, counted)
    problems += [f"{line}. check.limits.confident asks for that" for line in asked]
    passed = not problems and all(m.passed is not False for m in measured)
    doubts = (*_unproven(control, measured), *near_chance(measured, data), *data.judgement.says_nothing())
    return CheckReport(
        executed,
        runner.name,
        data.samples,
        measured,
        control,
        passed,
        tuple(problems),
        tuple(notes),
        tuple(dict.fromkeys((*warnings, *doubts))),  # a kit's check has said some already
        _on_golden(data, outputs, [m.output for m in measured if m.name == "relative_l2"]),
    )


def _on_golden(data: CheckData, outputs: Mapping[str, Array], names: Iterable[str]) -> dict[str, float]:
    """The relative L2 error of the outputs `names` on the samples that golden data keep; those that are finite."""
    few = data.first(KEPT_SAMPLES)
    got = data.batching.first(outputs, few.samples)
    errors = {name: metrics.relative_l2(few.reference[name], got[name]) for name in names}
    return {name: e for name, e in errors.items() if math.isfinite(e)}


def _control(damaged: Damaged, few: CheckData, limits: Limits) -> tuple[Control, str]:
    """The damaged copy checked by its figures alone (that its samples are few is no failure), and a note."""
    with damaged.open() as executor:
        outputs, wrong = run_all(executor.runner, few, None)
    measured, worse = measure(
        few.reference,
        outputs,
        few.labels,
        limits.model_copy(update={"confident": False}),
        few.batching.unranked,
        few.judgement,
    )
    failed = bool(wrong or worse) or any(m.passed is False for m in measured)
    met = {m.output: True for m in measured if m.passed is not None}
    met |= {m.output: False for m in measured if m.passed is False}
    unmoved = tuple(name for name, still in met.items() if still) if failed and not wrong + worse else ()
    name = executor.runner.name
    return Control(damaged.tensor, damaged.how, failed, few.samples, executor.executed, name, unmoved), executor.note


def _unproven(control: Control, measured: Sequence[Metric]) -> tuple[str, ...]:
    """A warning that names the outputs of which the control shows nothing."""
    if not control.unmoved:
        return ()
    limited = {m.name for m in measured if m.output in control.unmoved and m.passed is not None}
    step = (
        "Tighter limits"
        if limited & {"relative_l2", "sqnr_db"}
        else "A limit of another figure (relative_l2_max, sqnr_db_min)"
    )
    return (
        f"the check of {', '.join(control.unmoved)} alone cannot fail: it met its limits in the damaged copy too, "
        f"where only others missed theirs. {step} may tell",
    )


def run_all(runner: Runner, data: CheckData, progress: Progress | None) -> tuple[dict[str, Array], list[str]]:
    """The rows of every output over all batches, [S, ...] in the runner's dtype, and what is wrong with them."""
    parts: list[dict[str, Array]] = []
    done = 0
    for batch in data.batches():
        for piece, count in data.batching.pieces(batch):
            parts.append(data.batching.rows(runner.run(piece), count))
            done += count
            if progress is not None:
                progress.step(done, data.samples, "samples")
    if not done or not any(parts):
        return {}, ["no sample was compared"]
    return joined(parts), []


def measure(
    reference: Mapping[str, Array],
    outputs: Mapping[str, Array],
    labels: Array | None,
    limits: Limits,
    unranked: Collection[str] = (),
    judgement: Judgement = NO_METRICS,
) -> tuple[tuple[Metric, ...], list[str]]:
    """Every metric of every output, paired by exact name, judged where there is a limit; and the problems.

    Args:
        reference: the baseline's outputs, [S, ...] of any dtype by name.
        outputs: what was executed gave, in the same shapes.
        labels: int64 [S], -1 where unknown, or None.
        limits: the job's.
        unranked: names the outputs that are compared, and are no class scores of samples, as `Batching.unranked`.
        judgement: the job's own metrics, measured where all outputs can be compared.
    """
    unranked = {*unranked, *judgement.boxed}
    problems = [f"output {n} is missing from what was executed" for n in reference if n not in outputs]
    problems += [f"output {n} was executed and has no baseline" for n in outputs if n not in reference]
    values: list[Metric] = []
    scores = _class_scores(reference, unranked)
    for name in reference:
        if name not in outputs:
            continue
        a, b = reference[name], outputs[name]
        if a.shape != b.shape:
            problems.append(f"output {name} has the shape {b.shape}, its baseline {a.shape}")
        elif not len(a):
            problems.append("no sample was compared")
        elif not a.size:
            problems.append(f"output {name} has no elements (shape {a.shape})")
        elif not (np.isfinite(a).all() and np.isfinite(b).all()):
            which = "the baseline" if not np.isfinite(a).all() else "what was executed"
            problems.append(f"output {name} {HOLDS_NAN} in {which}")
        else:
            own_labels = labels if scores.get(name, 0) > last_label(labels) else None
            values += _of_output(name, a, b, own_labels, ranks=name in scores)
    if not problems:
        own, wrong = judgement.measure(outputs)
        values += own
        problems += wrong
    by_metric = {m.name for m in values}
    missing = unjudgeable(limits, reference, labels, unranked) | judgement.unjudgeable(limits)
    for bound in bounds(limits):
        if bound.metric not in by_metric:
            not_judged = f"{bound.key} was not judged"
            problems.append(not_judged if problems else missing.get(bound.key, not_judged))
    return tuple(judged(m, limits) for m in values), problems


def unjudgeable(
    limits: Limits, reference: Mapping[str, Array], labels: Array | None, unranked: Collection[str]
) -> dict[str, str]:
    """Why a limit of the job cannot be judged whatever is executed, by its name; the baseline alone says so.

    Args:
        limits: the job's.
        reference: the baseline's outputs, as `measure` has them.
        labels: int64 [S], or None.
        unranked: as `measure` has it.
    """
    why: Mapping[str, str] = {}
    if not _class_scores(reference, unranked):
        lacks = "cannot be judged: it needs an output of one score a class, float [N, 2 or more]"
        why = {limit: lacks for limit in SHARE_LIMITS if getattr(limits, limit) is not None}
    elif labels is None:
        why = without_labels(limits)
    elif last_label(labels) < 0 and limits.accuracy_drop_max is not None:
        why = {"accuracy_drop_max": "cannot be judged: it needs labels that are known (all are -1)"}
    return {limit: f"check.limits.{limit} {text}" for limit, text in why.items()}


def _class_scores(reference: Mapping[str, Array], unranked: Collection[str]) -> dict[str, int]:
    """How many classes each output of one score a class has, float [S, 2 or more], by name."""
    return {n: int(a.shape[1]) for n, a in reference.items() if n not in unranked and metrics.ranks_classes(a)}


def _without_the_labels(data: CheckData) -> tuple[str, ...]:
    """A note on each output of scores that has no column for some label: the labels are of another output's classes.

    One where no output has scores of classes, and no metric of the job's judges by the labels either.
    """
    last = last_label(data.labels)
    if data.labels is not None and last < 0 and not data.judgement.judges:
        return ("no accuracy was measured, as all labels are -1, unknown",)
    scores = _class_scores(data.reference, {*data.batching.unranked, *data.judgement.boxed})
    if last >= 0 and not scores and not data.judgement.judges:
        return (
            "no accuracy was measured, as no output has one score a class, float [N, 2 or more]; "
            "a metric of your own (check.metrics) can judge by the labels",
        )
    return tuple(
        f"{name}: no accuracy was measured, as labels go to {last} and it has {count} columns"
        for name, count in scores.items()
        if count <= last
    )


def without_labels(limits: Limits) -> dict[str, str]:
    """Why a limit of the job cannot be judged on samples without labels, by its name."""
    if limits.accuracy_drop_max is None:
        return {}
    lacks = (
        "labels: folders of classes that check.labels, or as many calibration folders as the model has classes, name; "
        "`labels` beside the arrays; or one class a sample in check.labels"
    )
    return {"accuracy_drop_max": f"cannot be judged: it needs {lacks}"}


def _of_output(name: str, a: Array, b: Array, labels: Array | None, *, ranks: bool) -> list[Metric]:
    """Every figure of one output; shares of the samples carry their 95 % confidence interval (see `intervals`)."""
    cosines = metrics.cosine(a, b)
    values = [
        Metric("cosine", name, float(cosines.mean())),
        Metric("cosine_worst", name, float(cosines.min())),
        Metric("max_abs", name, metrics.max_abs(a, b)),
        Metric("relative_l2", name, metrics.relative_l2(a, b)),
        Metric("sqnr_db", name, metrics.sqnr_db(a, b)),
    ]
    if ranks:
        agreement = intervals.binomial_interval(metrics.same_class(a, b), len(a))
        values.append(Metric("top1_agreement", name, metrics.top1_agreement(a, b), interval=agreement))
        if labels is not None and (labels >= 0).any():
            pairs = metrics.paired_accuracy(a, b, labels)
            before, after = pairs.accuracies
            drop = intervals.paired_interval(pairs.only_reference, pairs.only_output, pairs.samples)
            values.append(Metric("accuracy_baseline", name, before))
            values.append(Metric("accuracy_engine", name, after))
            values.append(Metric("accuracy_drop", name, pairs.drop, interval=drop))
    return values


def near_chance(measured: Sequence[Metric], data: CheckData) -> tuple[str, ...]:
    """A warning where the baseline's own accuracy could be that of guessing: labels then say nothing of the engine.

    Guessing reaches the share of the most frequent label. The baseline is near that when its 95 % interval reaches down
    to it, unless its accuracy is nearer to 1.
    """
    if data.labels is None:
        return ()
    known = data.labels[data.labels >= 0]
    lines = []
    for m in measured:
        if m.name != "accuracy_baseline":
            continue
        frequent, uniform = float(np.bincount(known).max()) / len(known), 1 / data.reference[m.output].shape[1]
        chance = uniform if frequent == 1 else max(frequent, uniform)
        low, _ = intervals.binomial_interval(round(m.value * len(known)), len(known))
        if low <= chance and m.value < (1 + chance) / 2:
            lines.append(
                f"{m.output}: the baseline itself is right on {100 * m.value:.1f} % of {len(known)} labelled samples, "
                f"and guessing on {100 * chance:.1f} %: accuracy and drop say nothing. Do the labels number the "
                "model's classes? See check.labels"
            )
    return tuple(lines)

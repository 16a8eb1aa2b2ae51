"""The job's own metrics: figures of the baseline and of what was executed, and how much worse that is. No torch."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from calib.images import source_digest
from calib.types import Array, JsonMapping
from calib.user_code import user_code
from trtpipe.errors import InputError
from trtpipe.evaluation import intervals
from trtpipe.evaluation.limits import BASELINE_SUFFIX, DROP_SUFFIX, ENGINE_SUFFIX, IS_NAN
from trtpipe.evaluation.standard import IGNORED, SHARE_METRICS, STANDARD, Unfit
from trtpipe.figures import apart, less, mean, own_limit
from trtpipe.job.limits import Limits
from trtpipe.model.labels import Labels
from trtpipe.values import Metric


@dataclass(frozen=True)
class Figure:
    """A metric's value; `rows` [S, ...] and what makes the value of any rows, where it can be resampled.

    each: whether a row is the metric of its sample, float [S]; NaN is then none.
    shares: whether each is 1 or 0, so that the value is a share of the samples.
    """

    value: float
    rows: Array | None = None
    total: Callable[[Array], float] | None = None
    each: bool = False
    shares: bool = False

    def same_value(self, other: Figure) -> bool:
        """Whether both are one number but for how it is rounded, or none."""
        same = math.isclose(self.value, other.value, rel_tol=1e-6, abs_tol=1e-12)
        return same or (math.isnan(self.value) and math.isnan(other.value))

    def without(self) -> Array:
        """Whether a sample has no number of its own, bool [S]; empty where no row is a sample's metric."""
        return np.isnan(self.rows) if self.each and self.rows is not None else np.empty(0, bool)

    def infinite(self) -> int:
        """How many samples have an infinite number of their own."""
        return int(np.isinf(self.rows).sum()) if self.each and self.rows is not None else 0

    def uncounted(self, after: Figure) -> Array:
        """Samples that cannot be compared, bool [S]: they have no number here, or the same infinity in both, which
        hides what all others lose; empty where no row is a sample's metric."""
        if not (self.each and after.each) or self.rows is None or after.rows is None:
            return np.empty(0, bool)
        uncounted: Array = self.without() | (np.isinf(self.rows) & (self.rows == after.rows))
        return uncounted

    def of_others(self, uncounted: Array) -> Figure:
        """The same of all samples but these, bool [S], unless there is no other."""
        if self.rows is None or self.total is None or not uncounted.any() or uncounted.all():
            return self
        rows = np.where(uncounted, np.nan, self.rows)
        return replace(self, value=self.total(rows), rows=rows)

    def interval(self) -> intervals.Interval | None:
        """Of the value: exact of a share, else by resampling the samples."""
        total = self.total
        if self.rows is None or total is None:
            return None
        rows = self.rows[~self.without()] if self.each else self.rows
        if not len(rows):  # all are NaN, which is a problem by itself
            return None
        if self.shares:
            return intervals.binomial_interval(int(rows.sum()), len(rows))
        return intervals.bootstrap_interval(lambda chosen: total(rows[chosen]), len(rows))

    def interval_below(self, other: Figure, sign: int) -> intervals.Interval | None:
        """Of sign * (this less the other): the paired one of two shares, else both resampled alike."""
        a, b, of_a, of_b = self.rows, other.rows, self.total, other.total
        if a is None or b is None or of_a is None or of_b is None:
            return None
        if self.each and other.each:
            known = ~(self.without() | other.without())
            a, b = a[known], b[known]
        if self.shares and other.shares and len(a):
            lost, won = int((sign * a > sign * b).sum()), int((sign * a < sign * b).sum())
            return intervals.paired_interval(lost, won, len(a))
        return intervals.bootstrap_interval(lambda chosen: sign * less(of_a(a[chosen]), of_b(b[chosen])), len(a))


@dataclass(frozen=True)
class Judge:
    """One metric ready to be called. `truth` makes labels of a baseline's output, where the metric is against that;
    `reference` is the job's name of a callable of its own, package.module:callable."""

    name: str
    function: Callable[..., object]
    args: JsonMapping
    larger_is_better: bool = True
    built_in: bool = False
    truth: Callable[[Array], Array] | None = None
    reference: str = ""

    def labels_of(self, output: Array) -> Labels:
        """What the baseline's output, [S, ...] of any dtype, says of the samples.

        Raises:
            InputError: it cannot say that.
        """
        assert self.truth is not None
        try:
            return self.truth(output)
        except Unfit as error:
            raise InputError(f"check.metrics.{self.name}: {error}.") from error

    def figure(self, outputs: Mapping[str, Array], labels: Labels, ids: Sequence[str]) -> Figure:
        """The metric of these outputs, [S, ...] of any dtype by name; `ids` names the S samples.

        Raises:
            InputError: the function raises, cannot take these, or returns what is no figure.
        """
        where = f"check.metrics.{self.name}"
        called = f"{where}: {self.reference}" if self.reference else where
        if self.built_in:
            self._require_rows(outputs, len(ids))
        with nullcontext() if self.built_in else user_code(called, InputError):
            try:
                given = (dict(outputs), labels, ids, dict(self.args))
                own = given if self.built_in else copy.deepcopy(given)  # a callable may write into what it is given
                rows, total, pair = self.function(*own[:3], **own[3]), mean, False
                if isinstance(rows, tuple | list) and len(rows) == 2 and callable(rows[1]):
                    (rows, total), pair = rows, True
                array, each = _numbers(rows), not pair
            except Unfit as error:
                raise InputError(f"{where}: {error}.") from error
        real = array.dtype.kind in "fiub"
        if array.shape == () and each and real:
            return Figure(float(array))
        by_sample = array.shape[:1] == (len(ids),) and (not each or (array.ndim == 1 and real))
        if not by_sample:
            kind = array.dtype.name if isinstance(rows, np.ndarray) and not real else type(rows).__name__
            got = f"{'a pair of rows, ' if pair else ''}{kind} {list(array.shape) or ''}".rstrip()
            raise InputError(
                f"{where}: must return a number, one number for each of {len(ids)} samples, or a pair of rows [S, ...] "
                f"and a function of rows that gives a number (got {got})."
            )

        def of(rows: Array) -> float:
            with nullcontext() if self.built_in else user_code(called, InputError):
                figure = _numbers(total(rows))
            if figure.shape != () or figure.dtype.kind not in "fiub":
                raise InputError(
                    f"{where}: the function of rows must return a number (got {figure.dtype} {list(figure.shape)})."
                )
            return float(figure)

        counts = each and (not self.built_in or self.function is STANDARD["top5"][0])  # the others measure
        known = array[~np.isnan(array)] if counts else ()
        shares = len(known) > 0 and bool(np.isin(known, (0, 1)).all())
        return Figure(of(array), array, of, each, shares)

    def _require_rows(self, outputs: Mapping[str, Array], samples: int) -> None:
        named = [name for name in outputs if name in map(str, self.args.values())] or list(outputs)[:1]
        for name in named:
            if len(outputs[name]) != samples:
                raise InputError(
                    f"check.metrics.{self.name}: output {name} must have one row a sample (got one a batch, "
                    f"{len(outputs[name])} for {samples} samples). Name another output, or give a callable."
                )


@dataclass(frozen=True)
class Judgement:
    """The job's metrics with the labels of the check's samples; labels and ids are in the samples' order.

    reference: the baseline's outputs on those samples, [S, ...] by name.
    boxed: names of the outputs that are scores and classes of boxes, as `Job.boxed`.
    """

    judges: tuple[Judge, ...] = ()
    labels: Labels = None
    ids: tuple[str, ...] = ()
    reference: Mapping[str, Array] = field(default_factory=dict)
    boxed: frozenset[str] = frozenset()

    def first(self, count: int, reference: Mapping[str, Array]) -> Judgement:
        """The same for the first `count` samples, on which `reference` are the baseline's outputs, [S, ...]."""
        labels = None if self.labels is None else self.labels[:count]
        return replace(self, labels=labels, ids=self.ids[:count], reference=reference)

    @cached_property
    def _baseline(self) -> tuple[tuple[Judge, str, Labels, Figure], ...]:
        """Of each metric the output it is about, what is right, and the baseline's figure: measured once."""
        made = []
        for judge in self.judges:
            named = str(judge.args.get("output"))
            output = named if named in self.reference else next(iter(self.reference))
            labels = self.labels if judge.truth is None else judge.labels_of(self.reference[output])
            made.append((judge, output, labels, judge.figure(self.reference, labels, self.ids)))
        return tuple(made)

    @cached_property
    def _steady(self) -> set[str]:
        """Names of the metrics that gave the baseline's figure again after another one: each is asked once."""
        return set()

    @property
    def counted(self) -> Mapping[str, int]:
        """How many samples a metric's figures are of, by their names, where each sample has a number or none."""
        each = {j.name: int((~before.without()).sum()) for j, _, _, before in self._baseline if before.each}
        return {name + suffix: n for name, n in each.items() for suffix in (ENGINE_SUFFIX, DROP_SUFFIX)}

    def require_figures(self) -> None:
        """Raise InputError where a metric of the baseline cannot be made, or is NaN."""
        if names := [judge.name for judge, _, _, before in self._baseline if math.isnan(before.value)]:
            raise InputError(
                f"check.metrics: must be numbers on the baseline (got NaN for {', '.join(names)}). Correct the "
                "function, or give labels that it can judge by."
            )

    def says_nothing(self) -> tuple[str, ...]:
        """A warning for each metric that has no number for a sample, and for each built-in one by which the baseline is
        no nearer to its labels than to others, or whose masks hold one class."""
        said = [
            f"{judge.name}: {nan} of {len(self.ids)} samples have no number in the baseline (NaN) and do not count"
            for judge, _, _, before in self._baseline
            if (nan := int(before.without().sum()))
        ]
        for judge, _, _, before in self._baseline:
            if infinite := before.infinite():
                said.append(
                    f"{judge.name}: {infinite} of {len(self.ids)} samples are infinite in the baseline, and count only "
                    "where what was executed has another figure"
                )
            elif judge.truth is None and math.isinf(before.value):
                said.append(f"{judge.name}: is infinite in the baseline, so its drop says only whether it still is")
        said += [
            f"{judge.name}: besides {ignored}, which is ignored, its masks hold class {alone} alone. Where {ignored} "
            f"is a class too, give check.metrics.{judge.name}.args.ignore another number"
            for judge in self.judges
            if judge.function is STANDARD["miou"][0] and isinstance(self.labels, np.ndarray) and judge.truth is None
            if (ignored := int(judge.args.get("ignore", IGNORED))) in (held := set(np.unique(self.labels).tolist()))
            for alone in held - {ignored}
            if len(held) == 2
        ]
        return *said, *self._fits_no_labels

    @cached_property
    def _fits_no_labels(self) -> tuple[str, ...]:
        """Of each built-in metric from 0 to 1 whether the baseline has 0, or no more than by other samples' labels."""
        lines = []
        for judge, _, labels, before in self._baseline:
            if judge.truth is not None or judge.function not in [STANDARD[name][0] for name in SHARE_METRICS]:
                continue
            boxes = ", and are boxes in pixels of the input" if judge.function is STANDARD["coco_map"][0] else ""
            ask = f"Do check.labels and the outputs number classes alike{boxes}?"
            if before.value == 0:
                lines.append(f"{judge.name}: the baseline itself has 0, so the figure and its drop say nothing. {ask}")
            elif (others := self._by_other_labels(judge, labels, before)) is not None:
                lines.append(
                    f"{judge.name}: the baseline itself has {before.value:.4g}, and {others:.4g} by the labels of "
                    f"other samples, so the figure and its drop say nothing. {ask}"
                )
        return tuple(lines)

    def _by_other_labels(self, judge: Judge, labels: Labels, before: Figure) -> float | None:
        """The baseline's figure where each sample is given the labels of another, if its own could be no better by the
        95 % interval of the difference, and is not nearer to 1; None if it is, or if all labels are the same."""
        half = len(self.ids) // 2
        moved: Labels
        if isinstance(labels, np.ndarray):
            rolled = np.roll(labels, half, axis=0)
            moved, same = rolled, np.array_equal(rolled, labels)
        else:
            assert labels is not None
            moved = (*labels[half:], *labels[:half])
            same = half == 0
        if same:
            return None
        other = judge.figure(self.reference, moved, self.ids)
        interval = before.interval_below(other, 1)
        known = interval is not None and interval != intervals.ALL_NUMBERS
        low = interval[0] if interval is not None and known else less(before.value, other.value)
        return other.value if low <= 0 and before.value < (1 + other.value) / 2 else None

    def measure(self, outputs: Mapping[str, Array]) -> tuple[list[Metric], list[str]]:
        """`<name>_engine` of each metric, against labels `<name>_baseline` and `<name>_drop` too; and what is NaN.

        A sample without a number in the baseline, or with the same infinity in both, counts in none of them; one
        without in what was executed is a problem.

        Args:
            outputs: those of what was executed, [S, ...] by name.
        """
        metrics, problems = list[Metric](), list[str]()
        for judge, output, labels, before in self._baseline:
            after = judge.figure(outputs, labels, self.ids)
            if not (judge.built_in or judge.name in self._steady or after.same_value(before)):
                _require_same(judge, before, judge.figure(self.reference, labels, self.ids))
                self._steady.add(judge.name)
            uncounted = before.uncounted(after)
            if lost := int((after.without() & ~before.without()).sum()) if before.each and after.each else 0:
                problems.append(
                    f"{judge.name} {IS_NAN} in {lost} of {len(self.ids)} samples of what was executed, in which it is "
                    "a number in the baseline"
                )
            before, after = before.of_others(uncounted), after.of_others(uncounted)
            made = [Metric(judge.name + ENGINE_SUFFIX, output, after.value, interval=after.interval())]
            if judge.truth is None:
                sign = 1 if judge.larger_is_better else -1
                made.insert(0, Metric(judge.name + BASELINE_SUFFIX, output, before.value))
                drop = sign * less(before.value, after.value) + 0.0  # never -0
                made.append(Metric(judge.name + DROP_SUFFIX, output, drop, interval=before.interval_below(after, sign)))
            metrics += made
        return metrics, [*(f"{m.name} {IS_NAN}" for m in metrics if math.isnan(m.value)), *problems]

    @property
    def digest(self) -> str:
        """sha256 hex of the metrics, as far as their own source and arguments decide them, and of the labels."""
        digest = hashlib.sha256(" ".join(self.ids).encode())
        for j in self.judges:
            text = f"{j.name} {sorted(j.args.items())} {j.larger_is_better} {j.truth is None}"
            digest.update(f"{text} {source_digest(j.function)}".encode())
        arrays = (
            [self.labels]
            if isinstance(self.labels, np.ndarray)
            else [a for known in self.labels or () for a in (known.corners, known.classes, known.crowd)]
        )
        for array in arrays:
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        return digest.hexdigest()

    def unjudgeable(self, limits: Limits) -> dict[str, str]:
        """Why a limit of a metric cannot be judged whatever is executed, by its name."""
        dropping = {n for n, own in limits.metrics.items() if own.drop_max is not None}
        names = [j.name for j in self.judges if j.truth is not None and j.name in dropping]
        why = "check.limits.{} cannot be judged: {} is against the baseline, and a drop needs check.labels"
        found = {(key := own_limit(n, "drop_max")): why.format(key, n) for n in names}
        whole = {j.name for j, _, _, f in self._baseline if f.rows is None} if limits.confident else set()
        why = "check.limits.confident cannot be judged: {} is one number for all samples, and has no interval"
        return found | {own_limit(n, "confident"): why.format(n) for n in limits.metrics if n in whole}


NO_METRICS = Judgement()


def _require_same(judge: Judge, before: Figure, again: Figure) -> None:
    if not again.same_value(before):
        first, second = apart(before.value, again.value)
        raise InputError(
            f"check.metrics.{judge.name}: must give the same for the same outputs (got {first} of the baseline's, and "
            f"{second} of these after it was called with others). Does it keep what it was given, as a metric of "
            "torchmetrics does without reset(), or draw at random?"
        )


def _numbers(made: object) -> Array:
    """What a metric returned as an array: real numbers as float64, in which means and differences are taken, and masked
    ones as NaN, which is no number; anything else as NumPy has it."""
    if isinstance(made, np.ma.MaskedArray) and made.dtype.kind in "fiub":
        return np.ma.filled(made.astype(np.float64), np.nan)
    plain = made.detach().cpu() if hasattr(made, "detach") else made  # of a tensor
    try:
        array: Array = np.asarray(plain)
    except ValueError:
        if not isinstance(plain, list | tuple):  # which have several lengths
            raise
        array = np.empty((), object)
    return array.astype(np.float64) if array.dtype.kind in "fiub" else array

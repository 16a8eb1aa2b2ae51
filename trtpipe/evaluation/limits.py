"""The limits of a job: which figures meet them, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trtpipe.evaluation import intervals, metrics
from trtpipe.figures import CONFIDENCE_TEXT, beside, own_limit
from trtpipe.values import Metric

if TYPE_CHECKING:
    from trtpipe.job.limits import Limits

#: limit of the job -> metric
METRIC_OF_LIMIT: Mapping[str, str] = {
    f"{metric}_{'min' if metrics.BEST[metric] > 0 else 'max'}": metric
    for metric in ("cosine", "cosine_worst", "max_abs", "relative_l2", "sqnr_db", "top1_agreement", "accuracy_drop")
}
#: What the figures of a job's own metric end in: the baseline's, that of what was executed, and what was lost.
BASELINE_SUFFIX, ENGINE_SUFFIX, DROP_SUFFIX = "_baseline", "_engine", "_drop"
#: limit of `check.limits.metrics` -> (what the metric's name ends in, whether larger is better)
OWN_LIMITS: Mapping[str, tuple[str, bool]] = {
    "min": (ENGINE_SUFFIX, True),
    "max": (ENGINE_SUFFIX, False),
    "drop_max": (DROP_SUFFIX, False),
}
#: How a problem of a check says of values, and of a figure, that they are no numbers.
HOLDS_NAN, IS_NAN = "holds NaN or infinity", "is NaN"


def is_of_nan(problem: str) -> bool:
    """Whether a problem of a check is that outputs, or figures of them, are no numbers."""
    return any(f" {said}" in problem for said in (HOLDS_NAN, IS_NAN))


def best_of(name: str) -> float:
    """The best value that a figure can have, by its name; NaN where it has none, or none is known of it."""
    return metrics.BEST.get(name, 0.0 if name.endswith(DROP_SUFFIX) else math.nan)


def worst(figures: Iterable[Metric]) -> dict[str, Metric]:
    """Each figure by its name, of several outputs the one that is farthest from the best there is; NaN is the worst.

    Of a metric of the job's own that has no best value, the first.
    """
    found: dict[str, Metric] = {}
    for figure in figures:
        known = found.setdefault(figure.name, figure)
        best = best_of(figure.name)
        worse = figure.value < known.value if best > 0 else figure.value > known.value
        if not math.isnan(best) and not math.isnan(known.value) and (worse or math.isnan(figure.value)):
            found[figure.name] = figure
    return found


@dataclass(frozen=True)
class JudgedLimit:
    """One limit of a job: its key below check.limits, the metric that it is for, and which figures meet it."""

    key: str
    metric: str
    larger_is_better: bool
    limit: float

    def met_by(self, value: float) -> bool:
        """Whether `value` is within the limit."""
        return value >= self.limit if self.larger_is_better else value <= self.limit


def bounds(limits: Limits) -> tuple[JudgedLimit, ...]:
    """The limits that are set and that figures of outputs are held against."""
    usual = [
        JudgedLimit(key, metric, metrics.BEST[metric] > 0, v)
        for key, metric in METRIC_OF_LIMIT.items()
        if (v := getattr(limits, key)) is not None
    ]
    own = [
        JudgedLimit(own_limit(name, key), name + end, larger, v)
        for name, of in limits.metrics.items()
        for key, (end, larger) in OWN_LIMITS.items()
        if (v := getattr(of, key)) is not None
    ]
    return (*usual, *own)


def judged(metric: Metric, limits: Limits) -> Metric:
    """The measured value decides; with `confident`, its whole confidence interval has to meet the limit too."""
    bound = _bound(metric, limits)
    if bound is None:
        return metric
    worst = metric.value
    if limits.confident and metric.interval is not None:
        worst = metric.interval[0 if bound.larger_is_better else 1]
    passed = bound.met_by(worst) and not math.isnan(metric.value)
    return replace(metric, limit=bound.limit, passed=passed, larger_is_better=bound.larger_is_better)


def _bound(metric: Metric, limits: Limits) -> JudgedLimit | None:
    return next((b for b in bounds(limits) if b.metric == metric.name), None)


def misses(metric: Metric, limits: Limits) -> bool:
    """Whether the measured value is beyond its limit, however sure it is; what has no limit misses none."""
    bound = _bound(metric, limits)
    return bound is not None and not bound.met_by(metric.value)


def missed_by_both(measured: Iterable[Metric], limits: Limits) -> dict[str, Metric]:
    """Figures that miss their limit as the baseline's own does, by name, with the baseline's: no precision meets it."""
    figures = tuple(measured)
    baselines = {
        (m.output, m.name.removesuffix(BASELINE_SUFFIX)): m for m in figures if m.name.endswith(BASELINE_SUFFIX)
    }
    found = {}
    for m in figures:
        judged = m.name.removesuffix(ENGINE_SUFFIX)
        before = baselines.get((m.output, judged)) if judged != m.name else None
        bound = _bound(m, limits)
        if before is not None and bound is not None and not (bound.met_by(m.value) or bound.met_by(before.value)):
            found[m.name] = before
    return found


def doubtful(
    measured: Sequence[Metric], samples: int, limits: Limits, counted: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """A line for each limit whose verdict another sample of the same data might turn round.

    Args:
        measured: judged figures.
        samples: how many they are of.
        limits: the job's.
        counted: how many of the samples a figure is of, by its name; None, or no entry, for all.
    """
    better = {b.metric: b.larger_is_better for b in bounds(limits)}
    lines = []
    for m in measured:
        if m.limit is None or m.interval is None or intervals.can_tell(m.interval, m.limit, better[m.name]):
            continue
        meets = m.value >= m.limit if better[m.name] else m.value <= m.limit
        number = (counted or {}).get(m.name, samples)
        enough = intervals.samples_to_tell(m.value, m.interval, m.limit, number)
        more = "no number of samples would settle it" if enough is None else f"about {enough} would settle it"
        if m.interval == intervals.ALL_NUMBERS:
            more = f"it takes {intervals.LEAST_RESAMPLED} that count, or more"
        lines.append(
            f"{m.output}.{m.name}: {beside(m.value, m.limit, 4)} {'meets' if meets else 'misses'} the limit "
            f"{m.limit_text}, and {number} samples are too few to be sure of it ({CONFIDENCE_TEXT} interval "
            f"{m.interval_text}; {more})"
        )
    return tuple(lines)

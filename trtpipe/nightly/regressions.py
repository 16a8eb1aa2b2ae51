"""Tonight's figures against the last green run and against the trend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trtpipe.errors import FAILED, InputError, did_you_mean
from trtpipe.evaluation.limits import DROP_SUFFIX
from trtpipe.evaluation.metrics import BEST
from trtpipe.figures import beside, exact, less, share
from trtpipe.nightly.outcome import ACCEPTED, THERE, Comparison, JobOutcome

#: Signal to noise ratios above it count as equal: both are rounding errors of float32.
EXACT_DB = 100.0
#: Green nights with a figure from which there is a trend.
LEAST_TREND = 3


@dataclass(frozen=True)
class Limit:
    """How much worse a figure may be: a share of the earlier one when `relative`, else in its own unit.

    `least` is the absolute difference under which a relative one does not count.
    """

    larger_is_better: bool
    worse_by: float
    relative: bool = False
    least: float = 0.0


#: By the name of a metric of the check, or `size_bytes`, `latency_ms` and `build_s`.
LIMITS: Mapping[str, Limit] = {
    **{
        metric: Limit(BEST[metric] > 0, worse_by)
        for metric, worse_by in (
            ("accuracy_engine", 0.01),
            ("accuracy_baseline", 0.01),
            ("top1_agreement", 0.01),
            ("cosine", 0.005),
            ("sqnr_db", 3.0),
        )
    },
    "size_bytes": Limit(False, 0.05, relative=True, least=4096),
    "latency_ms": Limit(False, 0.10, relative=True, least=0.05),
    "build_s": Limit(False, 1.0, relative=True, least=60.0),
}
#: What a metric of the job's own loses is named like this, and may grow by that, in its own unit, unless --limit says
#: otherwise.
OWN_LIMIT = Limit(False, 0.01)


def limit_of(name: str, limits: Mapping[str, Limit]) -> Limit | None:
    """How much worse a figure may become; None where it is not judged."""
    own = name.endswith(DROP_SUFFIX) and name != f"accuracy{DROP_SUFFIX}"
    limit = limits.get(name, OWN_LIMIT if own else None)
    return None if limit is None or math.isinf(limit.worse_by) else limit


def _way(name: str, limits: Mapping[str, Limit]) -> Limit | None:
    """The limit of a figure; without one, which way is worse. None where nothing says that, as of a metric of the job's
    own."""
    if (limit := limit_of(name, limits)) is not None:
        return limit
    return limits.get(name, Limit(BEST[name] > 0, math.inf) if name in BEST else None)


def parse_limits(given: Sequence[str]) -> dict[str, Limit]:
    """`NAME=VALUE` each laid over `LIMITS`; a value of `off` judges no more.

    Raises:
        InputError: an unknown name, or no number.
    """
    limits = dict(LIMITS)
    for text in given:
        name, _, value = text.partition("=")
        own = limit_of(name, {})
        if name not in LIMITS and own is None:
            hint = did_you_mean(name, tuple(LIMITS))
            raise InputError(
                f"--limit: must name one of {', '.join(LIMITS)}, or METRIC{DROP_SUFFIX} of a metric of check.metrics "
                f"(got {name!r}). {hint}".rstrip()
            )
        known = LIMITS.get(name) or OWN_LIMIT
        if value == "off":
            limits[name] = Limit(known.larger_is_better, math.inf)
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not number >= 0:
            raise InputError(f"--limit: {name} must be a number from 0 up, or off (got {value!r}).")
        limits[name] = Limit(known.larger_is_better, number, known.relative, known.least)
    return limits


def compare(
    outcome: JobOutcome, greens: Sequence[JobOutcome], limits: Mapping[str, Limit]
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """Every figure beside its past, and a line for each one that became worse than it may, or for the check.

    A job that could not be built has no engine that could be worse: it is an error, whatever refused it.

    Args:
        outcome: tonight's.
        greens: the latest green ones, the latest first; those before one that was accepted do not count.
        limits: by figure.
    """
    if not greens or outcome.outcome not in THERE:
        return (), ()
    failed = ("passed its check and now fails it",) if outcome.exit_code == FAILED else ()
    worse_ones: list[tuple[str, str]] = []
    since = next((i for i, green in enumerate(greens, 1) if green.accepted), len(greens))
    past = [_figures(g) for g in greens[:since]]
    comparisons = []
    for (name, output), now in _figures(outcome).items():
        earlier = [p[name, output] for p in past if (name, output) in p]
        before = earlier[0] if earlier else None
        trend = statistics.median(earlier) if len(earlier) >= LEAST_TREND else None
        if before is None:
            continue
        if (limit := _way(name, limits)) is None:
            comparisons.append(Comparison(name, output, before, trend, now, None, None, False, False))
            continue
        most = None if math.isinf(limit.worse_by) else limit.worse_by
        bad, worse, against = max(
            (most is not None and not worse <= most and _counts(limit, earlier_one, now), worse, what)
            for earlier_one, what in ((before, "the last green run"), (trend, "the trend"))
            if earlier_one is not None
            for worse in [_worse(limit, earlier_one, now)]
        )
        comparisons.append(Comparison(name, output, before, trend, now, worse, most, limit.relative, bad))
        if bad:
            reference = before if against == "the last green run" else trend
            worse_ones.append((name, _line(name, output, float(reference or 0.0), now, worse, limit, against)))
    judged = {k for k in past[0] if limit_of(k[0], limits) and k[0] not in ("build_s", "latency_ms")}
    missing = judged - set(_figures(outcome))
    worse_ones += [(n, f"{n} of {o or 'the engine'} was measured and no longer is") for n, o in sorted(missing)]
    return tuple(comparisons), (*failed, *(line for _, line in sorted(worse_ones, key=_importance)))


def declared_normal(outcome: JobOutcome, lines: tuple[str, ...]) -> tuple[JobOutcome, tuple[str, ...]]:
    """The outcome of a job that `--accept` names, and what is left of its regressions: of a job that passed its check
    none, of another all, as nothing that it has is held against later nights."""
    if outcome.exit_code == FAILED:
        refused = "--accept is for what passed its check: repair the job, or change its check.limits"
        return replace(outcome, notes=(*outcome.notes, refused)), lines
    noted = (*outcome.notes, *(f"{ACCEPTED}{line}" for line in lines))  # a resumed night judges what is done again
    return replace(outcome, notes=tuple(dict.fromkeys(noted))), ()


def _figures(outcome: JobOutcome) -> dict[tuple[str, str], float]:
    """Everything that can be compared, by name and output."""
    return dict(_pairs(outcome))


def _pairs(outcome: JobOutcome) -> Iterator[tuple[tuple[str, str], float]]:
    for metric in outcome.metrics:
        # Above this SQNR, differences are those of float32 sums in another order.
        value = min(metric.value, EXACT_DB) if metric.name == "sqnr_db" else metric.value
        yield (metric.name, metric.output), value
    if outcome.size_bytes is not None:
        yield ("size_bytes", ""), float(outcome.size_bytes)
    if outcome.outcome == "built" and outcome.seconds and not outcome.stages_reused:
        yield ("build_s", ""), outcome.total_seconds


def _counts(limit: Limit, before: float, now: float) -> bool:
    """Whether two figures are so far apart that a relative difference is one."""
    return not limit.relative or not abs(now - before) < limit.least


def _worse(limit: Limit, before: float, now: float) -> float:
    """By how much; NaN is the worst there is."""
    if math.isnan(now):
        return math.inf
    difference = less(before, now) if limit.larger_is_better else less(now, before)
    if not limit.relative or difference == 0:
        return difference
    return share(difference, abs(before)) if before else math.inf


def _line(name: str, output: str, before: float, now: float, worse: float, limit: Limit, against: str) -> str:
    of = f" of {output}" if output else ""
    scale, unit = (100.0, " %") if limit.relative else (1.0, "")
    most = round(scale * limit.worse_by, 12)
    by = beside(scale * worse, most, 3 if limit.relative else 4)
    figures = f"{before:.6g} -> {beside(now, before)}, worse by {by}{unit} than {against}"
    return f"{name}{of} {figures} (limit {exact(most)}{unit})"


def _importance(figure: tuple[str, str]) -> tuple[bool, int, str]:
    """Of a figure's name and its line: outputs before size, size before time, as `LIMITS` has them; a job's own metrics
    are about outputs too."""
    name, line = figure
    order = list(LIMITS)
    return name in LIMITS and name not in BEST, order.index(name) if name in LIMITS else len(order), line

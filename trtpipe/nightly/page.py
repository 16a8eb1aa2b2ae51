"""The page of a night's builds: one row a job, those that need attention first; a click opens the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from trtpipe.errors import SUCCESS, first_line
from trtpipe.evaluation.limits import worst
from trtpipe.nightly.options import PAGE
from trtpipe.nightly.outcome import (
    OUTCOMES,
    THERE,
    TROUBLES,
    Comparison,
    JobOutcome,
    NightlyReport,
    Standing,
    drift_line,
    worst_first,
)
from trtpipe.progress import duration, size
from trtpipe.report import charts
from trtpipe.report.figures import beside_limit, compact, percent
from trtpipe.report.metric_rows import HEADLINES, MetricRow, meaning, metric_row
from trtpipe.report.page import packages, page

#: Of the rows that are bad, the first so many are open.
OPEN_ROWS = 5
#: What `history` holds beside metrics, and how it is called.
_OTHERS: Mapping[str, str] = {
    "size_bytes": "Engine size",
    "seconds": "Build time, s",
}

Figures = Mapping[str, Mapping[str, Sequence[float | None]]]


@dataclass(frozen=True)
class Series:
    """The past of one figure, drawn."""

    title: str
    picture: str
    first: str
    last: str


@dataclass(frozen=True)
class ComparisonRow:
    """One figure of tonight beside the past, as text."""

    title: str
    before: str
    trend: str
    now: str
    worse_by: str
    limit: str
    regressed: bool


@dataclass(frozen=True)
class JobRow:
    """One job as it is shown; `state` is one of good, bad and plain."""

    job: JobOutcome
    state: str
    word: str
    remark: str
    figure: str
    figure_title: str
    spark: str
    size: str
    seconds: str
    metrics: tuple[MetricRow, ...]
    comparisons: tuple[ComparisonRow, ...]
    series: tuple[Series, ...]
    stages: tuple[tuple[str, str, float], ...]
    drift: str
    link: str


def render(report: NightlyReport, history: Figures | None = None, links: Mapping[str, str] | None = None) -> str:
    """The page.

    Args:
        report: the night.
        history: by job and figure (a metric's name, `size_bytes`, `seconds`, `latency_ms`), its values of past runs and
            tonight, oldest first; None where a run has none.
        links: by job, the path of its report.html relative to this page.
    """
    listed = sorted(report.outcomes, key=worst_first)
    rows = [job_row(o, (history or {}).get(o.name, {}), (links or {}).get(o.name, "")) for o in listed]
    counts = [(word, sum(r.job.outcome == word for r in rows)) for word in OUTCOMES]
    return page(
        PAGE,  # its template has its name
        report=report,
        rows=rows,
        failed=report.exit_code != SUCCESS,
        troubles=[(word, n) for word in TROUBLES if (n := sum(r.word == word for r in rows))],
        packages=packages(report.environment),
        open_rows=OPEN_ROWS,
        attention=sum(r.state == "bad" for r in rows),
        counts=[(word, n) for word, n in counts if n or word in THERE],
        duration=duration(report.seconds),
    )


def job_row(o: JobOutcome, past: Mapping[str, Sequence[float | None]], link: str) -> JobRow:
    """One job's row and detail."""
    state, remark = at_a_glance(o)
    by_name = worst(o.metrics)
    first = next((n for n in HEADLINES if n in by_name), None)
    total = o.total_seconds
    return JobRow(
        job=o,
        state=state,
        word=o.standing,
        remark=remark,
        figure="" if first is None else figure(first, by_name[first].value),
        figure_title="" if first is None else HEADLINES[first],
        spark=charts.sparkline(past.get(first, ()), f"{title(first)} of past runs") if first else "",
        size="" if o.size_bytes is None else size(o.size_bytes),
        seconds=duration(total) if o.seconds else "",
        metrics=tuple(metric_row(m) for m in o.metrics),
        comparisons=tuple(comparison_row(c) for c in o.comparisons),
        series=tuple(_series(name, values) for name, values in past.items() if any(v is not None for v in values)),
        stages=tuple((n, duration(s), 100 * s / total if total else 0.0) for n, s in o.seconds.items()),
        drift="" if o.drift is None else drift_line(o.drift),
        link=quote(link),
    )


def at_a_glance(o: JobOutcome) -> tuple[str, str]:
    """(state, remark) of one job: how its row looks, and what it says beside its `standing`."""
    missed = [f"{title(m.name)} missed its limit" for m in o.metrics if m.passed is False]
    remarks: Mapping[Standing, str] = {
        "regression": "; ".join(o.regressions[:1]),
        "failed check": "; ".join([*missed, *o.problems]) or first_line(o.error),
        "error": first_line(o.error),
        "cancelled": "not begun, or stopped",
        "built": "; ".join(o.reasons),
        "reused": "nothing changed",
    }
    states: Mapping[Standing, str] = {"cancelled": "plain", **dict.fromkeys(THERE, "good")}
    shown = o.standing in ("drift", *THERE) and o.drift is not None
    remark = drift_line(o.drift) if shown and o.drift is not None else remarks[o.standing]
    return states.get(o.standing, "bad"), remark


def comparison_row(c: Comparison) -> ComparisonRow:
    """One comparison as text."""

    def shown(x: float | None) -> str:
        return "–" if x is None else figure(c.metric, x)

    def distance(x: float | None) -> str:
        return "–" if x is None else percent(x, 1) if c.relative else figure(c.metric, x)

    allowed = distance(c.limit)

    name = f"{title(c.metric)} ({c.output})" if c.output else title(c.metric)
    if c.worse_by is None:
        worse = "same" if c.now == c.before else "changed"
    else:
        worse = "better" if c.worse_by < 0 else "same" if c.worse_by == 0 else distance(c.worse_by)
    if c.worse_by is not None and c.limit is not None and worse == allowed:
        share = c.relative or meaning(c.metric)[3]
        worse, allowed = beside_limit(c.worse_by, c.limit, share=share)
    return ComparisonRow(name, shown(c.before), shown(c.trend), shown(c.now), worse, allowed, c.regressed)


def _series(name: str, values: Sequence[float | None]) -> Series:
    known = [v for v in values if v is not None]
    picture = charts.sparkline(values, f"{title(name)} of past runs")
    return Series(title(name), picture, figure(name, known[0]), figure(name, known[-1]))


def title(name: str) -> str:
    """A figure's name for people."""
    return _OTHERS.get(name) or meaning(name)[0]


def figure(name: str, value: float) -> str:
    """A figure's value for people."""
    if name == "size_bytes" and math.isfinite(value):
        return size(int(value))
    return percent(value) if meaning(name)[3] else compact(value)

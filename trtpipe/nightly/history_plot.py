"""A job's past as lines of text and as an SVG."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trtpipe.errors import first_line
from trtpipe.evaluation.limits import worst
from trtpipe.nightly.outcome import TROUBLES
from trtpipe.report.metric_rows import HEADLINES

if TYPE_CHECKING:
    from trtpipe.nightly.history import Past

#: What is shown, in this order, where a job has it: name, title, factor.
_FIGURES = (
    *((name, title, 1.0) for name, title in HEADLINES.items()),
    ("size_bytes", "engine, MB", 1e-6),
    ("build_s", "build, s", 1.0),
)


def figures(past: Past) -> dict[str, float]:
    """The figures of one night by name; of several outputs the worst one."""
    outcome = past.outcome
    values = {name: metric.value for name, metric in worst(outcome.metrics).items()}
    if outcome.size_bytes is not None:
        values["size_bytes"] = float(outcome.size_bytes)
    if outcome.outcome == "built":
        values["build_s"] = outcome.total_seconds
    return values


def series(past: Sequence[Past]) -> dict[str, list[float | None]]:
    """Every figure over the nights, the earliest first; None where a night lacks it."""
    nights = [figures(p) for p in past]
    names = dict.fromkeys(name for night in nights for name in night)
    return {"seconds" if n == "build_s" else n: [night.get(n) for night in nights] for n in names}


def _in_trouble(past: Past) -> bool:
    """Whether its night's report had it among the troubles. `--repeat` alone, which compares nothing, is none."""
    return past.outcome.standing in TROUBLES


def rows(past: Sequence[Past]) -> Iterator[str]:
    """A line a night: when, how it ended, the figures, and why it was built."""
    shown = [(n, t, f) for n, t, f in _FIGURES if any(n in figures(p) for p in past)]
    yield f"{'run':>5}  {'UTC':<20}  {'outcome':<9}  " + "  ".join(f"{t:>15}" for _, t, _ in shown)
    for p in past:
        measures = figures(p)
        values = [f"{measures[n] * f:>15.6g}" if n in measures else f"{'':>15}" for n, _, f in shown]
        why = "; ".join(p.outcome.reasons) if p.outcome.outcome == "built" else ""
        if p.outcome.outcome == "error":
            why = first_line(p.outcome.error)
        why = "; ".join(text for text in (*p.outcome.regressions, why) if text)
        word = f"{p.outcome.outcome} !" if _in_trouble(p) and p.outcome.outcome != "error" else p.outcome.outcome
        yield f"{p.run:>5}  {p.recorded:<20}  {word:<9}  {'  '.join(values)}  {why}".rstrip()
    if any(_in_trouble(p) and p.outcome.outcome != "error" for p in past):
        yield "! not green: a failed check, a regression, or outputs that drifted"


def svg(name: str, past: Sequence[Past]) -> bytes:
    """Each figure over the nights, those of a trouble crossed. The same past gives the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [(n, t, f) for n, t, f in _FIGURES if any(n in figures(p) for p in past)]
    with rc_context({"svg.hashsalt": "trtpipe", "svg.fonttype": "none"}):
        drawing = Figure(figsize=(8, 1.6 * max(1, len(shown)) + 0.6), layout="constrained")
        axes = drawing.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (figure, title, factor) in zip(axes, shown, strict=False):
            points = [(p.run, figures(p)[figure] * factor, _in_trouble(p)) for p in past if figure in figures(p)]
            axis.plot([x for x, _, _ in points], [y for _, y, _ in points], color="#4477aa", linewidth=1)
            for trouble, marker, color in ((False, "o", "#228833"), (True, "X", "#cc3311")):
                chosen = [(x, y) for x, y, t in points if t == trouble]
                axis.plot([x for x, _ in chosen], [y for _, y in chosen], marker, color=color, markersize=5)
            axis.set_ylabel(title)
            axis.grid(True, color="#dddddd", linewidth=0.5)
        axes[-1].set_xlabel("run")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        drawing.suptitle(name)
        stream = io.BytesIO()
        drawing.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()

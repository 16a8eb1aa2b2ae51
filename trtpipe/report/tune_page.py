"""What a search found, as text: its verdict, its table of trials and its ranking, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from trtpipe.figures import beside, exact, markdown_table
from trtpipe.job.limits import Limits
from trtpipe.quantization.ranking import Sensitivity
from trtpipe.quantization.search import Candidate, Trial, Tuned, pareto
from trtpipe.report.figures import percent
from trtpipe.report.metric_rows import HEADLINES, SIZE, meaning
from trtpipe.values import shortcomings

#: Figures that have a column when any trial has them, in this order; behind them others that the budget names.
_FIGURES = {"accuracy_engine": "accuracy", "accuracy_drop": "drop", **HEADLINES}
#: How many modules of the ranking the page shows.
RANKED = 20


def verdict(tuned: Tuned) -> str:
    """One line: what to keep, or what came closest and how far off it is."""
    best = tuned.best
    what = f"{_kept(best.candidate)}, {best.candidate.algorithm}; {percent(best.int8_share, 1)} of the MACs quantized"
    count = f"{len(tuned.trials)} evaluation{'s' if len(tuned.trials) != 1 else ''}"
    if tuned.met:
        return f"budget met: {what} ({count})"
    missed = ", ".join(shortcomings(best.metrics, best.problems)) or "no figure"
    return f"budget NOT met; closest: {what}, with {missed} ({count})"


def after_search(tuned: Tuned) -> str:
    """What to do where a check fails after a search."""
    count = f"{len(tuned.trials)} candidate{'s' if len(tuned.trials) != 1 else ''}"
    came = (
        "one that met the limits in its trial is this one"
        if tuned.met
        else "none met the limits, and this is the closest"
    )
    return (
        f"check.on_fail: tune has tried {count}: {came}. Set limits that it can meet, calibrate on more samples, or "
        "build without quantization."
    )


def page(name: str, tuned: Tuned, limits: Limits) -> str:
    """The whole page: verdict, trials with the Pareto front marked, ranking."""
    given = ", ".join(f"{k} {exact(v)}" for k, v in limits.given.items())
    parts = [f"# {name}: tuning", verdict(tuned) + ".", f"Budget: {given}.", table(tuned.trials)]
    parts.append(
        "A `*` marks the Pareto front: no other trial is as good in quantized MACs, size, SQNR and "
        "latency (where it was measured) and better in one. "
        "Sizes are those of the Q/DQ graph; of several outputs the worst one's figures are shown. All trials saw the "
        "same check samples, so the best of them is flattered a little: samples that no trial has seen would say by "
        "how much."
    )
    parts += tuned.notes
    if tuned.sensitivity is not None:
        parts.append(ranking(tuned.sensitivity))
    return "\n\n".join(parts) + "\n"


def table(trials: Sequence[Trial]) -> str:
    """The trials in the order they were made."""
    limited = {
        m.name: meaning(m.name)[0] for t in trials for m in t.metrics if m.limit is not None and m.name not in _FIGURES
    }
    figures = {n: title for n, title in (_FIGURES | limited).items() if any(t.value(n) is not None for t in trials)}
    timed = any(t.latency_ms is not None for t in trials)
    front = pareto(trials)
    titles = ["", "calibration", "kept out", "quantized MACs", SIZE, *figures.values()]
    rows = []
    for t in trials:
        row = ["*" if t in front else "", t.candidate.algorithm, _kept(t.candidate), percent(t.int8_share, 1)]
        row += ["" if t.size_bytes is None else f"{t.size_bytes / 1e6:.3f}", *(_of_trial(t, n) for n in figures)]
        row += [_figure(t.latency_ms)] if timed else []
        rows.append([*row, "met" if t.passed else "refused" if t.size_bytes is None else "not met"])
    return markdown_table([*titles, *(["latency ms"] if timed else []), "budget"], rows)


def ranking(sensitivity: Sensitivity) -> str:
    """The most sensitive modules, with what it took to find them."""
    in_fp8 = any(m.fp8_sqnr_db is not None for m in sensitivity.modules)
    in_int8 = any(m.int8_sqnr_db is not None for m in sensitivity.modules)
    titles = [
        "module",
        "source",
        "SQNR dB at the outputs",
        "at its own output",
        "in half",
        *(["in FP8"] if in_fp8 else []),
        *(["in INT8"] if in_int8 else []),
        "agreement",
        "loss +",
        "MACs",
    ]
    rows = [
        [
            f"`{m.module}`" if m.module else "(the model itself)",
            m.source,
            _figure(m.sqnr_db),
            _figure(m.own_sqnr_db),
            _figure(m.half_sqnr_db),
            *([_figure(m.fp8_sqnr_db)] if in_fp8 else []),
            *([_figure(m.int8_sqnr_db)] if in_int8 else []),
            _figure(m.agreement),
            _figure(m.loss_rise),
            percent(m.macs / sensitivity.macs, 1) if sensitivity.macs else "",
        ]
        for m in sensitivity.modules[:RANKED]
    ]
    head = (
        f"## Sensitivity\n\nEach module alone in its number format, over {sensitivity.samples} samples: the worst "
        f"{len(rows)} of {len(sensitivity.modules)}. It took {sensitivity.passes:.1f} forward passes over them."
    )
    return f"{head}\n\n{markdown_table(titles, rows)}"


def _kept(candidate: Candidate) -> str:
    if not candidate.kept:
        return "nothing kept"
    groups = (
        ("FP8", candidate.fp8),
        ("INT8", candidate.int8),
        ("half", candidate.half),
        ("FP32", candidate.fp32),
    )
    return "; ".join(f"{', '.join(f'`{p}`' for p in paths)} in {name}" for name, paths in groups if paths)


def _of_trial(trial: Trial, name: str) -> str:
    metric = trial.metric(name)
    if metric is None or metric.limit is None:
        return _figure(None if metric is None else metric.value)
    return beside(metric.value, metric.limit, 4)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"

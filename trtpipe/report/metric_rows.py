"""A figure of the check as pages show it: what it is called, its limit, and how close it is to that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtpipe.evaluation.limits import BASELINE_SUFFIX, DROP_SUFFIX, ENGINE_SUFFIX, best_of
from trtpipe.report.figures import beside_limit, compact, percent

if TYPE_CHECKING:
    from trtpipe.values import Metric

#: metric -> (title, what it says, whether it is a share)
METRICS: Mapping[str, tuple[str, str, bool]] = {
    "cosine": ("Cosine similarity", "mean over the samples; 1 is the same direction", False),
    "cosine_worst": ("Cosine similarity, worst sample", "the least of all samples", False),
    "max_abs": ("Largest difference", "max |executed − baseline|", False),
    "relative_l2": ("Relative error", "|executed − baseline| / |baseline|", False),
    "sqnr_db": ("SQNR, dB", "signal to quantization noise ratio; more is better", False),
    "top1_agreement": ("Top-1 agreement", "samples given the class that the baseline gives", True),
    "accuracy_baseline": ("Accuracy of the baseline", "top-1, against the labels", True),
    "accuracy_engine": ("Accuracy of what was executed", "top-1, against the labels", True),
    "accuracy_drop": ("Accuracy lost", "baseline − executed", True),
    "latency_ms": ("Latency, ms", "the engine's median for one batch; less is better", False),
}
#: The figures by which a build is judged at a glance, the one that says most first, and their titles in narrow columns.
HEADLINES: Mapping[str, str] = {
    "accuracy_engine": "accuracy",
    "top1_agreement": "agreement",
    "cosine": "cosine",
    "sqnr_db": "SQNR dB",
}
#: The title of a file's size in such a column, in 10^6 bytes.
SIZE = "size MB"
#: What the name of a metric of the job's own ends in -> (title, what it says).
OWN_METRICS: Mapping[str, tuple[str, str]] = {
    BASELINE_SUFFIX: ("{} of the baseline", ""),
    ENGINE_SUFFIX: ("{} of what was executed", ""),
    DROP_SUFFIX: ("{} lost", "how much worse than the baseline's, in its own unit"),
}


@dataclass(frozen=True)
class MetricRow:
    """One metric as it is shown. `used` is the share of what the limit allows; `reach` that of its interval; both None
    where there is no limit, or no best value to count from."""

    title: str
    says: str
    output: str
    value: str
    interval: str
    limit: str
    passed: bool | None
    used: float | None
    reach: tuple[float, float] | None

    @property
    def bar(self) -> str:
        """Width of the bar in percent: the limit stands at two thirds."""
        return _width(self.used or 0.0)

    @property
    def undecided(self) -> bool:
        """Whether the limit is met and the interval reaches beyond it: more samples would decide."""
        return bool(self.passed) and self.reach is not None and self.reach[1] > 1

    @property
    def closeness(self) -> str:
        """The bar in words."""
        if self.used is None or math.isinf(self.used):
            return "beyond any limit" if self.used else ""
        if self.used <= 1:
            return f"{percent(self.used, 0)} of the error that is allowed"
        return f"{compact(round(self.used, 1))} times the error that is allowed"

    @property
    def whisker(self) -> str:
        """The style of the interval's mark, or nothing."""
        if self.reach is None:
            return ""
        low, high = (float(_width(r)) for r in self.reach)
        return f"left:{low:.2f}%;width:{max(0.0, high - low):.2f}%"


def meaning(name: str) -> tuple[str, str, float, bool]:
    """Title, what it says, best value, whether it is a share; its name with blanks for one that is nowhere known."""
    best = best_of(name)
    for end, (title, says) in OWN_METRICS.items():
        if name not in METRICS and name.endswith(end):
            return title.format(name.removesuffix(end).replace("_", " ")), says, best, False
    title, says, share = METRICS.get(name, (name.replace("_", " "), "", False))
    return title, says, best, share


def metric_row(metric: Metric) -> MetricRow:
    """One metric with its limit, if it has one, and how much of it is used."""
    title, says, best, share = meaning(metric.name)
    shown = percent if share else compact
    value, interval, used, reach, limit = shown(metric.value), "", None, None, ""
    if metric.interval is not None:
        interval = f"{shown(metric.interval[0])} to {shown(metric.interval[1])}"
    if metric.limit is not None:
        least = best > 0 if metric.larger_is_better is None else metric.larger_is_better  # of bundles of before
        value, bound = beside_limit(metric.value, metric.limit, share=share)
        limit = f"{'≥' if least else '≤'} {bound}"
        if not math.isnan(best):
            used = allowance(metric.value, metric.limit, best)
        if used is not None and metric.interval is not None:
            ends = sorted(allowance(v, metric.limit, best) for v in metric.interval)
            reach = (ends[0], ends[1])
    return MetricRow(title, says, metric.output, value, interval, limit, metric.passed, used, reach)


def allowance(value: float, limit: float, best: float) -> float:
    """How much of what a limit allows is used: 0 at the best value, 1 at the limit, more beyond it.

    In dB, where there is no best value, it is the noise's amplitude over the one allowed.
    """
    if math.isnan(value):
        return math.inf
    if math.isinf(best):
        return 0.0 if value == math.inf else float(10 ** (min(limit - value, 400.0) / 20))
    room = abs(best - limit)
    off = max(0.0, best - value if best > 0 else value - best)
    if room == 0:
        return 0.0 if off == 0 else math.inf
    return off / room


def _width(used: float) -> str:
    return f"{100 * min(max(used, 0.0), 1.5) / 1.5:.2f}"

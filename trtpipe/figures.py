"""A figure beside its limit: no rounding takes one across the other, of a difference as of its text. Differences of
arrays, of which no rounding hides one, and their mean. And tables of figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal

import numpy as np

from calib.types import Array

#: Of every confidence interval.
CONFIDENCE = 0.95
CONFIDENCE_TEXT = f"{100 * CONFIDENCE:.0f} %"
#: What the names of the limits of a job's own metrics begin with.
OWN = "metrics."


def own_limit(metric: str, limit: str) -> str:
    """The name of a limit of one of a job's own metrics, as messages and `job.limits.Limits.given` have it."""
    return f"{OWN}{metric}.{limit}"


def exact(x: float) -> str:
    """The number itself in the fewest digits: 0.99, 1e-05, 0.9999999."""
    return f"{x:g}" if float(f"{x:g}") == x else repr(x)


def beside(value: float, limit: float, digits: int = 6) -> str:
    """`value` in `digits` significant digits, or in as many more as keep it on its own side of `limit`."""
    for count in range(digits, 17):
        text = f"{value:.{count}g}"
        rounded = float(text)
        if (rounded < limit, rounded > limit) == (value < limit, value > limit):
            return text
    return repr(value)


def span(low: float, high: float, limit: float | None) -> str:
    """An interval in four significant digits, its ends on their own sides of the limit; `unknown` where it is all."""
    if (low, high) == (-math.inf, math.inf):
        return "unknown"
    return " to ".join(f"{x:.4g}" if limit is None else beside(x, limit, 4) for x in (low, high))


def apart(a: float, b: float, digits: int = 6) -> tuple[str, str]:
    """Two figures in `digits` significant digits, or in as many more as tell them apart."""
    for count in range(digits, 17):
        texts = f"{a:.{count}g}", f"{b:.{count}g}"
        if texts[0] != texts[1] or a == b:
            return texts
    return repr(a), repr(b)


def less(a: float, b: float) -> float:
    """a - b of the decimal numbers that people read: 1 less 0.71 is 0.29, where binary digits give a little more.

    0 where both are the same infinity; any two floats.
    """
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return a - b
    return float(Decimal(repr(float(a))) - Decimal(repr(float(b))))


def difference(wanted: Array, got: Array) -> Array:
    """got - wanted of two arrays of one shape, any dtypes, as float64 of that shape.

    Whole numbers are subtracted as such: above 2^53 float64 holds not every int64, and would take different ones for
    the same.
    """
    wide: Array = np.asarray(got.astype(np.float64) - wanted.astype(np.float64))  # scalars give no array by themselves
    if not (wanted.dtype.kind == got.dtype.kind == "i"):
        return wide
    a, b = got.astype(np.int64), wanted.astype(np.int64)
    with np.errstate(over="ignore"):
        whole = a - b
    past = ((a ^ b) & (a ^ whole)) < 0  # what int64 holds: float64 is near enough there
    result: Array = np.where(past, wide, whole.astype(np.float64))
    return result


def mean(values: Array) -> float:
    """Mean of those of float64 [N] that are numbers (not NaN), as near as float64 can be: twenty times 0.7 give 0.7, of
    which a plain sum falls short. NaN without any, or of infinities of both signs."""
    known = values[~np.isnan(values)]
    with np.errstate(invalid="ignore", over="ignore"):
        plain = float(np.mean(known)) if len(known) else math.nan
    if not math.isfinite(plain):
        return plain
    near = math.fsum(known.tolist()) / len(known)
    return near + math.fsum([*known.tolist(), *[-near] * len(known)]) / len(known)


def share(part: float, whole: float) -> float:
    """part / whole of the decimal numbers that people read; `whole` finite and not 0."""
    if not math.isfinite(part):
        return part / whole
    return float(Decimal(repr(float(part))) / Decimal(repr(float(whole))))


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table in Markdown without a line break at its end; with `numbers` all columns but the first stand right."""
    marks = ["---", *["---:" if numbers else "---"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, marks, *rows))

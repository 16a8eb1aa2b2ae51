"""Numbers as people read them. The same number always gives the same text."""

from __future__ import annotations

import math


def shortest(value: float, digits: int) -> str:
    """At most so many decimals, no zeros at their end, and never "-0"."""
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def compact(x: float, digits: int = 4) -> str:
    """At most `digits` significant digits: 0.9988, 25.93, 1.38e-05; whole numbers from 1,000 on."""
    if isinstance(x, bool) or not math.isfinite(x):
        return {math.inf: "∞", -math.inf: "−∞"}.get(x, "NaN")
    if x == int(x) and abs(x) < 1e6:
        return f"{int(x):,}".replace("-", "−")
    text = f"{x:,.{digits - 4}f}" if 1e3 <= abs(x) < 1e6 else f"{x:.{digits}g}"
    text = text.rstrip("0").rstrip(".") if "," in text and "." in text else text
    return text.replace("-", "−") if "e" not in text else text


def percent(share: float, digits: int = 2) -> str:
    """A share in [0, 1] as percent: "99.72 %", "0 %", and "< 0.01 %" or "> 99.99 %" for what would read as 0
    or 100 and is not."""
    if not math.isfinite(share):
        return compact(share)
    least = 10.0**-digits
    if 0 < abs(100 * share) < least / 2:
        return f"< {least:.{digits}f} %"
    if 100 - least / 2 <= 100 * share < 100:
        return f"> {100 - least:.{digits}f} %"
    return f"{shortest(100 * share, digits)} %".replace("-", "−")


def beside_limit(value: float, limit: float, *, share: bool) -> tuple[str, str]:
    """A figure and its limit as people read them: the limit itself, and no rounding takes the figure across it."""
    show, fewest = (percent, 2) if share else (compact, 4)
    for digits in range(fewest, 14):
        shown, bound = show(value, digits), show(limit, digits)
        if bound == show(limit, 13) and (shown != bound or value == limit):
            return shown, bound
    return str(value), str(limit)

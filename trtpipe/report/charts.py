"""Small SVG pictures, drawn from numbers alone: colours come from the page's style, so they follow its light or dark.

Every function returns markup that is safe as it stands; text given to it is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from trtpipe.report.figures import compact

if TYPE_CHECKING:
    from calib.histogram import Histogram
    from trtpipe.report.answers import Confusion

#: Bars of a histogram.
BARS = 60


def number(x: float) -> str:
    """A coordinate: at most two decimals, never "-0"."""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def histogram(counts: Histogram, amax: float, title: str) -> Markup:
    """|x| by frequency (log scale) with the threshold drawn; what lies beyond it, and saturates, stands out."""
    width, height, foot = 240.0, 84.0, 14.0
    top = max(counts.max, amax)
    if not top > 0:
        return Markup("")
    edges = np.linspace(0.0, top, BARS + 1)
    heights = np.log1p(np.diff(counts.below(edges)))
    heights = heights / heights.max() if heights.max() > 0 else heights
    step = width / BARS
    kept, beyond = [], []
    for i, h in enumerate(heights.tolist()):
        if h <= 0:
            continue
        bar = max(1.0, h * (height - 6))
        (beyond if edges[i] >= amax else kept).append(
            f"M{number(i * step)} {number(height)}v{number(-bar)}h{number(step * 0.84)}v{number(bar)}z"
        )
    x = width * amax / top
    return Markup(
        '<svg class="hist" viewBox="0 0 {w} {h}" role="img" aria-label="{title}">'
        '<path class="kept" d="{kept}"/><path class="beyond" d="{beyond}"/>'
        '<path class="axis" d="M0 {base}H{w}"/><path class="threshold" d="M{x} 0V{base}"/>'
        '<text x="0" y="{foot}">0</text><text x="{w}" y="{foot}" text-anchor="end">{top}</text></svg>'
    ).format(
        w=number(width), h=number(height + foot), title=title, kept="".join(kept), beyond="".join(beyond),
        base=number(height), foot=number(height + foot - 2), x=number(x), top=compact(top),
    )  # fmt: skip


def sparkline(values: Sequence[float | None], label: str) -> Markup:
    """The past of one figure, oldest first; a gap where there is None, a dot on the last."""
    width, height = 120.0, 26.0
    points = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if not points:
        return Markup('<span class="muted small">no history</span>')
    low, high = min(v for _, v in points), max(v for _, v in points)
    span = high - low

    def place(i: int, v: float) -> tuple[float, float]:
        x = 4 + (width - 8) * (i / (len(values) - 1) if len(values) > 1 else 1.0)
        y = height / 2 if span == 0 else 4 + (height - 8) * (high - v) / span
        return x, y

    path, last = [], -2
    for i, v in points:
        x, y = place(i, v)
        path.append(f"{'L' if i == last + 1 else 'M'}{number(x)} {number(y)}")
        last = i
    x, y = place(*points[-1])
    return Markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">'
        '<title>{label}</title><path d="{d}"/><circle cx="{x}" cy="{y}" r="2.6"/></svg>'
    ).format(w=number(width), h=number(height), label=label, d="".join(path), x=number(x), y=number(y))


def matrix(confusion: Confusion) -> Markup:
    """The confusion matrix: agreement in one colour, errors in another, the stronger the more of its row."""
    names, counts = confusion.names, confusion.counts
    cell, count = 30.0, len(names)
    letters = max(len(_short(n)) for n in names)
    left = 26.0 + 6.4 * letters
    head = 24.0 if letters <= 4 else 22.0 + 5.4 * letters
    width, height = left + cell * count + (0.0 if letters <= 4 else 2.6 * letters), head + cell * count
    parts = []
    for i, name in enumerate(names):
        y = head + cell * (i + 0.5)
        parts.append(
            Markup('<text x="{x}" y="{y}" text-anchor="end" class="tick">{n}<title>{full}</title></text>').format(
                x=number(left - 6), y=number(y + 4), n=_short(name), full=name
            )
        )
        x = left + cell * (i + 0.5)
        turn = Markup("") if letters <= 4 else Markup(' transform="rotate(-60 {x} {y})"').format(
            x=number(x + 3), y=number(head - 6)
        )  # fmt: skip
        parts.append(
            Markup('<text x="{x}" y="{y}" text-anchor="{a}" class="tick"{turn}>{n}<title>{full}</title></text>').format(
                x=number(x if letters <= 4 else x + 3), y=number(head - 6), a="middle" if letters <= 4 else "start",
                turn=turn, n=_short(name), full=name,
            )  # fmt: skip
        )
        total = max(1, int(counts[i].sum()))
        for j, other in enumerate(names):
            n = int(counts[i, j])
            share = n / total
            kind = "same" if i == j else "other"
            opacity = 0.0 if not n else 0.18 + 0.72 * share if i == j else 0.35 + 0.55 * share
            parts.append(
                Markup(
                    '<g><title>{row} {name}, executed {other}: {n}</title><rect class="{kind}" x="{x}" y="{y}" width="{s}" '
                    'height="{s}" rx="3" fill-opacity="{o}"/>{text}</g>'
                ).format(
                    row=confusion.rows, name=name, other=other, n=n, kind=kind if n else "none",
                    x=number(left + cell * j + 1), y=number(head + cell * i + 1), s=number(cell - 2), o=number(opacity if n else 1),
                    text=Markup('<text x="{x}" y="{y}" text-anchor="middle" class="{c}">{n}</text>').format(
                        x=number(left + cell * (j + 0.5)), y=number(y + 4), n=compact(n), c="strong" if opacity > 0.6 else "cell",
                    ) if n else "",
                )  # fmt: skip
            )
    side = Markup('<text x="10" y="{y}" text-anchor="middle" transform="rotate(-90 10 {y})" class="axis-name">{t}</text>').format(
        y=number(head + cell * count / 2), t=confusion.rows
    )  # fmt: skip
    return Markup('<svg class="matrix" viewBox="0 0 {w} {h}" role="img" aria-label="confusion matrix">{side}{body}</svg>').format(
        w=number(width), h=number(height), side=side, body=Markup("").join(parts)
    )  # fmt: skip


def distribution(values: Sequence[float], label: str) -> Markup:
    """Measured times: one bar for each of 40 equal steps from the least to the 99th percentile, which holds the rest."""
    data = np.sort(np.asarray([v for v in values if math.isfinite(v)], np.float64))
    if not data.size:
        return Markup("")
    low, high = float(data[0]), float(np.percentile(data, 99))
    bars, width, height, foot = 40, 480.0, 90.0, 16.0
    counts = np.histogram(np.minimum(data, high), bars, (low, high if high > low else low + 1e-9))[0]
    tallest, step = int(counts.max()), width / bars
    d = "".join(
        f"M{number(i * step)} {number(height)}v{number(-(height - 4) * c / tallest)}h{number(step * 0.86)}V{number(height)}z"
        for i, c in enumerate(counts.tolist())
        if c
    )
    return Markup(
        '<svg class="hist" viewBox="0 0 {w} {h}" role="img" aria-label="{label}"><path class="kept" d="{d}"/>'
        '<path class="axis" d="M0 {b}H{w}"/><text x="0" y="{y}">{low} ms</text>'
        '<text x="{w}" y="{y}" text-anchor="end">{high} ms (p99)</text></svg>'
    ).format(
        w=number(width), h=number(height + foot), label=label, d=d, b=number(height), y=number(height + foot - 3),
        low=compact(low), high=compact(high),
    )  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"

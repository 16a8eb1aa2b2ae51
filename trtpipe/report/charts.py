"""Small SVG pictures, drawn from numbers alone: colours come from the page's style, so they follow its light or dark.

Every function returns markup that is safe as it stands; text given to it is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trtpipe.report.figures import compact, shortest

if TYPE_CHECKING:
    from markupsafe import Markup

    from calib.histogram import Histogram
    from trtpipe.report.comparison import Confusion

#: Bars of a histogram.
BARS = 60


def number(x: float) -> str:
    """A coordinate: at most two decimals, never "-0"."""
    return shortest(x, 2)


def histogram(counts: Histogram, amax: float, title: str) -> Markup:
    """|x| by frequency (log scale) with the threshold drawn; what lies beyond it, and saturates, stands out."""
    width, height, foot = 240.0, 84.0, 14.0
    top = max(counts.max, amax)
    if not counts.max > 0:
        return _markup("")
    edges = np.linspace(0.0, top, BARS + 1)
    heights = np.log1p(np.diff(counts.below(edges)))
    heights = heights / heights.max() if heights.max() > 0 else heights
    step = width / BARS
    kept: list[str] = []
    beyond: list[str] = []
    for i, h in enumerate(heights.tolist()):
        if h <= 0:
            continue
        bar = max(1.0, h * (height - 6))
        (beyond if edges[i] >= amax else kept).append(
            f"M{number(i * step)} {number(height)}v{number(-bar)}h{number(step * 0.84)}v{number(bar)}z"
        )
    x = width * amax / top
    return _markup(
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
        return _markup('<span class="muted small">no history</span>')
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
    return _markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">'
        '<title>{label}</title><path d="{d}"/><circle cx="{x}" cy="{y}" r="2.6"/></svg>'
    ).format(w=number(width), h=number(height), label=label, d="".join(path), x=number(x), y=number(y))


def matrix(confusion: Confusion) -> Markup:
    """The confusion matrix: agreement in one colour, errors in another, the stronger the more of its row."""
    names, counts = confusion.names, confusion.counts
    cell, count = 30.0, len(names)
    letters = max(len(_short(n)) for n in names)
    turned = letters > 4
    left = 26.0 + 6.4 * letters
    head = 22.0 + 5.4 * letters if turned else 24.0
    width = left + cell * count + (2.6 * letters if turned else 0.0)
    height = head + cell * count
    parts = []
    for i, name in enumerate(names):
        x, y = left + cell * (i + 0.5), head + cell * (i + 0.5)
        parts.append(_label(left - 6, y + 4, "end", name))
        parts.append(
            _label(x + 3, head - 6, "start", name, turn=-60) if turned else _label(x, head - 6, "middle", name)
        )
        total = max(1, int(counts[i].sum()))
        for j, other in enumerate(names):
            n = int(counts[i, j])
            hint = f"{confusion.rows} {name}, executed {other}: {n}"
            parts.append(_cell(left + cell * j, head + cell * i, cell, n, n / total, i == j, hint))
    axis = '<text x="10" y="{y}" text-anchor="middle" transform="rotate(-90 10 {y})" class="axis-name">{t}</text>'
    parts.append(_markup(axis).format(y=number(head + cell * count / 2), t=confusion.rows))
    frame = (
        '<svg class="matrix" viewBox="0 0 {w} {h}" style="max-width:{most}px" role="img" '
        'aria-label="confusion matrix">{body}</svg>'
    )
    body = _markup("").join(parts)
    return _markup(frame).format(w=number(width), h=number(height), most=number(1.15 * width), body=body)


def _label(x: float, y: float, anchor: str, name: str, turn: float = 0.0) -> Markup:
    """A class's name, cut short, in full for the pointer."""
    rotated = ' transform="rotate({t} {x} {y})"' if turn else ""
    text = '<text x="{x}" y="{y}" text-anchor="{a}" class="tick"' + rotated + ">{n}<title>{full}</title></text>"
    return _markup(text).format(x=number(x), y=number(y), a=anchor, t=number(turn), n=_short(name), full=name)


def _cell(x: float, y: float, side: float, n: int, share: float, same: bool, hint: str) -> Markup:
    """One count [px, px]; an empty cell is left blank."""
    opacity = 0.18 + 0.72 * share if same else 0.35 + 0.55 * share
    kind = ("same" if same else "other") if n else "none"
    box = (
        '<g><title>{hint}</title><rect class="{kind}" x="{x}" y="{y}" width="{s}" height="{s}" rx="3" '
        'fill-opacity="{o}"/>'
    )
    text = '<text x="{cx}" y="{cy}" text-anchor="middle" class="{c}">{n}</text></g>' if n else "</g>"
    return _markup(box + text).format(
        hint=hint,
        kind=kind,
        x=number(x + 1),
        y=number(y + 1),
        s=number(side - 2),
        o=number(opacity if n else 1.0),
        cx=number(x + side / 2),
        cy=number(y + side / 2 + 4),
        c="strong" if opacity > 0.6 else "cell",
        n=compact(n),
    )


def distribution(values: Sequence[float], label: str) -> Markup:
    """Measured times in 40 equal steps from the least to the 99th percentile; the last step holds the rest."""
    data = np.sort(np.asarray([v for v in values if math.isfinite(v)], np.float64))
    if not data.size:
        return _markup("")
    low, high = float(data[0]), float(np.percentile(data, 99))
    bars, width, height, foot = 40, 480.0, 90.0, 16.0
    counts = np.histogram(np.minimum(data, high), bars, (low, high if high > low else low + 1e-9))[0]
    tallest, step = int(counts.max()), width / bars
    d = "".join(
        f"M{number(i * step)} {number(height)}v{number(-(height - 4) * c / tallest)}"
        f"h{number(step * 0.86)}V{number(height)}z"
        for i, c in enumerate(counts.tolist())
        if c
    )
    return _markup(
        '<svg class="hist" viewBox="0 0 {w} {h}" role="img" aria-label="{label}"><path class="kept" d="{d}"/>'
        '<path class="axis" d="M0 {b}H{w}"/><text x="0" y="{y}">{low} ms</text>'
        '<text x="{w}" y="{y}" text-anchor="end">{high} ms (p99)</text></svg>'
    ).format(
        w=number(width), h=number(height + foot), label=label, d=d, b=number(height), y=number(height + foot - 3),
        low=compact(low), high=compact(high),
    )  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"


def _markup(text: str) -> Markup:
    """Text that a template takes as it is. A device that finishes kits has no markupsafe, and draws nothing."""
    from markupsafe import Markup

    return Markup(text)

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from calib.histogram import Histogram
from trtpipe.report import charts
from trtpipe.report.comparison import Confusion
from trtpipe.report.figures import compact, percent

HOSTILE = '"><script>x</script>'


def test_a_histogram_draws_the_threshold_where_it_is_and_what_is_beyond_it() -> None:
    counted = Histogram.of(np.linspace(0.001, 4.0, 4000))
    svg = ElementTree.fromstring(charts.histogram(counted, 3.0, HOSTILE))
    paths = {p.get("class"): p.get("d") or "" for p in svg.iter("path")}
    assert paths["threshold"].startswith("M180 0")  # 3 of 4, 240 wide
    kept, beyond = (len(re.findall("M", paths[k])) for k in ("kept", "beyond"))
    assert (kept, beyond) == (45, 15)  # of 60 bars a quarter lies beyond
    assert svg.get("aria-label") == HOSTILE


def test_bars_are_logarithmic() -> None:
    counted = Histogram.of([0.1] * 99 + [3.999] * 9)
    svg = ElementTree.fromstring(charts.histogram(counted, 4.0, ""))
    kept = next(p.get("d") or "" for p in svg.iter("path") if p.get("class") == "kept")
    heights = [float(h) for h in re.findall(r"v-([\d.]+)h", kept)]
    assert heights[-1] / heights[0] == pytest.approx(np.log1p(9) / np.log1p(99), abs=0.01)


def test_a_tensor_of_zeros_has_no_picture() -> None:
    assert charts.histogram(Histogram.of(np.zeros(4)), 1.0, "") == ""


def test_a_sparkline_has_a_gap_where_a_run_has_no_figure() -> None:
    svg = ElementTree.fromstring(charts.sparkline([1.0, 3.0, None, 2.0], HOSTILE))
    path = next(svg.iter("path")).get("d") or ""
    assert path == "M4 22L41.33 4M116 13"
    circle = next(svg.iter("circle"))
    assert (circle.get("cx"), circle.get("cy")) == ("116", "13")


def test_a_sparkline_of_one_value_or_none() -> None:
    assert 'cx="116" cy="13"' in charts.sparkline([5.0], "")
    assert "no history" in charts.sparkline([None, float("nan")], "")


def test_the_matrix_holds_every_count_and_escapes_names() -> None:
    confusion = Confusion((HOSTILE, "b"), np.array([[7, 2], [0, 12_345]]), "label", 0, 2)
    svg = ElementTree.fromstring(charts.matrix(confusion))
    texts = [t.text for t in svg.iter("text")]
    assert [t for t in texts if t in ("7", "2", "0", "12,345")] == ["7", "2", "12,345"]
    assert len(list(svg.iter("rect"))) == 4
    titles = [t.text or "" for t in svg.iter("title")]
    assert f"label {HOSTILE}, executed b: 2" in titles


def test_a_distribution_keeps_every_value() -> None:
    values = [1.0] * 10 + [2.0] * 5
    svg = ElementTree.fromstring(charts.distribution(values, "latency"))
    path = next(p.get("d") or "" for p in svg.iter("path") if p.get("class") == "kept")
    heights = [float(h) for h in re.findall(r"v-([\d.]+)h", path)]
    assert heights == [86.0, 43.0]
    assert charts.distribution([], "latency") == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.99888, "0.9989"), (25.925, "25.93"), (12345.0, "12,345"), (0.0, "0"), (-2.0, "−2"), (1.38e-5, "1.38e-05"),
     (float("inf"), "∞"), (float("nan"), "NaN"), (1234.6, "1,235")],
)  # fmt: skip
def test_compact(value: float, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.99722, "99.72 %"),
        (1.0, "100 %"),
        (0.0, "0 %"),
        (0.00001, "< 0.01 %"),
        (-0.01, "−1 %"),
        (0.99998, "> 99.99 %"),
        (0.9999, "99.99 %"),
    ],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text

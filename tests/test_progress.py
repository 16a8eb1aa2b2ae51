"""Rates, sizes and times as text."""

from __future__ import annotations

import pytest

from trtpipe.progress import duration, per_second, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 bytes"), (1000, "1.0 kB"), (33_376, "33.4 kB"), (29_600_000, "29.6 MB"), (2_500_000_000, "2.5 GB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.424, "0.42 s"), (12.34, "12.3 s"), (187, "3 min 07 s"), (7500, "2 h 05 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(1600.4, "1,600"), (9.5, "10"), (1.42, "1.4"), (0.081, "0.081")])
def test_per_second(rate: float, text: str) -> None:
    assert per_second(rate) == text

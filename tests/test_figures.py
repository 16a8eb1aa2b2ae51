"""A figure beside its limit never reads as if it were on the other side, or at it."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.figures import apart, beside, exact, less, mean, share
from trtpipe.report.figures import beside_limit
from trtpipe.values import Metric

NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False) | st.sampled_from([0.99, 0.9999999, 1.0, 1e-7, 0.07, 999.9999])


@given(NUMBERS)
def test_a_limit_is_shown_as_it_is(limit: float) -> None:
    assert float(exact(limit)) == limit


@given(NUMBERS, NUMBERS, st.integers(2, 6))
def test_no_rounding_takes_a_figure_across_its_limit(value: float, limit: float, digits: int) -> None:
    shown = float(beside(value, limit, digits))
    assert (shown < limit, shown > limit) == (value < limit, value > limit)
    assert shown == pytest.approx(value, rel=10.0 ** (1 - digits))


NEAR = st.tuples(st.floats(0.01, 100), st.floats(-1e-7, 1e-7)).map(lambda t: (t[0], t[0] + t[1]))


@given(NEAR, st.booleans())
def test_nor_on_a_page(pair: tuple[float, float], share: bool) -> None:
    limit, value = round(pair[0], 9), round(pair[1], 9)
    texts = beside_limit(value, limit, share=share)
    shown, bound = (Decimal(t.removesuffix(" %").replace("\u2212", "-").replace(",", "")) for t in texts)
    assert (shown < bound, shown > bound) == (value < limit, value > limit)
    assert float(bound) == pytest.approx(100 * limit if share else limit, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (1.0, 0.9999999, ("1", "0.9999999")),
        (0.99999999, 0.9999999, ("1", "0.9999999")),
        (0.9899999, 0.99, ("0.9899999", "0.99")),
        (0.998887, 0.99, ("0.998887", "0.99")),
        (0.01, 0.01, ("0.01", "0.01")),
        (math.nan, 0.5, ("nan", "0.5")),
        (math.inf, 30.0, ("inf", "30")),
    ],
)
def test_as_text(value: float, limit: float, shown: tuple[str, str]) -> None:
    metric = Metric("cosine", "y", value, limit, value >= limit)
    assert (metric.value_text, metric.limit_text) == shown


@pytest.mark.parametrize(
    ("value", "limit", "share", "shown"),
    [
        (1.0, 0.9999999, True, ("100 %", "99.99999 %")),
        (0.979999, 0.98, True, ("97.9999 %", "98 %")),
        (0.9988872, 0.99, False, ("0.9989", "0.99")),
        (0.98999, 0.99, False, ("0.98999", "0.99")),
        (1234.56, 1234.6, False, ("1,234.56", "1,234.6")),
        (math.inf, 30.0, False, ("∞", "30")),
    ],
)
def test_on_a_page(value: float, limit: float, share: bool, shown: tuple[str, str]) -> None:
    assert beside_limit(value, limit, share=share) == shown


@given(NUMBERS, NUMBERS)
def test_two_figures_are_told_apart(a: float, b: float) -> None:
    here, there = apart(a, b, 4)
    assert (here == there) == (a == b)
    assert float(here) == pytest.approx(a, rel=1e-3)


def test_figures_that_differ_at_once_stay_short() -> None:
    assert apart(0.72, 0.99981, 4) == ("0.72", "0.9998")
    assert apart(0.99979, 0.99981, 4) == ("0.99979", "0.99981")


@given(st.sampled_from([10, 20, 40, 50, 100, 500, 1000, 4000]), st.data())
def test_a_difference_of_shares_is_the_share_of_the_difference(samples: int, data: st.DataObject) -> None:
    """Whatever the counts: 0.93 less 0.92 is the 0.01 that a limit allows, not 0.01000000000000001."""
    before, after = (data.draw(st.integers(0, samples)) for _ in range(2))
    assert less(before / samples, after / samples) == (before - after) / samples


@given(st.integers(1, 10_000), st.integers(-50, 50))
def test_a_relative_difference_of_decimals_is_what_people_compute(whole: int, percent: int) -> None:
    assert share(less(whole * (100 + percent) / 100, whole), whole) == pytest.approx(percent / 100, abs=1e-16)
    assert share(less((100 + percent) / 100, 1.0), 1.0) == percent / 100


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_a_difference_is_that_of_the_floats_but_for_their_rounding(a: float, b: float) -> None:
    if a == b:
        assert less(a, b) == 0
    elif not (math.isfinite(a) and math.isfinite(b)):
        assert less(a, b) == a - b
    else:
        assert less(a, b) == pytest.approx(a - b, abs=4 * max(math.ulp(a), math.ulp(b)), rel=1e-15)


@given(st.floats(-1e6, 1e6, allow_subnormal=False), st.integers(1, 300))
def test_a_mean_of_one_number_many_times_is_that_number(value: float, many: int) -> None:
    """Else samples that are all at their limit would fail it."""
    assert mean(np.full(many, value)) == value


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_mean_is_the_number_nearest_to_it(values: list[float]) -> None:
    right = float(sum(map(Fraction, values)) / len(values))
    assert mean(np.array([*values, math.nan])) == pytest.approx(right, rel=3e-16, abs=1e-300)


def test_a_mean_of_what_is_no_number() -> None:
    nan, inf = math.nan, math.inf
    for values, wanted in (([], nan), ([nan], nan), ([inf, -inf], nan), ([inf, 1, nan], inf), ([1e308] * 3, inf)):
        assert mean(np.array(values)) == pytest.approx(wanted, nan_ok=True)

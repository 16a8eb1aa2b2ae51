"""Intervals against SciPy's exact binomial, McNemar's test and a numeric maximum of the likelihood."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from trtpipe.evaluation.intervals import binomial_interval, can_tell, fails, paired_interval, samples_to_tell, score


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 20), (20, 20), (3, 20), (359, 360), (48_000, 50_000)])
def test_agreement_has_scipys_exact_interval(k, n):
    expected = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    assert binomial_interval(k, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_no_discordant_pair_gives_tangos_closed_form():
    # with b = c = 0 the score is -sqrt(n d / (1 - d)): it is -z at d = z^2 / (n + z^2)
    edge = 1.959964**2 / (360 + 1.959964**2)
    assert paired_interval(0, 0, 360) == pytest.approx((-edge, edge), abs=1e-6)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40), st.floats(-0.9, 0.9))
@settings(deadline=None, max_examples=60)
def test_the_score_uses_the_likeliest_probabilities_under_the_difference(b, c, rest, difference):
    n = b + c + rest + 1

    def unlikely(q):
        cells = ((b, q + difference), (c, q), (n - b - c, 1 - 2 * q - difference))
        return -sum(k * math.log(max(p, 1e-300)) for k, p in cells if k)

    low, high = max(0.0, -difference), (1 - difference) / 2
    best = optimize.minimize_scalar(unlikely, bounds=(low, high), method="bounded", options={"xatol": 1e-12})
    ends = min((low, high, best.x), key=unlikely)
    variance = n * (2 * ends + difference - difference**2)
    if variance < 1e-6:
        return
    expected = (b - c - n * difference) / math.sqrt(variance)
    assert score(b, c, n, difference) == pytest.approx(expected, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(("b", "c"), [(12, 3), (8, 2), (5, 5), (15, 4), (1, 0), (30, 14)])
def test_zero_is_excluded_exactly_when_mcnemar_rejects(b, c):
    low, high = paired_interval(b, c, 100)
    rejects = (b - c) ** 2 / (b + c) > stats.chi2.ppf(0.95, 1)
    assert (low > 0 or high < 0) == rejects


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_the_interval_holds_the_figure_and_turns_with_it(b, c, rest):
    n = b + c + rest + 1
    low, high = paired_interval(b, c, n)
    assert -1 <= low <= (b - c) / n <= high <= 1
    assert paired_interval(c, b, n) == pytest.approx((-high, -low), abs=1e-9)


def test_the_interval_covers_the_truth_in_about_95_of_100_samples():
    rng = np.random.default_rng(0)
    draws = rng.multinomial(200, [0.06, 0.03, 0.91], size=600)
    covered = [low <= 0.03 <= high for low, high in (paired_interval(int(b), int(c), 200) for b, c, _ in draws)]
    assert 0.93 <= np.mean(covered) <= 0.975


@pytest.mark.parametrize(
    ("interval", "limit", "larger", "failed", "told"),
    [
        ((0.90, 0.95), 0.98, True, True, True),
        ((0.90, 0.99), 0.98, True, False, False),
        ((0.985, 0.999), 0.98, True, False, True),
        ((0.02, 0.05), 0.01, False, True, True),
        ((-0.01, 0.05), 0.01, False, False, False),
        ((-0.01, 0.005), 0.01, False, False, True),
        ((0.5, 1.0), 0.0, True, False, True),
    ],
)
def test_a_limit_fails_only_when_no_value_of_the_interval_meets_it(interval, limit, larger, failed, told):
    assert fails(interval, limit, larger) is failed
    assert can_tell(interval, limit, larger) is told


def test_the_number_of_samples_that_would_tell():
    # the limit's side of the interval is 0.02 wide and the distance 0.01: four times the samples
    assert samples_to_tell(0.02, (0.0, 0.9), 0.01, 100) == 400
    assert samples_to_tell(0.01, (0.0, 0.04), 0.01, 100) is None
    for samples in (20, 50, 100):  # nothing differs: found by trying every number
        least = next(n for n in range(1, 999) if binomial_interval(n, n)[0] >= 0.98)
        assert samples_to_tell(1.0, binomial_interval(samples, samples), 0.98, samples) == least
        assert samples_to_tell(0.0, binomial_interval(0, samples), 0.02, samples) == least
        least = next(n for n in range(1, 999) if paired_interval(0, 0, n)[1] <= 0.01)
        assert samples_to_tell(0.0, paired_interval(0, 0, samples), 0.01, samples) == least
    assert samples_to_tell(0.5, (0.499, 0.501), 0.9, 100) == 101, "more than there are"
    n = samples_to_tell(0.97, binomial_interval(97, 100), 0.98, 100)
    assert not can_tell(binomial_interval(round(0.97 * n / 2), n // 2), 0.98, True)
    assert can_tell(binomial_interval(round(0.97 * n * 2), n * 2), 0.98, True)


@pytest.mark.parametrize(("b", "c", "n"), [(1, 1, 1), (-1, 0, 5), (0, 0, 0)])
def test_impossible_counts_are_refused(b, c, n):
    with pytest.raises(ValueError, match="must be among the samples"):
        paired_interval(b, c, n)
    with pytest.raises(ValueError, match=r"must be in 0\.\.samples"):
        binomial_interval(n + 1, n)

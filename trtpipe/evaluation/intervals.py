"""Confidence intervals of a check's shares, and whether they decide a limit. No torch.

Two figures of a check are shares of the samples, and another sample of the same data would give others:

- agreement, k of n samples with the baseline's class: the exact interval of Clopper and Pearson, "The use of
  confidence or fiducial limits illustrated in the case of the binomial", Biometrika 26 (1934) 404-413;
- the accuracy drop, (b - c) / n with b samples that only the baseline and c that only the engine gets right. Both
  run on the same samples, so the interval is a paired one: Tango's score interval, "Equivalence test and confidence
  interval for the difference in proportions for the paired-sample design", Statistics in Medicine 17 (1998) 891-908.
  It inverts a score test that for no difference is McNemar's, "Note on the sampling error of the difference between
  correlated proportions or percentages", Psychometrika 12 (1947) 153-157: it excludes 0 when McNemar's test rejects.

A metric of the job's own that is 1 or 0 for each sample is such a share, and its drop such a difference. Any other has
the interval of the percentile bootstrap: Efron, "Bootstrap methods: another look at the jackknife", Annals of
Statistics 7 (1979) 1-26. A few samples do not show how far others lie apart: of fewer than 10 it is all numbers.

All are two-sided at `CONFIDENCE`.

By hand, since a device checks with the light core alone, which has no SciPy, and Tango's interval is not in SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from calib.types import Array
from trtpipe.figures import CONFIDENCE

#: The quantile of the normal distribution that bounds an interval from above.
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

Interval = tuple[float, float]
#: Of a bootstrap: the ends of its interval vary by some 5 % of its width with another seed.
RESAMPLES = 1000
#: Samples of which it takes no fewer.
LEAST_RESAMPLED = 10
#: Where samples say nothing.
ALL_NUMBERS: Interval = -math.inf, math.inf


def binomial_interval(successes: int, samples: int) -> Interval:
    """Clopper and Pearson's interval of a probability, in [0, 1].

    It holds those under which neither `successes` or more nor as many or fewer of `samples` have a chance below half of
    what `CONFIDENCE` leaves.

    Raises:
        ValueError: no sample, or more successes than samples.
    """
    if samples < 1 or not 0 <= successes <= samples:
        raise ValueError(f"successes must be in 0..samples, samples at least 1 (got {successes} of {samples})")
    counts = np.arange(samples + 1)
    logs = np.array([math.lgamma(k + 1) for k in range(samples + 1)])
    choose = logs[-1] - logs - logs[::-1]
    tail = (1 - CONFIDENCE) / 2

    def chance(p: float, of: slice) -> float:
        return float(np.exp(choose[of] + counts[of] * math.log(p) + (samples - counts[of]) * math.log1p(-p)).sum())

    low = 0.0 if successes == 0 else _root(lambda p: chance(p, slice(successes, None)) - tail)
    high = 1.0 if successes == samples else _root(lambda p: tail - chance(p, slice(0, successes + 1)))
    return low, high


def paired_interval(only_first: int, only_second: int, samples: int) -> Interval:
    """Tango's score interval of the difference of two proportions of the same samples, in [-1, 1].

    Args:
        only_first: samples that succeed the first way and fail the second.
        only_second: the other way round.
        samples: all of them.

    Raises:
        ValueError: no sample, or more that differ than samples.
    """
    b, c, n = only_first, only_second, samples
    if n < 1 or min(b, c) < 0 or b + c > n:
        raise ValueError(f"only_first and only_second must be among the samples (got {b} and {c} of {n})")
    return _solve(b, c, n, Z), _solve(b, c, n, -Z)


def score(b: int, c: int, n: int, difference: float) -> float:
    """Tango's statistic for a true difference in (-1, 1); standard normal when that is the truth (equation 5)."""
    linear = (2 * n - b + c) * difference - b - c
    free = max(0.0, linear * linear + 8 * n * c * difference * (1 - difference))
    q = (math.sqrt(free) - linear) / (4 * n)
    variance = n * (2 * q + difference * (1 - difference))
    off = b - c - n * difference
    if variance <= 0:
        return 0.0 if off == 0 else math.copysign(math.inf, off)
    return off / math.sqrt(variance)


def _solve(b: int, c: int, n: int, z: float) -> float:
    """The difference at which the score, which falls with it, is z."""
    at = _root(lambda x: z - score(b, c, n, x), -1.0, 1.0)
    return max(-1.0, min(1.0, at))


def bootstrap_interval(statistic: Callable[[Array], float], samples: int) -> Interval:
    """Percentiles of a statistic over samples drawn anew, with replacement; the same ones each time.

    Args:
        statistic: a number for the samples at the places int64 [samples].
        samples: how many there are. Of fewer than `LEAST_RESAMPLED` it is all numbers, and so it is where some draw
            has no number (NaN), as only few of the samples count then.
    """
    if samples < LEAST_RESAMPLED:
        return ALL_NUMBERS
    random = np.random.default_rng(0)
    values = np.array([statistic(random.integers(samples, size=samples)) for _ in range(RESAMPLES)])
    if np.isnan(values).any():
        return ALL_NUMBERS
    # Between two infinities NumPy's interpolation has no value.
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="closest_observation")
    return float(low), float(high)


def _root(rising: Callable[[float], float], low: float = 0.0, high: float = 1.0) -> float:
    """Where a rising function is zero, by bisection; an end of the range when it has no zero inside."""
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def fails(interval: Interval, limit: float, larger_is_better: bool) -> bool:
    """Whether the data say that the limit is not met: no value of the interval meets it."""
    return interval[1] < limit if larger_is_better else interval[0] > limit


def can_tell(interval: Interval, limit: float, larger_is_better: bool) -> bool:
    """Whether the data say either that the limit is met or that it is not; a limit nothing can break is met."""
    met = interval[0] >= limit if larger_is_better else interval[1] <= limit
    return met or fails(interval, limit, larger_is_better)


def samples_to_tell(value: float, interval: Interval, limit: float, samples: int) -> int | None:
    """About how many samples would decide, were the value to stay: widths shrink with the root of the number. Where all
    samples are alike it is the least number: of a share of 1 or 0 the interval's other end is (alpha / 2)^(1 / n) away
    from 1, of a drop of which none is lost or won z^2 / (n + z^2) from 0.

    None when the value is at the limit, or something is infinite: no number decides.
    """
    distance = abs(value - limit)
    width = interval[1] - value if limit > value else value - interval[0]
    if distance == 0 or not math.isfinite(distance) or not math.isfinite(width):
        return None
    share, drop = binomial_interval(samples, samples), paired_interval(0, 0, samples)
    enough = samples * (width / distance) ** 2
    if distance < 1 and any(np.allclose(interval, s, rtol=0, atol=1e-9) for s in (share, (1 - share[1], 1 - share[0]))):
        enough = math.log((1 - CONFIDENCE) / 2) / math.log1p(-distance)
    elif np.allclose(interval, drop, rtol=0, atol=1e-9):
        enough = Z**2 * (1 - distance) / distance
    return max(samples + 1, math.ceil(enough))

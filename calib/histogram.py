"""The histogram everything else is computed from: |x| by the top 16 bits below the sign of its float32 pattern.

A bucket is an exponent and 8 mantissa bits, so it is 2^-8 of a power of two wide (0.2 to 0.4 % of its value). No range
is needed in advance and nothing is ever rescaled: adding two histograms is exact, whatever was in either, in whatever
order.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from calib.errors import CalibError
from calib.types import Array

#: The bits of a float32 pattern below a bucket: 31 - 8 (exponent) - 8 (mantissa).
SHIFT = 15
#: Buckets an observer counts into, among them 256 of infinities and NaN.
ALL_BINS = 1 << (31 - SHIFT)
#: Of a table that a CPU counts in: zeros have two more, as they are most of what a ReLU gives.
SLOTS = ALL_BINS + 2
#: Buckets of finite values: exponents 0 to 254.
BINS = 255 << (23 - SHIFT)

Counts = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@functools.cache
def edges() -> Reals:
    """Lower edges of the buckets and, last, the upper edge of the top one (2^128): float64 [BINS + 1]."""
    patterns = np.arange(BINS, dtype=np.uint32) << np.uint32(SHIFT)
    bounds = np.append(patterns.view(np.float32).astype(np.float64), 2.0**128)
    bounds.flags.writeable = False
    return bounds


def magnitude(low: float, high: float) -> float:
    """The largest |x| of a range."""
    return max(abs(low), abs(high))


@dataclass(frozen=True, eq=False)
class Histogram:
    """How often each magnitude was seen. Values are added by `+`; the empty histogram is neutral.

    Attributes:
        counts: int64 [BINS], finite values by bucket; bucket 0 is zero (and denormals under 2^-134).
        low: exact least finite value (+inf when there is none).
        high: exact greatest finite value (-inf when there is none).
        non_finite: how many values were NaN or infinite; they are in no bucket.
    """

    counts: Counts
    low: float = math.inf
    high: float = -math.inf
    non_finite: int = 0

    def __post_init__(self) -> None:
        if self.counts.shape != (BINS,) or self.counts.dtype != np.int64:
            raise CalibError(
                f"histogram: counts must be int64 [{BINS}] (got {self.counts.dtype} {list(self.counts.shape)}). "
                "Build it with an observer or Histogram.of."
            )
        # Of 0.0 and -0.0 the one seen first would stay: the order of samples would be in the table's digest.
        object.__setattr__(self, "low", self.low + 0.0)
        object.__setattr__(self, "high", self.high + 0.0)

    @classmethod
    def empty(cls) -> Histogram:
        """The histogram of no values."""
        return cls(np.zeros(BINS, np.int64))

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Histogram:
        """The histogram of an array of any shape, taken as float32. NumPy alone: the slow, plain way."""
        flat = np.ascontiguousarray(np.asarray(values, np.float32)).reshape(-1)
        finite = flat[np.isfinite(flat)]
        index = (np.abs(finite).view(np.uint32) >> np.uint32(SHIFT)).astype(np.int64)
        counts = np.bincount(index, minlength=BINS).astype(np.int64)
        if not finite.size:
            return cls(counts, non_finite=int(flat.size))
        return cls(counts, float(finite.min()), float(finite.max()), int(flat.size - finite.size))

    @classmethod
    def total(cls, parts: Iterable[Histogram]) -> Histogram:
        """The sum of any number of histograms."""
        return sum(parts, cls.empty())

    def compact(self) -> Histogram:
        """The same, in pages of its own that exist only where something was counted: of most tensors a tenth."""
        # Anonymous memory by name: what NumPy allocates was used before, and has to be set to zero everywhere.
        pages = mmap.mmap(-1, 8 * BINS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        counts = np.frombuffer(pages, np.int64)
        used = np.flatnonzero(self.counts)
        counts[used] = self.counts[used]
        return replace(self, counts=counts)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.counts + other.counts,
            min(self.low, other.low),
            max(self.high, other.high),
            self.non_finite + other.non_finite,
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Histogram)
            and (self.low, self.high, self.non_finite) == (other.low, other.high, other.non_finite)
            and np.array_equal(self.counts, other.counts)
        )

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def elements(self) -> int:
        """How many finite values were seen."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """How many of them were zero."""
        return int(self.counts[0])

    @property
    def max(self) -> float:
        """The exact maximum of |x| over finite values; 0.0 when there are none."""
        return magnitude(self.low, self.high) if self.elements else 0.0

    @property
    def constant(self) -> bool:
        """Whether all of at least two values are the same."""
        return self.elements > 1 and self.low == self.high

    def points(self) -> tuple[Reals, Reals]:
        """The buckets that are not empty, as (middle of the bucket float64 [K], count float64 [K]), ascending.

        The top bucket ends at the exact maximum; bucket 0 stands for exact zero.
        """
        used, lower, upper = self._used
        middle = (lower + upper) / 2  # a new array: the cached ones stay as they are
        if used.size and used[0] == 0:
            middle[0] = 0.0
        return middle, self.counts[used].astype(np.float64)

    def counts_of(self, whole: Histogram) -> Reals:
        """How many values of each of `whole.points()` this one, a part of `whole`, has: float64 [K]."""
        counts: Reals = self.counts[whole._used[0]].astype(np.float64)
        return counts

    def linear(self, bins: int) -> Reals:
        """The counts over `bins` equal bins of [0, max]: float64 [bins], fractional, summing to `elements`.

        Values are taken to be spread evenly within their bucket. Zeros are in bin 0.
        """
        result = np.zeros(bins)
        if self.max > 0:
            result = np.diff(self.below(np.linspace(0.0, self.max, bins + 1)))
        result[0] += self.zeros
        return result

    def below(self, x: npt.ArrayLike) -> Reals:
        """How many values that are not zero have a magnitude of at most each of `x` (float64, any shape; x >= 0).

        Exact at bucket edges, linear within a bucket; all of them at the exact maximum and above.
        """
        lower, upper, counts = self._magnitudes()
        points = np.asarray(x, np.float64)
        if not lower.size:
            return np.zeros_like(points)
        done = np.concatenate([[0.0], np.cumsum(counts)])
        at = np.searchsorted(lower, points, side="right") - 1
        inside = np.maximum(at, 0)
        width = np.where(upper > lower, upper - lower, 1.0)
        share = np.clip((points - lower[inside]) / width[inside], 0.0, 1.0)
        share = np.where(points >= upper[inside], 1.0, share)
        return np.where(at < 0, 0.0, done[inside] + counts[inside] * share)

    def reaching(self, count: float) -> float:
        """The magnitude at most which `count` (> 0) of the values that are not zero have: the inverse of `below`."""
        lower, upper, counts = self._magnitudes()
        done = np.cumsum(counts)
        if not done.size or count >= done[-1]:
            return self.max
        at = int(np.searchsorted(done, count, side="left"))
        share = 1.0 - (done[at] - count) / counts[at]
        return float(lower[at] + share * (upper[at] - lower[at]))

    def _magnitudes(self) -> tuple[Reals, Reals, Reals]:
        """Lower edges, upper edges and counts of the buckets in use, but for the one of zeros."""
        used, lower, upper = self._used
        start = int(used.size > 0 and used[0] == 0)
        return lower[start:], upper[start:], self.counts[used[start:]].astype(np.float64)

    @functools.cached_property
    def _used(self) -> tuple[Array, Reals, Reals]:
        """Indices of the buckets that are not empty, their lower edges, and upper edges cut at the exact maximum."""
        used = np.flatnonzero(self.counts)
        bounds = edges()
        return used, bounds[used], np.minimum(bounds[used + 1], self.max)

"""From a histogram to amax, the magnitude that INT8's 127 stands for: pure functions, by TensorRT's names.

Scale is amax / 127; a value x becomes round(x / scale) clipped to [-127, 127] in all figures here. TensorRT uses -128
of activations too, not of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from calib.errors import CalibError
from calib.histogram import Histogram, Reals

Algorithm = Literal["auto", "entropy_2", "entropy", "minmax", "percentile", "mse"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
#: Which of TensorRT's own calibrators (8.6 to 10) does which algorithm; it has none for the others.
BASES = {
    "entropy_2": "IInt8EntropyCalibrator2",
    "entropy": "IInt8EntropyCalibrator",
    "minmax": "IInt8MinMaxCalibrator",
    "percentile": "IInt8LegacyCalibrator",
}
#: What TensorRT's CalibrationAlgoType calls what these do.
ALGO_TYPES = {
    "entropy_2": "ENTROPY_CALIBRATION_2",
    "entropy": "ENTROPY_CALIBRATION",
    "minmax": "MINMAX_CALIBRATION",
    "percentile": "LEGACY_CALIBRATION",
}
#: What TensorRT's own calibrators do for `auto`: its guide recommends that one for convolutional networks.
AUTO_BASE = "entropy_2"

#: TensorRT's and the slides' figures: bins of the linear histogram, and magnitudes an INT8 value can have.
ENTROPY_BINS, LEVELS = 2048, 128
#: The magnitude that amax stands for.
INT8_MAX = LEVELS - 1
#: The least normal number of float32: no scale is smaller.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
#: The integers of INT8; and the levels that weights are given, whose amax is their exact maximum. A model that was
#: quantized elsewhere may have others.
INT8_RANGE, WEIGHT_RANGE = (-LEVELS, INT8_MAX), (-INT8_MAX, INT8_MAX)
#: Per cent of the values that algorithm percentile keeps where none is named.
PERCENTILE = 99.99
#: Thresholds tried at once: times some thousand buckets they stay in a core's cache.
AT_ONCE = 8
#: Of the error that `auto` minimizes.
AUTO_POWER = 2.4


def threshold(histogram: Histogram, algorithm: str, percentile: float = PERCENTILE) -> float:
    """The amax that `algorithm` chooses for what `histogram` saw.

    Args:
        histogram: magnitudes of one tensor.
        algorithm: one of `ALGORITHMS`.
        percentile: in (0, 100]; the share of values that `percentile` keeps. The others ignore it.

    Returns:
        amax, 0 <= amax <= histogram.max. 0.0 only for a tensor that was zero everywhere, or never observed, or whose
        zeros alone make up the percentile.

    Raises:
        CalibError: an unknown algorithm, or a percentile out of range.
    """
    return thresholds(histogram, (), algorithm, percentile)[0]


def thresholds(whole: Histogram, parts: Sequence[Histogram], algorithm: str, percentile: float) -> list[float]:
    """The amax of `whole`, as `threshold` gives it, and that of each of the `parts` that it is the sum of.

    Of `auto` and `mse` the candidates for a part are those of the whole, cut at the part's own maximum, so that what
    each candidate costs a value is computed once for all of them.

    Args:
        whole: magnitudes of one tensor.
        parts: histograms whose sum it is.
        algorithm, percentile: as for `threshold`.

    Raises:
        CalibError: an unknown algorithm, or a percentile out of range.
    """
    if algorithm not in ALGORITHMS:
        raise CalibError(f"algorithm: must be one of {', '.join(ALGORITHMS)} (got {algorithm!r}).")
    if not 0 < percentile <= 100:
        raise CalibError(f"percentile: must be over 0 and at most 100 (got {percentile!r}).")
    each = (whole, *parts)
    if whole.max == 0:
        return [0.0 for _ in each]
    chosen: dict[str, Callable[[], list[float]]] = {
        "minmax": lambda: [h.max for h in each],
        "entropy": lambda: [_entropy(h) for h in each],
        "entropy_2": lambda: [_entropy_2(h) for h in each],
        "percentile": lambda: [_percentile(h, percentile) for h in each],
        "mse": lambda: _mse(each),
        "auto": lambda: _auto(each),
    }
    return chosen[algorithm]()


def divergences(counts: Reals, levels: int = LEVELS) -> Reals:
    """KL divergence of a histogram from its quantized self, for every number of bins kept.

    With i bins kept, P is counts[:i] with everything beyond added to bin i - 1, and Q is counts[:i] summed into
    `levels` runs of bins, each sum spread evenly over the run's bins that are not empty; both are normalised.

    Args:
        counts: float64 [N], N >= levels, not negative, not all zero.
        levels: how many magnitudes the quantized type has.

    Returns:
        float64 [N - levels + 1]: KL(P || Q) in nats for i = levels, ..., N; inf where Q is 0 and P is not.

    Source: Szymon Migacz, "8-bit Inference with TensorRT", GTC 2017, slides "Entropy calibration - pseudocode".
    Written out, a run with sum S over n bins contributes S log(S / n) to sum P log Q, so each i costs `levels` terms,
    not i.
    """
    size = counts.size
    kept = np.arange(levels, size + 1)
    total = counts.sum()
    runs, longest = _runs(size, levels)
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    own = np.concatenate([[0.0], np.cumsum(_x_log_x(counts))])
    starts = np.arange(size)
    ends = np.minimum(starts + np.arange(1, longest + 1)[:, None], size)  # [longest, size]: every run there can be
    run_sum = sums[ends] - sums[starts]
    mean = np.divide(run_sum, filled[ends] - filled[starts], out=np.ones_like(run_sum), where=run_sum > 0)
    log_mean = np.log(mean)
    inside, beyond, last = sums[kept], total - sums[kept], counts[kept - 1]
    cross = np.take(run_sum * log_mean, runs).sum(axis=1) + beyond * np.take(log_mean, runs[:, -1])
    entropy = own[kept] - _x_log_x(last) + _x_log_x(last + beyond)
    with np.errstate(divide="ignore", invalid="ignore"):
        result = (entropy - cross) / total + np.log(inside / total)
    # A last bin that is empty in Q and holds the outliers in P; the tolerance is for sums of fractions of counts.
    impossible = (inside <= 0) | ((last <= 0) & (beyond > 1e-9 * total))
    return np.where(impossible, np.inf, result)


@functools.cache
def _runs(size: int, levels: int) -> tuple[npt.NDArray[np.int64], int]:
    """Which run of bins each level is, for every number of bins kept, and how long the longest one is.

    A run of n bins from bin b has number (n - 1) * size + b; level k of i bins begins at ceil(k * i / levels). Few
    runs are distinct, so `divergences` takes the logarithm of each once.
    """
    kept = np.arange(levels, size + 1)[:, None]
    edges = -(-np.arange(levels + 1) * kept // levels)  # [I, levels + 1]
    lengths = np.diff(edges, axis=1)
    return (lengths - 1) * size + edges[:, :-1], int(lengths.max())


def _entropy(histogram: Histogram) -> float:
    """The slides' algorithm as written, zeros included."""
    return _least_divergence(histogram, histogram.linear(ENTROPY_BINS))


def _entropy_2(histogram: Histogram) -> float:
    """The same with bin 0 given bin 1's count, so that a ReLU's zeros, which quantize exactly, do not weigh.

    Source: NVIDIA's open calibrators (pytorch-quantization, ModelOpt) do this; TensorRT's own second version is not
    public.
    """
    counts = histogram.linear(ENTROPY_BINS)
    counts[0] = counts[1]
    if counts.sum() <= 0:
        return histogram.max
    return _least_divergence(histogram, counts)


def _least_divergence(histogram: Histogram, counts: Reals) -> float:
    """The threshold of the least divergence, the widest of equals: (i + 1/2) bins, as TensorRT's caches show."""
    kl = divergences(counts)
    kept = kl.size - 1 - int(np.argmin(kl[::-1])) + LEVELS
    return min(histogram.max, (kept + 0.5) * histogram.max / ENTROPY_BINS)


def _percentile(histogram: Histogram, percentile: float) -> float:
    """The least amax that keeps `percentile` % of all values, zeros included; linear within a bucket."""
    wanted = histogram.elements * (percentile / 100) - histogram.zeros
    if wanted <= 0:
        return 0.0
    if percentile == 100:
        return histogram.max
    return histogram.reaching(wanted)


def _mse(each: Sequence[Histogram]) -> list[float]:
    """The amax of the least mean squared error.

    Among 257 in steps of 2^(1/32) under max, and 64 finer ones around the best of those.
    """
    return _least_error(each, 2.0, each[0].max * 2.0 ** (np.arange(-256, 1) / 32), 64)


def _auto(each: Sequence[Histogram]) -> list[float]:
    """The amax of the least mean |error|^2.4.

    Among 81 in steps of 2^(1/8) under max, and 32 finer ones around the best of those. A power over 2 weighs what is
    clipped more than what is rounded: the few largest values of a tensor decide more of what comes after it than their
    share of the squares.

    Source: BRECQ (Li et al., 2021) chooses its activation thresholds so.
    """
    return _least_error(each, AUTO_POWER, each[0].max * 2.0 ** (np.arange(-80, 1) / 8), 32)


def _least_error(each: Sequence[Histogram], power: float, coarse: Reals, finer: int) -> list[float]:
    """Of `coarse` (ascending) and `finer` ones around its best, the amax of the least mean |error|^power: of the first
    histogram, and of the others, which are parts of it.

    What is clipped alone grows as amax falls: below the one where it costs more than the best so far, none is tried.
    """
    values, _ = each[0].points()
    counts = [h.counts_of(each[0]) for h in each]
    errors = np.full((len(each), coarse.size), np.inf)
    for stop in range(coarse.size, 0, -AT_ONCE):
        part = slice(max(stop - AT_ONCE, 0), stop)
        errors[:, part] = _errors(values, counts, coarse[part], power)
        clipped = np.maximum(values - coarse[part.start], 0.0) ** power
        if all(clipped @ c > e.min() * (1 + 1e-9) for c, e in zip(counts, errors, strict=True)):
            break
    best = [int(np.argmin(e)) for e in errors]
    found = {}
    for at in set(best):
        around = coarse[max(at - 1, 0)], coarse[min(at + 1, coarse.size - 1)]
        fine = np.append(np.geomspace(*around, finer), coarse[at])
        found[at] = fine[np.argmin(_errors(values, counts, fine, power), axis=1)]
    return [min(h.max, float(found[at][row])) for row, (h, at) in enumerate(zip(each, best, strict=True))]


def mean_squared_errors(histogram: Histogram, amax: Reals) -> Reals:
    """Mean of (x - quantized x)^2 over everything seen, for each of `amax` (float64 [K], > 0): float64 [K].

    Each bucket counts as its middle.
    """
    values, counts = histogram.points()
    mean: Reals = _errors(values, [counts], amax, 2.0)[0] / max(histogram.elements, 1)
    return mean


def _errors(values: Reals, counts: Sequence[Reals], amax: Reals, power: float) -> Reals:
    """Sum of counts |x - quantized x|^power for each of `counts` (each as long as `values`) and of `amax` (K of them):
    float64 [len(counts), K]."""
    result = np.empty((len(counts), amax.size))
    for start in range(0, amax.size, AT_ONCE):
        scale = amax[start : start + AT_ONCE, None] / INT8_MAX
        error = values / scale
        np.minimum(np.rint(error, out=error), INT8_MAX, out=error)
        error *= scale
        np.abs(np.subtract(values, error, out=error), out=error)
        error **= power
        for row, count in enumerate(counts):
            result[row, start : start + AT_ONCE] = error @ count
    return result


def _x_log_x(x: Reals) -> Reals:
    return x * np.log(np.where(x > 0, x, 1.0))

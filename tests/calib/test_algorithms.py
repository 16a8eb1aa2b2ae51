"""Thresholds: hand-worked, against a float64 implementation of the slides, and their bounds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.algorithms import ALGORITHMS, divergences, mean_squared_errors, threshold, thresholds
from calib.errors import CalibError
from calib.histogram import Histogram


def slides_divergence(counts, kept, levels=128):
    """KL(P || Q) for the first `kept` bins, bin by bin as the 2017 GTC slides have it. Float64, no shortcuts."""
    p = np.array(counts[:kept], np.float64)
    p[-1] += sum(counts[kept:])
    q = np.zeros(kept)
    runs = [[b for b in range(kept) if b * levels // kept == level] for level in range(levels)]
    for run in runs:
        filled = [b for b in run if counts[b] > 0]
        for b in filled:
            q[b] = sum(counts[c] for c in run) / len(filled)
    p, q = p / p.sum(), q / max(q.sum(), 1e-300)
    if any(q[p > 0] == 0):
        return math.inf
    return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def reference(values, ignore_zeros, bins=2048):
    """Every candidate threshold of the slides and its divergence, from a linear histogram of the values themselves."""
    most = float(np.abs(values).max())
    counts = np.histogram(np.abs(values).astype(np.float64), bins, (0, most))[0].astype(np.float64)
    if ignore_zeros:
        counts[0] = counts[1]
    kept = np.arange(128, bins + 1)
    return np.minimum(most, (kept + 0.5) * most / bins), np.array([slides_fast(counts, k) for k in kept])


def slides_fast(counts, kept, levels=128):
    """The same as slides_divergence with NumPy, still from P and Q written out."""
    p = counts[:kept].copy()
    p[-1] += counts[kept:].sum()
    level = np.arange(kept) * levels // kept
    filled = counts[:kept] > 0
    sums = np.bincount(level, counts[:kept], levels)
    spread = np.bincount(level, filled, levels)
    q = np.where(filled, (sums / np.maximum(spread, 1))[level], 0.0)
    if (q[p > 0] == 0).any():
        return math.inf
    p, q = p / p.sum(), q / q.sum()
    return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())


def test_divergences_are_the_slides():
    rng = np.random.default_rng(0)
    counts = rng.poisson(20 * np.exp(-np.arange(40) / 8)).astype(np.float64)
    counts[[5, 17, 38]] = 0
    ours = divergences(counts, levels=8)
    theirs = [slides_divergence(counts, kept, 8) for kept in range(8, 41)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert np.isinf(ours).any()


def test_the_quick_reference_is_the_slow_one():
    counts = np.random.default_rng(1).poisson(3, 300).astype(np.float64)
    for kept in (128, 200, 299, 300):
        assert slides_fast(counts, kept) == pytest.approx(slides_divergence(counts, kept))


def test_a_hand_worked_divergence():
    # Four bins in two levels. All kept: P = (4, 2, 1, 1) / 8, Q = (3, 3, 1, 1) / 8, KL = (4 ln 4/3 + 2 ln 2/3) / 8.
    # Two kept: P = (4, 4) / 8, Q = (4, 2) / 6. Three kept, levels {0, 1} and {2}: P = (4, 2, 2) / 8, Q = (3, 3, 1) / 7.
    found = divergences(np.array([4.0, 2.0, 1.0, 1.0]), levels=2)
    two = 0.5 * math.log(0.5 / (4 / 6)) + 0.5 * math.log(0.5 / (2 / 6))
    three = 0.5 * math.log(0.5 / (3 / 7)) + 0.25 * math.log(0.25 / (3 / 7)) + 0.25 * math.log(0.25 / (1 / 7))
    four = (4 * math.log(4 / 3) + 2 * math.log(2 / 3)) / 8
    np.testing.assert_allclose(found, [two, three, four], rtol=1e-12)


@pytest.mark.parametrize("algorithm", ["entropy", "entropy_2"])
def test_a_hand_worked_threshold_has_half_a_bin_more(algorithm):
    # 2048 bins of width 1: 1, 3, 1, 3, ... in the first 128, and one value in the last. With 128 kept each level is a
    # bin, so P and Q differ by that one value of 257: KL is under 0.001. With 129 to 2047 the last bin kept is empty,
    # so KL is infinite. With all kept a level is 16 bins, so Q is 2, 2, 2, 2, ...: KL is 64 (3 ln 3/2 - ln 2) / 257.
    first = [bin + 0.5 for bin in range(128) for _ in range(1 + 2 * (bin % 2))]
    histogram = Histogram.of([*first, 2048.0])
    found = divergences(histogram.linear(2048))
    assert 0 < found[0] < 0.001
    assert np.isinf(found[1:-1]).all()
    assert found[-1] == pytest.approx(64 * (3 * math.log(3 / 2) - math.log(2)) / 257)
    assert threshold(histogram, algorithm) == 128.5


SHAPES = {
    "half-normal": lambda rng: np.abs(rng.normal(size=1_000_000)),
    "Laplace": lambda rng: rng.laplace(size=1_000_000),
    "ReLU": lambda rng: np.maximum(rng.normal(size=1_000_000), 0),
}


@pytest.mark.parametrize("algorithm", ["entropy", "entropy_2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_of_a_histogram_is_the_references(algorithm, shape):
    """The same histogram, P and Q written out: every seed, far within 2 %."""
    for seed in range(4):
        histogram = Histogram.of(SHAPES[shape](np.random.default_rng(seed)))
        counts = histogram.linear(2048)
        if algorithm == "entropy_2":
            counts[0] = counts[1]
        found = np.array([slides_fast(counts, kept) for kept in range(128, 2049)])
        best = 2048 - int(np.argmin(found[::-1]))
        expected = min(histogram.max, (best + 0.5) * histogram.max / 2048)
        assert threshold(histogram, algorithm) == pytest.approx(expected, rel=0.02)


def test_the_reference_moves_with_one_value():
    """Why no histogram can be within 2 % of it always: its largest value 0.02 % higher, nothing else changed."""
    moved = []
    for seed in range(10):
        values = SHAPES["Laplace"](np.random.default_rng(seed)).astype(np.float32)
        nudged = values.copy()
        nudged[np.abs(values).argmax()] *= np.float32(1.0002)
        (first, found), (second, again) = (reference(v, ignore_zeros=True) for v in (values, nudged))
        moved.append(abs(second[int(np.argmin(again))] / first[int(np.argmin(found))] - 1))
    assert max(moved) > 0.02
    assert np.median(moved) < 0.02


@pytest.mark.parametrize("algorithm", ["entropy", "entropy_2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_is_within_two_percent_of_the_reference_on_the_values(algorithm, shape):
    """The divergence has many minima of nearly one depth, and single counts of the tail decide which is the least.

    So over eight seeds the median must be within 2 %, and each threshold within 2 % of one that is as good.
    """
    differences = []
    for seed in range(8):
        values = SHAPES[shape](np.random.default_rng(seed)).astype(np.float32)
        candidates, found = reference(values, ignore_zeros=algorithm == "entropy_2")
        ours = threshold(Histogram.of(values), algorithm)
        best = candidates[found.size - 1 - int(np.argmin(found[::-1]))]
        differences.append(abs(ours / best - 1))
        assert found[np.abs(candidates / ours - 1) <= 0.02].min() <= 1.04 * found.min()
    assert np.median(differences) <= 0.02


def test_percentile_is_numpys_quantile():
    values = np.random.default_rng(4).normal(size=100_000).astype(np.float32)
    found = Histogram.of(values)
    for percentile in (50, 99, 99.9, 99.99):
        expected = np.quantile(np.abs(values), percentile / 100)
        assert threshold(found, "percentile", percentile) == pytest.approx(expected, rel=0.004)
    assert threshold(found, "percentile", 100) == float(np.abs(values).max())


def test_percentile_is_onnxruntimes(capsys):
    from onnxruntime.quantization.calibrate import HistogramCollector

    values = np.random.default_rng(6).laplace(size=200_000).astype(np.float32)
    collector = HistogramCollector("percentile", True, 2048, 128, 99.9, "same")
    collector.collect({"x": [values]})
    low, high = (float(v) for v in collector.compute_collection_result()["x"][:2])
    assert threshold(Histogram.of(values), "percentile", 99.9) == pytest.approx(max(-low, high), rel=0.01)


def test_percentile_counts_zeros():
    found = Histogram.of([0.0] * 90 + [1.0] * 9 + [7.0])
    assert threshold(found, "percentile", 95) == pytest.approx(1.0, rel=0.004)
    assert threshold(found, "percentile", 80) == 0.0


def test_mse_is_the_least_error_of_a_plain_search():
    values = np.random.default_rng(5).laplace(size=50_000).astype(np.float32)
    found = threshold(Histogram.of(values), "mse")

    def error(amax):
        scale = amax / 127
        return float(np.mean((values - np.clip(np.rint(values / scale), -127, 127) * scale) ** 2, dtype=np.float64))

    best = min(error(a) for a in np.linspace(0.2, 1.0, 400) * np.abs(values).max())
    assert error(found) <= best * 1.01


def test_auto_is_the_least_error_to_the_power_of_2_4_of_a_plain_search():
    """Two million values up to 1 and a single 4: with a power of 2.3 the best amax would be a fifth lower."""
    bulk = np.linspace(0, 1, 4001)
    even = Histogram.of(bulk)
    histogram = Histogram(500 * even.counts, even.low, even.high) + Histogram.of([4.0])

    def error(amax):
        levels = np.arange(128) * (amax / 127)
        nearest = levels[np.abs(bulk[:, None] - levels).argmin(axis=1)]
        return 500 * np.sum(np.abs(bulk - nearest) ** 2.4) + max(4.0 - amax, 0) ** 2.4

    candidates = np.linspace(0.2, 4.0, 1901)
    best = candidates[np.argmin([error(amax) for amax in candidates])]
    assert threshold(histogram, "auto") == pytest.approx(best, rel=0.02)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["mse", "auto"]),
    st.lists(st.floats(-40, 40).map(lambda e: 2.0**e), min_size=1, max_size=5),
    st.sampled_from(["normal", "uniform", "cauchy", "two values", "relu6"]),
    st.integers(0, 2**32 - 1),
)
def test_thresholds_that_are_not_tried_are_none_of_the_best(algorithm, scales, shape, seed):
    """A search that leaves out what clipping alone makes worse ends where one over every candidate does."""
    rng = np.random.default_rng(seed)
    draw = {
        "normal": lambda n: rng.normal(size=n), "uniform": rng.random, "cauchy": rng.standard_cauchy,
        "two values": lambda n: rng.choice([0.01, 1.0], n), "relu6": lambda n: np.clip(rng.normal(3, 4, n), 0, 6),
    }[shape]  # fmt: skip
    histogram = Histogram.of(np.concatenate([np.float32(s) * draw(300).astype(np.float32) for s in scales]))
    values, counts = histogram.points()
    power, coarse, finer = (
        (2.0, np.arange(-256, 1) / 32, 64) if algorithm == "mse" else (2.4, np.arange(-80, 1) / 8, 32)
    )

    def errors(amax):
        scale = amax[:, None] / 127
        return (np.abs(values - np.minimum(np.rint(values / scale), 127) * scale) ** power) @ counts

    coarse = histogram.max * 2.0**coarse
    best = int(np.argmin(errors(coarse)))
    fine = np.append(
        np.geomspace(coarse[max(best - 1, 0)], coarse[min(best + 1, coarse.size - 1)], finer), coarse[best]
    )
    wanted = errors(fine).min()
    assert errors(np.array([threshold(histogram, algorithm)]))[0] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("shape", ["normal", "cauchy", "relu", "one half is a hundredth", "one half is zero"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_whole_has_its_own_threshold_and_its_parts_have_nearly_theirs(algorithm, shape):
    """Parts of a whole are tried at the whole's candidates, 0.6 % apart: that is how near they come."""
    rng = np.random.default_rng(3)
    first, second = rng.normal(size=(2, 40_000)), rng.standard_cauchy((2, 40_000))
    halves = {
        "normal": first, "cauchy": second, "relu": np.maximum(first, 0),
        "one half is a hundredth": first * [[1.0], [1e-2]], "one half is zero": first * [[1.0], [0.0]],
    }[shape]  # fmt: skip
    parts = [Histogram.of(h) for h in halves]
    whole = parts[0] + parts[1]
    chosen, *of_parts = thresholds(whole, parts, algorithm, 99.99)
    assert chosen == threshold(whole, algorithm)
    for part, found in zip(parts, of_parts, strict=True):
        assert found == pytest.approx(threshold(part, algorithm), rel=0.02)
        assert found <= part.max


def test_a_hand_worked_squared_error():
    # amax 127 makes the scale 1: 0.5 rounds to 0 (to even), 3 is exact, 130 is clipped to 127. Bucket middles are used.
    found = Histogram.of([3.0, 3.0])
    middle = (3.0 + 3.0) / 2
    assert mean_squared_errors(found, np.array([127.0]))[0] == (middle - 3) ** 2
    assert mean_squared_errors(Histogram.of([130.0]), np.array([127.0]))[0] == pytest.approx(9.0)


def test_minmax_is_exact():
    assert threshold(Histogram.of([0.1, -3.1415927]), "minmax") == float(np.float32(3.1415927))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_and_zeros_give_zero(algorithm):
    assert threshold(Histogram.empty(), algorithm) == 0.0
    assert threshold(Histogram.of(np.zeros(9)), algorithm) == 0.0


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50), st.sampled_from(ALGORITHMS))
def test_every_threshold_is_within_the_exact_maximum(values, algorithm):
    found = Histogram.of(np.array(values, np.float32))
    amax = threshold(found, algorithm)
    assert 0 <= amax <= found.max
    if found.max > 0 and algorithm != "percentile":
        assert amax > 0


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=60),
    st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
)
def test_percentile_is_monotone(values, percentiles):
    found = Histogram.of(np.array(values, np.float32))
    amax = [threshold(found, "percentile", p) for p in sorted(percentiles)]
    assert amax == sorted(amax)


def test_unknown_options_are_refused():
    with pytest.raises(
        CalibError, match=r"must be one of auto, entropy_2, entropy, minmax, percentile, mse \(got 'kl'\)"
    ):
        threshold(Histogram.empty(), "kl")
    for percentile in (0, 100.1, math.nan):
        with pytest.raises(CalibError, match="percentile: must be over 0 and at most 100"):
            threshold(Histogram.empty(), "percentile", percentile)

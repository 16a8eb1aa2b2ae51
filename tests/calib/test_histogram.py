"""Histograms against NumPy, and their algebra."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calib.errors import CalibError
from calib.histogram import BINS, Histogram, edges

FLOATS = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


def test_a_hand_worked_histogram():
    # 1.0 and 1.003 share the bucket [1, 1 + 1/256); 1.005 is in the next; -2.0 opens the next octave, 256 buckets on.
    found = Histogram.of([0.0, -0.0, 1.0, 1.003, 1.005, -2.0])
    one = 127 << 8
    assert {int(i): int(found.counts[i]) for i in np.flatnonzero(found.counts)} == {
        0: 2,
        one: 2,
        one + 1: 1,
        one + 256: 1,
    }
    assert (found.elements, found.zeros, found.low, found.high, found.max) == (6, 2, -2.0, np.float32(1.005), 2.0)
    assert edges()[one : one + 2].tolist() == [1.0, 1 + 1 / 256]


def test_edges_bracket_every_value():
    values = np.abs(np.random.default_rng(0).standard_cauchy(2000)).astype(np.float32)
    bounds = edges()
    for value in values:
        at = int(np.flatnonzero(Histogram.of([value]).counts)[0])
        assert bounds[at] <= value < bounds[at + 1]


def test_the_empty_histogram():
    found = Histogram.empty()
    assert (found.elements, found.max, found.low, found.high) == (0, 0.0, math.inf, -math.inf)
    assert found.linear(16).tolist() == [0.0] * 16


def test_nan_and_infinity_are_counted_apart():
    found = Histogram.of([1.0, math.nan, -math.inf, math.inf, -3.0])
    assert (found.elements, found.non_finite, found.max) == (2, 3, 3.0)


def test_constant():
    assert Histogram.of([2.5, 2.5]).constant
    assert not Histogram.of([2.5, -2.5]).constant
    assert not Histogram.of([2.5]).constant


@settings(deadline=None, max_examples=60)
@given(FLOATS, st.randoms(use_true_random=False))
def test_splits_and_orders_do_not_matter(values, random):
    order = list(range(values.size))
    random.shuffle(order)
    cut = random.randint(0, values.size)
    shuffled = values[order]
    assert Histogram.total([Histogram.of(shuffled[:cut]), Histogram.of(shuffled[cut:])]) == Histogram.of(values)


@settings(deadline=None, max_examples=60)
@given(hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-100, 100, width=32)))
def test_the_linear_histogram_keeps_every_count(values):
    found = Histogram.of(values)
    linear = found.linear(64)
    assert linear.sum() == pytest.approx(values.size)
    assert (linear >= 0).all()


def test_the_linear_histogram_is_numpys_within_a_bucket():
    values = np.abs(np.random.default_rng(1).normal(size=200_000)).astype(np.float32)
    ours = np.cumsum(Histogram.of(values).linear(128)) / values.size
    numpys = np.cumsum(np.histogram(values, 128, (0, values.max()))[0]) / values.size
    assert np.abs(ours - numpys).max() < 5e-4


def test_below_and_reaching_are_inverse():
    found = Histogram.of(np.random.default_rng(2).laplace(size=5000))
    for count in (1.0, 17.5, 2500.0, 4999.0):
        assert found.below(found.reaching(count)) == pytest.approx(count)
    assert found.below([0.0, found.max, 1e9]).tolist() == [0.0, 5000.0, 5000.0]
    assert found.reaching(5000) == found.max


def test_counts_of_another_shape_are_refused():
    with pytest.raises(CalibError) as caught:
        Histogram(np.zeros(3, np.int64))
    assert str(caught.value) == (
        f"histogram: counts must be int64 [{BINS}] (got int64 [3]). Build it with an observer or Histogram.of."
    )


#: What 200 histograms take: dense, compact, and compact once they were read. A process of its own has no freed memory
#: that the first would be made of.
MEMORY = """
from pathlib import Path
import numpy as np
from calib.histogram import Histogram

def resident():
    return sum(int(line.split()[1]) for line in Path("/proc/self/smaps").read_text().splitlines() if "Rss:" in line)

full = Histogram.of(np.random.default_rng(0).normal(size=10_000))
before = resident()
dense = [full + Histogram.empty() for _ in range(200)]
between = resident()
compact = [full.compact() for _ in range(200)]
after = resident()
assert sum(h.elements for h in compact) == 200 * full.elements
print(between - before, after - between, resident() - after)
"""


def test_a_compact_histogram_is_the_same_and_takes_a_part_of_the_memory() -> None:
    full = Histogram.of(np.random.default_rng(0).normal(size=10_000))
    assert full.compact() == full
    assert (full.compact() + full).elements == 2 * full.elements
    ran = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    dense, compact, by_reading = map(int, ran.stdout.split())
    assert compact < 0.4 * dense
    assert by_reading < 0.1 * dense

"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.evaluation import metrics


def test_cosine_by_sample() -> None:
    a = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    b = np.array([[0.0, 2.0], [2.0, 2.0], [0.0, 0.0], [1.0, 0.0], [-3.0, -4.0]])
    assert metrics.cosine(a, b) == pytest.approx([0.0, 1.0, 1.0, 0.0, -1.0])


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 9999), st.floats(1e-30, 1e30))
def test_equal_rows_have_a_cosine_of_one_and_none_is_beyond(rows: int, columns: int, seed: int, scale: float) -> None:
    a = np.random.default_rng(seed).standard_normal((rows, columns)) * scale
    assert metrics.similarity(a, a.copy()).tolist() == [1.0] * rows
    assert np.abs(metrics.similarity(a, -3 * a)).max() <= 1.0


def test_differences() -> None:
    a, b = np.array([[3.0, 4.0]]), np.array([[3.0, 4.5]])
    assert metrics.max_abs(a, b) == 0.5
    assert metrics.relative_l2(a, b) == pytest.approx(0.1)
    assert metrics.sqnr_db(a, b) == pytest.approx(20.0)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20)), min_size=1, max_size=20))
def test_whole_numbers_are_subtracted_as_such(pairs: list[tuple[int, int]]) -> None:
    """Ids, hashes and times above 2^53, which float64 does not hold, against Python's own integers."""
    wanted = [a for a, _ in pairs]
    got = [min(max(a + d, -(2**63)), 2**63 - 1) for a, d in pairs]
    a, b = np.array([wanted], np.int64), np.array([got], np.int64)
    assert metrics.max_abs(a, b) == max(abs(x - y) for x, y in zip(wanted, got, strict=True))
    assert (metrics.sqnr_db(a, b) == float("inf")) == (wanted == got)
    assert (metrics.relative_l2(a, b) == 0) == (wanted == got)
    far = np.array([[2**63 - 1, -(2**63)]], np.int64)
    assert metrics.max_abs(far, far[:, ::-1].copy()) == pytest.approx(2.0**64)


def test_equal_and_zero_references() -> None:
    zero, one = np.zeros((1, 2)), np.ones((1, 2))
    assert metrics.sqnr_db(one, one) == float("inf")
    assert metrics.relative_l2(zero, zero) == 0.0
    assert metrics.relative_l2(zero, one) == float("inf")
    assert metrics.sqnr_db(zero, one) == float("-inf")


def test_the_share_of_samples_with_one_class_is_counted() -> None:
    a = np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]])
    b = np.array([[0.2, 0.8], [0.3, 0.7], [0.1, 0.9]])
    assert metrics.top1_agreement(a, b) == pytest.approx(2 / 3)


def test_half_precision_is_widened_before_it_is_summed() -> None:
    # 70000 ones: their sum of squares is far beyond FP16's 65504.
    a = np.ones((1, 70000), np.float16)
    assert metrics.cosine(a, a) == pytest.approx([1.0])
    assert metrics.relative_l2(a, a * np.float16(1.5)) == pytest.approx(0.5)


def test_only_scores_by_class_are_ranked() -> None:
    assert metrics.ranks_classes(np.zeros((4, 2), np.float16))
    assert not metrics.ranks_classes(np.zeros((4, 1), np.float32))
    assert not metrics.ranks_classes(np.zeros((4, 2), np.int64))
    assert not metrics.ranks_classes(np.zeros((4, 2, 2), np.float32))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[1, math.inf], [1, math.nan], [-math.inf, math.inf], [1e200, 1e300], [0, 0]])
@pytest.mark.parametrize("others", [[1, math.inf], [1, 2], [0, 0], [math.nan, 0], [1e200, 1e300]])
def test_numbers_that_are_not_finite_give_figures_and_no_warning(values: list[float], others: list[float]) -> None:
    a, b = np.array([values], np.float64), np.array([others], np.float64)
    finite = np.isfinite([values, others]).all()
    assert metrics.cosine(a, b).shape == (1,)
    assert finite == math.isfinite(metrics.max_abs(a, b)) or values == others
    assert isinstance(metrics.relative_l2(a, b), float)
    assert isinstance(metrics.sqnr_db(a, b), float)

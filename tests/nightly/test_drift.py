"""Drift: what two builds of one job differ by, whichever two of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtpipe.nightly.drift import _largest_difference


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([1.5, 1.5, 1.5], 0.0),
        ([0.0, 1.0, -1.0], 2.0),  # of the second and the third
        ([np.inf, np.inf], 0.0),
        ([np.inf, -np.inf], np.inf),
        ([np.nan, 1.0], np.inf),
        ([2**53, 2**53 + 1], 1.0),  # whole numbers that are one number in float64
    ],
)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_the_largest_difference_is_that_of_any_two_builds(values: list[Any], largest: float, shape: Any) -> None:
    outputs = [{"y": np.full(shape, value)} for value in values]
    assert _largest_difference(outputs) == largest

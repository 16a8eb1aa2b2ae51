"""The check of outputs in every layout: batch axes, whole batches, no elements, shapes of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from checking import Echo
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.batching import Batching, joined
from trtpipe.errors import InputError
from trtpipe.evaluation.check import CheckData, check_engine, measure, run_all
from trtpipe.job.limits import Limits
from trtpipe.progress import Silent
from trtpipe.values import Control, DimRange, TensorSpec

#: Networks' outputs by name: (shape of the binding, batch axis, what it computes of [B, 4]).
LAYOUTS: dict[str, tuple[tuple[int | str, ...], int | None, Any]] = {
    "rows": (("N", 4), 0, lambda x: x),
    "one number a sample": (("N",), 0, lambda x: x.sum(1)),
    "planes": (("N", 2, 2), 0, lambda x: x.reshape(-1, 2, 2)),
    "batch last": ((4, "N"), 1, lambda x: x.T),
    "batch in the middle": ((2, "N", 2), 1, lambda x: x.reshape(-1, 2, 2).transpose(1, 0, 2)),
    "scalar": ((), None, lambda x: x.mean()),
    "statistic": ((4,), None, lambda x: x.mean(0)),
    "pairs": (("N", "N"), None, lambda x: x @ x.T),
    "two lists": (("2*N", 4), None, lambda x: np.concatenate([x, -x])),
    "flat": (("4*N",), None, lambda x: x.reshape(-1)),
}


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    samples=st.integers(1, 23),
    low=st.integers(1, 4),
    more=st.integers(0, 4),
    size=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    bad=st.sampled_from([np.nan, np.inf, -np.inf, 1e6]),
)
def test_every_element_of_every_output_is_compared(
    layout: str, samples: int, low: int, more: int, size: int, seed: int, bad: float
) -> None:
    """Whatever the output's shape, the batches and their padding are: one wrong element of one batch fails."""
    shape, axis, function = LAYOUTS[layout]
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, 4)).astype(np.float32)
    dims = {"N": DimRange(low, low, low + more)}
    every = {**dims, "2*N": DimRange(1, 2, 99), "4*N": DimRange(1, 2, 99)}
    output = TensorSpec("y", "float32", shape, {d: every[d] for d in shape if isinstance(d, str)}, axis)
    how = Batching((TensorSpec("x", "float32", ("N", 4), dims),), (output,), size)
    size = max(low, min(size, low + more))
    how = Batching(how.inputs, how.outputs, size)

    def batches() -> Iterator[dict[str, Any]]:
        return ({"x": x[k : k + size]} for k in range(0, samples, size))

    class Network(Echo):
        """Its output, with one element of one batch replaced: never one that belongs to padding alone."""

        def __init__(self, wrong: int | None) -> None:
            super().__init__()
            self.wrong, self.seen = wrong, 0

        def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
            self.sizes.append(len(inputs["x"]))
            assert low <= len(inputs["x"]) <= low + more
            value = np.array(function(inputs["x"]), np.float32)
            count = min(len(inputs["x"]), samples - self.seen)
            real = np.moveaxis(value, axis, 0)[:count] if axis is not None else value
            if self.wrong is not None and len(self.sizes) - 1 == self.wrong:
                at = tuple(int(random.integers(0, n)) for n in real.shape)
                real[at] = bad
            self.seen += count
            return {"y": value}

    baseline = joined(how.rows(Network(None).run(p), c) for b in batches() for p, c in how.pieces(b))
    checked = CheckData(batches, baseline, None, samples, how)
    control = Control("w", "weight set to zero", True, 3)
    limits, options = Limits(max_abs_max=1e-3), {"damaged": None, "control": control, "progress": Silent()}
    right = Network(None)
    assert measure(baseline, run_all(right, checked, None)[0], None, limits, how.whole)[1] == []
    wrong = Network(int(random.integers(0, len(right.sizes))))
    assert not check_engine(wrong, "graph", checked, limits, **options).passed  # type: ignore[arg-type]
    few = checked.first(3)
    assert sum(len(b["x"]) for b in few.batches()) == few.samples
    assert run_all(Network(None), few, None)[0]["y"].shape == few.reference["y"].shape


def test_a_shape_that_depends_on_the_data_is_refused() -> None:
    parts = [{"y": np.zeros((1, 3, 6))}, {"y": np.zeros((1, 5, 6))}]
    with pytest.raises(InputError) as caught:
        joined(parts)
    assert str(caught.value) == (
        "outputs.y: must have one shape for all samples (got [3, 6] and [5, 6]). Give samples of one size; a "
        "shape that depends on the data cannot be compiled: return a fixed number of rows and a mask."
    )


def test_an_output_without_elements_proves_nothing() -> None:
    empty = np.zeros((10, 0), np.float32)
    assert measure({"y": empty}, {"y": empty}, None, Limits(cosine_min=0.9))[1][0] == (
        "output y has no elements (shape (10, 0))"
    )

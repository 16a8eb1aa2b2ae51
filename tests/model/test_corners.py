"""The graph is held against the model at the sizes that the job declares, whatever sizes the samples have."""

from __future__ import annotations

import nets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trtpipe.errors import BuildError
from trtpipe.model.capture import capture
from trtpipe.model.corners import corners, require_corners
from trtpipe.values import DimRange, TensorSpec

RANGES = st.tuples(*[st.integers(1, 9)] * 3).map(lambda v: DimRange(*sorted(v)))


@settings(max_examples=60, deadline=None)
@given(batch=RANGES, height=RANGES, sample=st.tuples(st.integers(1, 6), st.integers(1, 12)))
def test_every_dimension_is_at_its_least_and_each_but_the_batch_at_its_largest(
    batch: DimRange, height: DimRange, sample: tuple[int, int]
) -> None:
    dims = {"N": batch, "H": height}
    specs = (TensorSpec("x", "float32", ("N", 2, "H"), dims), TensorSpec("y", "int64", ("N",), {"N": batch}))
    x = np.arange(sample[0] * 2 * sample[1]).reshape(sample[0], 2, sample[1])
    found = list(corners(specs, {"x": x, "y": np.arange(sample[0])}))
    shapes = [(f["x"].shape, f["y"].shape) for f in found]
    least, largest = ((batch.min, 2, height.min), (batch.min,)), ((batch.min, 2, height.max), (batch.min,))
    if batch.min == batch.max and height.min == height.max:
        assert shapes == []
    else:
        assert shapes == ([least] if least == largest else [least, largest])
    for arrays in found:  # real numbers, of the samples
        assert set(arrays["x"].flat) <= set(x.flat)
        assert arrays["x"].flat[0] == 0


class Decides(nn.Module):
    """Computes another thing for one batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.mean((2, 3))
        return -y if x.shape[0] == self.at else y


def test_a_model_that_decides_by_its_batch_is_refused() -> None:
    loaded = nets.loaded(Decides(1), out_shape=("N", 3))
    samples = {"x": nets.images(4, 3, 8, 8).numpy()}
    captured = capture(loaded)
    with pytest.raises(BuildError) as caught:
        require_corners(loaded, captured, samples)
    assert str(caught.value) == (
        "capture: the graph must answer as the model for x [1, 3, 8, 8] too (got 100% other values in output logits). "
        "The model decides by a shape (an if, squeeze(), a number taken from x.shape): make it compute the same for "
        "every size, or declare in inputs only sizes that it treats alike."
    )


@pytest.mark.parametrize("name", ["residual", "attention", "concat"])
def test_models_that_do_not_are_taken(name: str) -> None:
    loaded = getattr(nets, name)()
    shape = [d if isinstance(d, int) else 3 for d in loaded.inputs[0].shape]
    require_corners(loaded, nets.captured(name), {"x": nets.images(*shape).numpy()})


def test_a_model_that_fails_for_one_sample_is_said() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                raise ValueError("one is too few")
            return x.mean((2, 3))

    loaded = nets.loaded(Fails(), out_shape=("N", 3))
    with pytest.raises(BuildError) as caught:
        require_corners(loaded, capture(loaded), {"x": nets.images(4, 3, 8, 8).numpy()})
    assert str(caught.value) == (
        "capture: the model fails on x [1, 3, 8, 8], which the job declares: ValueError: one is too few. Narrow the "
        "range in inputs, or make the model take it."
    )

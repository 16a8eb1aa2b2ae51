"""The graph is held against the model at the sizes that the job declares, whatever sizes the samples have."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import nets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trtpipe.errors import BuildError, InputError
from trtpipe.model import corners as corners_module
from trtpipe.model.capture import capture
from trtpipe.model.corners import corner_outputs, corners, largest_batch, require_corners
from trtpipe.values import DimRange, TensorSpec

RANGES = st.tuples(*[st.integers(1, 9)] * 3).map(lambda v: DimRange(*sorted(v)))


@settings(max_examples=60, deadline=None)
@given(batch=RANGES, height=RANGES, sample=st.tuples(st.integers(1, 6), st.integers(1, 12)))
def test_every_dimension_is_at_its_least_and_at_its_largest(
    batch: DimRange, height: DimRange, sample: tuple[int, int]
) -> None:
    dims = {"N": batch, "H": height}
    specs = (TensorSpec("x", "float32", ("N", 2, "H"), dims), TensorSpec("y", "int64", ("N",), {"N": batch}))
    x = np.arange(sample[0] * 2 * sample[1]).reshape(sample[0], 2, sample[1])
    inputs = list(corners(specs, {"x": x, "y": np.arange(sample[0])}, ()))
    shapes = [(f["x"].shape, f["y"].shape) for f in inputs]
    least, largest = ((batch.min, 2, height.min), (batch.min,)), ((batch.max, 2, height.max), (batch.max,))
    assert shapes == [s for s in dict.fromkeys([least, largest]) if s != (x.shape, (sample[0],))]
    for arrays in inputs:  # real numbers, of the samples
        assert set(arrays["x"].flat) <= set(x.flat)
        assert arrays["x"].flat[0] == 0


@given(batch=RANGES, side=st.integers(1, 40), most=st.integers(1, 4000))
def test_the_largest_batch_holds_no_more_values_than_are_given_at_once(batch: DimRange, side: int, most: int) -> None:
    spec = TensorSpec("x", "float32", ("N", side, side), {"N": batch})
    with mock.patch.object(corners_module, "MOST_VALUES", most):
        largest = largest_batch((spec,))
    assert batch.min <= largest <= batch.max
    assert largest == batch.min or largest * side * side <= most
    assert largest == batch.max or (largest + 1) * side * side > most


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
        require_corners(loaded, captured, samples, corner_outputs(loaded, samples, ()), ())
    assert str(caught.value) == (
        "capture: the graph gives other outputs than the model for x [1, 3, 8, 8] (100% other values in output "
        "logits). The model decides by a shape (an if, squeeze(), a number taken from x.shape): make it compute the "
        "same for every size, or declare in inputs only sizes that it treats alike."
    )


@pytest.mark.parametrize("name", ["residual", "attention", "concat"])
def test_models_that_do_not_are_taken(name: str) -> None:
    loaded = getattr(nets, name)()
    shape = [d if isinstance(d, int) else 3 for d in loaded.inputs[0].shape]
    samples = {"x": nets.images(*shape).numpy()}
    require_corners(loaded, nets.captured(name), samples, corner_outputs(loaded, samples, ()), ())


def test_a_model_that_fails_for_one_sample_is_said() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                raise ValueError("one is too few")
            return x.mean((2, 3))

    loaded = nets.loaded(Fails(), out_shape=("N", 3))
    with pytest.raises(InputError) as caught:
        corner_outputs(loaded, {"x": nets.images(4, 3, 8, 8).numpy()}, ())
    assert str(caught.value) == (
        "capture: the model fails on x [1, 3, 8, 8], which the job declares: ValueError: one is too few. Narrow the "
        "range in inputs, or make the model take it."
    )


def test_a_model_that_gives_nan_for_one_sample_is_said() -> None:
    """Before anything is built: no precision, route or release would change it."""

    class Deviation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.mean((2, 3))
            return y / (y - y.mean(0)).abs().sum()

    loaded = nets.loaded(Deviation(), out_shape=("N", 3))
    with pytest.raises(InputError) as caught:
        corner_outputs(loaded, {"x": nets.images(4, 3, 8, 8).numpy()}, ())
    assert str(caught.value) == (
        "capture: output logits of the model itself holds NaN or infinity for x [1, 3, 8, 8], which the job declares. "
        "Narrow the range in inputs, or make the model take it."
    )


def test_a_graph_that_fails_at_a_corner_is_said() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("one is too few")

    loaded = nets.loaded(nets.Residual().eval())
    samples = {"x": nets.images(4, 3, 8, 8).numpy()}
    captured = replace(capture(loaded), graph=Fails())
    with pytest.raises(BuildError) as caught:
        require_corners(loaded, captured, samples, corner_outputs(loaded, samples, ()), ())
    assert str(caught.value) == (
        "capture: the graph of the model fails on x [1, 3, 8, 8], which the job declares: ValueError: one is too few. "
        "Narrow the range in inputs, or make the model take it."
    )


class Counting(nn.Module):
    """A graph that notes the sizes that it is run at, and gives other outputs than `graph` at one of them."""

    def __init__(self, graph: nn.Module, wrong: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.graph, self.wrong, self.sizes = graph, wrong, list[tuple[int, ...]]()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.sizes.append(tuple(x.shape))
        outputs: tuple[torch.Tensor, ...] = self.graph(x)
        return tuple(-o for o in outputs) if tuple(x.shape) == self.wrong else outputs


def test_samples_that_a_larger_batch_has_are_not_run_once_more() -> None:
    loaded = nets.residual()
    samples = {"x": nets.images(4, 3, 8, 8).numpy()}
    counting = Counting(nets.captured("residual").graph)
    captured = replace(nets.captured("residual"), graph=counting)
    require_corners(loaded, captured, samples, corner_outputs(loaded, samples, ()), ())
    assert counting.sizes == [(1, 3, 8, 8), (8, 3, 8, 8)]


def test_samples_of_a_size_between_the_corners_are_run_as_they_are() -> None:
    side = DimRange(6, 8, 10)
    loaded = nets.loaded(nets.Residual().eval(), ("N", 3, "H", 8))
    inputs = (TensorSpec("x", "float32", ("N", 3, "H", 8), {"N": DimRange(1, 4, 8), "H": side}),)
    loaded = replace(loaded, inputs=inputs)
    samples = {"x": nets.images(4, 3, 8, 8).numpy()}
    graph = capture(loaded)
    right = Counting(graph.graph)
    require_corners(loaded, replace(graph, graph=right), samples, corner_outputs(loaded, samples, ()), ())
    assert right.sizes == [(1, 3, 6, 8), (8, 3, 10, 8), (4, 3, 8, 8)]
    wrong = replace(graph, graph=Counting(graph.graph, (4, 3, 8, 8)))
    with pytest.raises(
        BuildError, match=r"^capture: the graph gives other outputs than the model for x \[4, 3, 8, 8\], samples"
    ):
        require_corners(loaded, wrong, samples, corner_outputs(loaded, samples, ()), ())


def test_a_model_that_is_another_where_it_is_exported_is_not_told_of_sizes() -> None:
    class Exported(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.mean((2, 3))
            return -y if torch.compiler.is_exporting() else y

    loaded = nets.loaded(Exported(), out_shape=("N", 3))
    samples = {"x": nets.images(4, 3, 8, 8).numpy()}
    with pytest.raises(BuildError, match=r"is_exporting or its like"):
        require_corners(loaded, capture(loaded), samples, corner_outputs(loaded, samples, ()), ())

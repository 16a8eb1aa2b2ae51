"""What is executed is held against the model at the least and the largest declared sizes too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpipe.batching import Batching
from trtpipe.errors import InputError
from trtpipe.evaluation.corners import AtCorner, run_corners, with_corners
from trtpipe.model import corners as declared
from trtpipe.model.corners import corners
from trtpipe.values import CheckReport, Control, DimRange, Metric, TensorSpec

Array = np.ndarray[Any, Any]
DIMS = {"N": DimRange(1, 2, 4), "H": DimRange(2, 4, 8)}
INPUTS = (TensorSpec("x", "float32", ("N", "H"), DIMS),)
OUTPUTS = (TensorSpec("y", "float32", ("N", 3), {"N": DIMS["N"]}),)
SAMPLES = {"x": np.arange(1, 9, dtype=np.float32).reshape(2, 4)}
#: The check's: a worst cosine of 0.99 and a largest difference of 0.1.
METRICS = (Metric("cosine_worst", "y", 0.99), Metric("max_abs", "y", 0.1))
PASSED = CheckReport("graph", "double", 2, METRICS, Control("w", "zero", True, 2), True)
NARROW = "Narrow the range in inputs, or build again with another precision.keep, route or TensorRT release."


def model(x: Array) -> Array:
    """[N, H] -> [N, 3]: the largest value, its negative and 1."""
    most = x.max(1)
    return np.stack([most, -most, np.ones_like(most)], 1)


class Runner:
    """Executes `how`, and remembers the shapes it saw."""

    name = "double"

    def __init__(self, how: Callable[[Array], Any] = model) -> None:
        self.how = how
        self.shapes: list[tuple[int, ...]] = []

    def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
        self.shapes.append(inputs["x"].shape)
        return {"y": self.how(inputs["x"])}


def at_corners(runner: Runner, inputs: tuple[TensorSpec, ...] = INPUTS) -> CheckReport:
    expected = [{"y": model(arrays["x"])} for arrays in corners(inputs, SAMPLES, ())]
    return with_corners(*ran(runner, Batching(inputs, OUTPUTS, 4)), SAMPLES, expected)


def ran(runner: Runner, check: Batching) -> tuple[CheckReport, tuple[AtCorner, ...], Batching]:
    """What `with_corners` is given first."""
    return PASSED, run_corners(runner, check, SAMPLES), check


def test_with_profiles_the_sizes_are_those_that_a_profile_takes() -> None:
    """A batch of one with the largest sizes, or many small ones: the engine refuses both at their largest."""
    profiles = ({"N": DimRange(1, 1, 1)}, {"N": DimRange(2, 4, 4), "H": DimRange(2, 2, 4)})
    runner = Runner()
    expected = [{"y": model(arrays["x"])} for arrays in corners(INPUTS, SAMPLES, profiles)]
    report = with_corners(*ran(runner, Batching(INPUTS, OUTPUTS, 4, profiles)), SAMPLES, expected)
    assert report.passed
    assert runner.shapes == [(1, 2), (1, 8), (2, 2), (4, 4)]


def test_the_least_and_the_largest_sizes_are_executed() -> None:
    runner = Runner()
    report = at_corners(runner)
    assert runner.shapes == [(1, 2), (4, 8)]
    assert (report.passed, report.problems, report.warnings) == (True, (), ())
    assert report.notes == ("declared sizes beyond the check's batches were executed too: x [1, 2] and x [4, 8]",)


def test_what_the_check_has_executed_itself_is_not_executed_again() -> None:
    runner = Runner()
    fixed = (TensorSpec("x", "float32", ("N", 4), {"N": DimRange(2, 2, 2)}),)
    assert at_corners(runner, fixed) == PASSED
    assert runner.shapes == []


def test_a_batch_whose_inputs_are_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "MOST_VALUES", 25)
    runner = Runner()
    report = at_corners(runner)
    assert runner.shapes == [(1, 2), (3, 8)]
    assert report.notes[1:] == ("batches of 4 to 4 were not executed: their inputs are too large for this check",)


def refuses(x: Array) -> Any:
    raise InputError("inputs: must fit the graph (got a refusal).\nmore")


AT = "for x [4, 8], which the job declares"


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (refuses, f"what was executed fails {AT}: inputs: must fit the graph (got a refusal). {NARROW}"),
        (lambda x: np.zeros(3), f"output y has the shape [3] {AT}, not [N, 3]. {NARROW}"),
        (lambda x: np.zeros((2, 3)), f"output y has the shape [2, 3] {AT}, not [N, 3]. {NARROW}"),
        (lambda x: np.zeros((4, 4)), f"output y has the shape [4, 4] {AT}, not [N, 3]. {NARROW}"),
        (lambda x: np.full((4, 3), np.inf), f"output y holds NaN or infinity {AT}. {NARROW}"),
        (
            lambda x: -model(x),
            f"output y has a maximum difference of 16 from the baseline (check: 0.1) {AT}. {NARROW}",
        ),
    ],
)
def test_what_goes_wrong_at_the_largest_is_a_problem(how: Callable[[Any], Any], problem: str) -> None:
    report = at_corners(Runner(lambda x: how(x) if len(x) == 4 else model(x)))
    assert (report.passed, report.problems, report.warnings) == (False, (problem,), ())


def test_samples_of_another_size_may_be_further_off_which_is_a_warning() -> None:
    report = at_corners(Runner(lambda x: model(x) + (0.5 if len(x) == 4 else 0)))
    assert report.passed
    assert report.warnings == (
        f"output y has a maximum difference of 0.5 from the baseline (check: 0.1) {AT}. Check on samples of that size "
        "to judge it, or narrow the range in inputs",
    )


BATCH = (TensorSpec("x", "float32", ("N", 4), {"N": DimRange(1, 2, 16)}),)


@settings(max_examples=60, deadline=None)
@given(row=st.integers(0, 15), factor=st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
def test_one_wrong_row_of_a_batch_larger_than_the_check_s_fails(row: int, factor: float) -> None:
    def wrong(x: Array) -> Array:
        y = model(x)
        y[row : row + 1] *= factor if len(x) == 16 else 1
        return y

    (problem,) = at_corners(Runner(wrong), BATCH).problems
    assert "for x [16, 4], which the job declares" in problem


@settings(max_examples=60, deadline=None)
@given(noise=st.floats(-0.19, 0.19))
def test_rounding_as_the_check_s_own_does_not(noise: float) -> None:
    report = at_corners(Runner(lambda x: model(x) + np.float32(noise) * (np.arange(3) == 0)), BATCH)
    assert (report.problems, report.warnings) == ((), ())


def test_a_direction_that_is_lost_fails_where_every_value_is_small() -> None:
    small = [{"y": model(a["x"]) / 1000} for a in corners(BATCH, SAMPLES, ())]
    report = with_corners(*ran(Runner(lambda x: -model(x) / 1000), Batching(BATCH, OUTPUTS, 4)), SAMPLES, small)
    assert report.problems[1] == (
        "output y has a worst cosine of -1 with the baseline (check: 0.99) for x [16, 4], which the job declares. "
        + NARROW
    )

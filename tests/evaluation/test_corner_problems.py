"""What is executed is run at the least and the largest declared sizes too; what goes wrong there is a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from trtpipe.errors import InputError
from trtpipe.evaluation.corners import corner_problems
from trtpipe.values import DimRange, TensorSpec

DIMS = {"N": DimRange(1, 2, 4), "H": DimRange(2, 4, 8)}
INPUTS = (TensorSpec("x", "float32", ("N", "H"), DIMS),)
OUTPUTS = (TensorSpec("y", "float32", ("N", 3), {"N": DIMS["N"]}),)
SAMPLES = {"x": np.ones((2, 4), np.float32)}


class Answers:
    """Answers [N, 3] zeros, changed by `how`, and remembers the shapes it saw."""

    name = "double"

    def __init__(self, how: Callable[[np.ndarray[Any, Any]], Any] = lambda x: np.zeros((len(x), 3))) -> None:
        self.how = how
        self.shapes: list[tuple[int, ...]] = []

    def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
        self.shapes.append(inputs["x"].shape)
        return {"y": self.how(inputs["x"])}


def test_the_least_and_the_largest_sizes_are_executed() -> None:
    runner = Answers()
    assert corner_problems(runner, INPUTS, OUTPUTS, SAMPLES) == ()
    assert runner.shapes == [(1, 2), (1, 8)]


def refuses(x: np.ndarray[Any, Any]) -> Any:
    raise InputError("inputs: must fit the graph (got a refusal).\nmore")


AT = "for x [1, 8], which the job declares"


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (refuses, f"what was executed fails {AT}: inputs: must fit the graph (got a refusal)."),
        (lambda x: np.zeros(3), f"output y has the shape [3] {AT}, not [N, 3]"),
        (lambda x: np.zeros((2, 3)), f"output y has the shape [2, 3] {AT}, not [N, 3]"),
        (lambda x: np.zeros((1, 4)), f"output y has the shape [1, 4] {AT}, not [N, 3]"),
        (lambda x: np.full((1, 3), np.inf), f"output y holds NaN or infinity {AT}"),
    ],
)
def test_what_goes_wrong_at_the_largest_is_a_problem(how: Callable[[Any], Any], problem: str) -> None:
    runner = Answers(lambda x: how(x) if x.shape[1] == 8 else np.zeros((len(x), 3)))
    assert corner_problems(runner, INPUTS, OUTPUTS, SAMPLES) == (problem,)

"""A runner, check data and a control for tests of the check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from trtpipe.batching import Batching
from trtpipe.evaluation.check import CheckData, Damaged, Executor, check_engine
from trtpipe.job.limits import Limits
from trtpipe.progress import Silent
from trtpipe.values import CheckReport, DimRange, TensorSpec

X = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
N = {"N": DimRange(2, 2, 4)}
INPUT = (TensorSpec("x", "float32", ("N", 4), N),)
HOW = Batching(INPUT, (TensorSpec("y", "float32", ("N", 4), N),), 5)


class Echo:
    """Answers with its input, changed by `how`; remembers the batch sizes it saw."""

    name = "echo"

    def __init__(self, how: Any = lambda x: x) -> None:
        self.how = how
        self.sizes: list[int] = []

    def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
        self.sizes.append(len(inputs["x"]))
        return {"y": self.how(inputs["x"])}


def data(reference: Any = X, labels: Any = None, batch: int = 5) -> CheckData:
    def batches() -> Iterable[dict[str, Any]]:
        return ({"x": X[k : k + batch]} for k in range(0, len(X), batch))

    return CheckData(batches, {"y": reference}, labels, len(X), HOW)


def damaged(runner: Echo, tensor: str = "x/QuantizeLinear") -> Damaged:
    return Damaged(lambda: nullcontext(Executor(runner, "graph")), tensor, "scale x 127")


ZERO = damaged(Echo(np.zeros_like))


def run(runner: Echo, limits: Limits | None = None, **more: Any) -> CheckReport:
    options: dict[str, Any] = {"damaged": ZERO, "progress": Silent()} | more
    return check_engine(runner, "graph", options.pop("data", data()), limits or Limits(cosine_min=0.99), **options)


def value(report: CheckReport, name: str) -> float:
    return next(m.value for m in report.metrics if m.name == name)

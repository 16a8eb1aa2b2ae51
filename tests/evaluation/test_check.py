"""The check: pairs by name, judges by limit, fails on what cannot be compared, and shows that it can fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from trtpipe.batching import fitted
from trtpipe.errors import InputError
from trtpipe.evaluation.check import CheckData, Damaged, check_engine, measure, undecided
from trtpipe.evaluation.intervals import binomial_interval, paired_interval
from trtpipe.job.sections import Limits
from trtpipe.progress import Silent
from trtpipe.values import CheckReport, Control, DimRange, Metric, TensorSpec

X = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
INPUT = (TensorSpec("x", "float32", ("N", 4), {"N": DimRange(2, 2, 4)}),)


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

    return CheckData(batches, {"y": reference}, labels)


ZERO = Damaged(Echo(np.zeros_like), "x/QuantizeLinear", "scale x 127")


def run(runner: Echo, limits: Limits | None = None, **more: Any) -> CheckReport:
    options: dict[str, Any] = {"damaged": ZERO, "progress": Silent()} | more
    return check_engine(
        runner, "graph", options.pop("data", data()), INPUT, limits or Limits(cosine_min=0.99), **options
    )


def value(report: CheckReport, name: str) -> float:
    return next(m.value for m in report.metrics if m.name == name)


def test_equal_outputs_pass() -> None:
    report = run(Echo())
    assert report.passed
    assert value(report, "cosine") == pytest.approx(1.0)
    assert value(report, "max_abs") == 0.0
    assert report.control == Control("x/QuantizeLinear", "scale x 127", True, 10)


def test_batches_are_cut_and_padded_to_what_the_bindings_allow() -> None:
    runner = Echo()
    assert run(runner).samples == 10
    assert runner.sizes == [4, 2, 4, 2]  # 5 + 5 samples; a rest of 1 is padded to the smallest batch, 2
    pieces = list(fitted({"x": X[:5]}, INPUT))
    assert [count for _, count in pieces] == [4, 1]
    assert np.array_equal(pieces[1][0]["x"], np.repeat(X[4:5], 2, axis=0))


def test_a_limit_that_is_not_met_fails() -> None:
    report = run(Echo(lambda x: x + 0.5), Limits(max_abs_max=0.4))
    assert not report.passed
    assert [m.name for m in report.metrics if m.passed is False] == ["max_abs"]


def test_a_check_that_cannot_fail_says_so() -> None:
    report = run(Echo(), damaged=Damaged(Echo(), "head/QuantizeLinear", "scale x 127"))
    assert not report.passed
    assert not report.control.failed
    assert report.problems == (
        "the check cannot fail: a copy with head/QuantizeLinear damaged (scale x 127) met every limit too. "
        "Tighten check.limits, or check on data that differ from each other",
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_fail_whatever_the_limits(bad: float) -> None:
    report = run(Echo(lambda x: np.where(x > 1, bad, x)), Limits(cosine_min=-1.0))
    assert not report.passed
    assert "output y holds NaN or infinity in what was executed" in report.problems


def test_a_baseline_with_nan_fails() -> None:
    reference = X.copy()
    reference[0, 0] = np.nan
    assert "output y holds NaN or infinity in the baseline" in run(Echo(), data=data(reference)).problems


def test_no_sample_fails() -> None:
    nothing = CheckData(lambda: iter(()), {"y": X[:0]}, None)
    report = run(Echo(), data=nothing)
    assert not report.passed
    assert "no sample was compared" in report.problems


def test_outputs_pair_by_exact_name() -> None:
    class Other(Echo):
        def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
            return {"y_": inputs["x"]}

    problems = run(Other()).problems
    assert "output y is missing from what was executed" in problems
    assert "output y_ was executed and has no baseline" in problems


def test_shapes_must_agree() -> None:
    problems = run(Echo(lambda x: x[:, :3])).problems
    assert "output y has the shape (10, 3), its baseline (10, 4)" in problems


def test_require_engine_fails_where_only_the_graph_ran() -> None:
    report = run(Echo(), require="engine")
    assert not report.passed
    assert report.problems == ("check.require is engine, and no GPU executed it here",)


def test_accuracy_needs_labels() -> None:
    report = run(Echo(), Limits(accuracy_drop_max=0.01))
    assert not report.passed
    assert report.problems[0] == "check.limits.accuracy_drop_max could not be judged: it needs labels"


def wrong_on(count: int, samples: int) -> tuple[Any, Any, Any]:
    """Scores of two classes, the same with the first `count` turned round, and labels that the first answers."""
    scores = np.tile(np.array([[1.0, 2.0]], np.float32), (samples, 1))
    other = scores.copy()
    other[:count] = other[:count, ::-1]
    return scores, other, np.ones(samples, np.int64)


def test_accuracy_and_its_drop() -> None:
    scores, wrong, labels = wrong_on(40, 200)
    metrics, problems = measure({"y": scores}, {"y": wrong}, labels, Limits(accuracy_drop_max=0.05))
    found = {m.name: m for m in metrics}
    assert not problems
    assert found["accuracy_baseline"].value == 1.0
    assert found["accuracy_drop"].value == pytest.approx(0.2)
    assert found["accuracy_drop"].interval == pytest.approx(paired_interval(40, 0, 200))
    assert found["accuracy_drop"].passed is False
    assert found["top1_agreement"].interval == pytest.approx(binomial_interval(160, 200))
    assert found["cosine"].interval is None
    assert undecided(metrics, 200) == ()


def test_a_limit_fails_only_when_the_data_can_say_so() -> None:
    scores, wrong, labels = wrong_on(1, 10)
    limits = Limits(accuracy_drop_max=0.05, top1_agreement_min=0.95)
    metrics, _ = measure({"y": scores}, {"y": wrong}, labels, limits)
    found = {m.name: m for m in metrics}
    assert found["accuracy_drop"].passed is True
    assert found["top1_agreement"].passed is True
    lines = undecided(metrics, 10)
    assert len(lines) == 2
    assert lines[0].startswith(
        "y.top1_agreement: 10 samples are too few to tell whether 0.9 meets the limit 0.95 "
        "(95 % interval 0.555 to 0.9975; "
    )
    assert re.search(r"; about \d+ would be needed\)$", lines[0])
    assert "no number would" in undecided((Metric("accuracy_drop", "y", 0.1, 0.1, True, (0.0, 0.4)),), 10)[0]


def first_turned(x: Any) -> Any:
    """The input, but for the first of all samples."""
    return np.where((x == X[0]).all(1, keepdims=True), -x, x)


def test_a_report_says_which_limits_its_samples_are_too_few_for() -> None:
    report = run(Echo(first_turned), Limits(top1_agreement_min=0.9))
    assert any("y.top1_agreement: 10 samples are too few" in note for note in report.notes)


def test_a_control_too_small_to_fail_fails_the_check_and_says_why() -> None:
    damaged = Damaged(Echo(first_turned), "head/QuantizeLinear", "scale x 127")
    report = run(Echo(), Limits(top1_agreement_min=0.95), damaged=damaged)
    assert not report.passed
    assert report.problems[0] == "the control's 10 samples are too few for the limits to tell anything"
    assert report.problems[1].startswith("the check cannot fail")


def test_with_the_comparison_taken_out_no_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control sees it: whoever measures nothing, or the baseline against itself, cannot tell damage either."""
    module = sys.modules[check_engine.__module__]  # trtpipe.evaluation.check itself is the function of the Python API
    real = module.measure
    monkeypatch.setattr(module, "measure", lambda reference, found, *more: real(reference, reference, *more))
    report = run(Echo(np.zeros_like))
    assert not report.passed
    assert not report.control.failed
    monkeypatch.setattr(module, "measure", lambda *_: ((), []))
    assert not run(Echo(np.zeros_like)).passed


def test_an_earlier_control_is_taken_where_no_copy_can_run() -> None:
    earlier = Control("t", "scale x 127", True, 3)
    assert run(Echo(), damaged=None, control=earlier).control == earlier
    with pytest.raises(InputError, match="check: must have a control"):
        run(Echo(), damaged=None)

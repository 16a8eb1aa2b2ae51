"""What executes for a user first gives the golden outputs as closely as the check did."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import shipping
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import trtpipe
from trtpipe.bundle.format import Bundle
from trtpipe.bundle.manifest import GRAPH
from trtpipe.cli.main import main
from trtpipe.errors import BuildError, InputError
from trtpipe.runtime import executor
from trtpipe.runtime.onnxruntime import Optimization, OrtRunner
from trtpipe.runtime.session import open_model
from trtpipe.values import CheckReport, Control, Metric


def test_what_is_fast_and_right_stays_fast_and_silent(tmp_path: Path) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    with trtpipe.load(tmp_path / "c") as model:
        assert model.notes == ()
    assert executor.serving_optimization(bundle) == ("all", ())


def test_without_a_recorded_check_nothing_is_optimized(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c", check=None)
    with trtpipe.load(tmp_path / "c") as model:
        assert model.notes == (
            "ONNX Runtime executes each node as it stands, without graph optimizations: no check of output logits is "
            "recorded that its outputs could be held to",
        )


def test_without_onnxruntime_a_server_is_told_to_optimize_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    level, (note,) = executor.serving_optimization(bundle)
    assert level == "none"
    assert note.startswith("graph optimizations are turned off, as the graph cannot be tried here: onnxruntime")
    assert "Run: pip install" in note  # the error's own next step


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("figure", ["cosine_worst", "max_abs", "relative_l2"])
def test_a_distance_that_is_not_finite_allows_nothing(tmp_path: Path, figure: str, value: float) -> None:
    check = shipping.manifest().check
    assert check is not None
    metrics = tuple(replace(m, value=value) if m.name == figure else m for m in check.metrics)
    shipping.bundle(tmp_path / "c", check=replace(check, metrics=metrics))
    with trtpipe.load(tmp_path / "c") as model:
        (note,) = model.notes
        assert "no check of output logits is recorded" in note


def test_a_graph_that_onnxruntime_refuses_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipping.bundle(tmp_path / "c", extra={GRAPH: b"no graph"})
    assert main(["export", str(tmp_path / "c"), "--to", "triton", str(tmp_path / "models")]) == 4
    assert re.search(r"graph: ONNX Runtime [\d.]+ does not accept it", capsys.readouterr().err)
    assert not (tmp_path / "models").exists()


class Optimizer:
    """Stands for ONNX Runtime with an optimizer that changes outputs by `error`, relative to their size."""

    def __init__(self, error: Callable[[np.ndarray], np.ndarray]) -> None:
        self.error, self.real = error, OrtRunner

    def __call__(self, model: bytes, *, as_written: bool = False, optimization: str = "all") -> Any:
        runner = self.real(model, as_written=as_written)
        if not as_written and optimization == "all":
            run = runner.run
            runner.run = lambda inputs: {n: self.error(o) for n, o in run(inputs).items()}  # type: ignore[method-assign]
        return runner


def noisy(size: float, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    noise = np.random.default_rng(seed).standard_normal(64).astype(np.float32)
    return lambda o: o + np.float32(size) * np.abs(o).max() * noise[: o.size].reshape(o.shape)


FAULTS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "NaN in one element": lambda o: np.where(np.arange(o.size).reshape(o.shape) == 1, np.nan, o),
    "infinity": lambda o: np.full_like(o, np.inf),
    "zeros": np.zeros_like,
    "half the size": lambda o: o / 2,
    "a sign": lambda o: -o,
    "two classes swapped": lambda o: o[:, ::-1],
    "one sample wrong": lambda o: np.concatenate([o[:-1], -o[-1:]]),
    "another shape": lambda o: o[:, :1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_an_optimizer_reaches_a_user(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    kept = bundle.golden()
    monkeypatch.setattr(executor, "OrtRunner", Optimizer(FAULTS[fault]))
    with open_model(bundle, graph=True) as model:
        np.testing.assert_allclose(model(kept.inputs)["logits"], kept.outputs["logits"], atol=1e-6)
        assert len(model.notes) == 1
    level, notes = executor.serving_optimization(bundle)
    assert level == "extended"
    assert notes[0].startswith("graph optimizations are limited to 'extended': with more, output logits has ")


def test_a_graph_that_the_optimizer_refuses_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(model: bytes, *, as_written: bool, optimization: Optimization) -> OrtRunner:
        if not as_written:
            raise BuildError("no kernel for the fused node")
        return OrtRunner(model, as_written=True)

    bundle = shipping.bundle(tmp_path / "c")
    monkeypatch.setattr(executor, "OrtRunner", refusing)
    with open_model(bundle, graph=True) as model:
        (note,) = model.notes
    assert note.endswith(" as it stands, without graph optimizations: with them it refuses the graph")


@pytest.mark.parametrize(("recorded", "notes"), [({"logits": 0.01}, 0), ({"logits": 0.005}, 1), ({}, 1)])
def test_golden_samples_that_are_worse_than_the_mean_are_held_to_their_own_distance(
    recorded: Mapping[str, float], notes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"cosine_worst": 0.5, "max_abs": 1.0, "relative_l2": 1e-4}
    measured = tuple(Metric(name, "logits", value) for name, value in figures.items())
    check = CheckReport("graph", "r", 6, measured, Control("w", "zeroed", True, 6), True, golden=recorded)
    bundle = shipping.bundle(tmp_path / "c", check=check)
    monkeypatch.setattr(executor, "OrtRunner", Optimizer(lambda o: o * 1.01))
    with open_model(bundle, graph=True) as model:
        assert len(model.notes) == notes


@given(size=st.floats(1e-7, 10), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_runs_is_within_the_checks_distance(
    size: float, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an optimizer adds, the golden outputs that a user gets are as close as the check found them."""
    bundle = shipping.bundle(tmp_path / "c")
    kept = bundle.golden()
    with monkeypatch.context() as patch:
        patch.setattr(executor, "OrtRunner", Optimizer(noisy(size, seed)))
        with open_model(bundle, graph=True) as model:
            got = model(kept.inputs)["logits"]
            baseline = kept.outputs["logits"]
            assert np.linalg.norm(got - baseline) <= 1.25e-4 * np.linalg.norm(baseline) + 1e-9
            assert np.abs(got - baseline).max() <= 1.001e-4
            assert bool(model.notes) == (size > 1e-3 or bool(model.notes))


def test_a_check_is_never_helped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ONNX Runtime is the target, a check judges the session that users open, whatever it gives."""
    bundle = shipping.bundle(tmp_path / "c")
    monkeypatch.setattr(executor, "OrtRunner", Optimizer(np.zeros_like))
    with open_model(bundle, as_written=True) as model:
        assert not model(bundle.golden().inputs)["logits"].any()
    assert main(["check", str(tmp_path / "c")]) == 1


def test_the_repr_says_what_it_is(tmp_path: Path) -> None:
    shipping.bundle(tmp_path / "c")
    with trtpipe.load(tmp_path / "c") as model:
        said = repr(model)
        assert said.startswith("<trtpipe.Model colour: graph executed by onnxruntime ")
        assert said.endswith("; image float32 [N, 3, 8, 8] -> logits float32 [N, 3]>")
    assert repr(model).startswith("<trtpipe.Model colour: closed; ")


def test_a_figure_and_the_checks_are_told_apart() -> None:
    baseline, got = np.array([[1.0, 0.0]], np.float32), np.array([[1.0, 0.0205]], np.float32)
    said = executor._beyond(baseline, got, executor.Distance(0.99981, 1.0, 1.0))
    assert said == "a worst cosine of 0.99979 (check: 0.99981)"
    said = executor._beyond(baseline, got + np.float32(1), executor.Distance(0.5, 1.0, 9.0))
    assert said == "a maximum difference of 1.02 (check: 1)"


def test_one_number_a_sample_has_no_worst_cosine_that_some_samples_could_be_held_to() -> None:
    """Its cosine is that of all samples of the check together: any eight of them may have another."""
    baseline, got = np.array([[1.0], [2.0]], np.float32), np.array([[1.1], [1.9]], np.float32)
    assert executor._beyond(baseline, got, executor.Distance(0.9999, 0.2, 0.1)) == ""
    assert "a relative L2 error of" in executor._beyond(baseline, -got, executor.Distance(0.9999, 9.0, 0.1))


@pytest.mark.parametrize("slack", [1.0, 1.25])
def test_every_error_may_be_as_many_times_as_large_as_the_slack_says(slack: float) -> None:
    """Outputs turned by an angle: 1 - cosine is that of the check times the square of the factor, to first order."""
    baseline = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    noise = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32) * 0.02
    limit = executor.Distance(
        float(executor.metrics.cosine(baseline, baseline + noise).min()),
        executor.metrics.max_abs(baseline, baseline + noise),
        1.0,
    )
    assert executor._beyond(baseline, baseline + noise * slack * 0.98, limit, slack) == ""
    assert executor._beyond(baseline, baseline + noise * slack * 1.05, limit, slack) != ""


@pytest.mark.parametrize(("precision", "hint"), [
    ("fp16", "It computes FP16 in FP32 on a CPU, where the check rounds: judge what the server answers."),
    ("int8", "Run `trtpipe check --graph` on the bundle."),
])  # fmt: skip
def test_a_graph_that_a_server_cannot_execute_closely_says_what_to_do(
    precision: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = replace(shipping.manifest().layers[0], precision=precision)
    bundle = shipping.bundle(tmp_path / "c", layers=(layer,))
    monkeypatch.setattr(executor, "deviation", lambda *a: "output logits has a worst cosine of 0.5 (check: 0.9)")
    assert executor.serving_optimization(bundle) == (
        "none",
        (
            "even without graph optimizations output logits has a worst cosine of 0.5 (check: 0.9) in ONNX Runtime. "
            + hint,
        ),
    )


def test_the_reason_is_of_the_level_above_the_one_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"all": "refused", "extended": "far off", "basic": "", "none": ""}
    monkeypatch.setattr(executor, "graph_runner", lambda bundle, *, optimization: nullcontext(optimization))
    monkeypatch.setattr(executor, "deviation", lambda runner, *_: found[runner])
    level, notes = executor.serving_optimization(shipping.bundle(tmp_path / "c"))
    assert (level, notes) == ("basic", ("graph optimizations are limited to 'basic': with more, far off.",))


def test_elsewhere_there_is_slack_for_another_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, slacks = shipping.bundle(tmp_path / "c"), []

    def recorded(runner: object, bundle: Bundle, slack: float = 1.0) -> str:
        slacks.append(slack)
        return "something"

    monkeypatch.setattr(executor, "deviation", recorded)
    executor.serving_optimization(bundle)
    assert slacks == [1.25] * len(slacks)
    assert len(slacks) > 2
    slacks.clear()
    executor.open_graph(bundle)
    assert slacks == [1.0, 1.25]


def test_a_bundle_without_a_graph_is_not_run_as_one(tmp_path: Path) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    files = {n: f for n, f in bundle.manifest.files.items() if n != "model.onnx"}
    bare = replace(bundle, manifest=bundle.manifest.model_copy(update={"files": files}))
    with pytest.raises(InputError) as caught:
        executor.graph_runner(bare)
    assert str(caught.value) == (
        f"{bundle.path}: must hold model.onnx to be run as a graph (it does not). Run it on its GPU."
    )


def with_other_name(graph: onnx.GraphProto, kind: str) -> None:
    old = getattr(graph, kind)[0].name
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = ["zz" if n == old else n for n in names]
    getattr(graph, kind)[0].name = "zz"


def with_another_output(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Identity", [graph.output[0].name], ["zz"]))
    graph.output.append(helper.make_tensor_value_info("zz", TensorProto.FLOAT, None))


def with_another_shape(graph: onnx.GraphProto) -> None:
    del graph.input[0].type.tensor_type.shape.dim[2:]
    graph.input[0].type.tensor_type.shape.dim[1].dim_value = 192


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda graph: with_other_name(graph, "input"),
            "must have the manifest's inputs, image [N, 3, 8, 8] (got zz [N, 3, 8, 8])",
        ),
        (lambda graph: with_other_name(graph, "output"), "must have the manifest's outputs"),
        (with_another_output, "must have the manifest's outputs"),
        (with_another_shape, "must have the manifest's inputs"),
    ],
)
def test_a_graph_with_other_bindings_than_its_manifest_is_no_bundles(
    tmp_path: Path, change: Callable[[onnx.GraphProto], object], said: str
) -> None:
    """Whoever wrote the files anew has made their digests right; what runs them ended in a KeyError of one output."""
    model = onnx.load_from_string(shipping.graph())
    change(model.graph)
    bundle = shipping.bundle(tmp_path / "c", extra={GRAPH: model.SerializeToString()})
    for opened in (
        executor.open_graph, executor.serving_optimization, lambda b: open_model(b, graph=True, as_written=True)
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            opened(bundle)
        assert str(caught.value).startswith(f"{bundle.path}: model.onnx {said}")
        assert str(caught.value).endswith("). Fetch or build the bundle again.")


def test_an_engine_without_an_output_is_further_away_than_any(tmp_path: Path) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    assert executor.deviation(SimpleNamespace(run=lambda arrays: {"zz": np.zeros(1)}), bundle) == "no output logits"

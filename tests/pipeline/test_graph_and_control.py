"""The control of a graph is its damaged copy, of which only what the damage changes is executed beside the check."""

from __future__ import annotations

from typing import Any

import nets
import numpy as np
import pytest
import torch
from torch import nn

from trtpipe.evaluation.check import CONTROL_SAMPLES
from trtpipe.evaluation.control import damaged_copy
from trtpipe.evaluation.damaged_end import damaged_end
from trtpipe.job.sections import Precision
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.pipeline import controls
from trtpipe.quantization.narrow import Statistics
from trtpipe.quantization.policy import modes_of
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import Narrow, quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.executor import graph_as_checked
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import LoadedModel, OnnxModel, TensorSpec

X = nets.images(8, 3, 8, 8).numpy()


class Branches(nn.Module):
    """Two ways to one output, and an output that no weight is on the way to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left, self.right = nn.Linear(192, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.first(x.flatten(1)))
        return self.left(y) + self.right(torch.tanh(y)), x.amax((2, 3)) * 2


class Tied(nn.Module):
    """Its last weight is its first one too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.first = nn.Linear(64, 192), nn.Linear(192, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.left(torch.relu(self.first(x.flatten(1)))))
        return self.first(y), y.mean(1)


class Through(nn.Module):
    """Its first output, on the way to which there is no weight, is what its last operation reads; so is an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left = nn.Linear(48, 64), nn.Linear(192, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x[:, :, ::2, ::2].flatten(1) * 2
        return y, self.first(y) + self.left(x.flatten(1))


def file_of(network: nn.Module, half: torch.dtype | None = None, precision: Precision | None = None) -> OnnxModel:
    loaded = nets.loaded(network, outputs=("a", "b"), out_shape=("N", 64))
    captured, precision = capture(loaded), precision or Precision()
    amax = {s.group: 4.0 for s in captured.sites if s.axis is None}
    given: dict[str, Any] = {"keep": Keep(), "amax": amax, "ranges": {}}
    if precision != Precision():
        given["narrow"] = Narrow(modes_of(precision), Statistics(amax, {}))
    return to_onnx(quantize(captured, int8=precision.int8_mode, half=half, **given))


def require_as_whole(file: OnnxModel, inputs: dict[str, Any]) -> None:
    """The graph and its control give, to the last bit, what the whole graph and the whole damaged copy give."""
    with graph_as_checked(file.data, "tensorrt_rtx") as plain:
        wanted, few = plain.run(inputs), plain.run({n: a[:2] for n, a in inputs.items()})
    with graph_as_checked(damaged_copy(file)[0].data, "tensorrt_rtx") as copy:
        wrong, few_wrong = copy.run(inputs), copy.run({n: a[:2] for n, a in inputs.items()})
    with controls.graph_and_control(file, "tensorrt_rtx") as (runner, damaged):
        assert_equal(runner.run(inputs), wanted)
        with damaged.open() as opened:
            assert opened.executed == "graph"
            assert opened.runner.name == runner.name == plain.name
            assert_equal(opened.runner.run(inputs), wrong)
            assert_equal(opened.runner.run({n: a[:2] for n, a in inputs.items()}), few_wrong)  # the last of a control
        assert_equal(runner.run({n: a[:2] for n, a in inputs.items()}), few)
    assert (damaged.tensor, damaged.how) == damaged_copy(file)[1:]
    assert any(not np.array_equal(wanted[n], wrong[n]) for n in wanted)


def assert_equal(got: Any, wanted: Any) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(got[name], wanted[name], name)


@pytest.mark.parametrize(
    "precision",
    [
        Precision(),
        Precision(int8_mode=True),
        Precision(fp8_mode=True),
        Precision(int8_mode=True, fp8_mode=True, formats={"*": "fp8", "left": "int8"}),
        Precision(weights="int4"),
        Precision(weights="nvfp4"),
        Precision(fp8_mode=True, weights="int4", formats={"*": "int4", "first": "fp8"}),
        Precision(int8_mode=True, weights="nvfp4", formats={"*": "nvfp4", "first": "int8"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("network", [Branches, Tied, Through])
def test_the_end_of_a_damaged_copy_gives_what_the_copy_gives(
    network: type[nn.Module], half: torch.dtype | None, precision: Precision
) -> None:
    require_as_whole(file_of(network().eval(), half, precision), {"x": X})


@pytest.mark.parametrize("net", ["residual", "attention", "concat"])
@pytest.mark.parametrize("int8", [True, False])
def test_of_networks_too(net: str, int8: bool) -> None:
    captured = nets.captured(net)
    amax = {s.group: 4.0 for s in captured.sites if s.axis is None}
    file = to_onnx(quantize(captured, int8=int8, half=None, keep=Keep(), amax=amax, ranges={}))
    shape = [8 if isinstance(d, str) else d for d in file.inputs[0].shape]
    require_as_whole(file, {"x": nets.images(*shape).numpy()})


def test_of_whole_numbers() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3, 13) * 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table[x % 10] + x  # type: ignore[index]

    spec, out = TensorSpec("x", "int64", ("N", 6), {"N": nets.N}), TensorSpec("y", "int64", ("N", 6), {"N": nets.N})
    loaded = LoadedModel(bind(Table().eval(), (spec,), {}, ("y",)), (spec,), (out,), "w" * 64, "test")
    file = to_onnx(quantize(capture(loaded), int8=False, half=None, keep=Keep(), amax={}, ranges={}))
    require_as_whole(file, {"x": np.arange(48).reshape(8, 6)})


def test_little_of_a_graph_is_executed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def counted(data: bytes, *given: Any, **named: Any) -> OrtRunner:
        opened.append(len(data))
        return graph_as_checked(data, *given, **named)

    monkeypatch.setattr(controls, "graph_as_checked", counted)
    file = file_of(Branches().eval(), precision=Precision(int8_mode=True))
    with controls.graph_and_control(file, "tensorrt_rtx") as (_, damaged), damaged.open():
        whole, end = opened
    assert end < whole
    assert (whole - len(file.data)) < 300
    # First and foremost: no second copy of what comes before.
    found = damaged_end(file)
    assert found is not None
    assert b"first.weight" not in found.end


def test_the_end_runs_on_as_many_samples_as_a_control_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    real = OrtRunner.run

    def counted(self: OrtRunner, inputs: Any, /, names: Any = ()) -> Any:
        asked.append(tuple(names))
        return real(self, inputs, names)

    monkeypatch.setattr(OrtRunner, "run", counted)
    file = file_of(Branches().eval())
    with controls.graph_and_control(file, "tensorrt_rtx") as (runner, _):
        for seed in range(CONTROL_SAMPLES // 8 + 3):
            runner.run({"x": nets.images(8, 3, 8, 8, seed=seed).numpy()})
    plain = [names for names in asked if names == ("a", "b")]
    assert len(plain) == 3
    assert len(asked) == 3 + 2 * CONTROL_SAMPLES // 8


def test_what_users_open_themselves_is_damaged_as_a_whole() -> None:
    """ONNX Runtime's optimizer sees the graph that they have, without more outputs."""
    file = file_of(Branches().eval())
    with controls.graph_and_control(file, "onnxruntime") as (runner, damaged), damaged.open() as copy:
        assert isinstance(runner, OrtRunner)
        assert list(runner.outputs) == ["a", "b"]
        assert isinstance(copy.runner, OrtRunner)
        assert np.abs(copy.runner.run({"x": X})["a"] - runner.run({"x": X})["a"]).max() > 0.05

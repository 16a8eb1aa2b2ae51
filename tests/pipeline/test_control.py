"""The control goes through the executor of the check: an engine of the damaged copy where an engine was executed."""
# ruff: noqa: E501  (whole messages)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import nets
import numpy as np
import onnx
import pytest
import torch

from trtpipe.batching import Batching
from trtpipe.errors import BuildError
from trtpipe.evaluation.check import CheckData, check_engine
from trtpipe.evaluation.control import damaged_copy, damaged_program
from trtpipe.evaluation.metrics import relative_l2
from trtpipe.job.job import Job
from trtpipe.job.limits import Limits
from trtpipe.job.sections import Precision
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.torch_versions import graph_module
from trtpipe.pipeline import controls
from trtpipe.progress import Silent
from trtpipe.quantization.narrow import Statistics
from trtpipe.quantization.policy import modes_of
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import Narrow, quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.routes.registry import ROUTES
from trtpipe.runtime.executor import graph_as_checked
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt.implicit import NativeCalibration
from trtpipe.values import Engine, LoadedModel, OnnxModel, Quantized, TensorSpec

X = nets.images(8, 3, 8, 8).numpy()


def quantized(int8: bool = True) -> Quantized:
    captured = nets.captured("residual")
    amax = dict.fromkeys(_keys(), 4.0) if int8 else {}
    return quantize(captured, int8=int8, half=None, keep=Keep(), amax=amax, ranges={})


def _keys() -> set[str]:

    return {s.group for s in nets.captured("residual").sites if s.axis is None}


def outputs(program: Quantized) -> Any:
    with torch.inference_mode():
        return program.program.module()(torch.from_numpy(X))[0].numpy()


@dataclass
class OfProgram:
    """An engine in disguise: a program executed by PyTorch."""

    program: Quantized
    name: str = "double of TensorRT"

    def __enter__(self) -> OfProgram:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
        with torch.inference_mode():
            return {"logits": self.program.program.module()(torch.from_numpy(inputs["x"]))[0].numpy()}


def engine(graph: OnnxModel | None, data: bytes = b"engine") -> Engine:
    inputs, specs = nets.residual().inputs, nets.residual().outputs
    return Engine(data, "tensorrt", "11.4", (), inputs, specs, graph)


def job(route: str) -> Job:
    return Job.model_validate(
        {
            "name": "control",
            "model": {"factory": "nets:Residual"},
            "inputs": {"x": {"shape": ["N", 3, 8, 8], "N": {"min": 1, "opt": 4, "max": 8}}},
            "outputs": {"logits": {}},
            "build": {"route": route, "target": "tensorrt"},
            "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.99}},
        }
    )


def checked(damaged: Any, program: Quantized) -> Any:
    loaded = nets.residual()
    how = Batching(loaded.inputs, loaded.outputs, 8)
    data = CheckData(lambda: [{"x": X}], {"logits": outputs(program)}, None, 8, how)
    runner = OfProgram(program)
    return check_engine(runner, "engine", data, Limits(cosine_min=0.99), damaged=damaged, progress=Silent())


@pytest.mark.parametrize("int8", [True, False])
def test_a_program_is_damaged_as_its_file_is(int8: bool) -> None:
    program = quantized(int8)
    changed, loaded, tensor, how = damaged_program(nets.residual(), program)
    assert how == ("scale x 127" if int8 else "weight set to zero")
    assert tensor == "head/linear"
    wrong = outputs(changed)
    file, _, same = damaged_copy(to_onnx(program))
    assert same == how
    assert np.allclose(wrong, OrtRunner(file.data, as_written=True).run({"x": X})["logits"], atol=1e-3)
    assert np.abs(wrong - outputs(program)).max() > 0.1
    with torch.inference_mode():
        eager = loaded.module(torch.from_numpy(X))[0].numpy()
    assert np.allclose(eager, wrong, atol=1e-5) is not int8  # a route that converts the module sees the damage too
    assert nets.residual().module.network.head.weight.abs().sum() > 0


class Branches(torch.nn.Module):
    """Two linears whose outputs are summed, behind a third one: two quantizers are nearest the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left, self.right = torch.nn.Linear(192, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x.flatten(1)))
        return self.left(x) + self.right(torch.tanh(x))


class Heads(torch.nn.Module):
    """Two outputs from branches of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.one, self.two = torch.nn.Linear(192, 64), torch.nn.Linear(64, 8), torch.nn.Linear(192, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.flatten(1)
        return self.one(torch.relu(self.stem(x))), self.two(x)


def differing(before: OnnxModel, after: OnnxModel) -> set[str]:
    """Names of the constants of a file that differ in another one, which has them all."""
    files = [onnx.load_from_string(f.data) for f in (before, after)]
    held, other = ({i.name: i.SerializeToString() for i in f.graph.initializer} for f in files)
    return {name for name, data in held.items() if other[name] != data}


@pytest.mark.parametrize("int8", [True, False])
def test_every_output_is_damaged(int8: bool) -> None:
    loaded = nets.loaded(Heads(), outputs=("a", "b"), out_shape=("N", 8))
    captured = capture(loaded)
    amax = {s.group: 4.0 for s in captured.sites if s.axis is None} if int8 else {}
    program = quantize(captured, int8=int8, half=None, keep=Keep(), amax=amax, ranges={})
    whole = to_onnx(program)
    file, tensor, _ = damaged_copy(whole)
    assert tensor.endswith("and 1 more")
    assert differing(whole, file)
    right, wrong = (OrtRunner(f.data, as_written=True).run({"x": X}) for f in (whole, file))
    assert all(np.abs(right[n] - wrong[n]).max() > 0.05 for n in right)
    changed, module, same, _ = damaged_program(loaded, program)
    assert same.endswith("and 1 more")
    with torch.inference_mode():
        for of in (changed.program.module(), *([] if int8 else [module.module])):
            for name, got in zip(right, of(torch.from_numpy(X)), strict=True):
                np.testing.assert_allclose(got.numpy(), wrong[name], atol=1e-3)


@pytest.mark.parametrize(
    ("precision", "how"),
    [
        (Precision(int8_mode=True), "scale x 127"),
        (Precision(fp8_mode=True), "scale / 127"),
        (Precision(int8_mode=True, fp8_mode=True, formats={"*": "fp8", "left": "int8"}), "scale / 127"),
        (Precision(weights="int4"), "weight set to zero"),
        (Precision(weights="nvfp4"), "weight set to zero"),
        (Precision(fp8_mode=True, weights="int4", formats={"*": "int4", "first": "fp8"}), "weight set to zero"),
        (Precision(fp8_mode=True, weights="nvfp4", formats={"*": "nvfp4", "first": "fp8"}), "weight set to zero"),
        (Precision(int8_mode=True, weights="nvfp4", formats={"*": "nvfp4", "first": "int8"}), "weight set to zero"),
        (Precision(fp8_mode=True, weights="int4", formats={"*": "fp8", "left": "int4"}), "scale / 127"),
        (Precision(fp8_mode=True, weights="nvfp4", formats={"*": "fp8", "left": "nvfp4"}), "scale / 127"),
    ],
)
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
def test_a_program_is_damaged_as_its_file_is_in_every_number_format(
    precision: Precision, how: str, half: torch.dtype | None
) -> None:
    loaded = nets.loaded(Branches(), out_shape=("N", 64))
    captured = capture(loaded)
    amax = {s.group: 4.0 for s in captured.sites if s.axis is None}
    narrow = Narrow(modes_of(precision), Statistics(amax, {}))
    program = quantize(captured, int8=precision.int8_mode, half=half, keep=Keep(), amax=amax, ranges={}, narrow=narrow)
    changed, _, tensor, same = damaged_program(loaded, program)
    whole = to_onnx(program)
    file, node, of_file = damaged_copy(whole)
    assert same == of_file == how
    assert differing(whole, file)  # by their names a refit gives them to an engine
    assert node.endswith("and 1 more") or how != "weight set to zero" or not precision.fp8_mode  # left and right alone
    assert tensor.partition("/")[2].partition(" ")[2] == node.partition("/")[2].partition(" ")[2]  # "and 1 more"
    with graph_as_checked(file.data, "tensorrt_rtx") as runner:
        got = runner.run({"x": X})["logits"]
        assert np.allclose(outputs(changed), got, atol=1e-3 if half is None else 0.02)
    assert np.abs(outputs(changed) - outputs(program)).max() > 0.05


@pytest.mark.parametrize("formats", [{}, {"first": "fp8"}, {"first": "int8"}])
@pytest.mark.parametrize("half", [None, torch.float16])
def test_a_weight_of_many_scales_in_four_bits_is_damaged(formats: dict[str, str], half: torch.dtype | None) -> None:
    """More than 8,192 of them are stored in FP32 and cast."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(192, 256), torch.nn.Linear(256, 4200)
    network = torch.nn.Sequential()
    network.add_module("flat", torch.nn.Flatten())
    network.add_module("first", first)
    network.add_module("last", last)
    captured = capture(nets.loaded(network, out_shape=("N", 4200)))
    amax = {s.group: 4.0 for s in captured.sites if s.axis is None}
    precision = Precision(
        weights="int4", int8_mode="int8" in formats.values(), fp8_mode="fp8" in formats.values(),
        formats={"*": "int4", **formats} if formats else {},
    )  # fmt: skip
    program = quantize(
        captured, int8=precision.int8_mode, half=half, keep=Keep(), amax=amax, ranges={},
        narrow=Narrow(modes_of(precision), Statistics(amax, {})),
    )  # fmt: skip
    file, node, how = damaged_copy(to_onnx(program))
    assert how == "weight set to zero"
    assert node.startswith("last")
    with graph_as_checked(file.data, "tensorrt_rtx") as runner:
        assert np.allclose(runner.run({"x": X})["logits"], last.bias.detach().numpy(), atol=1e-2)


@pytest.mark.parametrize(
    ("route", "with_graph"),
    [(name, with_graph) for name in ROUTES for with_graph in (True, False) if with_graph or name != "onnx"],
)
def test_where_an_engine_was_executed_the_control_is_an_engine(
    monkeypatch: pytest.MonkeyPatch, route: str, with_graph: bool
) -> None:
    """And a program without an ONNX form has one too."""
    program, built, by = quantized(), [], []
    graph = to_onnx(program) if with_graph else None

    def compile_file(job: Job, model: OnnxModel, progress: Any, calibration: NativeCalibration) -> Engine:
        by.append(calibration)
        built.append(model)
        return engine(model)

    def compile_program(
        job: Job, loaded: LoadedModel, changed: Quantized, progress: Any, calibration: NativeCalibration
    ) -> Engine:
        by.append(calibration)
        built.append(changed)
        return engine(None)

    def opened(made: Engine) -> tuple[Any, str]:
        last = built[-1]
        return (OrtRunner(last.data, as_written=True) if isinstance(last, OnnxModel) else OfProgram(last)), "engine"

    monkeypatch.setattr(controls, "compile_graph", compile_file)
    monkeypatch.setattr(controls, "route", lambda name: compile_program)
    monkeypatch.setattr(controls, "open_engine", opened)
    made_of: Callable[[], Any] = lambda: (nets.residual(), program)  # noqa: E731
    source: Any = object()
    calibration = NativeCalibration(source, file="ranges.cache")
    damaged = controls.control(job(route), engine(graph), "engine", made_of, Silent(), calibration)
    assert built == []  # nothing is built before the check has run
    report = checked(damaged, program)
    assert report.passed, report.problems
    assert (report.control.executed, report.control.failed) == ("engine", True)
    assert report.notes == ()
    assert by == [NativeCalibration(source)]  # the file holds the ranges of the engine, not of a damaged copy
    assert len(built) == 1
    assert isinstance(built[0], OnnxModel if route == "onnx" else Quantized)


def test_where_no_engine_can_be_built_of_it_the_graph_stands_in_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Engine:
        raise BuildError("tensorrt: out of memory. Lower build.workspace.\nmore")

    monkeypatch.setattr(controls, "compile_graph", refuse)
    program = quantized()
    damaged = controls.control(job("onnx"), engine(to_onnx(program)), "engine", lambda: None, Silent())  # type: ignore[arg-type, return-value]
    report = checked(damaged, program)
    assert report.passed
    assert report.notes[0] == (
        "no engine could be built of the control: tensorrt: out of memory. Lower build.workspace."
    )
    assert report.notes[1].startswith("the control was executed as a graph (onnxruntime ")


def test_where_the_graph_was_executed_so_is_the_control() -> None:
    program = quantized()
    damaged = controls.control(job("onnx"), engine(to_onnx(program)), "graph", lambda: None, Silent())  # type: ignore[arg-type, return-value]
    with damaged.open() as executor:
        assert (executor.executed, executor.note) == ("graph", "")


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = torch.nn.LSTM(8, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x.mean(1))[0][:, -1]


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).mean((1, 2))


class Shifted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.mean((2, 3)) - 0.5) / 0.25


@pytest.mark.parametrize("network", [Recurrent, Normed, Shifted])
def test_a_model_without_convolutions_and_linears_has_a_control(network: type[torch.nn.Module]) -> None:
    loaded = nets.loaded(network(), out_shape=("N", 5))
    program = quantize(capture(loaded), int8=False, half=None, keep=Keep(), amax={}, ranges={})
    whole = to_onnx(program)
    file, _, how = damaged_copy(whole)
    assert how == "weight set to zero"
    wanted = OrtRunner(whole.data).run({"x": X})["logits"]
    with np.errstate(all="ignore"):
        wrong = OrtRunner(file.data).run({"x": X})["logits"]
    assert not np.allclose(wrong, wanted, atol=1e-3)
    if network is not Shifted:  # whose constants are numbers of the program, and no tensors
        assert not np.allclose(outputs(damaged_program(loaded, program)[0]), wanted, atol=1e-3)


@pytest.mark.parametrize(
    ("operator", "constants"),
    [
        ("Resize", {"roi": np.zeros(0, np.float32), "scales": np.array([1, 1, 2.5, 1.5], np.float32)}),
        ("Upsample", {"scales": np.array([1, 1, 2.5, 1.5], np.float32)}),
        ("Reshape", {"sizes": np.array([1.0, -1.0], np.float32)}),
        ("Expand", {"sizes": np.array([2.0, 1, 1, 1], np.float32)}),
        ("Tile", {"sizes": np.array([1.0, 1, 2, 2], np.float32)}),
        ("Pad", {"sizes": np.ones(8, np.float32)}),
    ],
)
@pytest.mark.parametrize("weight", [False, True])
def test_sizes_and_scales_are_no_weights(operator: str, constants: dict[str, Any], weight: bool) -> None:
    """Whatever is computed of them first: zeros there make a graph invalid."""
    from onnx import TensorProto, helper, numpy_helper

    computed = [helper.make_node("Abs", [n], [f"{n}_abs"]) for n in constants if n == "sizes"]
    computed += [helper.make_node("Cast", [f"{n}_abs"], [f"{n}_int"], to=7) for n in constants if n == "sizes"]
    nodes = [
        *computed,
        helper.make_node(operator, ["x", *(f"{n}_int" if n == "sizes" else n for n in constants)], ["z"]),
    ]
    nodes.append(helper.make_node("Mul", ["z", "w"], ["y"]) if weight else helper.make_node("Relu", ["z"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(a, n)
            for n, a in (constants | ({"w": np.array(2, np.float32)} if weight else {})).items()
        ],
    )
    file = OnnxModel(helper.make_model(graph).SerializeToString(), 9 if operator == "Upsample" else 17, (), ())
    if not weight:
        with pytest.raises(BuildError, match="cannot build the negative control"):
            damaged_copy(file)
        return
    damaged = onnx.load_from_string(damaged_copy(file)[0].data)
    for constant in damaged.graph.initializer:
        value = numpy_helper.to_array(constant)
        assert np.array_equal(value, 0 * value if constant.name == "w" else constants[constant.name])


class WholeNumbers(torch.nn.Module):
    """A network of integers and truth values alone, by `what` it holds."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("table", torch.arange(3, 13) * 7)
        self.register_buffer("mask", torch.arange(6) % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "table":
            return self.table[x % 10]
        if self.what == "mask":
            return x * self.mask
        return x // 3 * 5


@pytest.mark.parametrize("what", ["table", "mask", "number"])
def test_whole_numbers_are_damaged_where_there_is_nothing_else(what: str) -> None:
    """And no divisor becomes zero, with which ONNX Runtime would end the process."""
    spec, out = TensorSpec("x", "int64", ("N", 6), {"N": nets.N}), TensorSpec("y", "int64", ("N", 6), {"N": nets.N})
    loaded = LoadedModel(bind(WholeNumbers(what).eval(), (spec,), {}, ("y",)), (spec,), (out,), "w" * 64, "test")
    program = quantize(capture(loaded), int8=False, half=None, keep=Keep(), amax={}, ranges={})
    file, x = to_onnx(program), {"x": np.arange(12).reshape(2, 6)}
    answers = []
    for data in (file.data, damaged_copy(file)[0].data):
        with OrtRunner(data, as_written=True) as runner:
            answers.append(runner.run(x)["y"])
    assert answers[0].any()
    assert not answers[1].any()
    if what != "number":  # a number is no constant of a program
        (made,) = graph_module(damaged_program(loaded, program)[0].program)(torch.from_numpy(x["x"]))
        assert not made.any()


def test_a_model_without_any_constant_has_none() -> None:
    loaded = nets.loaded(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Flatten()), out_shape=("N", 192))
    program = quantize(capture(loaded), int8=False, half=None, keep=Keep(), amax={}, ranges={})
    message = (
        "check: cannot build the negative control: the graph has no quantization scale, no weight and no other constant "
        "to damage. A model without any computes nothing that precision could change: run it outside the engine"
    )
    for damage in (lambda: damaged_copy(to_onnx(program)), lambda: damaged_program(loaded, program)):
        with pytest.raises(BuildError) as caught:
            damage()
        assert str(caught.value) == message


@pytest.mark.parametrize(("times", "warned"), [(1.0, False), (1.9, False), (2.1, True), (6.0, True)])
def test_an_error_that_is_the_runtimes_and_not_the_graphs_is_said(times: float, warned: bool) -> None:
    """A stock ONNX Runtime on x86 without VNNI: EfficientNet-Lite0 has 1.3 dB there, and its graph 17.9; the modules
    that INT8 costs most were blamed."""
    graph, loaded = to_onnx(quantized()), nets.residual()
    baseline = outputs(quantized(int8=False))
    data = CheckData(lambda: [{"x": X}], {"logits": baseline}, None, 8, Batching(loaded.inputs, loaded.outputs, 8))
    with OrtRunner(graph.data, as_written=True) as exact:
        own = relative_l2(baseline, exact.run({"x": X})["logits"])
    assert own > 0.01
    found = controls.departures(graph, data, {"logits": times * own})
    assert bool(found) is warned
    assert all("each node is executed as it stands. On x86 without VNNI they add products of INT8" in f for f in found)

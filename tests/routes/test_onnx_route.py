"""The ONNX files: types, Q/DQ, names, bytes; and that ONNX Runtime answers as the program does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import nets
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from trtpipe.errors import BuildError, InputError
from trtpipe.evaluation.control import damaged_copy
from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import lowered_for, to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import OnnxModel, Quantized


@cache
def lowered(net: str, half: torch.dtype | None = None, int8: bool = True) -> tuple[Quantized, OnnxModel]:
    captured = nets.captured(net)
    sites = captured.sites
    amax = {s.group: 2.0 for s in sites if s.axis is None}
    found = quantize(captured, int8=int8, half=half, keep=Keep(), amax=amax, ranges={})
    return found, to_onnx(found)


def nodes(model: OnnxModel, *types: str) -> list[Any]:
    return [n for n in onnx.load_from_string(model.data).graph.node if n.op_type in types]


@pytest.mark.parametrize("half", [None, torch.float16])
@pytest.mark.parametrize(("net", "shape"), [("residual", (3, 8, 8)), ("attention", (6, 8))])
def test_onnxruntime_answers_as_the_program(net: str, shape: tuple[int, ...], half: torch.dtype | None) -> None:
    program, model = lowered(net, half)
    x = nets.images(3, *shape)
    with torch.inference_mode():
        expected = program.program.module()(x)[0].numpy()
    with OrtRunner(model.data, as_written=True) as runner:
        found = runner.run({"x": x.numpy()})["logits"]
    # One rounding of a value between two INT8 levels may fall either way.
    assert np.abs(found - expected).max() <= (1e-5 if half is None else 0.03) * np.abs(expected).max()


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(BuildError, match=r"graph: ONNX Runtime [\d.]+ does not accept it"):
        OrtRunner(b"no graph")


@pytest.mark.parametrize("half", [None, torch.float16])
@pytest.mark.parametrize("net", ["residual", "attention"])
def test_no_dtype_of_a_quantized_tensor_is_left_to_a_default(net: str, half: torch.dtype | None) -> None:
    """ONNX Runtime before 1.28 writes Q without a zero point, UINT8, in the place of a DQ without one."""
    _, plain = lowered(net, half)
    model = lowered_for(plain, "onnxruntime")
    constants = {i.name: i for i in onnx.load_from_string(model.data).graph.initializer}
    found = nodes(model, "QuantizeLinear", "DequantizeLinear")
    assert min(len(n.input) for n in nodes(plain, "DequantizeLinear")) == 2
    for node in found:
        assert constants[node.input[2]].data_type == onnx.TensorProto.INT8
        assert constants[node.input[2]].dims == constants[node.input[1]].dims
    x = nets.images(3, *((3, 8, 8) if net == "residual" else (6, 8))).numpy()
    results = []
    for file in (plain, model):
        with OrtRunner(file.data, as_written=True) as runner:
            results.append(runner.run({"x": x})["logits"])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-3, atol=1e-5)


class WholeNumbers(torch.nn.Module):
    """A product of whole numbers [N, 4], with a constant or among themselves, beside one of floats."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.linear = kind, torch.nn.Linear(4, 3)
        self.register_buffer("w", torch.arange(12, dtype=dtype).reshape(4, 3))
        self.register_buffer("b", torch.tensor([5, -7, 1], dtype=dtype))
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, w, b = (x * 50).to(self.dtype), self.w, self.b
        found = {
            "mm": lambda: n @ w,
            "matmul of rows": lambda: (n[:, None] @ w)[:, 0],
            "addmm": lambda: torch.addmm(b, n, w),
            "addmm, scaled": lambda: torch.addmm(b, n, w, beta=2, alpha=3),
            "linear": lambda: torch.nn.functional.linear(n, w.t()),
            "linear with bias": lambda: torch.nn.functional.linear(n, w.t().contiguous(), b),
            "of two inputs": lambda: (n[:, None] @ n[:, :, None])[:, 0] + b,
        }[self.kind]()
        return self.linear(x) + found.float()


KINDS = ("mm", "matmul of rows", "addmm", "addmm, scaled", "linear", "linear with bias", "of two inputs")


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_whole_numbers_are_what_onnxruntime_has(kind: str, dtype: torch.dtype, int8: bool) -> None:
    network = WholeNumbers(kind, dtype).eval()
    captured = capture(nets.loaded(network, ("N", 4), out_shape=("N", 3)))
    amax = {s.group: 2.0 for s in captured.sites if s.axis is None}
    found = quantize(captured, int8=int8, half=None, keep=Keep(), amax=amax, ranges={})
    assert sorted({s.consumer.name for s in captured.sites}) == ["linear"]
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)
    with torch.inference_mode(), OrtRunner(to_onnx(found).data) as runner:
        wanted = found.program.module()(x)[0]
        got = runner.run({"x": x.numpy()})["logits"]
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(got, network(x).numpy(), rtol=1e-3, atol=0.1)


def test_names_begin_with_the_module_path() -> None:
    _, model = lowered("residual")
    assert [n.name for n in nodes(model, "Conv")] == ["stem/Conv", "conv1/Conv", "conv2/Conv", "down/Conv"]
    paths = [n.name.removesuffix("QuantizeLinear") for n in nodes(model, "QuantizeLinear")]
    assert paths == ["stem/", "pool/", "down/", "conv2/", "", "head/"]  # the residual add is in no module
    names = [n.name for n in onnx.load_from_string(model.data).graph.node]
    assert len(set(names)) == len(names)


def test_scales_have_the_float_type_of_their_side() -> None:
    for half, kind in ((None, np.float32), (torch.float16, np.float16)):
        _, model = lowered("residual", half)
        constants = {i.name: numpy_helper.to_array(i) for i in onnx.load_from_string(model.data).graph.initializer}
        assert {constants[n.input[1]].dtype for n in nodes(model, "DequantizeLinear")} == {np.dtype(kind)}


def test_scales_are_the_tables() -> None:
    program, model = lowered("residual")
    constants = {i.name: numpy_helper.to_array(i) for i in onnx.load_from_string(model.data).graph.initializer}
    found = {float(constants[n.input[1]]) for n in nodes(model, "QuantizeLinear")}
    assert found == set(program.scales.values()) == {float(np.float32(2.0) / np.float32(127))}


def test_weights_are_int8_in_the_file() -> None:
    _, model = lowered("residual")
    proto = onnx.load_from_string(model.data)
    constants = {i.name: i for i in proto.graph.initializer}
    weights = [n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in constants]
    assert len(weights) == 5
    assert {constants[n.input[0]].data_type for n in weights} == {onnx.TensorProto.INT8}


def test_the_same_program_gives_the_same_bytes_and_no_path_of_this_machine() -> None:
    program, model = lowered("residual")
    assert to_onnx(program).data == model.data
    assert b"site-packages" not in model.data
    assert b"nets.py" not in model.data


def test_dynamic_dimensions_keep_the_jobs_names() -> None:
    _, model = lowered("residual")
    graph = onnx.load_from_string(model.data).graph
    for value in (*graph.input, *graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "N"


def test_the_damaged_copy_differs_in_one_scale() -> None:
    _, model = lowered("residual")
    damaged, name, how = damaged_copy(model)
    assert (name.rpartition("/")[2], how) == ("QuantizeLinear", "scale x 127")
    x = {"x": nets.images(3, 3, 8, 8).numpy()}
    good = OrtRunner(model.data, as_written=True).run(x)["logits"]
    bad = OrtRunner(damaged.data, as_written=True).run(x)["logits"]
    assert np.abs(good - bad).max() > 0.1 * np.abs(good).max()


def test_a_float_graph_is_damaged_in_a_weight() -> None:
    _, model = lowered("residual", int8=False)
    damaged, name, how = damaged_copy(model)
    assert (name, how) == ("head/Gemm", "weight set to zero")
    x = {"x": nets.images(3, 3, 8, 8).numpy()}
    found = OrtRunner(damaged.data, as_written=True).run(x)["logits"]
    bias = nets.residual().module.network.head.bias
    assert np.allclose(found, bias.detach().numpy(), atol=1e-6)


def test_the_runner_wants_exactly_its_inputs() -> None:
    _, model = lowered("residual")
    with OrtRunner(model.data) as runner, pytest.raises(InputError, match=r"inputs: must be x \(got y\)"):
        runner.run({"y": np.zeros((1, 3, 8, 8), np.float32)})


def test_more_weights_than_one_file_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.routes import onnx as route

    program, model = lowered("residual", int8=False)
    weights = sum(numpy_helper.to_array(i).nbytes for i in onnx.load_from_string(model.data).graph.initializer)
    monkeypatch.setattr(route, "MOST_WEIGHTS", weights)
    to_onnx(program)
    monkeypatch.setattr(route, "MOST_WEIGHTS", weights - 1)
    with pytest.raises(BuildError) as caught:
        to_onnx(program)
    assert str(caught.value) == (
        f"onnx: the graph's weights must be at most 2 GB, as a graph is one file (got {weights / 1e9:.2f} GB). Set "
        "precision.fp16_mode, which halves them; formats of 8 or 4 bits are for what convolutions and linears hold."
    )


@pytest.mark.parametrize("end", ["input", "output"])
def test_bindings_may_have_the_names_of_values_and_weights_inside(end: str) -> None:
    program, model = lowered("residual")
    graph = onnx.load_from_string(model.data).graph
    inside = {o for n in graph.node for o in n.output} | {i.name for i in graph.initializer}
    x = nets.images(3, 3, 8, 8).numpy()
    with OrtRunner(model.data, as_written=True) as runner:
        expected = runner.run({"x": x})["logits"]
    kinds = {name.rstrip("0123456789") for name in inside - {"logits"}}
    chosen = [min(n for n in inside - {"logits"} if n.rstrip("0123456789") == kind) for kind in sorted(kinds)]
    for name in chosen[:: max(1, len(chosen) // 8)]:
        names = {"x": "x", "logits": "logits", **({"x": name} if end == "input" else {"logits": name})}
        bound = {
            key: tuple(replace(s, name=names[s.name]) for s in getattr(program, key)) for key in ("inputs", "outputs")
        }
        with OrtRunner(to_onnx(replace(program, **bound)).data, as_written=True) as runner:
            found = runner.run({names["x"]: x})
        assert np.array_equal(found[names["logits"]], expected), name


def test_what_the_exporter_does_not_translate_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = lowered("residual")

    def export(*_args: object, **_options: object) -> None:
        raise RuntimeError("no translation")

    monkeypatch.setattr(torch.onnx, "export", export)
    with pytest.raises(BuildError) as caught:
        to_onnx(quantized)
    assert str(caught.value) == (
        "onnx: torch.onnx cannot translate the model (RuntimeError: no translation). Take another build.route."
    )


class Histogram(torch.nn.Module):
    """What torch.onnx knows, and not with these arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, 5)[None] + x.flatten(1)[:, :5]


def test_an_operation_that_the_exporter_fails_at_is_named() -> None:
    captured = capture(nets.loaded(Histogram().eval()))
    program = quantize(captured, int8=False, half=None, keep=Keep(), amax={}, ranges={})
    with pytest.raises(BuildError) as caught:
        to_onnx(program)
    assert re.fullmatch(
        r"onnx: torch\.onnx cannot translate aten\.histc\.default here \(\w+: [^\n]*histc[^\n]*\)\. Write it in other "
        r"operations\. With build\.target tensorrt a plugin can compute it \(build\.plugins\), and with that or "
        r"tensorrt_rtx build\.route torch_tensorrt may have it\.",
        str(caught.value),
    )


def test_an_exported_file_that_is_not_valid_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = lowered("residual")

    def check_model(model: bytes, full_check: bool = False) -> None:
        raise onnx.checker.ValidationError("no such operator")

    monkeypatch.setattr(onnx.checker, "check_model", check_model)
    with pytest.raises(BuildError) as caught:
        to_onnx(quantized)
    assert str(caught.value) == (
        "onnx: the exported file is not valid (no such operator). This is a bug of the exporter."
    )


@pytest.mark.parametrize("bounds", [(0, 5.5), (-1.5, 2), (0, 6), (0.0, 6.0), (None, 5), (0.5, None)])
@pytest.mark.parametrize("how", ["clamp", "clip"])
def test_bounds_of_a_clamp_may_be_of_two_kinds(how, bounds):
    """torch.onnx has no form of one with a whole number and another."""

    class Clamped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 6)

        def forward(self, x):
            return getattr(torch, how)(8 * self.head(x), *bounds)

    loaded = nets.loaded(nets.settled(Clamped(), nets.images(4, 4)), ("N", 4))
    captured = capture(loaded)
    graph = to_onnx(quantize(captured, int8=False, half=None, keep=Keep(), amax={}, ranges={}))
    x = nets.images(16, 4)
    with torch.inference_mode():
        wanted = loaded.module(x)[0].numpy()
    np.testing.assert_allclose(OrtRunner(graph.data).run({"x": x.numpy()})["logits"], wanted, atol=1e-5)

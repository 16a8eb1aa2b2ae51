"""ONNX Runtime as the check runs it: half precision is rounded where the file says so."""

from __future__ import annotations

import sys
from types import ModuleType

import nets
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trtpipe.errors import BuildError, MissingError
from trtpipe.import_errors import broken
from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.half_rounding import EXACT, Unrounded, rounded
from trtpipe.runtime.onnxruntime import OrtRunner


def model_of(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], kind: int = TensorProto.FLOAT) -> bytes:
    """x [3] to y [3], both of one type."""
    ends = [helper.make_tensor_value_info(name, kind, [3]) for name in "xy"]
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(made)
    data: bytes = made.SerializeToString()
    return data


def product_of_three(kind: int = TensorProto.FLOAT16) -> bytes:
    """x * 1e-4 * 1e-4 * 1e4 in half precision."""
    dtype = np.float16
    constants = {"tiny": np.array([1e-4], dtype), "huge": np.array([1e4], dtype)}
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=kind),
        helper.make_node("Mul", ["half", "tiny"], ["a"]),
        helper.make_node("Mul", ["a", "tiny"], ["b"]),  # 1e-8: zero in FP16
        helper.make_node("Mul", ["b", "huge"], ["c"]),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    return model_of(nodes, constants)


def test_what_vanishes_in_fp16_vanishes() -> None:
    x = {"x": np.ones(3, np.float32)}
    assert np.float16(1e-4) * np.float16(1e-4) * np.float16(1e4) == 0
    np.testing.assert_array_equal(OrtRunner(product_of_three(), as_written=True).run(x)["y"], 0)


def test_onnxruntime_alone_does_not_round() -> None:
    """Why the graph is rewritten. Where this fails, ONNX Runtime has changed, and `halves` may go."""
    x = {"x": np.ones(3, np.float32)}
    np.testing.assert_allclose(OrtRunner(product_of_three()).run(x)["y"], 1e-4, rtol=1e-2)


def test_each_operation_is_rounded_once_and_bindings_keep_their_type() -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(0, 100, 3).astype(np.float16) for _ in range(3))
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Add", ["r", "b"], ["s"]),
        helper.make_node("Tanh", ["s"], ["q"]),
        helper.make_node("Exp", ["q"], ["e"]),
        helper.make_node("Add", ["s", "e"], ["y"]),
    ]
    model = model_of(nodes, {"w": w, "b": b}, TensorProto.FLOAT16)
    found = OrtRunner(model, as_written=True).run({"x": x})["y"]
    with np.errstate(over="ignore"):
        wide = np.float32
        s = np.maximum((x.astype(wide) * w).astype(np.float16), 0)
        s = (s.astype(wide) + b).astype(np.float16)
        e = np.exp(np.tanh(s.astype(wide)).astype(np.float16).astype(wide)).astype(np.float16)
        expected = (s.astype(wide) + e).astype(np.float16)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, expected)


def test_an_exact_operation_gets_no_casts_inside_and_keeps_its_binding_at_an_output() -> None:
    """Two Relu: the result of the first is an output, which is also read; that of the second is only read."""
    written = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> graph (float16[3] x) => (float16[3] y, float16[3] z) {
            a = Mul(x, x)  y = Relu(a)  b = Exp(y)  c = Relu(b)  z = Sqrt(c)
        }"""
    )
    data = rounded(written.SerializeToString())
    assert data is not None
    made = onnx.load_from_string(data)
    onnx.checker.check_model(made, full_check=True)
    assert "c" not in {name for node in made.graph.node for name in node.output}
    x = np.array([0.1, 1.5, -2], np.float16)
    found = OrtRunner(data).run({"x": x})
    y = np.maximum(x * x, 0)
    z = np.sqrt(np.exp(y.astype(np.float32)).astype(np.float16))
    for name, expected in (("y", y), ("z", z)):
        assert found[name].dtype == np.float16
        np.testing.assert_array_equal(found[name], expected)


#: A call of each operation in EXACT, in ONNX's textual form; its inputs hold values that FP16 has.
CALLS = {
    "Abs": "Abs(x)", "Clip": "Clip(x, low, high)", "Concat": "Concat<axis = 1>(x, other)",
    "DepthToSpace": "DepthToSpace<blocksize = 2>(x)", "Expand": "Expand(x, repeats)", "Flatten": "Flatten(x)",
    "Gather": "Gather<axis = 2>(x, places)", "GlobalMaxPool": "GlobalMaxPool(x)", "Identity": "Identity(x)",
    "Max": "Max(x, other)", "MaxPool": "MaxPool<kernel_shape = [2, 2], pads = [1, 1, 1, 1]>(x)",
    "Min": "Min(x, other)", "Neg": "Neg(x)", "Pad": "Pad(x, margins, high)", "Relu": "Relu(x)",
    "Reshape": "Reshape(x, sizes)", "Slice": "Slice(x, zero, two)", "SpaceToDepth": "SpaceToDepth<blocksize = 2>(x)",
    "Split": "Split<axis = 1, num_outputs = 2>(x)", "Squeeze": "Squeeze(x)", "Tile": "Tile(x, repeats)",
    "Transpose": "Transpose(x)", "Unsqueeze": "Unsqueeze(x, zero)", "Where": "Where(chosen, x, other)",
}  # fmt: skip


def rounds(call: str) -> bool:
    """Whether a result of this call, computed in FP32 by ONNX Runtime from FP16 values, has to be rounded to FP16."""
    outputs = "y, z" if call.startswith("Split") else "y"
    constants = """
        float low = {-1.5}, float high = {2.25}, int64[4] repeats = {2, 1, 1, 1}, int64[3] places = {5, 0, 3},
        int64[8] margins = {0, 0, 1, 2, 0, 0, 3, 0}, int64[2] sizes = {12, 12}, int64[1] zero = {0}, int64[1] two = {2}
    """
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        graph (float[1, 4, 6, 6] x, float[1, 4, 6, 6] other, bool[1, 4, 6, 6] chosen)
            => ({", ".join(f"float[] {name}" for name in outputs.split(", "))}) <{constants}> {{
            {outputs} = {call}
        }}"""
    )
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 1 << 16, (2, 1, 4, 6, 6)).astype(np.uint16).view(np.float16)
    x, other = np.where(np.isfinite(patterns), patterns, np.float16(1)).astype(np.float32)
    chosen = rng.random(x.shape) < 0.5
    results = OrtRunner(model.SerializeToString()).run({"x": x, "other": other, "chosen": chosen})
    with np.errstate(over="ignore"):
        return any((r != r.astype(np.float16)).any() for r in results.values())


def test_results_of_exact_operations_are_fp16_values() -> None:
    assert CALLS.keys() == EXACT
    assert [name for name, call in CALLS.items() if rounds(call)] == []
    assert all(map(rounds, ("AveragePool<kernel_shape = [2, 2]>(x)", "Add(x, other)")))


def test_what_overflows_in_fp16_is_infinite() -> None:
    nodes = [helper.make_node("Mul", ["x", "x"], ["a"]), helper.make_node("Div", ["a", "x"], ["y"])]
    x = np.array([300, 1, 2], np.float16)
    found = OrtRunner(model_of(nodes, {}, TensorProto.FLOAT16), as_written=True).run({"x": x})["y"]
    np.testing.assert_array_equal(found, np.array([np.inf, 1, 2], np.float16))


@pytest.mark.parametrize("net", ["residual", "attention", "concat"])
@pytest.mark.parametrize("int8", [False, True])
def test_a_networks_fp16_graph_comes_closer_to_the_program(net: str, int8: bool) -> None:
    """The program itself, executed by PyTorch in FP16, rounds after each operation as well."""
    from trtpipe.quantization.precision import Keep
    from trtpipe.quantization.quantize import quantize
    from trtpipe.routes.onnx import to_onnx

    captured = nets.captured(net)
    amax = {s.group: 2.0 for s in captured.sites if s.axis is None}
    program = quantize(captured, int8=int8, half=torch.float16, keep=Keep(), amax=amax, ranges={})
    x = nets.images(3, *((6, 8) if net == "attention" else (3, 8, 8)))
    with torch.inference_mode():
        expected = program.program.module()(x)[0].numpy()
    found = OrtRunner(to_onnx(program).data, as_written=True).run({"x": x.numpy()})["logits"]
    assert np.abs(found - expected).max() <= (0.03 if int8 else 0.002) * np.abs(expected).max()


class Named(torch.nn.Module):
    """Its modules are called as values are by torch.export, after their operations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2d, self.relu = torch.nn.Conv2d(3, 3, 3, padding=1), torch.nn.ReLU()
        self.linear, self._to_copy = torch.nn.Linear(192, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._to_copy(self.linear(self.relu(self.conv2d(x)).flatten(1)))
        return y


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_modules_may_be_called_as_the_values_are(half: torch.dtype, int8: bool) -> None:
    """A node of module `conv2d` that casts, `conv2d/Cast`, met the one that rounds its value `conv2d`."""
    captured = capture(nets.loaded(Named().eval(), out_shape=("N", 8)))
    amax = {s.group: 4.0 for s in captured.sites if s.axis is None}
    file = to_onnx(quantize(captured, int8=int8, half=half, keep=Keep(), amax=amax, ranges={}))
    names = [name for n in onnx.load_from_string(file.data).graph.node for name in (n.name, n.output[0])]
    assert {"conv2d/Cast", "linear/Cast", "relu/Cast", "conv2d", "linear"} & set(names)
    with OrtRunner(file.data, as_written=True) as runner:
        assert np.isfinite(runner.run({"x": nets.images(2, 3, 8, 8).numpy()})["logits"]).all()


def test_a_graph_without_half_precision_stays_as_it_is() -> None:
    assert rounded(model_of([helper.make_node("Exp", ["x"], ["y"])], {})) is None


def test_without_onnx_the_name_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = product_of_three()
    monkeypatch.delitem(sys.modules, "trtpipe.runtime.half_rounding")
    monkeypatch.setitem(sys.modules, "onnx", None)
    runner = OrtRunner(data, as_written=True)
    assert runner.name.endswith(", which does not round FP16, if the graph has any (install onnx)")
    np.testing.assert_allclose(runner.run({"x": np.ones(3, np.float32)})["y"], 1e-4, rtol=1e-2)


def test_without_onnx_int4_is_executed_and_nvfp4_and_bf16_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime dequantizes INT4 by itself."""

    def linear(kind: int) -> bytes:
        scales = np.ones((2, 1), np.float32)
        weights = helper.make_tensor("w", kind, [2, 16], np.tile([1.0, 2.0], 16))
        nodes = [
            helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1, block_size=16),
            helper.make_node("Gemm", ["x", "d"], ["y"], transB=1),
        ]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
            [weights, numpy_helper.from_array(scales, "s")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
        data: bytes = model.SerializeToString()
        return data

    four, nv = linear(TensorProto.INT4), linear(TensorProto.FLOAT4E2M1)
    casts = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("Exp", ["b"], ["e"]),
        helper.make_node("Cast", ["e"], ["y"], to=TensorProto.FLOAT),
    ]
    brain = model_of(casts, {})
    OrtRunner(brain, as_written=True)
    x = np.ones((1, 16), np.float32)
    np.testing.assert_array_equal(OrtRunner(nv, as_written=True).run({"x": x})["y"], [[24, 24]])
    for module in ("four_bits", "half_rounding"):
        monkeypatch.delitem(sys.modules, f"trtpipe.runtime.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    np.testing.assert_array_equal(OrtRunner(four, as_written=True).run({"x": x})["y"], [[24, 24]])
    for model in (nv, brain):
        with pytest.raises(MissingError) as caught:
            OrtRunner(model, as_written=True)
        said = str(caught.value)
        assert said.startswith(
            "onnx: not installed, and a graph in NVFP4 or BF16 needs it on the CPU (ONNX Runtime by itself: "
        )
        assert said.endswith("). Run: pip install onnx")


def with_a_branch() -> bytes:
    """x in FP16, doubled in the taken branch of an If."""
    spec = helper.make_tensor_value_info("d", TensorProto.FLOAT16, [3])
    branch = helper.make_graph([helper.make_node("Add", ["x", "x"], ["d"])], "branch", [], [spec])
    other = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["d"])], "other", [], [spec])
    node = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=other)
    return model_of([node], {"yes": np.array(True)}, TensorProto.FLOAT16)


def test_a_graph_that_cannot_be_rewritten_runs_and_the_name_says_so() -> None:
    with pytest.raises(Unrounded, match="the graph has subgraphs"):
        rounded(with_a_branch())
    runner = OrtRunner(with_a_branch(), as_written=True)
    assert runner.name.endswith(", which does not round FP16: the graph has subgraphs")
    x = np.array([1, 2, 3], np.float16)
    np.testing.assert_array_equal(runner.run({"x": x})["y"], 2 * x)


def test_what_is_no_onnx_file_is_refused_by_onnxruntime() -> None:
    with pytest.raises(Unrounded, match="its types cannot be read"):
        rounded(b"garbage")
    with pytest.raises(
        BuildError,
        match=r"graph: ONNX Runtime [\d.]+ does not accept it \(.+\)\. "
        r"Check its opset and dtypes, or take another release\.",
    ):
        OrtRunner(b"garbage", as_written=True)


def test_nodes_are_executed_in_the_order_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own order begins with nodes that read constants alone: all weights are dequantized at once."""
    import onnxruntime

    given: list[onnxruntime.SessionOptions] = []
    real = onnxruntime.InferenceSession

    def session(model: bytes, options: onnxruntime.SessionOptions, **more: object) -> onnxruntime.InferenceSession:
        given.append(options)
        return real(model, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    OrtRunner(product_of_three())
    assert given[0].execution_order == onnxruntime.ExecutionOrder.PRIORITY_BASED


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "onnxruntime: not installed, and a graph on the CPU is run with it. Run: "),
        (ModuleType("onnxruntime"), broken("onnxruntime", "it has no InferenceSession")),
    ],
)
def test_what_is_no_onnxruntime_is_said(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    with pytest.raises(MissingError) as caught:
        OrtRunner(b"")
    assert str(caught.value).startswith(message)

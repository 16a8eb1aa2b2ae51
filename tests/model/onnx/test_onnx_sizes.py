"""What a file computes of dynamic sizes is right at others than its capture's, or refused by the node's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trtpipe.errors import InputError
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.export import export
from trtpipe.model.onnx.network import load_network
from trtpipe.model.onnx.operators import OPERATORS
from trtpipe.model.output_specs import output_specs
from trtpipe.model.torch_versions import graph_module
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import DimRange, LoadedModel, TensorSpec

#: The graph is captured with H 9 and W 8; these are others, of which each is less and more than most constants.
SIZES = [(4, 40), (7, 5), (9, 9), (40, 4)]
INPUT = TensorSpec("x", "float32", (2, 1, "H", "W"), {"H": DimRange(4, 9, 40), "W": DimRange(4, 8, 40)}, None)
Made = tuple[str, Sequence[Any], dict[str, Any]]


def compare(path: Path, made: Sequence[Made], opset: int = 18) -> None:
    """Hold a network against ONNX Runtime on its file: each operator reads sizes or constants, and each result is an
    output, as floats times the data.

    Names: `hw` is [H, W], `h` one number, both in int64; `hwf` and `hf` in float32; `more` is hw > 8; t0, t1 ... are
    earlier results. Anything else is a constant.
    """
    constants: dict[str, Any] = {"eight": np.array([8, 8]), "first": np.array(0), "flat": np.array([-1])}
    nodes = [
        helper.make_node("Shape", ["x"], ["hw"], start=2),
        helper.make_node("Gather", ["hw", "first"], ["h"]),
        helper.make_node("Cast", ["hw"], ["hwf"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["h"], ["hf"], to=TensorProto.FLOAT),
        helper.make_node("Greater", ["hw", "eight"], ["more"]),
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
    ]
    for k, (operator, inputs, attributes) in enumerate(made):
        names = [given if isinstance(given, str) else f"c{k}_{i}" for i, given in enumerate(inputs)]
        constants |= {n: given for n, given in zip(names, inputs, strict=True) if not isinstance(given, str)}
        nodes += [
            helper.make_node(operator, names, [f"t{k}"], f"tested{k}", **attributes),
            helper.make_node("Cast", [f"t{k}"], [f"f{k}"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"f{k}", "mean"], [f"y{k}"]),
        ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, "H", "W"])],
        [helper.make_tensor_value_info(f"y{k}", TensorProto.FLOAT, None) for k in range(len(made))],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path / "net.onnx")
    session = onnxruntime.InferenceSession(path / "net.onnx", providers=["CPUExecutionProvider"])
    names = [f"y{k}" for k in range(len(made))]
    bound = bind(load_network(path / "net.onnx"), (INPUT,), {}, names, nested=False)
    captured = graph_module(export(bound, (INPUT,)))
    for h, w in SIZES:
        x = np.random.default_rng(h).standard_normal((2, 1, h, w)).astype(np.float32)
        found = captured(torch.from_numpy(x))
        for k, wanted in enumerate(session.run(names, {"x": x})):
            where = f"{made[k]} at {h}, {w}"
            np.testing.assert_allclose(found[k].numpy(), wanted, rtol=1e-5, atol=1e-6, err_msg=where)


class Scaled(torch.nn.Module):
    """A mean by a sum, and a product over the root of a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
        return y + (x @ x.transpose(2, 3)).mean((2, 3)) / x.shape[3] ** 0.5


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_floats_of_dynamic_sizes_go_down_the_line(dynamo: bool, tmp_path: Path) -> None:
    """From a file of either exporter of PyTorch to the graph of an engine."""
    x, names = torch.randn(2, 1, 9, 8), {"input_names": ["x"], "output_names": ["y"]}
    dynamic: dict[str, Any] = {"dynamic_axes": {"x": {2: "H", 3: "W"}}, "opset_version": 17}
    if dynamo:
        sizes = {2: torch.export.Dim("H", min=4, max=40), 3: torch.export.Dim("W", min=4, max=40)}
        dynamic = {"dynamic_shapes": (sizes,), "verbose": False}
    torch.onnx.export(Scaled(), (x,), str(tmp_path / "net.onnx"), dynamo=dynamo, **names, **dynamic)
    bound = bind(load_network(tmp_path / "net.onnx"), (INPUT,), {}, ("y",), nested=False)
    loaded = LoadedModel(
        bound, (INPUT,), output_specs(bound, (INPUT,), {"y": "float32"})[0], "digest", "onnx", kind="onnx"
    )
    graph = to_onnx(quantize(capture(loaded), int8=False, half=None, keep=Keep(), amax={}, ranges={}))
    for h, w in SIZES:
        given = torch.randn(2, 1, h, w)
        found = OrtRunner(graph.data).run({"x": given.numpy()})["y"]
        np.testing.assert_allclose(found, Scaled()(given).numpy(), rtol=1e-4, atol=1e-5)


def of_two(operator: str, **attributes: Any) -> list[Made]:
    """A size with smaller, larger and negative constants, on either side, and with another size."""
    whole = [np.array([3, 2]), np.array([100, -7]), np.array(5)]
    reads: list[tuple[Any, Any]] = [(a, b) for c in whole for a, b in (("hw", c), (c, "hw"))]
    reads += [("hw", "h"), ("h", "hw")]
    if operator != "Mod":
        reads += [(a, b) for c in whole for a, b in (("hwf", c.astype(np.float32)), (c.astype(np.float32), "hwf"))]
        reads += [("hwf", "hf")]
    return [(operator, pair, attributes) for pair in reads]


#: Each elementwise operator that is computed of numbers known beforehand, and of other operators those of sizes.
CASES: dict[str, list[Made]] = {
    **{n: of_two(n) for n in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Mod")},
    "fmod": [*of_two("Mod", fmod=1), ("Mod", ["hwf", np.array([2.5, -3.5], np.float32)], {"fmod": 1})],
    **{n: of_two(n) for n in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")},
    **{n: [(n, ["more", np.array([True, False])], {})] for n in ("And", "Or", "Xor")},
    "Not": [("Not", ["more"], {})],
    "Neg": [("Neg", ["hw"], {}), ("Neg", ["hf"], {})],
    "Abs": [("Sub", ["hw", np.array(9)], {}), ("Abs", ["t0"], {}), ("Abs", ["hwf"], {})],
    "Sign": [("Sub", ["hw", np.array(9)], {}), ("Sign", ["t0"], {})],
    "Pow": [("Pow", ["hw", np.array(2)], {}), ("Pow", ["hw", np.array(0.5, np.float32)], {}),
            ("Pow", ["hwf", np.array(0.5, np.float32)], {}), ("Pow", [np.array(2), "h"], {})],
    "Sqrt": [("Sqrt", ["hwf"], {}), ("Sqrt", ["hf"], {})],
    "Floor": [("Div", ["hwf", np.array(3, np.float32)], {}), ("Floor", ["t0"], {}), ("Ceil", ["t0"], {}),
              ("Cast", ["t0"], {"to": TensorProto.INT64})],
    "Where": [("Where", ["more", "hw", np.array([5, 7])], {}),
              ("Where", ["more", "hwf", np.array(0.5, np.float32)], {}),
              ("Where", [np.array([True, False]), "hw", "h"], {})],
    "Cast": [("Cast", ["hw"], {"to": to}) for to in (TensorProto.INT32, TensorProto.BOOL, TensorProto.DOUBLE)],
    "Clip": [("Clip", ["hw", np.array(3), np.array(20)], {}), ("Clip", ["hwf", np.array(3.5, np.float32)], {})],
    "Reduce": [(f"Reduce{n}", [x], {"keepdims": keep}) for n in ("Max", "Min", "Prod", "Sum") for keep in (0, 1)
               for x in ("hw", "hwf")],
    "Reciprocal": [("Reciprocal", ["hwf"], {}), ("Log", ["hf"], {}), ("Exp", ["hf"], {})],
    "Size": [("Size", ["x"], {}), ("Cast", ["t0"], {"to": TensorProto.FLOAT})],
    "Concat": [("Concat", ["hw", np.array([3])], {"axis": 0}),
               ("Concat", ["hwf", np.array([2.5], np.float32)], {"axis": 0})],
    "Gather": [("Sub", ["hw", np.array(1)], {}), ("Gather", ["t0", np.array(1)], {}),
               ("Gather", ["x", "t1"], {"axis": 3}), ("Gather", ["x", np.array(-2)], {"axis": 2}),
               ("Gather", ["x", np.array([-1, 0])], {"axis": 3})],
    "Slice": [("Sub", ["hw", np.array([2, 1])], {}), ("Slice", ["x", np.array([0, 0]), "t0", np.array([2, 3])], {}),
              *(("Slice", ["x", np.array([a]), np.array([b]), np.array([3]), np.array([-step])], {})
                for a, b, step in ((-1, -99, 1), (-1, -99, 2), (3, 0, 1), (2**40, -2**40, 3)))],
    "Pad": [("Sub", ["h", "h"], {}), ("Reshape", ["t0", np.array([1])], {}), ("Sub", ["hw", np.array(2)], {}),
            ("Concat", [np.array([0, 0]), "t2", np.array([0, 0, 1]), "t1"], {"axis": 0}), ("Pad", ["x", "t3"], {})],
    "Tile": [("Concat", [np.array([1, 1]), "hw"], {"axis": 0}), ("Tile", ["x", "t0"], {}),
             ("Reshape", ["h", np.array([1])], {}), ("Tile", ["hw", "t2"], {})],
    "Expand": [("Expand", ["hf", "hw"], {}), ("Expand", ["h", "hw"], {}), ("ConstantOfShape", ["hw"], {})],
    "Range": [("Range", [np.array(0), "h", np.array(1)], {}), ("Range", ["h", np.array(50), np.array(2)], {})],
    "Reshape": [("Reshape", ["x", "flat"], {}), ("Reshape", ["h", "flat"], {}),
                ("Concat", ["flat", "t1"], {"axis": 0}), ("Reshape", ["x", "t2"], {}), ("Trilu", ["x", "h"], {})],
    "Resize": [("Resize", ["x", "", np.array([1, 1, s, s], np.float32)],
                {"mode": mode, "coordinate_transformation_mode": how})
               for s in (2.0, 3.0) for mode, how in (("linear", "half_pixel"), ("linear", "align_corners"))],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_computed_of_dynamic_sizes_is_right_at_others(case: str, tmp_path: Path) -> None:
    compare(tmp_path, CASES[case], 17 if case == "Reduce" else 18)


def test_every_operator_of_known_numbers_is_tried() -> None:
    tried = {operator for made in CASES.values() for operator, *_ in made}
    assert {n for n, f in OPERATORS.items() if f.__qualname__.startswith("either.")} <= tried


#: What takes one of the declared sizes alone as it is converted, and what is said of it.
OF_A_NUMBER = "needs a dynamic size as a number. Declare it as a number in inputs.*.shape, or export it with constants."
OF_FLOATS = (
    "takes a shape, an axis or a limit that is computed from the data, which no engine can be built for, or in floats "
    "from a dynamic size, which is not converted. Export the network with constants there, or with integers alone."
)
REFUSED: dict[str, tuple[list[Made], str]] = {
    "Slice": ([("Slice", ["x", "t0", np.array([-99]), np.array([2]), np.array([-1])], {})],
              "Slice (tested1) goes backwards from or to a dynamic size. Export it with constants there."),
    "Reshape": ([("Reshape", ["x", np.array([2, 9, -1])], {}),
                 ("Add", ["x", np.ones((9, 1), np.float32)], {})], f"Reshape (tested1) {OF_A_NUMBER}"),
    "Expand": ([("Mul", ["hwf", np.array(0.5, np.float32)], {}), ("Cast", ["t1"], {"to": TensorProto.INT64}),
                 ("Expand", ["mean", "t2"], {})], f"Expand (tested3) {OF_FLOATS}"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_of_dynamic_sizes_is_refused_by_the_node(case: str, tmp_path: Path) -> None:
    made, what = REFUSED[case]
    with pytest.raises(InputError) as caught:
        compare(tmp_path, [("Slice", ["hw", np.array([0]), np.array([1])], {}), *made])
    assert str(caught.value) == f"model.onnx: {what}"

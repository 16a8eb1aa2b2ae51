"""What no PyTorch operation computes, or no TensorRT fuses, is refused by the node's name, with the next step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from trtpipe.errors import InputError
from trtpipe.model.onnx import layers
from trtpipe.model.onnx.network import load_network

PLANE = np.ones((1, 1, 4, 4), np.float32)
HALF, WHOLE = np.array(0.5, np.float32), np.array(1.0, np.float32)
RESIZE = (
    "Export it with mode nearest (asymmetric, floor), or linear or cubic (half_pixel, cubic_coeff_a -0.75, nothing "
    "else set), from fixed sizes to whole ones."
)
#: Operator, attributes, inputs after the first, which is PLANE, and what is said of it.
OPERATIONS: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("ConvTranspose", {"pads": [0, 0, 1, 1]}, [np.ones((1, 1, 3, 3), np.float32)],
     "has an output_shape or uneven pads. Export it with even pads and output_padding."),
    ("AveragePool", {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}, [],
     "has uneven pads that are not counted. Export it with even pads."),
    ("AveragePool", {"kernel_shape": [2, 2], "dilations": [2, 2]}, [],
     "has dilations. Write it as a depthwise convolution of equal weights."),
    ("Cast", {"to": 8}, [], "casts to a type that is not known here (8). Export it in FP32."),
    ("LRN", {"size": 4}, [], "has an even size (4). Export it with an odd one."),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
     [np.array([], np.float32), np.array([1, 1, 2, 2], np.float32)],
     f"resizes in a way that is not converted (mode linear, asymmetric). {RESIZE}"),
    ("Resize", {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
     [np.array([], np.float32), np.array([1, 1, 2, 2], np.float32)],
     "resizes in a way that is not converted (mode cubic, half_pixel, cubic_coeff_a -0.5, exclude_outside 1). "
     + RESIZE),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
     [np.array([], np.float32), np.array([1, 1, 1.6, 0.7], np.float32)],
     "resizes in a way that is not converted (mode linear, align_corners, by scales that give no whole sizes). "
     + RESIZE),
    ("GatherND", {"batch_dims": 1}, [np.zeros((1, 1), np.int64)], "has batch_dims. Export it without them."),
    ("ScatterND", {"reduction": "add"}, [np.zeros((1, 1), np.int64), PLANE],
     "reduces by add. Export it without a reduction."),
    ("ArgMax", {"select_last_index": 1}, [], "takes the last of equal elements. Export it with select_last_index 0."),
    ("Dropout", {}, [HALF, np.array(True)], "is in training mode. Export the network in eval mode."),
    ("BatchNormalization", {"training_mode": 1}, [np.ones(1, np.float32)] * 4,
     "is in training mode. Export the network in eval mode."),
]  # fmt: skip
FOLD = "Fold its constants (ONNX Runtime: save the file with ORT_ENABLE_BASIC), or give the file in FP32."
IN_FLOAT = "Quantize it symmetrically in INT8 (ONNX Runtime: ActivationSymmetric), or give the file in FP32."
BETWEEN = (
    "Take the file as it was before an optimizer moved an operation between a QuantizeLinear and its DequantizeLinear, "
    "or give the file in FP32."
)
ZERO = np.array(0, np.int8)
#: Nodes between x and y, constants by name, and what is said.
QUANTIZED: list[tuple[list[tuple[str, list[str], list[str]]], dict[str, Any], str]] = [
    ([("QuantizeLinear", ["x", "s", "z"], ["q"]), ("DequantizeLinear", ["q", "t", "z"], ["y"])],
     {"s": HALF, "t": WHOLE, "z": ZERO},
     "DequantizeLinear (n1) dequantizes with another scale than it was quantized with."),
    ([("QuantizeLinear", ["x", "s", "z"], ["q"]), ("Identity", ["q"], ["p"]),
      ("DequantizeLinear", ["p", "s", "z"], ["y"])],
     {"s": HALF, "z": ZERO}, "DequantizeLinear (n2) dequantizes what no QuantizeLinear has made."),
    ([("QuantizeLinear", ["x", "s", "z"], ["q"]), ("Identity", ["q"], ["p"]), ("Cast", ["p"], ["y"])],
     {"s": HALF, "z": ZERO}, "QuantizeLinear (n0) has a reader that is no DequantizeLinear."),
    ([("ReduceMax", ["x"], ["m"]), ("QuantizeLinear", ["x", "m", "z"], ["q"]),
      ("DequantizeLinear", ["q", "m", "z"], ["y"])],
     {"z": ZERO}, "DequantizeLinear (n2) has a scale that the graph computes."),
]  # fmt: skip


def saved(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, Any], opset: int = 17) -> Path:
    """A file of these nodes, from x (PLANE's shape) to y."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, PLANE.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(("operator", "attributes", "others", "what"), OPERATIONS, ids=[row[0] for row in OPERATIONS])
def test_an_operation_that_pytorch_has_not(
    operator: str, attributes: dict[str, Any], others: list[Any], what: str, tmp_path: Path
) -> None:
    constants = {f"c{i}": value for i, value in enumerate(others)}
    node = helper.make_node(operator, ["x", *constants], ["y"], "n0", **attributes)
    with pytest.raises(InputError) as caught:
        load_network(saved(tmp_path / "m.onnx", [node], constants))(torch.from_numpy(PLANE))
    assert str(caught.value) == f"model.onnx: {operator} (n0) {what}"


def test_a_shape_that_is_computed_from_the_data(tmp_path: Path) -> None:
    made = [
        helper.make_node("Cast", ["x"], ["s"], "n0", to=onnx.TensorProto.INT64),
        helper.make_node("Reshape", ["x", "s"], ["y"], "n1"),
    ]
    with pytest.raises(InputError) as caught:
        load_network(saved(tmp_path / "m.onnx", made, {}))(torch.from_numpy(PLANE))
    assert str(caught.value) == (
        "model.onnx: Reshape (n1) takes a shape, an axis or a limit that is computed from the data, which no engine "
        "can be built for, or in floats from a dynamic size, which is not converted. Export the network with constants "
        "there, or with integers alone."
    )


@pytest.mark.parametrize(
    ("operator", "domain"), [("ReorderInput", "com.microsoft.nchwc"), ("FusedMatMul", "com.microsoft")]
)
def test_a_file_that_onnx_runtime_optimized(operator: str, domain: str, tmp_path: Path) -> None:
    """Nothing lies before what it puts first."""
    node = helper.make_node(operator, ["x"], ["y"], "n0", domain=domain)
    with pytest.raises(InputError) as caught:
        load_network(saved(tmp_path / "m.onnx", [node], {}))
    assert str(caught.value) == (
        f"model.onnx: must be a file as it was exported (got {domain}::{operator}, which ONNX Runtime writes when it "
        "optimizes). Give the file that it was made from."
    )


@pytest.mark.parametrize(("nodes", "constants", "what"), QUANTIZED)
def test_a_quantization_that_tensorrt_has_not(
    nodes: list[tuple[str, list[str], list[str]]], constants: dict[str, Any], what: str, tmp_path: Path
) -> None:
    made = [helper.make_node(op, given, gives, f"n{i}") for i, (op, given, gives) in enumerate(nodes)]
    with pytest.raises(InputError) as caught:
        load_network(saved(tmp_path / "m.onnx", made, constants))
    steps = {"that the graph computes": FOLD, "what no QuantizeLinear": BETWEEN, "is no DequantizeLinear": BETWEEN}
    step = next((step for words, step in steps.items() if words in what), IN_FLOAT)
    assert str(caught.value) == f"model.onnx: {what} {step}"


def test_an_unsigned_quantization_can_be_recalibrated(tmp_path: Path) -> None:
    """Its range then does the work of a ReLU: a scale of 0.5 is 0 to 127.5."""
    made = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], "n0"),
        helper.make_node("DequantizeLinear", ["q", "s"], ["p"], "n1"),
        helper.make_node("Neg", ["p"], ["y"], "n2"),
    ]
    path = saved(tmp_path / "m.onnx", made, {"s": HALF})
    with pytest.raises(InputError) as caught:
        load_network(path)
    assert str(caught.value) == (
        "model.onnx: DequantizeLinear (n1) quantizes to uint8. Quantize it symmetrically in INT8 (ONNX Runtime: "
        "ActivationSymmetric), or set calibration.recalibrate: true, which starts from its FP32 form."
    )
    x = torch.tensor([-3.0, 0.3, 127.4, 200.0])
    assert load_network(path, recalibrate=True)(x)["y"].tolist() == pytest.approx([0.0, -0.3, -127.4, -127.5])


def test_an_activation_by_channel_with_zero_points_cannot_be_recalibrated(tmp_path: Path) -> None:
    constants = {"s": np.array([0.5, 0.25], np.float32), "z": np.array([3, 7], np.int8)}
    made = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "n0", axis=0),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], "n1", axis=0),
    ]
    path = saved(tmp_path / "m.onnx", made, constants)
    with pytest.raises(InputError, match=r"n0\) quantizes an activation with several scales and zero points"):
        load_network(path, recalibrate=True)


#: Types of quantized tensors by name, and whether recalibration takes them.
TYPES = {"INT8": True, "UINT8": True, "INT16": True, "UINT16": True, "FLOAT8E4M3FN": False, "INT4": False}


@pytest.mark.parametrize("zero", ["zero point", "output_dtype"])
@pytest.mark.parametrize("weight", TYPES)
@pytest.mark.parametrize("activation", TYPES)
def test_recalibration_is_offered_where_it_takes_the_file(
    activation: str, weight: str, zero: str, tmp_path: Path
) -> None:
    first, second = (getattr(onnx.TensorProto, kind) for kind in (activation, weight))
    given = ["s", "z"] if zero == "zero point" else ["s"]
    kind = {} if zero == "zero point" else {"output_dtype": first}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *given], ["q"], "n0", **kind),
        helper.make_node("DequantizeLinear", ["q", *given], ["p"], "n1"),
        helper.make_node("DequantizeLinear", ["w", "s", "t"], ["v"], "n2"),
        helper.make_node("MatMul", ["p", "v"], ["y"], "n3"),
    ]
    path = saved(tmp_path / "m.onnx", nodes, {"s": HALF}, opset=21)
    model = onnx.load(path)
    model.graph.initializer.extend(
        [helper.make_tensor("z", first, [], [0]), helper.make_tensor("t", second, [], [0]),
         helper.make_tensor("w", second, [4, 2], [1] * 8)]
    )  # fmt: skip
    path.write_bytes(model.SerializeToString())
    if activation == weight == "INT8":
        load_network(path)
        return
    with pytest.raises(InputError) as caught:
        load_network(path)
    if TYPES[activation] and TYPES[weight]:
        assert "set calibration.recalibrate: true, which starts from its FP32 form." in str(caught.value)
        load_network(path, recalibrate=True)
        return
    first_read = "DequantizeLinear (n1)" if zero == "zero point" else "QuantizeLinear (n0)"
    node, name = ("DequantizeLinear (n2)", weight) if TYPES[activation] else (first_read, activation)
    said = f"model.onnx: {node} quantizes to {name.lower().replace('8e', '8_e')}. {IN_FLOAT}"
    assert str(caught.value) == said
    with pytest.raises(InputError) as caught:
        load_network(path, recalibrate=True)
    assert str(caught.value) == said


def test_a_quantization_by_blocks(tmp_path: Path) -> None:
    scales, zeros = np.full((1, 1, 4, 2), 0.5, np.float32), np.zeros((1, 1, 4, 2), np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "n0", axis=3, block_size=2),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], "n1", axis=3, block_size=2),
    ]
    with pytest.raises(InputError) as caught:
        load_network(saved(tmp_path / "m.onnx", nodes, {"s": scales, "z": zeros}, opset=21))
    assert str(caught.value) == f"model.onnx: DequantizeLinear (n1) quantizes by blocks. {IN_FLOAT}"


def test_padding_to_a_size_that_is_dynamic() -> None:
    """A stride over a size that a graph does not know: what is padded would depend on it."""

    def refused(what: str, step: str) -> InputError:
        return InputError(f"Conv {what}. {step}")

    attributes = {"auto_pad": "SAME_UPPER", "strides": [2, 2]}
    node = SimpleNamespace(get=lambda name, default=None: attributes.get(name, default), refused=refused)
    x = SimpleNamespace(shape=("N", 3, "H", 8))
    with pytest.raises(InputError) as caught:
        layers._windows(node, x, [3, 3])  # type: ignore[arg-type]
    assert str(caught.value) == (
        "Conv pads by a size that is dynamic (auto_pad). Export it with pads, or a fixed size."
    )


@pytest.mark.parametrize("operator", ["If", "Loop"])
def test_a_network_is_cut_at_all_that_its_control_flow_reads(operator: str, tmp_path: Path) -> None:
    """Branches and bodies read tensors from outside that are not among the node's inputs."""
    made = [helper.make_tensor_value_info(n, kind, None) for n, kind in (("inner", 1), ("on", 9))]
    body = [helper.make_node("Neg", ["features"], ["inner"])]
    if operator == "If":
        deep = helper.make_node(  # a branch in a branch
            "If", ["true"], ["outer"],
            then_branch=helper.make_graph(body, "deep", [], made[:1]),
            else_branch=helper.make_graph([], "as it is", [], [helper.make_tensor_value_info("features", 1, None)]),
        )  # fmt: skip
        branches = [
            helper.make_graph([deep], "then", [], [helper.make_tensor_value_info("outer", 1, None)]),
            helper.make_graph([helper.make_node("Abs", ["x"], ["inner"])], "else", [], made[:1]),
        ]
        flow = helper.make_node("If", ["true"], ["y"], then_branch=branches[0], else_branch=branches[1])
    else:
        starts = [helper.make_tensor_value_info(n, kind, []) for n, kind in (("i", 7), ("before", 9))]
        body.append(helper.make_node("Identity", ["before"], ["on"]))
        flow = helper.make_node(
            "Loop", ["two", "true"], ["y"], body=helper.make_graph(body, "body", starts, [made[1], made[0]])
        )
    path = saved(
        tmp_path / "file.onnx",
        [helper.make_node("Relu", ["x"], ["features"]), flow],
        {"true": np.array(True), "two": np.array(2, np.int64)},
    )
    with pytest.raises(InputError) as caught:
        load_network(path)
    assert str(caught.value) == (
        f"model.onnx: its operators must be among those that trtpipe converts (got {operator}). Cut it before them: "
        "name as the job's outputs what is computed without them (features), and do the rest behind the engine; or "
        "build from PyTorch with model.factory."
    )


def test_what_a_dropped_branch_read_is_dropped_too(tmp_path: Path) -> None:
    """A detector's tail: an If whose branch reads boxes that NonZero chose."""
    inner = [helper.make_tensor_value_info("chosen", 7, None)]
    then = helper.make_graph([helper.make_node("Transpose", ["boxes"], ["chosen"], perm=[1, 0])], "then", [], inner)
    other = helper.make_graph([], "else", [], [helper.make_tensor_value_info("boxes", 7, None)])
    nodes = [
        helper.make_node("Relu", ["x"], ["features"]),
        helper.make_node("NonZero", ["features"], ["boxes"]),
        helper.make_node("If", ["true"], ["y"], then_branch=then, else_branch=other),
    ]
    path = saved(tmp_path / "file.onnx", nodes, {"true": np.array(True)})
    with pytest.raises(InputError, match=r"got If, NonZero.*without them \(features\)"):
        load_network(path)
    found = load_network(path, ("features",))(torch.tensor([-1.0, 2.0]))
    assert found["features"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("pads", [(0, 1, 0, 2), (2, 0, 1, 0), (1, 1, 1, 1)])
def test_any_spatial_side_is_padded_in_every_mode(mode: str, pads: tuple[int, ...], tmp_path: Path) -> None:
    top, left, bottom, right = pads
    given = {"pads": np.array([0, 0, top, left, 0, 0, bottom, right])}
    path = saved(tmp_path / "m.onnx", [helper.make_node("Pad", ["x", "pads"], ["y"], mode=mode)], given, opset=19)
    x = torch.arange(48.0).reshape(1, 2, 4, 6)
    expected = np.pad(x.numpy(), ((0, 0), (0, 0), (top, bottom), (left, right)), mode)  # type: ignore[call-overload]
    np.testing.assert_array_equal(load_network(path)(x)["y"].numpy(), expected)


def test_channels_are_padded_with_a_constant_alone(tmp_path: Path) -> None:
    given = {"pads": np.array([0, 1, 0, 0, 0, 0, 0, 0])}
    path = saved(
        tmp_path / "m.onnx", [helper.make_node("Pad", ["x", "pads"], ["y"], "p", mode="edge")], given, opset=19
    )
    with pytest.raises(InputError) as caught:
        load_network(path)(torch.ones(1, 2, 4, 6))
    assert str(caught.value) == (
        "model.onnx: Pad (p) pads the batch or the channels in mode edge. Export it with Concat."
    )

"""ONNX files that another program wrote wrongly: each is refused as a file, and none ends in a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtpipe.errors import InputError
from trtpipe.model.onnx.reading import OnnxFile, opened
from trtpipe.model.onnx.reference import Reference

SHAPE = (3, 3, 3, 3)
WEIGHT = numpy_helper.from_array(np.ones(SHAPE, np.float32), "w")
CONV = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])


def model(nodes: list[onnx.NodeProto], weight: TensorProto | None = None) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ("N", 3, 8, 8)) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [weight or WEIGHT])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def raw(data: bytes, shape: tuple[int, ...] = SHAPE) -> onnx.ModelProto:
    return model([CONV], TensorProto(name="w", data_type=TensorProto.FLOAT, dims=shape, raw_data=data))


def beside(**where: object) -> onnx.ModelProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=SHAPE, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "w.bin", **where}.items():
        weight.external_data.add(key=key, value=str(value))
    return model([CONV], weight)


def recursive() -> onnx.ModelProto:
    call = helper.make_node("F", ["x"], ["y"], domain="f")
    body = helper.make_node("F", ["a"], ["b"], domain="f")
    made = model([call])
    made.functions.append(helper.make_function("f", "F", ["a"], ["b"], [body], [helper.make_opsetid("f", 1)]))
    made.opset_import.append(helper.make_opsetid("f", 1))
    return made


def inside() -> onnx.ModelProto:
    """A branch of an If reads it."""
    float32 = onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["x", "nope"], ["z"])]
    branch = helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info("z", float32, None)])
    yes = helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True])
    constant = helper.make_node("Constant", [], ["yes"], value=yes)
    return model([constant, helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)])


DATA = "the data of w: "
DAMAGED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "empty": (onnx.ModelProto, ", which has no nodes"),
    "a circle of nodes": (
        lambda: model([helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Relu", ["y"], ["b"])]),
        ": Graph contains a cycle",
    ),
    "a circle of functions": (recursive, ": Cyclic dependency"),
    "a name that nothing gives": (
        lambda: model([helper.make_node("Add", ["x", "nope"], ["y"])]),
        ": nothing gives nope, which a node reads",
    ),
    "a name that nothing gives, inside": (inside, ": nothing gives nope, which a node reads"),
    "two nodes of one output": (lambda: model([CONV, helper.make_node("Relu", ["x"], ["y"])]), ": "),
    "too little data": (lambda: raw(b"1234"), f": {DATA}"),
    "no data for a huge shape": (lambda: raw(b"", (2**20, 2**20, 2**10)), f": {DATA}"),
    "a negative size": (lambda: raw(b"1234" * 81, (-3, 3, 3, 3)), f": {DATA}-81 values for the shape [-3,3,3,3]"),
    "an offset beyond the data": (lambda: beside(offset=10**18, length=324), f": {DATA}"),
    "a length beyond the data": (lambda: beside(offset=300, length=324), f": {DATA}"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, reason = DAMAGED[name]
    path = tmp_path / "net.onnx"
    path.write_bytes(make().SerializeToString())
    np.ones(SHAPE, np.float32).tofile(tmp_path / "w.bin")
    with pytest.raises(InputError) as caught:
        opened(path)
    assert str(caught.value).startswith(f"model.onnx: must be an ONNX file (got net.onnx{reason}")
    assert str(caught.value).endswith("). Export it again.")


def test_a_file_that_onnx_runtime_cannot_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"^model\.onnx: ONNX Runtime cannot run it \(.+\)\. Export it again\.$"):
        Reference(OnnxFile(path, (), (), (), {}, quantized=False, cut=False, notes=()))


def test_a_whole_file_is_taken(tmp_path: Path) -> None:
    for number, made in enumerate((model([CONV]), beside(offset=0, length=324))):
        (tmp_path / f"{number}.onnx").write_bytes(made.SerializeToString())
        np.ones(SHAPE, np.float32).tofile(tmp_path / "w.bin")
        assert opened(tmp_path / f"{number}.onnx").graph.initializers["w"].const_value.numpy().shape == SHAPE

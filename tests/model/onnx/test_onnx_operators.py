"""Every operator of the table against ONNX's own test cases, and against ONNX Runtime where these have none."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trtpipe.errors import InputError
from trtpipe.model.onnx.network import load_network
from trtpipe.model.onnx.operators import OPERATORS

#: Kinds of tensors that a graph in FP32 has.
KINDS = {"float32", "int64", "int32", "bool", "uint8", "int8"}
#: Cases of ONNX that ask for what PyTorch does not promise or take, by a part of their name.
OTHERWISE = (
    "same_values",
    "empty_set",
    "gather_negative_indices",
    "ceil_last_window_starts_on_pad",
    "gridsample_bicubic",
)


@functools.cache
def cases() -> dict[str, list[Any]]:
    """ONNX's cases for single nodes, by operator, of those whose tensors a graph in FP32 has."""
    from onnx.backend.test.case.node import collect_testcases

    found: dict[str, list[Any]] = defaultdict(list)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        everything = collect_testcases(None)
    for case in everything:
        operators = {n.op_type for n in case.model.graph.node}
        if not operators <= set(OPERATORS) or not case.data_sets or any(part in case.name for part in OTHERWISE):
            continue
        arrays = [a for side in case.data_sets[0] for a in side]
        if all(isinstance(a, (np.ndarray, np.generic)) and a.dtype.name in KINDS for a in arrays):
            found[case.model.graph.node[0].op_type].append(case)
    return found


def answers(path: Path, case: Any, constants: bool) -> None:
    """Convert a case and compare; `constants`: all inputs but the first are initializers."""
    inputs, outputs = case.data_sets[0]
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    if constants:
        del model.graph.input[1:]
        for value, array in list(zip(case.model.graph.input, inputs, strict=True))[1:]:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), value.name))
    path.write_bytes(model.SerializeToString())
    found = load_network(path)(*(torch.from_numpy(np.array(a)) for a in (inputs[:1] if constants else inputs)))
    for value, expected in zip(case.model.graph.output, outputs, strict=True):
        array = found[value.name].numpy()
        assert array.dtype == expected.dtype, case.name
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5, err_msg=case.name)


#: `Linear` is what Gemm and MatMul by a constant become; their cases try it.
OF_ONNX = sorted(set(OPERATORS) - {"Linear"})


@pytest.mark.parametrize("operator", OF_ONNX)
def test_answers_as_onnx_says_or_is_refused(operator: str, tmp_path: Path) -> None:
    converted = 0
    for case in cases()[operator]:
        for constants in (True, False):
            with contextlib.suppress(InputError):  # refused by name
                answers(tmp_path / "case.onnx", case, constants)
                converted += 1
    assert converted or operator in {name for name, *_ in BY_RUNTIME}


PLANE = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
#: Operator, attributes, inputs (the first from the data), the opset.
BY_RUNTIME: list[tuple[str, dict[str, Any], list[Any], int]] = [
    ("Cast", {"to": TensorProto.INT64}, [np.array([[1.7, -1.7]], np.float32)], 17),
    ("Celu", {"alpha": 0.5}, [np.array([[1.0, -1.0]], np.float32)], 17),
    ("ConstantOfShape", {"value": numpy_helper.from_array(np.array([2.5], np.float32))}, [np.array([2, 3])], 17),
    ("DepthToSpace", {"blocksize": 2}, [np.arange(32, dtype=np.float32).reshape(1, 8, 2, 2)], 17),
    ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, [np.arange(32, dtype=np.float32).reshape(1, 8, 2, 2)], 17),
    ("Einsum", {"equation": "ij,jk->ik"}, [np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)], 17),
    *(
        ("CumSum", at, [np.array([[1, 1e30, 2, 3], [4, 5, 6, 7]], np.float32), np.array(axis)], 17)
        for at in ({"exclusive": 1}, {"exclusive": 1, "reverse": 1}, {"reverse": 1})
        for axis in (0, 1)
    ),
    ("LayerNormalization", {}, [PLANE[0, 0, :2, :3], PLANE[0, 0, 0, :3], PLANE[0, 0, 1, :3]], 17),
    ("Mod", {"fmod": 1}, [np.array([-5.5, 5.5], np.float32), np.array([2.0, -2.0], np.float32)], 17),
    ("Not", {}, [np.array([True, False])], 17),
    *(
        ("OneHot", at, [np.array([[0, -1], [3, 9]]), np.array(4), np.array([-3, 2])], 17)
        for at in ({}, {"axis": 0}, {"axis": -2})
    ),
    ("ReduceLogSum", {"axes": [1], "keepdims": 0}, [1 + np.arange(6, dtype=np.float32).reshape(2, 3)], 17),
    ("ReduceLogSumExp", {"axes": [1], "keepdims": 0}, [np.arange(6, dtype=np.float32).reshape(2, 3)], 17),
    *(
        (f"Reduce{kind}", {"noop_with_empty_axes": 1}, [np.array([[-0.5, 2.0]], np.float32)], 18)
        for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
    ),
    ("Softmax", {"axis": 1}, [np.arange(8, dtype=np.float32).reshape(2, 2, 2)], 11),
    ("SpaceToDepth", {"blocksize": 2}, [np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)], 17),
    ("Upsample", {"mode": "nearest"}, [PLANE, np.array([1, 1, 2, 3], np.float32)], 9),
    ("Range", {}, [np.array(0), np.array(6), np.array(2)], 17),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "attributes", "inputs", "opset"), BY_RUNTIME)
def test_answers_as_onnx_runtime_does(
    operator: str, attributes: dict[str, Any], inputs: list[Any], opset: int, tmp_path: Path
) -> None:
    kinds = [helper.np_dtype_to_tensor_dtype(a.dtype) for a in inputs]
    names = [f"x{i}" for i in range(len(inputs))]
    known = 0 if operator in ("ConstantOfShape", "Range") else 1  # the rest are initializers
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], **attributes)],
        "g",
        [
            helper.make_tensor_value_info(n, k, a.shape)
            for n, k, a in list(zip(names, kinds, inputs, strict=True))[:known]
        ],
        [helper.make_tensor_value_info("y", kinds[0], None)],
        [numpy_helper.from_array(a, n) for n, a in list(zip(names, inputs, strict=True))[known:]],
    )
    if operator in ("Cast", "ConstantOfShape"):
        graph.output[0].type.tensor_type.elem_type = TensorProto.INT64 if operator == "Cast" else TensorProto.FLOAT
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = dict(list(zip(names, inputs, strict=True))[:known])
    found = load_network(tmp_path / "m.onnx")(*(torch.from_numpy(a) for a in feed.values()))["y"].numpy()
    np.testing.assert_allclose(found, session.run(None, feed)[0], rtol=1e-5, atol=1e-6)

"""Gemm and MatMul by a constant matrix as PyTorch has them: `Linear`, y = x weight^T + bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from calib.types import Array
from trtpipe.model.marks import Mark
from trtpipe.model.onnx.values import Node

Constants = Mapping[str, Array]


def with_linears(
    nodes: Sequence[Node], constants: Constants, outputs: Collection[str]
) -> tuple[tuple[Node, ...], dict[str, Array]]:
    """The nodes and constants of a graph with every matrix product by a constant as `Linear`.

    A MatMul takes in the Add of a constant vector that alone reads it, unless that reads it quantized.

    Args:
        nodes: in the order of execution.
        constants: by name, each of the dtype and shape of its initializer.
        outputs: names of the graph's outputs.
    """
    count = Counter(name for n in nodes for name in n.inputs)
    reader = {name: n for n in nodes for name in n.inputs}
    found: list[Node] = []
    weights = dict(constants)
    done: set[str] = set()
    for node in nodes:
        if node.outputs[0] in done:
            continue
        linear = _gemm(node, weights) if node.op == "Gemm" else _matmul(node, weights) if node.op == "MatMul" else None
        if linear is not None and node.op == "MatMul" and count[name := node.outputs[0]] == 1 and name not in outputs:
            bias = _bias(reader[name], name, weights, weights[linear.inputs[1]].shape[0])
            if bias:
                linear = replace(linear, inputs=(*linear.inputs, bias), outputs=reader[name].outputs)
                done.add(linear.outputs[0])
        found.append(linear or node)
    return tuple(found), weights


def _gemm(node: Node, weights: dict[str, Array]) -> Node | None:
    name, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else ""
    plain = node.get("alpha", 1.0) == 1.0 and node.get("beta", 1.0) == 1.0 and not node.get("transA", 0)
    if not plain or name not in weights or (bias and (bias not in weights or weights[bias].ndim != 1)):
        return None
    linear = replace(node, op="Linear", attributes={}) if node.get("transB", 0) else _transposed(node, weights)
    rows = weights[linear.inputs[1]].shape[0]
    return None if bias and weights[bias].shape != (rows,) else linear


def _matmul(node: Node, weights: dict[str, Array]) -> Node | None:
    name = node.inputs[1]
    return _transposed(node, weights) if name in weights and weights[name].ndim == 2 else None


def _transposed(node: Node, weights: dict[str, Array]) -> Node:
    """A Linear with the transposed weight, which joins `weights`; a mark's axis goes with it."""
    name = f"{node.inputs[1]}.transposed"
    weights[name] = weights[node.inputs[1]].T
    marks = {k: Mark(m.scales, 1 - m.axis) if k == 1 and m.axis is not None else m for k, m in node.marks.items()}
    inputs = (node.inputs[0], name, *node.inputs[2:])
    return replace(node, op="Linear", attributes={}, inputs=inputs, marks=marks)


def _bias(node: Node, product: str, weights: Constants, rows: int) -> str:
    """The vector that an Add adds to a product, "" where the node is no such Add."""
    if node.op != "Add" or node.marks:
        return ""
    other = next((n for n in node.inputs if n != product), "")
    return other if other in weights and weights[other].shape == (rows,) else ""

"""The factors of a product's two inputs as one factor of the first.

torch.onnx's exporters write the scale of an attention as its square root on the query and on the key, and so do
models such as Whisper; torch.nn.functional.scaled_dot_product_attention is spelt out here with all of it on the query.
One form gives one calibration table, and saves a multiplication.
"""

from __future__ import annotations

import torch

from trtpipe.model.nodes import calls, constant_value, is_constant, is_float, op_name
from trtpipe.model.products import MATMULS


def join_factors(graph: torch.fx.GraphModule) -> None:
    """Write matmul(a * s, b * t) as matmul(a * (s t), b), in float32 and for numbers s and t of at most 1: no tensor
    then grows beyond what is in the graph already, which FP16 has to hold.

    The scores differ by the rounding of s t, about 1e-7 of them; not at all where both are powers of two.
    """
    for node in list(calls(graph.graph)):
        if op_name(node) not in MATMULS or len(node.args) != 2:
            continue
        first, second = (_scaled(graph, x) for x in node.args)
        if first is None or second is None:
            continue
        (a, s), (b, t) = first, second
        with graph.graph.inserting_before(node):
            scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (a, s * t))
        scaled.meta = dict(node.args[0].meta)  # type: ignore[union-attr]
        node.args = (scaled, b)


def _scaled(graph: torch.fx.GraphModule, node: object) -> tuple[torch.fx.Node, float] | None:
    """What is multiplied and by which number, of a product that one operation alone reads; None of anything else."""
    if not is_float(node) or op_name(node) != "mul" or len(node.users) != 1 or node.meta["val"].dtype != torch.float32:
        return None
    for x, factor in (node.args[:2], node.args[1::-1]):
        if not is_float(x) or is_constant(x) or x.meta["val"].dim() != node.meta["val"].dim():
            continue
        if is_constant(factor) and constant_value(graph, factor).numel() == 1:
            factor = constant_value(graph, factor).item()
        if isinstance(factor, int | float) and 0 < factor <= 1:
            return x, float(factor)
    return None

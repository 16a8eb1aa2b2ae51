"""Attention spelt out as matmul, softmax, matmul."""

from __future__ import annotations

import math
from typing import Any

import torch

from trtpipe.model.nodes import COPIES, add_constant, calls, constant_value, is_constant, op_name, shape_of

#: Operations that leave the rows of a matrix as they are, where its last two axes stay.
_KEEP_ROWS = ("expand", "unsqueeze", "view", "reshape", *COPIES)


def spell_out_attention(graph: torch.fx.GraphModule) -> None:
    """Replace every scaled_dot_product_attention, of no dropout, by `attention`, which the next export takes apart."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    for node in [n for n in calls(graph.graph) if n.target is torch.ops.aten.scaled_dot_product_attention.default]:
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        q, k, mask = given["query"], given["key"], given.get("attn_mask")
        rows, columns = q.meta["val"].shape[-2], k.meta["val"].shape[-2]
        causal = bool(given.get("is_causal"))
        if causal and isinstance(rows, int) and isinstance(columns, int):
            mask, causal = add_constant(graph, "causal_mask", torch.ones(rows, columns).tril().bool(), node), False
        known = None if causal else _known(graph, _behind_moves(mask))
        open_rows = causal or (known is not None and _has_no_closed_row(known))
        node.target = attention
        node.args = (q, k, given["value"], mask, causal, given.get("scale"), bool(given.get("enable_gqa")), open_rows)
        node.kwargs = {}


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    open_rows: bool,
) -> torch.Tensor:
    """softmax(query*scale key^T + mask) value, in operations that can be quantized and kept in FP32 one by one.

    What torch.nn.functional.scaled_dot_product_attention defines, without dropout. The scale is 1/sqrt(E) unless given
    (Vaswani et al. 2017, equation 1), and is applied to the query so that FP16 holds the product.

    Args:
        query: [..., H, L, E]; key, value: [..., H or fewer, S, E].
        mask: bool [..., L, S], False where a key is not seen, or float that is added; None for none.
        causal: a query sees keys up to its own position.
        scale: None for 1/sqrt(E).
        grouped: several heads of the query share one of the key and the value (Ainslie et al. 2023).
        open_rows: every query sees some key; otherwise one that sees none gets zeros, as in PyTorch.
    """
    if grouped and key.shape[-3] != query.shape[-3]:
        key, value = (_repeated(x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return torch.matmul(torch.softmax(scores, -1), value)
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    unseen = torch.finfo(torch.float32).min
    scores = torch.where(mask, scores, unseen) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    if not open_rows:
        weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
    return torch.matmul(weights, value)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """[..., H, S, E] with each head `times` in a row, [..., H * times, S, E]."""
    *outer, heads, length, size = x.shape
    return x.unsqueeze(-3).expand(*outer, heads, times, length, size).reshape(*outer, heads * times, length, size)


def _behind_moves(mask: object) -> object:
    """What a mask is made of by giving it leading axes, for each sample of a batch say: its rows are the same."""
    while isinstance(mask, torch.fx.Node) and mask.op == "call_function":
        x = mask.args[0] if op_name(mask) in _KEEP_ROWS else None
        if not isinstance(x, torch.fx.Node) or shape_of(x)[-2:] != shape_of(mask)[-2:]:
            break
        mask = x
    return mask


def _known(graph: torch.fx.GraphModule, node: object) -> torch.Tensor | None:
    """What a node gives that depends on no input, as a mask that forward makes of sizes; None of any other."""
    needed: set[torch.fx.Node] = set()
    todo = [node] if isinstance(node, torch.fx.Node) else []
    while todo:
        x = todo.pop()
        if x.op not in ("get_attr", "call_function"):
            return None
        todo += [n for n in x.all_input_nodes if n not in needed]
        needed.add(x)
    values: dict[torch.fx.Node, Any] = {}
    for x in graph.graph.nodes:
        if x in needed:
            args, kwargs = torch.fx.map_arg((x.args, x.kwargs), values.__getitem__)
            values[x] = constant_value(graph, x) if is_constant(x) else x.target(*args, **kwargs)
    value = values.get(node)  # type: ignore[call-overload]
    return value if isinstance(value, torch.Tensor) else None


def _has_no_closed_row(mask: torch.Tensor) -> bool:
    """Whether every row of a mask lets some key through."""
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    return bool(seen.any(-1).all())

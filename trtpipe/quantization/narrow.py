"""Q/DQ in FP8 and 4 bits, as operators of our own, inserted into a graph beside the INT8 pairs that torchao places.

`torch.ops.trtpipe.fp8_*`, `int4_*` and `fp4_*` compute what TensorRT and ONNX define; PyTorch's own
`quantized_decomposed` rounds to integers before it casts, which FP8 must not. Importing this module registers them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trtpipe.model.nodes import add_constant, constant_value, is_constant
from trtpipe.model.sites import shared_scales
from trtpipe.quantization.blocks import quantize_int4, quantize_nvfp4
from trtpipe.quantization.formats import (
    FP8,
    INT4,
    NVFP4,
    block_scales,
    block_size,
    check_complete,
    fp4_values,
    global_scale,
    scales_of,
    to_fp4,
    to_fp8,
)
from trtpipe.quantization.precision import ScaleTypes, drop_unread
from trtpipe.values import NumberFormatName

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from trtpipe.values import Site


_library: Any = torch.library.Library("trtpipe", "FRAGMENT")  # type: ignore[no-untyped-call]


def fp8_quantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """float8_e4m3fn of x / scale."""
    return to_fp8(x.to(torch.float32) / scale)


def fp8_dequantize(
    q: torch.Tensor, scale: float, out_dtype: torch.dtype | None = None, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """`q` (float8_e4m3fn) times its scale."""
    return (q.to(torch.float32) * scale).to(out_dtype or torch.float32)


def int4_dequantize(
    q: torch.Tensor, scales: torch.Tensor, out_dtype: torch.dtype | None = None, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """`q` (int8 [N, K] in -8..7) times the scale of its block, [N, blocks]."""
    return _by_block(q.to(torch.float32), scales.to(torch.float32)).to(out_dtype or torch.float32)


def fp4_dequantize(
    q: torch.Tensor,
    scales: torch.Tensor,
    scale: float,
    out_dtype: torch.dtype | None = None,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """The numbers of E2M1 codes (uint8 [N, K]) times the E4M3 scale of their block, [N, K / 16], times `scale`."""
    return _by_block(fp4_values(q), scales.to(torch.float32) * scale).to(out_dtype or torch.float32)


def fp4_dynamic(x: torch.Tensor, scale: float, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x` [..., K] in NVFP4 with block scales from `x` itself, as TensorRT's dynamic quantization does, and back."""
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], -1, NVFP4.blocks[0])
    wide = block_scales(blocks.abs().amax(-1), scale).to(torch.float32) * scale
    values = to_fp4(blocks / torch.where(wide == 0, 1.0, wide)[..., None])
    return (values * wide[..., None]).flatten(-2).to(out_dtype or torch.float32)


def _by_block(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values.reshape(*scales.shape, -1) * scales[..., None]).flatten(-2)


#: Operator to (schema, its arithmetic). Each dequantizer gives `out_dtype`, float32 when None. Those of weights do not
#: read `beside`: where a program is cut into parts, they stay in the part of that tensor.
_OPERATORS = {
    "fp8_quantize": ("(Tensor x, float scale) -> Tensor", fp8_quantize),
    "fp8_dequantize": (
        "(Tensor q, float scale, *, ScalarType? out_dtype=None, Tensor? beside=None) -> Tensor",
        fp8_dequantize,
    ),
    "int4_dequantize": (
        "(Tensor q, Tensor scales, *, ScalarType? out_dtype=None, Tensor? beside=None) -> Tensor",
        int4_dequantize,
    ),
    "fp4_dequantize": (
        "(Tensor q, Tensor scales, float scale, *, ScalarType? out_dtype=None, Tensor? beside=None) -> Tensor",
        fp4_dequantize,
    ),
    "fp4_dynamic": ("(Tensor x, float scale, *, ScalarType? out_dtype=None) -> Tensor", fp4_dynamic),
}
for _name, (_schema, _function) in _OPERATORS.items():
    # As INT8's: constant folders leave alone what is tagged so, and weights stay narrow.
    _library.define(_name + _schema, tags=(torch.Tag.nondeterministic_seeded,))
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class NarrowSite:
    """One input of one operation in FP8 or 4 bits: the `site`, which argument of its consumer it is, the format."""

    site: Site
    argument: int
    format: NumberFormatName


@dataclass(frozen=True)
class Statistics:
    """What calibration knows beyond INT8's amax.

    `maxima` are the largest |x| by table key; `moments`, by the name of a linear's node, are the second moments of
    what it reads, by blocks (`block_moments`), which its weight in 4 bits is fitted to.
    """

    maxima: Mapping[str, float]
    moments: Mapping[str, torch.Tensor]


def place_narrow(
    graph: GraphModule, sites: Sequence[NarrowSite], types: ScaleTypes, statistics: Statistics
) -> dict[str, float]:
    """Insert the sites' Q/DQ into `graph`, in place, weights stored narrow; the float32 scales of activations by key.

    Raises:
        InputError: the table lacks a tensor.
    """
    needed = dict.fromkeys(s.site.group for s in sites if s.site.axis is None)
    check_complete(statistics.maxima, needed)
    by_name = {n.name: n for n in graph.graph.nodes}
    sharing = shared_scales(s.site for s in sites)
    scales: dict[str, float] = {}
    rows: dict[Node, tuple[Node, list[Node]]] = {}
    made: dict[tuple[Node, NumberFormatName, str], Node] = {}  # what several operations read is quantized once
    for one in sites:
        consumer = by_name[one.site.consumer.name]
        source = consumer.args[one.argument]
        assert isinstance(source, torch.fx.Node)
        half = types.of(sharing[one.site.shared])
        if one.site.axis is None:
            scale = _scale(one, half, statistics.maxima[one.site.group])
            scales[one.site.group] = scale
            if one.format == "nvfp4" and _all_dynamic(source):
                rows[source] = rows.get(source) or _rows(graph, source)
                source = _on_rows(graph, consumer, *rows[source])
            again = (source, one.format, one.site.group)
            if again not in made:
                made[again] = _activation(graph, source, one.format, scale)
        else:
            again = (source, one.format, str(one.site.axis))
            if again not in made:
                made[again] = _weight(graph, source, one, half, statistics.moments.get(consumer.name))
        consumer.update_arg(one.argument, made[again])
    drop_unread(graph)
    return scales


def _all_dynamic(source: Node) -> bool:
    """Whether what a linear reads, [N, L, C], has two dynamic dimensions.

    TensorRT-RTX 1.7.1 compiles no attention of one head behind a linear that is given such a tensor in NVFP4. It does
    behind one that is given its rows.
    """
    shape = source.meta["val"].shape
    return len(shape) == 3 and not any(isinstance(d, int) for d in shape[:2])


def _rows(graph: GraphModule, source: Node) -> tuple[Node, list[Node]]:
    """`source` [N, L, C] as rows [N * L, C]; and N and L."""
    aten, nodes = torch.ops.aten, graph.graph
    with nodes.inserting_after(source):
        rows = nodes.call_function(aten.reshape.default, (source, [-1, source.meta["val"].shape[2]]))
        return rows, [nodes.call_function(aten.sym_size.int, (source, k)) for k in (0, 1)]


def _on_rows(graph: GraphModule, linear: Node, rows: Node, sizes: Sequence[Node]) -> Node:
    """`rows`, which the linear is to read; what reads its output gets that as it was."""
    with graph.graph.inserting_after(linear):
        shape = [*sizes, linear.meta["val"].shape[2]]
        whole = graph.graph.call_function(torch.ops.aten.reshape.default, (linear, shape))
    whole.meta = dict(linear.meta)
    linear.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    return rows


def roundings(
    sites: Sequence[NarrowSite], types: ScaleTypes, statistics: Statistics
) -> dict[Node, dict[Node, Callable[[torch.Tensor], torch.Tensor]]]:
    """For each consumer, what stands between it and each of these inputs: Q and DQ, float32 to float32."""
    result: dict[Node, dict[Node, Callable[[torch.Tensor], torch.Tensor]]] = {}
    sharing = shared_scales(s.site for s in sites)
    for one in sites:
        half = types.of(sharing[one.site.shared])
        if one.site.axis is None:
            rounding = _through(one.format, _scale(one, half, statistics.maxima[one.site.group]))
        else:
            moments = statistics.moments.get(one.site.consumer.name)
            rounding = functools.partial(_weight_through, one.format, half, moments)
        result.setdefault(one.site.consumer, {})[one.site.producer] = rounding
    return result


def _through(number_format: NumberFormatName, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    if number_format == "nvfp4":
        return lambda x: fp4_dynamic(x, scale)
    return lambda x: fp8_dequantize(fp8_quantize(x, scale), scale)


def _weight_through(
    number_format: NumberFormatName,
    half: torch.dtype | None,
    moments: torch.Tensor | None,
    w: torch.Tensor,
) -> torch.Tensor:
    stored = store_weight(w, number_format, half, moments)
    wide: torch.Tensor = stored.dequantize(stored.codes, *stored.scales, *stored.arguments)
    return wide


def _scale(one: NarrowSite, half: torch.dtype | None, amax: float) -> float:
    if one.format == "nvfp4":
        return global_scale(amax)
    return float(scales_of(torch.tensor(amax), FP8, half))


def _activation(graph: GraphModule, source: Node, number_format: NumberFormatName, scale: float) -> Node:
    """`source` through the format and back; a constant (which 4 bits never get, `policy.cannot`) is held in FP8."""
    ops, nodes = torch.ops.trtpipe, graph.graph
    if is_constant(source):
        codes = fp8_quantize(constant_value(graph, source).detach(), scale)
        q = add_constant(graph, f"{str(source.target).replace('.', '_')}_fp8", codes, source)
        with nodes.inserting_after(source):
            return nodes.call_function(ops.fp8_dequantize.default, (q, scale))
    with nodes.inserting_after(source):
        if number_format == "nvfp4":
            return nodes.call_function(ops.fp4_dynamic.default, (source, scale))
        q = nodes.call_function(ops.fp8_quantize.default, (source, scale))
    with nodes.inserting_after(q):
        return nodes.call_function(ops.fp8_dequantize.default, (q, scale))


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a narrow format: `codes`, the `scales` of its blocks where it has blocks, and what dequantizes them
    with the `arguments` after it."""

    codes: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    dequantize: torch._ops.OpOverload[..., torch.Tensor]
    arguments: tuple[float, ...] = ()


def store_weight(
    w: torch.Tensor,
    number_format: NumberFormatName,
    half: torch.dtype | None,
    moments: torch.Tensor | None,
) -> StoredWeight:
    """`w` in FP8 with one scale, or, [N, K], in 4 bits, a scale for each block along K.

    A scale for each output channel would gain FP8 little, as its rounding is relative (0.1 to 0.4 dB on trained
    networks), and TensorRT has it for matmuls alone, from 10.6 on Hopper and 10.7 on Ada GPUs (their release notes).

    Args:
        w: float, any shape.
        number_format: fp8, int4 or nvfp4.
        half: what scales are rounded up to.
        moments: of 4 bits, second moments of the inputs, as `blocks` has them; None: not known.
    """
    ops, w = torch.ops.trtpipe, w.detach()
    if number_format == "fp8":
        scale = float(scales_of(w.abs().amax(), FP8, half))
        return StoredWeight(fp8_quantize(w, scale), (), ops.fp8_dequantize.default, (scale,))
    if number_format == "int4":
        block = block_size(INT4, w.shape[1])
        assert block is not None  # the policy gives INT4 to nothing else
        codes, scales = quantize_int4(w, block, half, moments)
        return StoredWeight(codes, (scales,), ops.int4_dequantize.default)
    codes, scales, scale = quantize_nvfp4(w, moments, half)
    return StoredWeight(codes, (scales,), ops.fp4_dequantize.default, (scale,))


def _weight(
    graph: GraphModule, source: Node, one: NarrowSite, half: torch.dtype | None, moments: torch.Tensor | None
) -> Node:
    """The weight stored in the format, and its DQ."""
    assert is_constant(source)
    stem = f"{str(source.target).replace('.', '_')}_{one.format}"
    stored = store_weight(constant_value(graph, source), one.format, half, moments)
    codes = add_constant(graph, stem, stored.codes, source)
    scales = [add_constant(graph, f"{stem}_scale", s, source) for s in stored.scales]
    with graph.graph.inserting_after(source):
        return graph.graph.call_function(stored.dequantize, (codes, *scales, *stored.arguments))

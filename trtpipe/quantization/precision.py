"""The precision of each operation, and the casts that express it in the graph: strong typing without a builder flag."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from trtpipe.errors import InputError
from trtpipe.job.globs import matching, nearest_paths
from trtpipe.job.sections import Half, KeepGlobs
from trtpipe.model.batch_norms import BATCH_NORMS
from trtpipe.model.computing import CPU, placed, sent
from trtpipe.model.nodes import (
    COPIES,
    add_constant,
    calls,
    constant_value,
    is_constant,
    is_foreign,
    module_path,
    op_name,
    source_line,
)  # fmt: skip
from trtpipe.model.products import MATMULS, WEIGHTED
from trtpipe.trt.formats import NO_BF16, product_format
from trtpipe.values import Captured, LayerPrecision, PrecisionName, Site, TensorSpec

#: Largest finite FP16 (IEEE 754 binary16). An activation observed above half of it stays in FP32: other data go higher.
FP16_MAX = 65504.0
FP16_MARGIN = 0.5
#: Smallest normal FP16. A tensor that never reaches it would lose bits or become zero, whatever it is scaled to later.
FP16_TINY = 2.0**-14

SOFTMAX = ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax")
NORMS = (
    "layer_norm", "native_layer_norm", "group_norm", "native_group_norm", *BATCH_NORMS, "instance_norm", "rms_norm",
    "linalg_vector_norm",
)  # fmt: skip
REDUCTIONS = (
    "mean", "sum", "var", "std", "var_mean", "prod", "cumsum", "logsumexp", "exp", "pow", "log",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool1d",
    "avg_pool2d", "avg_pool3d",
)  # fmt: skip
#: Operations that move or select values: they run in the precision of their input.
PASSIVE = (
    *COPIES, "view", "reshape", "permute", "transpose", "flatten", "squeeze", "unsqueeze", "expand", "slice", "select",
    "getitem", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack", "dropout", "relu", "max_pool1d",
    "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "pad", "constant_pad_nd", "repeat", "index_select", "roll",
    "flip", "pixel_shuffle", "pixel_unshuffle", "t", "numpy_T", "maximum", "minimum", "upsample_nearest2d", "neg",
    "abs", "hardtanh", "clamp", "movedim", "unflatten", "gather", "index",
)  # fmt: skip
_NAMES: Mapping[torch.dtype, PrecisionName] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
CASTS = ("_to_copy", "to", "type_as")
#: Operations that read a tensor's shape and not its values.
_SHAPES = ("sym_size", "size", "sym_numel")
QUANTIZE = ("quantize_per_tensor", "quantize_per_channel", "fp8_quantize")
#: Dequantizer to the format that it reads.
FORMAT_OF: Mapping[str, PrecisionName] = {
    "dequantize_per_tensor": "int8", "dequantize_per_channel": "int8", "fp8_dequantize": "fp8",
    "int4_dequantize": "int4", "fp4_dequantize": "nvfp4", "fp4_dynamic": "nvfp4",
}  # fmt: skip
DEQUANTIZE = tuple(FORMAT_OF)


@dataclass(frozen=True)
class Keep:
    """What the job keeps out of a lower precision.

    `fp32`, `fp16` and `bf16` are the job's globs over module paths; a glob that names a container holds for all inside
    it. `wide` has the reason, by node name, of operations that are kept out of INT8 and FP8 beside those, and `notes`
    what else a reader of the report has to know of them.
    """

    fp32: tuple[str, ...] = ()
    fp16: tuple[str, ...] = ()
    bf16: tuple[str, ...] = ()
    wide: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, globs: KeepGlobs) -> Keep:
        """What `precision.keep` of a job keeps."""
        return cls(globs.fp32, globs.fp16, globs.bf16)

    def fp32_glob(self, node: Node) -> str | None:
        """The first glob that keeps the node in FP32."""
        return matching(self.fp32, module_path(node))

    def out_of_int8(self, node: Node) -> bool:
        """Whether the node must not compute in INT8."""
        return self.reason(node) is not None

    def reason(self, node: Node) -> str | None:
        """Why the node is kept out of INT8: the entry of the job, or what it does not gain."""
        return self.entry(node) or self.wide.get(node.name)

    def entry(self, node: Node) -> str | None:
        """The entry of the job that keeps the node out of every number format."""
        for name, globs in (("fp32", self.fp32), ("fp16", self.fp16), ("bf16", self.bf16)):
            glob = matching(globs, module_path(node))
            if glob:
                return f"precision.keep.{name}: {glob}"
        return None


def checked_keep(keep: Keep, graph: GraphModule) -> Keep:
    """`keep`, after every glob was found to match some module of the graph.

    Raises:
        InputError: a glob matches nothing; the message names the nearest paths.
    """
    paths = sorted({module_path(n) for n in calls(graph.graph)} - {""})
    for name, globs in (("fp32", keep.fp32), ("fp16", keep.fp16), ("bf16", keep.bf16)):
        for glob in globs:
            if not any(matching((glob,), p) for p in paths):
                raise InputError(
                    f"precision.keep.{name}: each glob must match a module (got {glob!r}, which matches none). "
                    f"{nearest_paths(glob, paths)}"
                )
    return keep


class _RangeInterpreter(Interpreter):
    """Runs the graph and keeps the largest |x| of every float input and result, in float32."""

    def __init__(self, graph: GraphModule, amax: dict[str, float]) -> None:
        super().__init__(graph)
        self.amax = amax

    def run_node(self, n: Node) -> Any:
        """The node's value, after its maximum was taken."""
        value = super().run_node(n)
        computed = n.op in ("placeholder", "call_function") and isinstance(value, torch.Tensor)
        if computed and value.is_floating_point() and value.numel():
            low, high = torch.aminmax(value)  # a tenth of the time of the infinity norm, and NaN where one is
            seen = max(-float(low), float(high))
            self.amax[n.name] = max(self.amax.get(n.name, 0.0), seen) if not math.isnan(seen) else math.inf
        return value


def observe_ranges(
    captured: Captured, batches: Iterable[Sequence[torch.Tensor]], device: str = CPU
) -> dict[str, float]:
    """Largest |x| of every float input and result in the graph over the batches, by node name; NaN counts as infinite.

    Constants have no range: their values are known.
    """
    amax: dict[str, float] = {}
    interpreter = _RangeInterpreter(captured.graph, amax)
    with placed(captured.graph, device), torch.inference_mode():
        for batch in batches:
            interpreter.run(*sent(batch, device))
    return amax


def place_casts(
    graph: GraphModule,
    *,
    half: torch.dtype | None,
    keep: Keep,
    fp32: Mapping[str, str],
    outputs: Sequence[TensorSpec],
    unquantized: Mapping[str, str],
) -> tuple[LayerPrecision, ...]:
    """Insert casts into `graph`, in place, and return the precision of each computing operation, in execution order.

    An operation runs in `half` (float16, bfloat16 or None: everything stays float32) unless it is a softmax, a norm or
    a reduction, is kept by the job, or touches a tensor that FP16 cannot hold (see `fp32_reasons`). Operations that
    only move values follow their input, but for such a tensor's: a concatenation of quantized ones has no other type.

    Args:
        graph: ATen graph, with Q/DQ or without.
        half: the low precision, None for none.
        keep: the job's globs.
        fp32: node name -> why an operation stays in FP32, from the graph before Q/DQ.
        outputs: the output bindings, whose dtypes get a last cast.
        unquantized: node name -> why an operation stays in float, or is not in the format that it would have had.
    """
    placer = _Placer(graph, half)
    layers = []
    for node in list(graph.graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if node.op == "output":
            placer.finish(node, [getattr(torch, s.dtype) for s in outputs])
        elif node.op != "call_function" or name in QUANTIZE + DEQUANTIZE + CASTS:
            continue
        elif name in PASSIVE:
            placer.follow(node, force_fp32=node.name in fp32)
        elif placer.float_inputs(node) and name not in _SHAPES:
            why = fp32.get(node.name, "")
            dtype = torch.float32 if half is None or why else half
            placer.compute(node, dtype)
            if placer.now(node) is not None:
                layers.append(_layer(node, name, dtype, why, keep, unquantized))
    drop_unread(graph)
    return tuple(layers)


def fp32_reasons(
    graph: GraphModule, half: torch.dtype | None, keep: Keep, ranges: Mapping[str, float]
) -> dict[str, str]:
    """Why operations compute in FP32 although `half` is allowed, by name; what only moves values does not compute.

    Args:
        graph: without Q/DQ: an operation reads through them what they cannot make smaller.
        half: the low precision, None for none.
        keep: the job's globs.
        ranges: largest |x| by node name; used for float16 alone.
    """
    if half is None:
        return {}
    reasons = {n.name: _why_fp32(n, op_name(n), half, keep, ranges) for n in calls(graph.graph)}
    return {name: why for name, why in reasons.items() if why}


@dataclass(frozen=True)
class ScaleTypes:
    """What scales are rounded up to: `half`, as Q and DQ hold them in the type of their float side, or nothing.

    `fp32` are the operations in FP32, with why, and `ranges` the largest |x|, both by node name.
    """

    half: torch.dtype | None = None
    fp32: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, float] = field(default_factory=dict)

    def of(self, sites: Iterable[Site]) -> torch.dtype | None:
        """The type for the scale that these inputs share, all activations or all one weight.

        Of an activation that FP16 cannot hold, both sides are FP32; of a weight, the operations that read it.
        """
        inputs = tuple(sites)
        if not all(s.consumer.name in self.fp32 for s in inputs):
            return self.half
        held = inputs[0].axis is None and not _beyond(
            self.half, [self.ranges.get(s.producer.name, 0.0) for s in inputs]
        )
        return self.half if held else None


def scale_types(graph: GraphModule, half: torch.dtype | None, keep: Keep, ranges: Mapping[str, float]) -> ScaleTypes:
    """What the scales of `graph` in `half` are rounded up to; the arguments are as for `fp32_reasons`."""
    return ScaleTypes(half, fp32_reasons(graph, half, keep, ranges), ranges)


def drop_unread(graph: GraphModule) -> None:
    """Remove nodes without users, our own Q/DQ included, which `eliminate_dead_code` keeps because of their tag."""
    graph.graph.eliminate_dead_code(lambda n: n.is_impure() and not _is(n, QUANTIZE + DEQUANTIZE))
    graph.recompile()


def _layer(
    node: Node, name: str, dtype: torch.dtype, why: str, keep: Keep, unquantized: Mapping[str, str]
) -> LayerPrecision:
    precision = _NAMES[dtype]
    left, right = (FORMAT_OF.get(op_name(x)) if isinstance(x, Node) else None for x in (*node.args, None, None)[:2])
    narrow = product_format(left, right) if name in (*WEIGHTED, *MATMULS) else None
    if narrow is not None:
        beside = f"beside it FP32: {why}" if why else ""
        precision, why = narrow, "; ".join(filter(None, (unquantized.get(node.name), beside)))
    elif not why:
        why = unquantized.get(node.name) or keep.reason(node) or ""
    return LayerPrecision(module_path(node), name, precision, why, source_line(node))


def _why_fp32(node: Node, name: str, half: torch.dtype, keep: Keep, ranges: Mapping[str, float]) -> str:
    if glob := keep.fp32_glob(node):
        return f"precision.keep.fp32: {glob}"
    if is_foreign(node):
        return "operations of a library of the user's own stay in FP32"
    values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    if any(isinstance(v, torch.Tensor) and v.is_complex() for v in values):
        return "complex numbers stay in FP32"
    for names, what in ((SOFTMAX, "softmax stays"), (NORMS, "norms stay"), (REDUCTIONS, "reductions stay")):
        if name in names:
            return f"{what} in FP32"
    if half is torch.bfloat16 and name in NO_BF16:
        return "TensorRT-RTX has no BF16 for it"
    touched = [node, *(n for n in node.all_input_nodes if not is_constant(n))]
    return _beyond(half, [ranges.get(n.name, 0.0) for n in touched])


def _beyond(half: torch.dtype | None, amax: Iterable[float]) -> str:
    """Why `half` cannot hold tensors with these largest |x|; "" where it can."""
    seen = [a for a in amax if a]  # zero is a number FP16 has
    if half is not torch.float16 or not seen:
        return ""
    if max(seen) > FP16_MAX * FP16_MARGIN:
        return f"observed amax {max(seen):.4g} nears FP16's largest number {FP16_MAX:.0f}"
    if min(seen) < FP16_TINY:
        return f"observed amax {min(seen):.4g} is below FP16's smallest normal number {FP16_TINY:.4g}"
    return ""


def _is(node: object, names: tuple[str, ...]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and op_name(node) in names


class _Placer:
    """Tracks the dtype that each float node has now, and inserts each cast once."""

    def __init__(self, graph: GraphModule, half: torch.dtype | None) -> None:
        self.graph = graph
        self.half = half
        self.dtype: dict[Node, torch.dtype] = {}
        self.made: dict[tuple[Node, torch.dtype], Node] = {}

    def now(self, node: Node) -> torch.dtype | None:
        """The float dtype of the node's value (or of its parts), None when it is not floating point."""
        if node in self.dtype:
            return self.dtype[node]
        if is_constant(node):
            dtype = constant_value(self.graph, node).dtype
            return dtype if dtype.is_floating_point else None
        if _is(node, DEQUANTIZE):
            return torch.float32
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None

    def float_inputs(self, node: Node) -> list[Node]:
        return [n for n in node.all_input_nodes if self.now(n) is not None]

    def compute(self, node: Node, dtype: torch.dtype) -> None:
        self._feed(node, dtype)
        if self.now(node) is not None and not isinstance(node.kwargs.get("dtype"), torch.dtype):
            self.dtype[node] = dtype

    def follow(self, node: Node, force_fp32: bool) -> None:
        inputs = self.float_inputs(node)
        if not inputs:
            return
        moving = [n for n in inputs if not is_constant(n)] or inputs
        have = {self.now(n) for n in moving if not _is(n, DEQUANTIZE)} or {self.half or torch.float32}
        dtype = self.half if self.half is not None and have == {self.half} and not force_fp32 else torch.float32
        self.compute(node, dtype)

    def finish(self, output: Node, dtypes: Sequence[torch.dtype]) -> None:
        values = output.args[0]
        assert isinstance(values, (list, tuple))
        output.args = (
            tuple(
                self._as(v, d, output) if isinstance(v, Node) and self._dtype(v) is not d else v
                for v, d in zip(values, dtypes, strict=True)
            ),
        )

    def _dtype(self, node: Node) -> torch.dtype:
        """The dtype of a tensor's node, floating point or not."""
        if (floating := self.now(node)) is not None:
            return floating
        found: torch.dtype = (constant_value(self.graph, node) if is_constant(node) else node.meta["val"]).dtype
        return found

    def _feed(self, node: Node, dtype: torch.dtype) -> None:
        def cast(n: Node) -> Node:
            return self._as(n, dtype, node) if self.now(n) is not None else n

        node.args = torch.fx.map_arg(node.args, cast)
        node.kwargs = torch.fx.map_arg(node.kwargs, cast)

    def _as(self, node: Node, dtype: torch.dtype, user: Node) -> Node:
        """`node` in `dtype`: itself, a constant or a DQ of that dtype, what it was widened from, or a cast."""
        if self.now(node) is dtype:
            return node
        if (node, dtype) in self.made:
            return self.made[node, dtype]
        if _is(node, CASTS) and isinstance(node.args[0], Node) and self.now(node.args[0]) is dtype:
            wide = self.now(node)
            if wide is not None and torch.promote_types(dtype, wide) is wide:  # any other cast of the model's rounds
                return node.args[0]
        new = self._make(node, dtype, user)
        self.made[node, dtype] = new
        self.dtype[new] = dtype
        return new

    def _make(self, node: Node, dtype: torch.dtype, user: Node) -> Node:
        if is_constant(node):
            value = constant_value(self.graph, node).to(dtype)
            return add_constant(self.graph, f"{str(node.target).replace('.', '_')}_{str(dtype)[6:]}", value, node)
        with self.graph.graph.inserting_after(node):
            if _is(node, DEQUANTIZE):
                new = self.graph.graph.call_function(node.target, node.args, {**node.kwargs, "out_dtype": dtype})  # type: ignore[arg-type]
                stack = node
            else:
                new = self.graph.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
                stack = user
        new.meta = {k: v for k, v in stack.meta.items() if k in ("nn_module_stack", "stack_trace")}
        return new


def half_dtype(half: Half | None) -> torch.dtype | None:
    """PyTorch's type of `Precision.half`; None for None."""
    return None if half is None else torch.float16 if half == "fp16" else torch.bfloat16

"""Observers and Q/DQ on the captured graph: a `TensorRTQuantizer` on torchao's PT2E."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from calib.algorithms import INT8_RANGE
from trtpipe.errors import InputError, titled
from trtpipe.model.export import export
from trtpipe.model.nodes import (
    add_constant,
    bias_of,
    calls,
    constant_value,
    copied,
    drop_unread_constants,
    is_constant,
    module_path,
    set_constant,
)
from trtpipe.model.pt2e import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
    convert_pt2e,
    prepare_pt2e,
)
from trtpipe.model.sites import kept_sites, of_product, shared_scales
from trtpipe.quantization.formats import FORMATS, INT8, check_complete, least_scales, scales_of
from trtpipe.quantization.given import not_fused, raised
from trtpipe.quantization.narrow import NarrowSite, Statistics, place_narrow
from trtpipe.quantization.observers import ActivationObserver, PerChannelWeightObserver
from trtpipe.quantization.policy import Assignment, Modes, assign, cannot, checked_modes, idle_globs, idle_modes
from trtpipe.quantization.precision import (
    Keep,
    ScaleTypes,
    checked_keep,
    place_casts,
    scale_types,
)
from trtpipe.quantization.rounding import on_grid
from trtpipe.values import Captured, Int8Weight, Quantized, Site, Skipped

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


class TensorRTQuantizer(Quantizer):  # type: ignore[misc]
    """Annotates the given sites, which `model.sites` has found."""

    def __init__(self, sites: Sequence[Site], types: ScaleTypes) -> None:
        self.sites = sites
        self.types = types

    def annotate(self, model: GraphModule) -> GraphModule:
        """Write each consumer's input specs; sites of one group, and of one weight, share the first one's observer.

        PT2E would share by itself what several operations read, and before torchao 0.13 runs in circles where that
        is also written down: all of it is written down here, and nothing left to it.
        """
        first: dict[object, tuple[Node, Node]] = {}
        sharing = shared_scales(self.sites)
        by_name = {n.name: n for n in model.graph.nodes}
        inputs: dict[Node, dict[Node, QuantizationSpec]] = {}
        for site in self.sites:
            consumer = by_name[site.consumer.name]
            producer = by_name[site.producer.name] if site.axis is None else consumer.args[1]
            if producer in inputs.get(consumer, ()):  # one tensor twice, as in matmul(y, y)
                continue
            spec: QuantizationSpec
            if site.shared in first:
                spec = SharedQuantizationSpec(first[site.shared])
            else:
                first[site.shared] = (producer, consumer)
                half = self.types.of(sharing[site.shared])
                spec = _ACTIVATION if site.axis is None else self._weight(site.axis, half)
            inputs.setdefault(consumer, {})[producer] = spec
        for consumer, spec_map in inputs.items():
            consumer.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map=spec_map, allow_implicit_sharing=False, _annotated=True
            )
        return model

    def validate(self, model: GraphModule) -> None:
        """Refuse nothing: the sites come from this graph."""

    def _weight(self, axis: int, half: torch.dtype | None) -> QuantizationSpec:
        low, high = INT8_RANGE
        return QuantizationSpec(
            dtype=torch.int8,
            quant_min=low,
            quant_max=high,
            qscheme=torch.per_channel_symmetric,
            ch_axis=axis,
            is_dynamic=False,
            observer_or_fake_quant_ctr=PerChannelWeightObserver.with_args(half=half),
        )


_ACTIVATION = QuantizationSpec(
    dtype=torch.int8,
    quant_min=INT8_RANGE[0],
    quant_max=INT8_RANGE[1],
    qscheme=torch.per_tensor_symmetric,
    is_dynamic=False,
    observer_or_fake_quant_ctr=ActivationObserver,
)


_FLOAT32 = ScaleTypes()


@dataclass(frozen=True)
class Prepared:
    """The captured graph with observers: `observers` maps the key of each shared scale to its observer; `int8` is that
    of the captured graph; `types` say what scales are rounded to."""

    graph: GraphModule
    observers: Mapping[str, ActivationObserver]
    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]
    int8: Mapping[str, Int8Weight]
    types: ScaleTypes


def prepare(
    captured: Captured, keep: Callable[[Node], bool] = lambda node: False, types: ScaleTypes = _FLOAT32
) -> Prepared:
    """A copy of the captured graph with an observer on every site that `keep` does not hold out of INT8.

    Of corrected INT8 weights it holds the shapes alone, until `place_qdq`.
    """
    sites = kept_sites(captured.sites, keep)
    graph = copied(captured.graph)
    names = [s.consumer.name for s in sites if s.axis is not None]
    write_int8(graph, {n: captured.int8[n] for n in names if n in captured.int8})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = prepare_pt2e(graph, TensorRTQuantizer(sites, types))
    by_name = {n.name: n for n in graph.graph.nodes}
    observers: dict[str, ActivationObserver] = {}
    for site in sites:
        if site.axis is None and site.group not in observers:
            observers[site.group] = _observer_on(graph, by_name[site.consumer.name], site.producer.name)
    return Prepared(graph, observers, sites, captured.skipped, captured.int8, types)


def write_int8(graph: GraphModule, weights: Mapping[str, Int8Weight]) -> None:
    """Give operations of a graph, by name, their corrected biases and room for their INT8 weights, which are zeros in
    no memory until `write_levels`: in float they would take four times what they take. The graph must be a copy.

    A weight that others read too, like the table of an embedding, stays for them as it is.
    """
    for node in [n for n in graph.graph.nodes if n.name in weights]:
        one, weight, bias = weights[node.name], node.args[1], bias_of(node)
        if one.stored is not None:
            room = torch.zeros(()).expand(one.stored.shape)
            alike = [n for n in graph.graph.find_nodes(op="get_attr") if n.target == weight.target]
            if {reader for n in alike for reader in n.users} == {node}:
                set_constant(graph, weight, room)
            else:
                own = add_constant(graph, f"{node.name}_int8_weight", room, node)
                node.args = (node.args[0], own, *node.args[2:])
        if one.bias is not None:
            new = add_constant(graph, f"{node.name}_int8_bias", one.bias, node)
            node.args = (*node.args[:2], new, *node.args[3:])
            if bias is not None and not bias.users:
                graph.graph.erase_node(bias)
    graph.recompile()


def place_qdq(prepared: Prepared, amax: Mapping[str, float]) -> tuple[GraphModule, dict[str, float]]:
    """The prepared graph converted to Q/DQ, weights stored as INT8; and the float32 scale used for each key.

    Raises:
        InputError: the table lacks a tensor, or holds no finite positive number for it.
    """
    scales = {}
    check_complete(amax, prepared.observers)
    sharing = shared_scales(prepared.sites)
    for key, observer in prepared.observers.items():
        observer.scale = scales[key] = float(scales_of(torch.tensor(amax[key]), INT8, prepared.types.of(sharing[key])))
    inputs = {site.consumer.name: scales[site.group] for site in prepared.sites if site.axis is None}
    for site in prepared.sites:
        if site.axis is not None:
            _observe_weight(prepared.graph, site, prepared.int8.get(site.consumer.name), inputs.get(site.consumer.name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = convert_pt2e(prepared.graph)
    axes = {s.consumer.name: s.axis for s in prepared.sites if s.axis is not None}
    write_levels(graph, axes, {n: prepared.int8[n] for n in axes if n in prepared.int8})
    return graph, scales


def write_levels(graph: GraphModule, axes: Mapping[str, int], weights: Mapping[str, Int8Weight]) -> None:
    """Put corrected weights into the room that `write_int8` made for them, in a converted graph.

    Args:
        graph: with Q/DQ; it is changed.
        axes: by the name of an operation, the axis of its weight's output channels.
        weights: by the same names.
    """
    to_int8 = torch.ops.quantized_decomposed.quantize_per_channel
    for node in [n for n in calls(graph.graph) if n.name in weights]:
        if (read := on_grid(weights[node.name])) is not None:
            levels, *given = cast("Node", node.args[1]).all_input_nodes
            scales, zeros = (constant_value(graph, n) for n in given)
            set_constant(graph, levels, to_int8(read, scales, zeros, axes[node.name], *INT8_RANGE, torch.int8))


def _observe_weight(graph: GraphModule, site: Site, corrected: Int8Weight | None, input_scale: float | None) -> None:
    """Show a weight, and the bias beside it, to its observer; `input_scale` is None where the input has none."""
    consumer = next(n for n in graph.graph.nodes if n.name == site.consumer.name)
    bias = bias_of(consumer)
    for node in consumer.all_input_nodes:
        if node.op != "call_module":
            continue
        observer = graph.get_submodule(str(node.target))
        if isinstance(observer, PerChannelWeightObserver):
            observer(constant_value(graph, node.args[0]))
            observer.scales = None if corrected is None else corrected.scales
            if input_scale is not None and is_constant(bias):
                least = least_scales(constant_value(graph, bias), input_scale)
                observer.least = least if observer.least is None else torch.maximum(observer.least, least)


def _observer_on(graph: GraphModule, consumer: Node, producer: str) -> ActivationObserver:
    """The observer between a tensor and its consumer."""
    for node in consumer.all_input_nodes:
        if node.op == "call_module" and any(p.name == producer for p in node.all_input_nodes):
            observer = graph.get_submodule(str(node.target))
            if isinstance(observer, ActivationObserver):
                return observer
    raise AssertionError(f"no observer between {producer} and {consumer.name}")


@dataclass(frozen=True)
class Narrow:
    """Input of quantization to FP8 and 4 bits: the job's modes, and the calibration statistics beyond amax."""

    modes: Modes
    statistics: Statistics


def quantize(
    captured: Captured,
    *,
    int8: bool,
    half: torch.dtype | None,
    keep: Keep,
    amax: Mapping[str, float],
    ranges: Mapping[str, float],
    narrow: Narrow | None = None,
) -> Quantized:
    """The captured graph made strongly typed: Q/DQ where wanted, casts where `half`, output bindings in their dtypes.

    Args:
        captured: the hub graph; it is not changed.
        int8: place INT8 Q/DQ pairs; on everything, or where `narrow` says so.
        half: torch.float16, torch.bfloat16 or None.
        keep: globs over module paths that stay in a higher precision.
        amax: float amax by table key, for `int8`.
        ranges: largest |x| by node name, for float16.
        narrow: FP8 and 4 bits, and what shares the graph between them and INT8; None for INT8 alone.

    Raises:
        InputError: a glob matches nothing, nothing is left to quantize, or the table lacks a tensor.
    """
    keep = checked_keep(keep, captured.graph)
    notes: list[str] = []
    scales: dict[str, float] = {}
    plan = checked_plan(captured, int8=int8, keep=keep, modes=None if narrow is None else narrow.modes)
    types = scale_types(captured.graph, half, keep, ranges)
    if int8 or narrow is not None:
        notes += not_fused(plan.int8)
        notes += [f"{titled(module_path(s.node))}: not quantized, {s.reason}" for s in plan.skipped]
    unmet = keep.notes
    if narrow is not None:
        nodes = tuple(plan.chosen.choices)
        unmet = (*unmet, *idle_globs(narrow.modes, nodes, keep), *idle_modes(narrow.modes, plan.chosen))
    if plan.int8:
        graph, scales = place_qdq(prepare(captured, plan.out_of_int8(keep), types), amax)
        notes += raised(captured, plan.int8, scales)
    else:
        graph = copied(captured.graph)
    if narrow is not None:
        scales |= place_narrow(graph, plan.narrow, types, narrow.statistics)
    layers = place_casts(
        graph, half=half, keep=keep, fp32=types.fp32, outputs=captured.outputs, unquantized=plan.reasons
    )
    drop_unread_constants(graph)
    program = export(graph, captured.inputs)
    return Quantized(program, captured.inputs, captured.outputs, layers, scales, tuple(notes), unmet)


@dataclass(frozen=True)
class SitePlan:
    """Which inputs of which operations are quantized, and to which format.

    `int8` are the sites of INT8, `narrow` those of FP8 and 4 bits, `chosen` the format of each operation (empty for a
    job with INT8 alone), `skipped` the operations that no format can hold.
    """

    int8: tuple[Site, ...]
    narrow: tuple[NarrowSite, ...]
    chosen: Assignment
    skipped: tuple[Skipped, ...]

    @property
    def reasons(self) -> dict[str, str]:
        """By the name of a node, why it has no format, or not the preferred one."""
        excluded = {n.name: c.reason for n, c in self.chosen.choices.items() if c.reason}
        return excluded | {s.node.name: s.reason for s in self.skipped}

    def out_of_int8(self, keep: Keep) -> Callable[[Node], bool]:
        """Whether a node must not compute in INT8."""
        return lambda node: keep.out_of_int8(node) or self.chosen.excludes_int8(node)


def checked_plan(captured: Captured, *, int8: bool, keep: Keep, modes: Modes | None) -> SitePlan:
    """`plan_sites`, after it was found to quantize something for a job that asks for it.

    Raises:
        InputError: nothing is left to quantize; or as `plan_sites`.
    """
    plan = plan_sites(captured, int8=int8, keep=keep, modes=modes)
    if (int8 or modes is not None) and not plan.int8 and not plan.narrow:
        raise InputError(_nothing_left(plan, modes, keep))
    return plan


def plan_sites(captured: Captured, *, int8: bool, keep: Keep, modes: Modes | None) -> SitePlan:
    """The sites of a job's formats; changes nothing. `int8` and `keep` are as for `quantize`; `modes` of a job with
    INT8 alone are None.

    Raises:
        InputError: a glob of `precision.formats` matches nothing that its format can hold.
    """
    if not int8 and modes is None:
        return SitePlan((), (), Assignment(), ())
    chosen = Assignment()
    if modes is not None:
        nodes = tuple(dict.fromkeys(s.consumer for s in captured.sites if of_product(s)))
        chosen = assign(captured.sites, checked_modes(modes, nodes), keep)
    plan = SitePlan((), () if modes is None else narrow_sites(captured.sites, chosen, modes), chosen, captured.skipped)
    return replace(plan, int8=kept_sites(captured.sites, plan.out_of_int8(keep))) if int8 else plan


def _nothing_left(plan: SitePlan, modes: Modes | None, keep: Keep) -> str:
    kept = bool(keep.fp32 or keep.fp16 or keep.bf16)
    if modes is None:
        step = "Narrow precision.keep, or turn int8_mode off" if kept else "Turn int8_mode off"
        skipped = next((f" ({s.node.name}: {s.reason})" for s in plan.skipped), "")
        return f"precision.int8_mode: no layer is left to quantize{'' if kept else skipped}. {step}."
    why = next(iter((*plan.reasons.values(), *_unfit(plan, modes))), "the graph has no convolution, linear or matmul")
    return (
        f"precision: something must be left to quantize in {modes.title} (got none: {why}). "
        f"{'Narrow precision.keep, or choose another format' if kept else 'Choose another format, or none'}."
    )


def _unfit(plan: SitePlan, modes: Modes) -> tuple[str, ...]:
    """Why no operation can have any of the job's formats."""
    return tuple(
        f"{FORMATS[f].title}: {why}"
        for n in plan.chosen.choices
        for f in sorted(modes.asked)
        if (why := cannot(n, f, weights_alone=modes.weights_alone(f)))
    )


def narrow_sites(sites: Sequence[Site], chosen: Assignment, modes: Modes) -> tuple[NarrowSite, ...]:
    """The inputs that get Q/DQ in FP8 or 4 bits: both of an operation, or its weight where that alone is narrow."""
    eligible = []
    for site in sites:
        choice = chosen.choices.get(site.consumer)
        name = None if choice is None else choice.format
        if name in (None, "int8") or not of_product(site):
            continue
        if site.axis is None and modes.weights_alone(name):
            continue
        arguments = [k for k, a in enumerate(site.consumer.args[:2]) if a is site.producer]
        eligible += [NarrowSite(site, k, name) for k in arguments]
    return tuple(dict.fromkeys(eligible))

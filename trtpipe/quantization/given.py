"""A model that came with its own Q/DQ: its scales as a table, its weights as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from calib.algorithms import SMALLEST_SCALE
from calib.audit import LEAST_AMAX
from trtpipe.errors import InputError, titled
from trtpipe.model.marks import Mark, is_marked, marks_of, without_marks
from trtpipe.model.nodes import bias_of, constant_value, copied, is_constant, module_path, op_name
from trtpipe.model.products import MATMULS, WEIGHTED
from trtpipe.model.sites import ADDS, SHARED, find_sites
from trtpipe.quantization.formats import INT8, least_scales
from trtpipe.values import Captured, Int8Weight, Site


def given_amax(captured: Captured) -> dict[str, float]:
    """127 times the scale of each activation that the model quantizes itself, by table key; empty where it does not.

    Raises:
        InputError: an activation has several scales.
    """
    if not is_marked(captured.graph):
        return {}
    found = {}
    for site in captured.sites:
        scales = _positive(site).scales
        if site.axis is None and len(scales) != 1:
            what = "a constant that is no weight" if is_constant(site.producer) else "an activation"
            raise InputError(
                f"{module_path(site.consumer) or 'model'}: {what} must have one scale (got {len(scales)}). "
                "Quantize it by tensor."
            )
        if site.axis is None:
            found[site.group] = max(scales[0] * INT8.largest, LEAST_AMAX)
    return found


def _positive(site: Site) -> Mark:
    """The scales of a quantized input.

    Raises:
        InputError: one is negative or not finite, which TensorRT does not take. Nor does it take 0, for which the least
            stands (`raised`): both give zeros.
    """
    mark = marks_of(site.consumer)[site.producer.name]
    for scale in mark.scales:
        if not 0 <= scale < math.inf:
            raise InputError(
                f"{module_path(site.consumer) or 'model'}: the scales of {site.producer.name} must be positive (got "
                f"{scale:g}), as TensorRT takes no other. Write a negative one positive and its integers negated, or "
                "set calibration.recalibrate: true."
            )
    return mark


def as_given(captured: Captured) -> Captured:
    """The graph of a quantized model with the scales of its weights.

    Raises:
        InputError: a weight has its scales along another axis than that of its output channels.
    """
    int8: dict[str, Int8Weight] = {}
    for site in captured.sites:
        if site.axis is not None:
            weight = constant_value(captured.graph, site.producer)
            mark = _positive(site)
            if len(mark.scales) > 1 and mark.axis != site.axis:
                raise InputError(
                    f"{module_path(site.consumer) or 'model'}: a weight must have its scales by output channel (got "
                    "them along another of its axes). Quantize it so, or set calibration.recalibrate: true."
                )
            scales = torch.tensor(mark.scales, dtype=torch.float32)
            scales = scales.clamp_min(SMALLEST_SCALE).expand(weight.shape[site.axis]).contiguous()
            int8[site.consumer.name] = Int8Weight(weight, scales, None)
    return replace(captured, int8=int8)


def raised(captured: Captured, sites: Sequence[Site], scales: Mapping[str, float]) -> list[str]:
    """A note on the tensors whose scales in the file are smaller than the engine can have them.

    Args:
        captured: the graph of any model.
        sites: its quantized inputs.
        scales: the engine's, of activations, by table key.
    """
    if not is_marked(captured.graph):
        return []
    inputs = {s.consumer: scales[s.group] for s in sites if s.axis is None}
    small = [s for s in sites if _too_small(captured, s, inputs.get(s.consumer))]
    if not small:
        return []
    named = ", ".join(dict.fromkeys(f"{titled(module_path(s.consumer))} ({s.producer.name})" for s in small))
    return [f"scales of the model that are 0, or too small for float32 or for INT32 biases, are raised: {named}"]


def _too_small(captured: Captured, site: Site, input_scale: float | None) -> bool:
    given = torch.tensor(_positive(site).scales, dtype=torch.float32)
    bias = None if site.axis is None else bias_of(site.consumer)
    least = torch.tensor(SMALLEST_SCALE)
    if input_scale is not None and is_constant(bias):
        least = least_scales(constant_value(captured.graph, bias), input_scale).clamp_min(SMALLEST_SCALE)
    return bool((given < least).any())


def not_fused(sites: Sequence[Site]) -> list[str]:
    """Notes on the quantized inputs of operations that TensorRT has no INT8 kernel for: only a model that came with
    its own Q/DQ has such."""
    odd: dict[str, list[str]] = {}
    for site in sites:
        if site.axis is None and op_name(site.consumer) not in (*WEIGHTED, *MATMULS, *ADDS, *SHARED):
            odd.setdefault(op_name(site.consumer), []).append(titled(module_path(site.consumer)))
    return [
        f"{op}: quantized by the model and not fused by TensorRT, which computes it in float between Q and DQ: "
        + ", ".join(dict.fromkeys(paths))
        for op, paths in odd.items()
    ]


def in_float(captured: Captured) -> Captured:
    """The same graph without the model's own Q/DQ, to be calibrated."""
    graph = copied(captured.graph)
    without_marks(graph)
    sites, skipped = find_sites(graph)
    return replace(captured, graph=graph, sites=sites, skipped=skipped)

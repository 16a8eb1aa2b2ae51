"""What a correction does at the model's outputs, on samples that it was not made from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trtpipe.quantization.partial import Partial, Rounding, roundings
from trtpipe.quantization.placement import find_sites
from trtpipe.values import Captured

Batch = Sequence[torch.Tensor]
Outputs = tuple[torch.Tensor, ...]

#: An exact copy counts as this many dB.
MOST_DB = 120.0
#: A step must gain more than this, in dB, to be kept.
LEAST_GAIN_DB = 0.05


class Guard:
    """Float outputs of the model on samples kept apart, and how close a quantized graph comes to them."""

    def __init__(self, captured: Captured, batches: Sequence[Batch]) -> None:
        self._batches = batches
        machine = Partial(captured.graph)
        self._wanted = [machine.finish(0, machine.inputs(b), {})[0] for b in batches]

    @property
    def comparable(self) -> bool:
        """Whether there is a finite floating-point output that is not zero everywhere."""
        values = [o for outputs in self._wanted for o in outputs if o.is_floating_point()]
        return bool(values) and all(bool(o.isfinite().all()) for o in values) and any(bool(o.any()) for o in values)

    def decibels(self, captured: Captured, amax: Mapping[str, float]) -> float:
        """Signal to quantization noise ratio of `captured` in INT8, over all outputs: noise over signal, averaged."""
        machine = Partial(captured.graph)
        changed: dict[Any, dict[Any, Rounding]] = roundings(
            captured.graph, find_sites(captured.graph)[0], amax, None, captured.int8
        )
        noise = [0.0] * len(self._wanted[0])
        signal = [0.0] * len(self._wanted[0])
        for batch, wanted in zip(self._batches, self._wanted, strict=True):
            outputs, _ = machine.finish(0, machine.inputs(batch), changed)
            for i, (want, got) in enumerate(zip(wanted, outputs, strict=True)):
                if want.is_floating_point():
                    noise[i] += float((want - got).double().square().sum())
                    signal[i] += float(want.double().square().sum())
        ratios = [n / s for n, s in zip(noise, signal, strict=True) if s > 0]
        mean = sum(ratios) / max(1, len(ratios))
        if not math.isfinite(mean):
            return -MOST_DB
        return min(MOST_DB, -10 * math.log10(max(mean, 10 ** (-MOST_DB / 10))))

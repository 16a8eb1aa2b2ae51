"""Equalization and smoothing: scales of a domain's channels that make INT8 err less, chosen from what channels hold.

A tensor's step is set by its largest channel; scaling the small ones up lets them use more of the 256 levels, and
their scale goes into the weights that read them. How far to go is a trade with those weights' own steps: the strength
of each domain is the one of least predicted error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calib.algorithms import INT8_MAX
from calib.types import Array
from trtpipe.machine import Heap
from trtpipe.model.nodes import constant_value, groups_of, is_constant, op_name
from trtpipe.quantization.corrections.domains import Domain
from trtpipe.quantization.corrections.edits import Arrays
from trtpipe.quantization.partial import Partial
from trtpipe.quantization.rounding import LEAST_MAGNITUDE

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

#: Strengths tried: 1 gives all channels of a domain one range. To leave it as it is is tried too.
STRENGTHS = tuple(i / 10 for i in range(1, 11))
#: Buckets of a channel's histogram: 8 an octave, 24 octaves.
BUCKETS = 192
#: Of so many batches one is counted; maxima are of all.
COUNTED = 4
#: A channel with less than this of the tensor's range is scaled as if it had that much.
_LEAST_SHARE = 2.0**-10
#: How far the largest value seen of a channel stays under a clip that does not cut it: other samples have larger ones,
#: and what is cut there is cut in every precision. MobileNetV2, scaled by 96 photographs, is 29.5 dB from itself in
#: float on the other 32 with 1.3, 35.9 with 2, and gains as much in INT8 (17.2 dB with 1.3 and with 2).
ROOM = 2.0


@dataclass
class ChannelValues:
    """What the channels of one tensor held: int64 counts [C, BUCKETS] of |x|, and the exact maxima float32 [C].

    `base` is what the first bucket's number, the exponent and 3 bits of mantissa of a float32, counts from.

    Mutable: batches are added.
    """

    base: int
    counts: torch.Tensor
    most: torch.Tensor

    @classmethod
    def empty(cls, channels: int, top: float) -> ChannelValues:
        """For a tensor whose first values reach `top`."""
        exponent = math.floor(math.log2(max(top, LEAST_MAGNITUDE))) + 4 + 127
        return cls(exponent * 8 - BUCKETS, torch.zeros(channels, BUCKETS, dtype=torch.int64), torch.zeros(channels))

    def add(self, x: torch.Tensor, count: bool = True) -> None:
        """Take |x|, float32 [C, N], into account; its maxima alone where it is not to be counted."""
        self.most = torch.maximum(self.most, x.amax(1))
        if not count:
            return
        bucket = ((x.view(torch.int32) >> 20) - self.base).clamp_(0, BUCKETS - 1)
        bucket += torch.arange(len(x), dtype=torch.int32)[:, None] * BUCKETS
        self.counts += torch.bincount(bucket.reshape(-1), minlength=self.counts.numel()).view_as(self.counts)

    @property
    def power(self) -> torch.Tensor:
        """Mean square by channel, float64 [C]."""
        middle, _ = self._bounds()
        return (self.counts.double() @ (middle * middle)) / self.counts.sum(1).clamp_min(1)

    @property
    def amax(self) -> torch.Tensor:
        """The threshold of least squared error of each channel alone, float64 [C]."""
        middle, upper = self._bounds()
        step, x = upper[:, None] / INT8_MAX, middle[None]
        inside = torch.where(x < step / 2, x * x, step * step / 12)
        error = torch.where(x > upper[:, None], (x - upper[:, None]) ** 2, inside)
        best = (self.counts.double() @ error.T).argmin(1)
        return torch.minimum(upper[best], self.most.double())

    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        bits = (torch.arange(BUCKETS + 1) + self.base).clamp(0, 255 * 8 - 1).to(torch.int32) << 20
        edges = bits.view(torch.float32).double()
        return (edges[:-1] + edges[1:]) / 2, edges[1:]


def channel_values(
    graph: GraphModule, domains: Sequence[Domain], batches: Iterable[Sequence[torch.Tensor]]
) -> dict[Node, ChannelValues]:
    """What the channels of every tensor that a domain's reader or clip concerns hold on `batches`.

    Args:
        graph: the captured graph.
        domains: found in it.
        batches: the graph's inputs in order, [B, ...] in their dtypes.
    """
    wanted = {node: d.axis for d in domains for node in (*_inputs(d), *(c for c, _ in d.clips))}
    machine = Partial(graph)
    by_node: dict[Node, ChannelValues] = {}
    for at, batch in enumerate(batches):
        alive = machine.inputs(batch)
        with torch.inference_mode():
            for node in machine.nodes:
                x = machine.step(node, alive, {})
                if node in wanted:
                    rows = x.movedim(wanted[node], 0).flatten(1).abs().contiguous()
                    if node not in by_node:
                        by_node[node] = ChannelValues.empty(len(rows), float(rows.max()))
                    by_node[node].add(rows, at % COUNTED == 0)
    return by_node


def _inputs(domain: Domain) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(r.args[0] for r in domain.readers))  # type: ignore[misc]


def equalize(graph: GraphModule, domains: Sequence[Domain], values: Mapping[Node, ChannelValues]) -> dict[str, Array]:
    """Scales for the constants around each domain, float32 [C], as `edits` writes them."""
    arrays: dict[str, Array] = {}
    heap = Heap()
    for domain in domains:
        s = _scales(graph, domain, values)
        if s is not None:
            arrays = merged(arrays, scales_around(domain, s))
        heap.settle()
    return dict(sorted(arrays.items()))


def scales_around(domain: Domain, s: torch.Tensor) -> dict[str, Array]:
    """What the constants of a domain's makers and readers are multiplied by for channel scales `s` (float64 [C])."""
    arrays: dict[str, Array] = {}
    for maker in domain.makers:
        first = 2 if op_name(maker) == "layer_norm" else 1
        for constant in maker.args[first : first + 2]:
            if is_constant(constant):
                arrays[f"scale:0:{constant.target}"] = s.float().numpy()
    for reader in domain.readers:
        axis = 0 if groups_of(reader) > 1 else 1
        arrays = merged(arrays, {f"scale:{axis}:{reader.args[1].target}": (1 / s).float().numpy()})  # type: ignore[union-attr]
    return arrays


def _scales(graph: GraphModule, domain: Domain, values: Mapping[Node, ChannelValues]) -> torch.Tensor | None:
    """float64 [C], every one > 0, or None where nothing is better than 1."""
    read = [(r, values[r.args[0]]) for r in domain.readers]  # type: ignore[index]
    amax = {id(v): v.amax for _, v in read}
    share = torch.stack([amax[id(v)] / amax[id(v)].max().clamp_min(LEAST_MAGNITUDE) for _, v in read]).amax(0)
    live = share > 0
    share = share.clamp_min(_LEAST_SHARE)
    weights = [_DomainReader.of(graph, r, v, amax[id(v)]) for r, v in read]
    candidates = [torch.ones_like(share)]
    for x in STRENGTHS:
        s = _under_clips(domain, values, torch.where(live, share**-x, candidates[0]))
        candidates.append(s if domain.clips else _with_idle(weights, s, live))
    best = int(np.argmin([sum(w.error(s) for w in weights) for s in candidates]))
    return candidates[best] if best else None


def _under_clips(domain: Domain, values: Mapping[Node, ChannelValues], s: torch.Tensor) -> torch.Tensor:
    """`s`, its largest channel at the bound of each clip: channels that it cuts stay as they are, no other one comes to
    be cut."""
    for node, bound in domain.clips:
        own = values[node]
        most = own.most.double()
        s = s * (bound / (own.amax * s).max().clamp_min(LEAST_MAGNITUDE))
        s = torch.minimum(s, bound / (ROOM * most.clamp_min(LEAST_MAGNITUDE)))
        s = torch.where((most >= bound * 0.999) | (most <= 0), torch.ones_like(s), s)
    return s


def _with_idle(readers: Sequence[_DomainReader], s: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """`s`, with no weight of a channel that was never active over what the others leave its output channel's step at:
    what such a channel is multiplied by costs nothing, and 1 would keep the step of all others where it was."""
    least = [r.least(s, live) for r in readers]
    return torch.where(live, s, torch.stack(least).amax(0))


@dataclass(frozen=True)
class _DomainReader:
    """A domain's reader, float64: sums of w^2 over all that one input meets, [C_in]; maxima of |w| over its kernel,
    [groups, C_out / groups, C_in / groups]; how many values a kernel has; what its input holds, [C_in] each."""

    squares: torch.Tensor
    most: torch.Tensor
    kernel: int
    power: torch.Tensor
    amax: torch.Tensor

    @classmethod
    def of(cls, graph: GraphModule, node: Node, values: ChannelValues, amax: torch.Tensor) -> _DomainReader:
        w = constant_value(graph, node.args[1]).detach().double()  # type: ignore[arg-type]
        groups = groups_of(node)
        w = w.reshape(groups, len(w) // groups, w.shape[1], -1)
        squares = (w * w).sum((1, 3)).flatten()
        return cls(squares, w.abs().amax(3), w.shape[3], values.power, amax)

    def least(self, s: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """float64 [C_in], >= 1: scales by which no channel's weight is over the largest of the `live` ones by `s`."""
        groups = len(self.most)
        largest = (self.most / s.view(groups, 1, -1) * live.view(groups, 1, -1)).amax(2, keepdim=True)
        over = torch.where(largest > 0, self.most / largest.clamp_min(LEAST_MAGNITUDE), 1.0)
        return over.amax(1).flatten().clamp(1, 1 / _LEAST_SHARE)

    def error(self, s: torch.Tensor) -> float:
        """Predicted noise over signal at its output when its input is scaled by `s` and its weight by 1 / s."""
        groups = len(self.most)
        steps = (self.most / s.view(groups, 1, -1)).amax(2) / INT8_MAX
        of_input = (self.squares / s**2 * (self.amax > 0)).sum() * ((self.amax * s).max() / INT8_MAX) ** 2 / 12
        read = (self.power * s * s).view(groups, -1).sum(1) * self.kernel
        of_weight = ((steps**2).sum(1) / 12 * read).sum()
        return float((of_input + of_weight) / (self.squares * self.power).sum().clamp_min(LEAST_MAGNITUDE))


def merged(first: Arrays, second: Arrays) -> dict[str, Array]:
    """Scales, float32 [C] by key, applied one after another."""
    return {**first, **{k: v * first[k] if k in first else v for k, v in second.items()}}

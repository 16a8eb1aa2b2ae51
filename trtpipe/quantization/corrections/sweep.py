"""One sweep along the graph, twice at once: what each operation gives in float, and with everything before it in INT8.

At each quantized operation, in execution order, levels of its weight and its bias are chosen so that its output in INT8
comes closest to its output in float, given what quantization has already done to its inputs. Each choice is made on the
samples to fit and kept only if it is also better on samples it did not see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trtpipe.errors import Cancelled
from trtpipe.machine import Heap
from trtpipe.model.nodes import bias_of, constant_value, groups_of, is_constant, op_name
from trtpipe.model.products import WEIGHTED
from trtpipe.quantization import rounding
from trtpipe.quantization.corrections.edits import Arrays, one_axis, weighted_by
from trtpipe.quantization.corrections.local import LocalError, channel_axis
from trtpipe.quantization.partial import BatchTensors, Partial, Rounding, per_tensor, replaced, roundings
from trtpipe.quantization.precision import ScaleTypes
from trtpipe.values import Site

if TYPE_CHECKING:
    from torch.fx import Node

    from trtpipe.progress import Progress
    from trtpipe.values import Captured


#: Rows of inputs that second moments are taken of, for each of a weight's inputs, and at least.
ROWS_PER_INPUT, LEAST_ROWS = 4, 8192
#: A weight with more inputs than this keeps its nearest levels: the moments' square would not fit.
MOST_INPUTS = 8192
#: How strongly a weight that makes up for its inputs' errors is held to itself; None: no such weight.
REGRESSIONS = (None, 0.1)
#: Share of samples left out at each end of the mean that corrects a bias.
TRIM = 0.1


@dataclass
class Fitted:
    """What a sweep chose: levels and scales by constant, bias by operation.

    Mutable: it grows by one place of the graph after the other.
    """

    levels: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)

    def level_arrays(self) -> Arrays:
        """Levels and their scales, as `edits` has them."""
        arrays = {}
        for name, (levels, steps) in self.levels.items():
            arrays[f"levels:{name}"] = levels.numpy()
            arrays[f"steps:{name}"] = steps.numpy()
        return arrays

    def bias_arrays(self) -> Arrays:
        """Biases, as `edits` has them."""
        return {f"bias:{name}": b.numpy() for name, b in self.biases.items()}


@dataclass(frozen=True)
class _Place:
    """An operation, how what it errs is measured, and for every batch the values alive before it and its output in
    float."""

    node: Node
    error: LocalError
    plain: Sequence[Mapping[Node, Any]]
    coded: Sequence[Mapping[Node, Any]]
    wanted: Sequence[torch.Tensor]


class Sweep:
    """Holds the values alive at one place of the graph for every batch, in float and in INT8.

    `amax` are the thresholds of activations, and `which` says whether levels ("rounding"), biases ("bias") or both are
    fitted. Operations of the names `fixed` are in INT8 as they are.
    """

    def __init__(
        self,
        captured: Captured,
        amax: Mapping[str, float],
        fit: Sequence[BatchTensors],
        guard: Sequence[BatchTensors],
        which: Sequence[str],
        progress: Progress,
        fixed: Collection[str] = (),
    ) -> None:
        self._machine = Partial(captured.graph)
        self._graph, self._int8 = captured.graph, captured.int8
        self._amax = amax
        self._batches = [*fit, *guard]
        self._fit = range(len(fit))
        self._guard = range(len(fit), len(fit) + len(guard))
        self._which, self._progress = which, progress
        self._sites: dict[Node, list[Site]] = {}
        for site in captured.sites:
            self._sites.setdefault(site.consumer, []).append(site)
        as_they_are = [s for s in captured.sites if s.consumer.name in fixed]
        self._fixed = roundings(as_they_are, amax, ScaleTypes(), captured.int8)
        self.fitted = Fitted()

    def run(self) -> Fitted:
        """Sweep to the last operation that something is fitted for.

        Raises:
            Cancelled: progress asked to stop.
        """
        plain = [self._machine.inputs(b) for b in self._batches]
        coded = [self._machine.inputs(b) for b in self._batches]
        quantized, heap = False, Heap()  # until then both are the same
        left = len(self._sites.keys() - self._fixed.keys())
        with torch.inference_mode():
            for at, node in self._machine.operations:
                if not left:
                    break
                if self._progress.cancelled():
                    raise Cancelled
                quantized = quantized or node in self._sites
                if node in self._sites and node not in self._fixed:
                    self._progress.step(at, len(self._machine.nodes), "operations")
                    wanted = [self._machine.value(node, alive, {}) for alive in plain]
                    place = _Place(node, LocalError(self._machine, node), plain, coded, wanted)
                    values = self._coded(place, partial(self._forget_batch, node, plain, coded))
                    for one, other, want, value in zip(plain, coded, wanted, values, strict=True):
                        one[node], other[node] = want, value
                    left -= 1
                else:  # what dies of a batch makes room for the next one
                    for one, other in zip(plain, coded, strict=True):
                        want = self._machine.value(node, one, {})
                        value = self._machine.value(node, other, self._fixed) if quantized else want
                        self._forget(node, one, other)
                        one[node], other[node] = want, value
                heap.settle(rising=True)
        return self.fitted

    def _forget_batch(
        self, node: Node, plain: Sequence[dict[Node, Any]], coded: Sequence[dict[Node, Any]], k: int
    ) -> None:
        self._forget(node, plain[k], coded[k])

    def _forget(self, node: Node, *alive: dict[Node, Any]) -> None:
        """Remove the values that no node behind this one reads."""
        for values in alive:
            for dead in self._machine.dying(node):
                values.pop(dead, None)

    def _bias(self, node: Node, channels: int) -> torch.Tensor:
        bias = bias_of(node)
        return constant_value(self._graph, bias).detach() if is_constant(bias) else torch.zeros(channels)

    def _coded(self, place: _Place, done: Callable[[int], None]) -> list[Any]:
        """What a quantized operation gives for each batch, its levels and bias chosen; `done` is told of each batch of
        which no input is needed any more."""
        sites = self._sites[place.node]
        changed: dict[Node, Rounding] = {}
        weight = next((s for s in sites if s.axis is not None), None)
        for site in sites:
            changed[site.producer] = self._nearest(site) if site is weight else per_tensor(self._amax[site.group])
        # The inputs stay as they are: each is quantized once.
        inputs = {s.producer: changed[s.producer] for s in sites if s is not weight}
        quantized = [{n: q(self._of(n, alive)) for n, q in inputs.items()} for alive in place.coded]
        if weight is not None and "rounding" in self._which:
            self._rounding(place, weight, quantized, changed)
        outputs = []
        for k in range(len(self._batches)):
            outputs.append(self._value(place, k, changed, quantized[k]))
            quantized[k] = {}
            done(k)
        if weight is not None and "bias" in self._which:
            outputs = self._correct_bias(place, outputs)
        return outputs

    def _of(self, node: Node, alive: Mapping[Node, Any]) -> Any:
        """The value of an input; a constant that is quantized as an activation (an einsum's, say) is not kept alive."""
        return constant_value(self._graph, node).detach() if is_constant(node) else alive[node]

    def _value(
        self, place: _Place, k: int, changed: Mapping[Node, Rounding], quantized: Mapping[Node, torch.Tensor]
    ) -> Any:
        """The operation on batch `k`; inputs that are in `quantized` need not be quantized again."""
        ready = {n: replaced(x) for n, x in quantized.items()}
        return self._machine.value(place.node, place.coded[k], {place.node: {**changed, **ready}})

    def _nearest(self, site: Site) -> Rounding:
        w = constant_value(self._graph, site.producer).detach()
        assert site.axis is not None
        rows = w.movedim(site.axis, 0).flatten(1)
        scales = rounding.weight_scales(rows)
        return replaced(_unrowed(rounding.nearest(rows, scales) * scales[:, None], w, site.axis))

    def _errors(
        self,
        place: _Place,
        changed: Mapping[Node, Rounding],
        which: Sequence[int],
        quantized: Sequence[Mapping[Node, torch.Tensor]],
    ) -> torch.Tensor:
        """Squared distance of the operation's output from that in float over some batches, by channel: float64 [C]."""
        distances = []
        for k in which:
            got = self._value(place, k, changed, quantized[k])
            distances.append(place.error.distance(got, place.wanted[k]))
        return torch.stack(distances).sum(0)

    def _rounding(
        self,
        place: _Place,
        site: Site,
        quantized: Sequence[Mapping[Node, torch.Tensor]],
        changed: dict[Node, Rounding],
    ) -> None:
        """Levels of the weight by second-order rounding, for the output channels where they are better than the nearest
        ones: each channel's are its own, and how large it is beside the others does not matter.

        A weight that several operations share has the levels of the first one, or of one that stays as it is, and none
        where they differ in which of its axes is that of outputs.
        """
        node, w = place.node, constant_value(self._graph, site.producer).detach()
        name = str(site.producer.target)
        readers = weighted_by(self._graph, name)
        sharing = [n for n in readers if n in self._sites]
        if node is not next((n for n in sharing if n in self._fixed), sharing[0]):
            if (held := self._shared(node, name)) is not None:
                changed[site.producer] = replaced(held)
            return
        padding = node.args[4] if len(node.args) > 4 else 0
        if op_name(node) not in ("conv2d", "linear") or isinstance(padding, str) or w[0].numel() > MOST_INPUTS:
            return
        if not one_axis(readers):
            return
        groups = groups_of(node)
        moments, lost = self._moments(place, quantized, groups, w)
        rows = w.flatten(1).reshape(groups, len(w) // groups, -1)
        steps = rounding.weight_scales(rows)
        levels = rounding.nearest(rows, steps)
        least = self._errors(place, changed, self._guard, quantized).view_as(steps)
        gained = False
        targets = [rows if d is None else rounding.regressed(rows, moments, lost, d) for d in REGRESSIONS]
        own_scales = [rounding.weight_scales(target) for target in targets]
        for own, own_steps in zip(rounding.second_order(targets, own_scales, moments), own_scales, strict=True):
            trial = {**changed, site.producer: replaced((own * own_steps[..., None]).view_as(w))}
            errors = self._errors(place, trial, self._guard, quantized).view_as(steps)
            better = errors < least
            gained |= bool(better.any())
            least = torch.where(better, errors, least)
            steps = torch.where(better, own_steps, steps)
            levels = torch.where(better[..., None], own, levels)
        if gained:
            changed[site.producer] = replaced((levels * steps[..., None]).view_as(w))
            self.fitted.levels[name] = (levels.view_as(w).to(torch.int8), steps.flatten())

    def _shared(self, node: Node, name: str) -> torch.Tensor | None:
        """The weight on the levels that another operation has been given for it; None where they are the nearest."""
        if name in self.fitted.levels:
            levels, steps = self.fitted.levels[name]
            return rounding.scaled(levels.to(steps.dtype), steps, WEIGHTED[op_name(node)])
        own = self._int8.get(node.name)
        return None if own is None else rounding.on_grid(own)

    def _moments(
        self, place: _Place, quantized: Sequence[Mapping[Node, torch.Tensor]], groups: int, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """E[q q^T], float32 [groups, K, K], and what the weight loses by its quantized inputs, E[w (x - q) q^T],
        float32 [groups, C_out / groups, K], over the samples to fit.
        """
        x: Node = place.node.args[0]  # type: ignore[assignment]
        inputs = w[0].numel()
        rows = w.flatten(1).reshape(groups, -1, inputs)
        each = -(-max(LEAST_ROWS, ROWS_PER_INPUT * inputs) // len(self._fit))
        first = 2 * rows.shape[1] < inputs  # the shorter way through the three factors: by the weight at once, or last
        moments = torch.zeros(groups, inputs, inputs)
        lost, count = torch.zeros_like(rows if first else moments), 0
        for k in self._fit:
            q = _patches(place.node, quantized[k][x], w, groups, each)
            gone = _patches(place.node, place.plain[k][x], w, groups, each) - q
            rounding.add_moments(moments, q)
            lost.baddbmm_(rows @ gone if first else gone, q.mT)
            count += q.shape[-1]
        moments.triu_().add_(moments.triu(1).mT)
        return moments.div_(count), (lost if first else rows @ lost).div_(count)

    def _correct_bias(self, place: _Place, outputs: list[Any]) -> list[Any]:
        """Add what is missing of each channel's mean, where it helps: over samples, largest and smallest left out."""
        node = place.node
        axis = channel_axis(node)

        def means(x: torch.Tensor) -> torch.Tensor:
            return x.movedim(axis, 1).flatten(2).mean(2) if x.dim() > 2 else x

        by_sample = torch.cat([means(place.wanted[k]) - means(outputs[k]) for k in self._fit]).sort(0).values
        cut = int(len(by_sample) * TRIM)
        delta = by_sample[cut : len(by_sample) - cut].mean(0)
        added = delta.reshape(-1, *[1] * (-axis - 1))
        gains = sum(
            place.error.distance(outputs[k], place.wanted[k])
            - place.error.distance(outputs[k] + added, place.wanted[k])
            for k in self._guard
        )
        delta = delta * (gains > 0)
        if not bool(delta.any()):
            return outputs
        added = delta.view_as(added)
        self.fitted.biases[node.name] = self._bias(node, len(delta)) + delta
        return [x.add_(added) for x in outputs]


def _unrowed(rows: torch.Tensor, like: torch.Tensor, axis: int) -> torch.Tensor:
    return rows.reshape(like.movedim(axis, 0).shape).movedim(0, axis)


def _patches(node: Node, x: torch.Tensor, w: torch.Tensor, groups: int, most: int) -> torch.Tensor:
    """The inputs of each output value, about `most` of them evenly drawn: float32 [groups, K, rows]."""
    if op_name(node) == "linear":
        rows = x.reshape(-1, x.shape[-1])
        return rows[_drawn(len(rows), most)].T[None].contiguous()
    stride, padding, dilation = (_pair(node.args[i] if len(node.args) > i else d) for i, d in ((3, 1), (4, 0), (5, 1)))
    positions = len(x) * (x.shape[2] // stride[0]) * (x.shape[3] // stride[1])
    every = max(1, round(math.sqrt(positions / most)))  # only so many of the output's rows and columns are unfolded
    stride = (stride[0] * every, stride[1] * every)
    if w.shape[2:] == (1, 1) and padding == (0, 0):
        columns = x[:, :, :: stride[0], :: stride[1]].flatten(2)
    else:
        columns = F.unfold(x, w.shape[2:], dilation, padding, stride)
    return columns.movedim(0, 1).reshape(groups, -1, len(columns) * columns.shape[2])


def _drawn(count: int, most: int) -> torch.Tensor:
    """At most `most` of `count` places, evenly spread: int64."""
    return torch.arange(count) if count <= most else torch.arange(most) * count // most


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    pair = tuple(value)
    return (pair[0], pair[0]) if len(pair) == 1 else (pair[0], pair[1])

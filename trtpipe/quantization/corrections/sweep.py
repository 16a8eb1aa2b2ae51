"""One sweep along the graph, twice at once: what each operation gives in float, and with everything before it in INT8.

At each quantized operation, in execution order, thresholds of its inputs, levels of its weight and its bias are chosen
so that its output in INT8 comes closest to its output in float, given what quantization has already done to its
inputs. Each choice is made on the samples to fit and kept only if it is also better on samples it did not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from calib.audit import LEAST_AMAX
from trtpipe.errors import Cancelled
from trtpipe.model.nodes import constant_value, is_constant, op_name
from trtpipe.quantization.corrections import rounding
from trtpipe.quantization.corrections.domains import groups_of
from trtpipe.quantization.partial import Partial, Rounding
from trtpipe.quantization.placement import Site, find_sites
from trtpipe.quantization.quantize import ACTIVATION_RANGE

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from trtpipe.progress import Progress

Batch = Sequence[torch.Tensor]

#: Thresholds tried for an activation, relative to the table's; the exact maximum is tried too.
FACTORS = (0.6, 0.8, 1.25, 1.6)
#: Samples that thresholds are tried on.
THRESHOLD_SAMPLES = 8
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
    """What a sweep chose: amax by key of a scale, levels and scales by constant, bias by operation."""

    amax: dict[str, float] = field(default_factory=dict)
    levels: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)


class Sweep:
    """Holds the values alive at one place of the graph for every batch, in float and in INT8."""

    def __init__(
        self,
        graph: GraphModule,
        amax: Mapping[str, float],
        most: Mapping[str, float],
        fit: Sequence[Batch],
        guard: Sequence[Batch],
        which: Sequence[str],
        progress: Progress,
    ) -> None:
        self._machine = Partial(graph)
        self._graph = graph
        self._amax, self._most = dict(amax), most
        self._batches = [*fit, *guard]
        self._fit = range(len(fit))
        self._guard = range(len(fit), len(fit) + len(guard))
        self._which, self._progress = which, progress
        self._sites: dict[Node, list[Site]] = {}
        for site in find_sites(graph)[0]:
            self._sites.setdefault(site.consumer, []).append(site)
        self.fitted = Fitted()
        self._settled: set[str] = set()

    def run(self) -> Fitted:
        """Sweep to the end of the graph.

        Raises:
            Cancelled: progress asked to stop.
        """
        plain = [self._machine.inputs(b) for b in self._batches]
        coded = [self._machine.inputs(b) for b in self._batches]
        with torch.inference_mode():
            for at, node in enumerate(self._machine.nodes):
                if node.op in ("placeholder", "get_attr", "output"):
                    continue
                if self._progress.cancelled():
                    raise Cancelled("interrupted")
                wanted = [self._machine.value(node, alive, {}) for alive in plain]
                changed = {}
                if node in self._sites:
                    changed = {node: self._choose(node, plain, coded, wanted)}
                    self._progress.step(at, len(self._machine.nodes), "operations")
                dying = self._machine.dying(node)
                for k, alive in enumerate(coded):
                    alive[node] = self._machine.value(node, alive, changed) + self._added(node)
                    plain[k][node] = wanted[k]
                    for dead in dying:
                        alive.pop(dead, None)
                        plain[k].pop(dead, None)
        return self.fitted

    def _added(self, node: Node) -> Any:
        """What a new bias adds, over the operation's own: a tensor to broadcast, or 0."""
        new = self.fitted.biases.get(node.name)
        if new is None:
            return 0
        return _along(new - self._bias(node, len(new)), node)

    def _bias(self, node: Node, channels: int) -> torch.Tensor:
        bias = node.args[2] if len(node.args) > 2 else None
        return constant_value(self._graph, bias).detach() if is_constant(bias) else torch.zeros(channels)

    def _choose(
        self, node: Node, plain: list[dict[Node, Any]], coded: list[dict[Node, Any]], wanted: list[torch.Tensor]
    ) -> dict[Node, Rounding]:
        """What stands between the operation and each of its quantized inputs."""
        sites = self._sites[node]
        changed: dict[Node, Rounding] = {}
        weight: Site | None = None
        for site in sites:
            if site.axis is not None:
                weight = site
            else:
                changed[site.producer] = _saturating(self._amax[site.group])
        if weight is not None:
            changed[weight.producer] = self._nearest(weight)
        if "thresholds" in self._which and any(s.rule == "Q1" for s in sites):
            self._thresholds(node, coded, wanted, changed)
        if weight is not None and "rounding" in self._which:
            self._rounding(node, weight, plain, coded, wanted, changed)
        if weight is not None and "bias" in self._which:
            self._correct_bias(node, coded, wanted, changed)
        return changed

    def _nearest(self, site: Site) -> Rounding:
        w = constant_value(self._graph, site.producer).detach()
        assert site.axis is not None
        rows = w.movedim(site.axis, 0).flatten(1)
        scales = rounding.weight_scales(rows)
        return _constant(_unrowed(rounding.nearest(rows, scales) * scales[:, None], w, site.axis))

    def _error(
        self,
        node: Node,
        coded: list[dict[Node, Any]],
        wanted: list[torch.Tensor],
        changed: Mapping[Node, Rounding],
        which: Sequence[int],
    ) -> float:
        total = 0.0
        for k in which:
            total += float((self._machine.value(node, coded[k], {node: changed}) - wanted[k]).double().square().sum())
        return total

    def _thresholds(
        self, node: Node, coded: list[dict[Node, Any]], wanted: list[torch.Tensor], changed: dict[Node, Rounding]
    ) -> None:
        """The threshold of each input of least error at the output, where it is not another operation's already."""
        size = max(1, len(wanted[0]) if wanted[0].dim() else 1)
        few = list(self._fit)[: max(1, THRESHOLD_SAMPLES // size)]
        for site in self._sites[node]:
            if site.axis is not None or site.group in self._settled:
                continue
            self._settled.add(site.group)
            amax, most = self._amax[site.group], self._most[site.group]
            candidates = sorted({min(amax * f, most) for f in FACTORS} | {amax, most})
            candidates = [c for c in candidates if c >= LEAST_AMAX]
            errors = {
                c: self._error(node, coded, wanted, {**changed, site.producer: _saturating(c)}, few) for c in candidates
            }
            best = min(errors, key=lambda c: (errors[c], -c))
            if best != amax and errors[best] < 0.98 * errors[amax]:
                trial = {**changed, site.producer: _saturating(best)}
                if self._error(node, coded, wanted, trial, self._guard) < self._error(
                    node, coded, wanted, changed, self._guard
                ):
                    changed[site.producer] = trial[site.producer]
                    self._amax[site.group] = self.fitted.amax[site.group] = best

    def _rounding(
        self,
        node: Node,
        site: Site,
        plain: list[dict[Node, Any]],
        coded: list[dict[Node, Any]],
        wanted: list[torch.Tensor],
        changed: dict[Node, Rounding],
    ) -> None:
        name, w = op_name(node), constant_value(self._graph, site.producer).detach()
        if (
            name not in ("conv2d", "linear")
            or site.axis != 0
            or isinstance(node.args[4] if len(node.args) > 4 else 0, str)
        ):
            return
        groups = groups_of(node)
        if w[0].numel() > MOST_INPUTS:
            return
        moments, lost = self._moments(node, plain, coded, changed, groups, w)
        if moments is None or lost is None:
            return
        rows = w.flatten(1).reshape(groups, len(w) // groups, -1)
        best = self._error(node, coded, wanted, changed, self._guard)
        found = None
        for damping in REGRESSIONS:
            target = rows if damping is None else rounding.regressed(rows, moments, lost, damping)
            steps = rounding.weight_scales(target)
            one = rounding.second_order(target, steps, moments)
            trial = {**changed, site.producer: _constant((one * steps[..., None]).view_as(w))}
            error = self._error(node, coded, wanted, trial, self._guard)
            if error < best:
                best, found = error, (one, steps.flatten(), trial)
        if found is not None:
            one, steps, trial = found
            changed[site.producer] = trial[site.producer]
            self.fitted.levels[str(site.producer.target)] = (one.view_as(w).to(torch.int8), steps)

    def _moments(
        self,
        node: Node,
        plain: list[dict[Node, Any]],
        coded: list[dict[Node, Any]],
        changed: Mapping[Node, Rounding],
        groups: int,
        w: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """E[q q^T] and E[(x - q) q^T] over the samples to fit: float32 [groups, K, K]."""
        x: Node = node.args[0]  # type: ignore[assignment]
        inputs = w[0].numel()
        rows = max(LEAST_ROWS, ROWS_PER_INPUT * inputs)
        each = -(-rows // len(self._fit))
        moments = lost = None
        count = 0
        for k in self._fit:
            q = _patches(node, changed[x](coded[k][x]), w, groups, each)
            f = _patches(node, plain[k][x], w, groups, each)
            second, cross = q @ q.mT, (f - q) @ q.mT
            moments = second if moments is None else moments + second
            lost = cross if lost is None else lost + cross
            count += q.shape[-1]
        if moments is None or lost is None:
            return None, None
        return moments / count, lost / count

    def _correct_bias(
        self, node: Node, coded: list[dict[Node, Any]], wanted: list[torch.Tensor], changed: Mapping[Node, Rounding]
    ) -> None:
        """Add the mean of what is missing by channel: over samples, the largest and smallest left out."""
        axis = wanted[0].dim() - 1 if op_name(node) == "linear" else 1
        missing, before = [], 0.0
        for k in (*self._fit, *self._guard):
            lost = wanted[k] - self._machine.value(node, coded[k], {node: changed})
            if k in self._guard:
                before += float(lost.double().square().sum())
                continue
            sample = lost.movedim(axis, 1).flatten(2).mean(2) if lost.dim() > 2 else lost
            missing.append(sample)
        stacked = torch.cat(missing).sort(0).values
        cut = int(len(stacked) * TRIM)
        delta = stacked[cut : len(stacked) - cut].mean(0)
        self.fitted.biases[node.name] = self._bias(node, len(delta)) + delta
        added, after = _along(delta, node), 0.0
        for k in self._guard:
            lost = wanted[k] - self._machine.value(node, coded[k], {node: changed}) - added
            after += float(lost.double().square().sum())
        if after >= before:
            del self.fitted.biases[node.name]


def _saturating(amax: float) -> Rounding:
    scale = max(amax / 127, 1e-38)
    return lambda x: torch.fake_quantize_per_tensor_affine(x, scale, 0, *ACTIVATION_RANGE)


def _constant(value: torch.Tensor) -> Rounding:
    return lambda _: value


def _unrowed(rows: torch.Tensor, like: torch.Tensor, axis: int) -> torch.Tensor:
    return rows.reshape(like.movedim(axis, 0).shape).movedim(0, axis)


def _along(delta: torch.Tensor, node: Node) -> torch.Tensor:
    """[C] to broadcast over the operation's output."""
    if op_name(node) == "linear":
        return delta
    return delta.reshape(-1, *[1] * (node.meta["val"].dim() - 2))


def _patches(node: Node, x: torch.Tensor, w: torch.Tensor, groups: int, most: int) -> torch.Tensor:
    """The inputs of each output value, at most about `most` of them evenly drawn: float32 [groups, K, rows]."""
    if op_name(node) == "linear":
        rows = x.reshape(-1, x.shape[-1])
        return rows[:: max(1, len(rows) // most)].T[None].contiguous()
    stride, padding, dilation = (_pair(node.args[i] if len(node.args) > i else d) for i, d in ((3, 1), (4, 0), (5, 1)))
    if w.shape[2:] == (1, 1) and padding == (0, 0):
        columns = x[:, :, :: stride[0], :: stride[1]].flatten(2)
    else:
        columns = F.unfold(x, w.shape[2:], dilation, padding, stride)
    step = max(1, columns.shape[0] * columns.shape[2] // most)
    flat = columns.movedim(1, 0).flatten(1)[:, ::step]
    return flat.reshape(groups, -1, flat.shape[1]).contiguous()


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    pair = tuple(value)
    return (pair[0], pair[0]) if len(pair) == 1 else (pair[0], pair[1])

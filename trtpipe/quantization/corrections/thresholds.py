"""Thresholds of activations by what each costs at the output of the operation that reads it, all else in float.

Behind quantized operations, one that makes every output smaller would look better the noisier they are. So thresholds
depend on no level or bias, and are chosen and judged before those are fitted to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from calib.audit import LEAST_AMAX
from trtpipe.errors import Cancelled
from trtpipe.quantization.corrections.local import LocalError
from trtpipe.quantization.partial import BatchTensors, Partial, per_tensor

if TYPE_CHECKING:
    from torch.fx import Node

    from trtpipe.progress import Progress
    from trtpipe.values import Captured, Site

#: Thresholds tried for an activation, relative to the best so far, for as long as they are better: coarse, then fine.
#: A softmax' probabilities want a tenth of their maximum, so that the many small ones are not rounded to zero.
FACTORS = (0.7, 1 / 0.7, 0.84, 1 / 0.84)
#: A threshold is changed for less than this share of the error.
LEAST_IMPROVEMENT = 0.98
#: Samples that thresholds are tried on.
THRESHOLD_SAMPLES = 8


class ThresholdSearch:
    """One pass along the graph in float, with the values alive at one place of it for every batch.

    `amax` are the thresholds to begin with, `most` the exact maxima, `rare` the keys of tensors of which too few values
    were seen to cut any of them, and `settled` those of the thresholds that stay.
    """

    def __init__(
        self,
        captured: Captured,
        amax: Mapping[str, float],
        most: Mapping[str, float],
        rare: Collection[str],
        fit: Sequence[BatchTensors],
        guard: Sequence[BatchTensors],
        progress: Progress,
        settled: Collection[str] = (),
    ) -> None:
        self._machine = Partial(captured.graph)
        self._amax, self._most, self._rare, self._settled = amax, most, rare, settled
        tried = fit[: max(1, THRESHOLD_SAMPLES // max(1, len(fit[0][0])))]
        #: The samples to fit that no threshold is tried on.
        self.unseen = fit[len(tried) :]
        self._batches = [*tried, *guard]
        self._tried, self._guard = range(len(tried)), range(len(tried), len(tried) + len(guard))
        self._progress = progress
        self._sites: dict[Node, list[Site]] = {}
        for site in captured.sites:
            self._sites.setdefault(site.consumer, []).append(site)

    def run(self) -> dict[str, float]:
        """The changed ones of `amax`, each chosen at the first weighted operation that reads it.

        Raises:
            Cancelled: progress asked to stop.
        """
        chosen: dict[str, float] = {}
        settled = set(self._settled)
        left = {n for n, sites in self._sites.items() if any(s.rule == "Q1" for s in sites)}
        alive = [self._machine.inputs(b) for b in self._batches]
        with torch.inference_mode():
            for at, node in self._machine.operations:
                if not left:
                    break
                left.discard(node)
                if self._progress.cancelled():
                    raise Cancelled
                wanted = [self._machine.value(node, values, {}) for values in alive]
                sites = self._sites.get(node, ())
                if any(s.rule == "Q1" for s in sites):
                    self._progress.step(at, len(self._machine.nodes), "operations")
                    for site in sites:
                        if site.axis is None and site.group not in settled:
                            settled.add(site.group)
                            best = self._best(site, alive, wanted)
                            if best != self._amax[site.group]:
                                chosen[site.group] = best
                for values, value in zip(alive, wanted, strict=True):
                    values[node] = value
                    for dead in self._machine.dying(node):
                        values.pop(dead, None)
        return chosen

    def _best(self, site: Site, alive: Sequence[Mapping[Node, Any]], wanted: Sequence[torch.Tensor]) -> float:
        """The threshold that costs least on the samples to try, where it also gains on those that it did not see."""
        node, error = site.consumer, LocalError(self._machine, site.consumer)

        def cost(c: float, which: Iterable[int]) -> float:
            alone = {node: {site.producer: per_tensor(c)}}
            outputs = ((k, self._machine.value(node, alive[k], alone)) for k in which)
            return sum(float(error.distance(got, wanted[k]).sum()) for k, got in outputs)

        errors: dict[float, float] = {}

        def tried(c: float) -> float:
            if c not in errors:
                errors[c] = cost(c, self._tried)
            return errors[c]

        amax, most = self._amax[site.group], self._most[site.group]
        best, least = amax, amax if site.group in self._rare else LEAST_AMAX
        for factor in FACTORS:
            while least <= (c := min(best * factor, most)) != best and tried(c) < tried(best):
                best = c
        if best == amax or errors[best] >= LEAST_IMPROVEMENT * errors[amax]:
            return amax
        return best if cost(best, self._guard) < cost(amax, self._guard) else amax

"""All corrections, one after another, each kept or taken back by what it does on samples it was not made from.

A table is made once for all targets, which may have different operations in INT8. What is fitted to the noise of
operations that are in float after all does harm: MobileNetV2 had 22.8 dB on TensorRT-RTX, which leaves it two
operations in INT8, with corrections fitted to the eleven that TensorRT has, and 30.3 without any (24 photographs, on 64
others). So the operations are corrected placement by placement, fewest first, each as in the first placement that has
it in INT8: what is fitted later changes nothing of an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from calib.audit import nine_digits
from calib.corrections import Corrections, Step
from trtpipe.errors import Cancelled
from trtpipe.job.sections import GRAPH_CORRECTIONS
from trtpipe.machine import Heap
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections.domains import Domain, find_domains
from trtpipe.quantization.corrections.edits import Arrays, corrected
from trtpipe.quantization.corrections.equalization import ChannelValues, channel_values, equalize, merged
from trtpipe.quantization.corrections.guard import CrossGuard, Gains, Guard, Score, of_halves
from trtpipe.quantization.corrections.samples import LEAST_SAMPLES, Samples, drawn
from trtpipe.quantization.corrections.sweep import Sweep
from trtpipe.quantization.corrections.thresholds import ThresholdSearch
from trtpipe.quantization.partial import BatchTensors
from trtpipe.quantization.placements import EVERYTHING, Placement
from trtpipe.values import Captured, Site

if TYPE_CHECKING:
    from torch.fx import Node

    from calib.data import Source
    from calib.table import CalibrationTable
    from trtpipe.progress import Progress

#: Further samples that judge thresholds, and samples of each half that judge scales. What is cut shows on few of them:
#: of two networks one photograph in twelve had all the loss, 4 and 7 dB over the set, and in every fourth run none of
#: those was among the 16 that judged.
MORE_JUDGES = 32
#: What a scaling may lose on turned samples.
MOST_LOSS_DB = 1.0
#: Values that must have been seen of a tensor for its largest to be cut: a few do not show how large they get.
ENOUGH_VALUES = 1 << 16


def correct(
    captured: Captured,
    table: CalibrationTable,
    source: Source,
    *,
    which: Sequence[str],
    batch_size: int,
    progress: Progress,
    placements: Sequence[Placement] = (EVERYTHING,),
) -> CalibrationTable:
    """The table with thresholds for the corrected model, and the corrections.

    Args:
        captured: the hub graph.
        table: its calibration without corrections, with histograms.
        source: the calibration samples.
        which: names out of `CORRECTIONS`.
        batch_size: samples per forward pass, where all of them are run.
        progress: is told the steps, and may cancel.
        placements: what will be in INT8, fewest operations first. Nothing is fitted for an operation that none of them
            has; a step is judged with all others in float, and must not lose in another placement. The table's
            thresholds are of all operations all the same.

    Raises:
        calib.CalibError: the data is bad.
        Cancelled: progress asked to stop.
    """
    samples = drawn(captured, source)
    if samples is None:
        return _uncorrected(table, f"need at least {LEAST_SAMPLES} calibration samples that differ", progress)
    placements = [p for p in placements if p.of(captured).sites]
    if not placements:
        return _uncorrected(table, "no operation will be in INT8", progress)
    guard = Guard(captured, samples.judge)
    if not guard.comparable:
        return _uncorrected(table, "need a finite floating-point output that is not zero", progress)
    return _Corrector(captured, table, source, guard, samples, which, batch_size, progress, placements).run()


def _uncorrected(table: CalibrationTable, why: str, progress: Progress) -> CalibrationTable:
    """The table as it is, which remembers why nothing could be tried."""
    made = Corrections((), {}, why)
    for line in made.lines:
        progress.note(f"{line}.")
    return replace(table, corrections=made)


class _Corrector:
    def __init__(
        self,
        captured: Captured,
        table: CalibrationTable,
        source: Source,
        guard: Guard,
        samples: Samples,
        which: Sequence[str],
        batch_size: int,
        progress: Progress,
        placements: Sequence[Placement],
    ) -> None:
        self._plain, self._table, self._source = captured, table, source
        self._guard, self._samples, self._which = guard, samples, which
        self._batch_size, self._progress = batch_size, progress
        self._steps: list[Step] = []
        self._heap = Heap()
        self._arrays: Arrays = {}
        self._now = captured
        self._amax: Mapping[str, float] = table.amax
        # The placement that is corrected; operations and thresholds of those before it stay.
        self._placements, self._at = placements, 0
        self._domains = find_domains(captured.graph) if set(GRAPH_CORRECTIONS) & set(which) else ()
        self._scores: Sequence[Score] = ()
        self._scores = self._measured(captured, table.amax)

    def run(self) -> CalibrationTable:
        self._choose_ranges()
        self._heap.settle(garbage=True)
        for at in range(len(self._placements)):
            self._at = at
            fixed = self._fixed
            self._correct([d for d in self._domains if not fixed & {n.name for n in (*d.makers, *d.readers)}])
        return self._table.corrected(self._amax, Corrections(tuple(self._steps), self._arrays))

    def _correct(self, domains: Sequence[Domain]) -> None:
        """All steps for the operations that are first in INT8 in this placement."""
        before = _BeforeScalings(self._now, self._table, self._amax, self._scores, self._arrays, len(self._steps))
        for name, mine in (
            ("equalization", [d for d in domains if not d.normalized]),
            ("smoothing", [d for d in domains if d.normalized]),
        ):
            if name in self._which and (mine := self._concern(mine)):
                self._scale(name, mine)
                self._heap.settle(garbage=True)
        if self._arrays.keys() != before.arrays.keys():
            self._on_all_samples(before)
        if {"thresholds", "rounding", "bias"} & set(self._which):
            self._fit()

    def _concern(self, domains: Sequence[Domain]) -> list[Domain]:
        """Those that an operation in INT8 in this placement belongs to; all, in the only placement."""
        if len(self._placements) == 1:
            return list(domains)
        mine = {s.consumer.name for s in self._placed().sites}
        return [d for d in domains if mine & {n.name for n in (*d.makers, *d.readers)}]

    def _on_all_samples(self, before: _BeforeScalings) -> None:
        """The scaled graph's table, of all samples where those that it was tried with are not all; without the scaling
        where it does not gain with those thresholds: one value more may be an outlier.
        """
        if self._samples.complete:
            return
        table = self._calibrated(self._now)
        amax = self._unless_fixed(table)
        scores = self._measured(self._now, amax)
        if self._gain(scores, before.scores):
            self._table, self._amax, self._scores = table, amax, scores
            return
        figures = {
            "before_db": nine_digits(before.scores[self._at].decibels),
            "after_db": nine_digits(scores[self._at].decibels),
        }
        self._steps[before.steps :] = [
            s.model_copy(update={**figures, "kept": False, "detail": f"{s.detail}; with thresholds of all samples"})
            if s.kept
            else s
            for s in self._steps[before.steps :]
        ]
        self._now, self._arrays = before.now, before.arrays
        self._table, self._amax, self._scores = before.table, before.amax, before.scores

    def _calibrated(self, captured: Captured) -> CalibrationTable:
        """The table of a scaled graph, of all samples."""
        return calibrate(
            captured,
            self._source,
            batch_size=self._batch_size,
            algorithm=self._table.algorithm,  # type: ignore[arg-type]
            percentile=self._table.percentile,
            digests={k: v for k, v in self._table.digests.items() if k != "data"},
            progress=self._progress,
        )

    def _unless_fixed(self, table: CalibrationTable) -> dict[str, float]:
        """A table's thresholds but for those that stay."""
        return {**table.amax, **self._fixed_amax}

    def _measured(self, captured: Captured, amax: Mapping[str, float]) -> list[Score]:
        """In every placement."""
        return [self._guard.measured(p.of(captured), amax) for p in self._placements]

    def _tried(
        self,
        measured: Callable[[Placement], Score],
        before: Sequence[Score],
        first: int = 0,
        gains: Gains = Score.beats,
    ) -> list[Score]:
        """In every placement from the `first` on, of a step that changes nothing of those before it. Where this one
        does not gain it is taken back: the others cost nothing."""
        scores = list(before)
        scores[self._at] = own = measured(self._placements[self._at])
        if gains(own, before[self._at]):
            for at in set(range(first, len(scores))) - {self._at}:
                scores[at] = measured(self._placements[at])
        return scores

    def _placed(self) -> Captured:
        """The graph as it is now, with sites of what is in INT8 in this placement alone."""
        return self._placements[self._at].of(self._now)

    @property
    def _before(self) -> list[Site]:
        """Sites of the placements before this one."""
        return [s for p in self._placements[: self._at] for s in p.of(self._now).sites]

    @property
    def _fixed(self) -> set[str]:
        """Names of the operations that stay as they are."""
        return {s.consumer.name for s in self._before}

    @property
    def _fixed_amax(self) -> dict[str, float]:
        """The thresholds that stay as they are."""
        return {s.group: self._amax[s.group] for s in self._before if s.axis is None}

    def _gain(self, scores: Sequence[Score], before: Sequence[Score], gains: Gains = Score.beats) -> bool:
        """Whether this placement `gains`, and none of the others loses."""
        pairs = list(zip(scores, before, strict=True))
        now, was = pairs.pop(self._at)
        return gains(now, was) and not any(was.beats(now) for now, was in pairs)

    def _choose_ranges(self) -> None:
        """With `auto`, the exact maxima in place of its thresholds, unless these are better at the outputs."""
        if self._table.algorithm != "auto" or self._table.histograms is None:
            return
        maxima = self._table.recomputed("minmax")
        scores = self._measured(self._now, maxima.amax)
        if not any(ours.beats(theirs) for ours, theirs in zip(self._scores, scores, strict=True)):
            self._note("ranges", True, scores, "the exact maxima")
            self._table, self._amax = maxima, maxima.amax

    def _scale(self, name: str, domains: Sequence[Domain]) -> None:
        """Equalize the domains in the graph as it is now; without ReLU6-like clips where that is better."""
        tries = [domains]
        if any(d.clips for d in domains) and not all(d.clips for d in domains):
            tries.append([d for d in domains if not d.clips])
        by_name = {n.name: n for n in self._now.graph.graph.nodes}
        moved = [[d.moved(by_name) for d in some] for some in tries]
        values = {by_name[n.name]: held for n, held in self._values.items()}
        before, best = [self._crosswise(self._now, (self._amax, self._amax))(p) for p in self._placements], None
        for some in moved:
            if self._progress.cancelled():
                raise Cancelled
            arrays = equalize(self._now.graph, some, values)
            if not arrays:
                continue
            trial = corrected(self._plain, merged(self._arrays, arrays), (self._now, self._arrays))
            table = self._table.recounted(self._cross.counted(trial))
            halves = of_halves(table)
            scores, why = self._tried(self._crosswise(trial, halves), before), ""
            gains = self._gain(scores, before, Score.surely_beats) and not (why := self._lost_on_turned(trial, halves))
            if best is None or gains or scores[self._at].decibels > best[1][self._at].decibels:
                best = (gains, scores, trial, arrays, table, f"{len(some)} groups of channels", why)
            if gains:
                break
        if best is None:
            return
        gains, scores, trial, arrays, table, detail, why = best
        if self._note(name, gains, scores, detail, why, compared=before):
            self._now, self._table, self._amax = trial, table, self._unless_fixed(table)
            self._arrays = merged(self._arrays, arrays)
            self._scores = self._measured(trial, self._amax)

    def _crosswise(
        self, captured: Captured, amax: tuple[Mapping[str, float], Mapping[str, float]], *, turned: bool = False
    ) -> Callable[[Placement], Score]:
        """What measures a placement on samples of each half with thresholds of the other; those that stay do."""
        fixed = self._fixed_amax
        both = ({**amax[0], **fixed}, {**amax[1], **fixed})
        return lambda placement: self._cross.measured(placement.of(captured), both, turned=turned)

    def _lost_on_turned(self, trial: Captured, amax: tuple[Mapping[str, float], Mapping[str, float]]) -> str:
        """What a scaling loses on turned samples, where it is too much."""
        tries = ((self._now, (self._amax, self._amax)), (trial, amax))
        was, now = (self._crosswise(c, a, turned=True)(self._placements[self._at]).decibels for c, a in tries)
        return "" if now >= was - MOST_LOSS_DB else f"; {was:.1f} to {now:.1f} dB on samples mirrored or transposed"

    @cached_property
    def _cross(self) -> CrossGuard:
        halves = self._samples.halves
        return CrossGuard(self._plain, halves, -(-MORE_JUDGES // len(halves[0][0][0])))

    @cached_property
    def _values(self) -> dict[Node, ChannelValues]:
        """What the channels of all domains hold: no scaling of one changes those of another."""
        return channel_values(self._plain.graph, self._domains, self._samples.fit)

    def _fit(self) -> None:
        """Thresholds, then levels and biases in one sweep, each kind judged on top of the ones before.

        Levels and biases make up for what the thresholds do, so they are fitted to those that stay.
        """
        if "thresholds" in self._which:
            search = self._thresholds()
            if amax := search.run():
                self._judged("thresholds", {}, amax, f"{len(amax)} tensors", search.unseen)
                self._heap.settle(garbage=True)
        if not {"rounding", "bias"} & set(self._which):
            return
        captured, samples = self._placed(), self._samples
        fitted = Sweep(captured, self._amax, samples.fit, samples.local, self._which, self._progress, self._fixed).run()
        levels, biases = fitted.level_arrays(), fitted.bias_arrays()
        rounded = bool(levels) and self._judged("rounding", levels, {}, f"{len(fitted.levels)} weights")
        self._heap.settle(garbage=True)
        if biases:  # they were fitted together: biases may be what makes the levels pay
            detail = f"{len(fitted.biases)} operations" + ("" if rounded or not levels else ", with rounding")
            self._judged("bias", {**levels, **biases}, {}, detail)

    def _thresholds(self) -> ThresholdSearch:
        table = self._table
        most = {k: max(t.max, table.amax[k]) for k, t in table.audit.tensors.items()}
        rare = {k for k, t in table.audit.tensors.items() if t.elements < ENOUGH_VALUES}
        captured, samples = self._placed(), self._samples
        return ThresholdSearch(
            captured, self._amax, most, rare, samples.fit, samples.local, self._progress, self._fixed_amax
        )

    def _judged(
        self, name: str, arrays: Arrays, amax: Mapping[str, float], detail: str, unseen: Sequence[BatchTensors] = ()
    ) -> bool:
        """Take a step if it gains on the samples kept apart.

        Of thresholds, by which more are `unseen`, it is enough to lose on neither: rounding gains more behind them than
        they do. Taken back by the last bits of sums, a MobileNetV2 had 19.0 dB on unseen samples, 19.5 with them.
        """
        trial_arrays, trial_amax = {**self._arrays, **arrays}, {**self._amax, **amax}
        trial = corrected(self._plain, trial_arrays, (self._now, self._arrays))
        gain = Score.keeps_up if unseen else Score.beats
        scores = self._tried(lambda p: self._guard.measured(p.of(trial), trial_amax), self._scores, self._at, gain)
        gains, why = self._gain(scores, self._scores, gain), ""
        more = unseen[: -(-MORE_JUDGES // len(unseen[0][0]))] if unseen else ()
        if gains and more:
            guard, of = Guard(self._plain, more), self._placements[self._at].of
            now, was = guard.measured(of(trial), trial_amax), guard.measured(of(self._now), self._amax)
            if not (gains := now.keeps_up(was)):
                why = f"; {was.decibels:.1f} to {now.decibels:.1f} dB on {len(now.noise)} others"
                if now.decibels >= was.decibels:
                    why += f", {now.mean_gain(was):+.1f} dB in their mean"
        if kept := self._note(name, gains, scores, detail, why):
            self._now, self._arrays, self._amax = trial, trial_arrays, trial_amax
        return kept

    def _note(
        self,
        name: str,
        kept: bool,
        scores: Sequence[Score],
        detail: str,
        why: str = "",
        compared: Sequence[Score] = (),
    ) -> bool:
        """A line on a step, which is compared with the scores of now, or with others."""
        compared = compared or self._scores
        score, now = scores[self._at], compared[self._at]
        before, after = nine_digits(now.decibels), nine_digits(score.decibels)
        if len(self._placements) > 1:
            detail += f", with what {self._placements[self._at].title} has in INT8"
        detail += why + score.losses(now, [o.name for o in self._plain.outputs])
        if not why and kept is (score.decibels < now.decibels) and math.isfinite(gain := score.mean_gain(now)):
            detail += f"; in the mean of the samples {gain:+.1f} dB"
        for placement, other, was in zip(self._placements, scores, compared, strict=True):
            if other is not score and was.beats(other):
                detail += f"; {was.decibels:.1f} to {other.decibels:.1f} dB with what {placement.title} has"
        self._steps.append(Step(name=name, kept=kept, before_db=before, after_db=after, detail=detail))
        if kept:
            self._scores = scores
        return kept


@dataclass(frozen=True)
class _BeforeScalings:
    """What there was before a placement's scalings, and how many steps."""

    now: Captured
    table: CalibrationTable
    amax: Mapping[str, float]
    scores: Sequence[Score]
    arrays: Arrays
    steps: int

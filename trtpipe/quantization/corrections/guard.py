"""What a correction does at the model's outputs, on samples that it was not made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from calib.audit import Halves, choose
from calib.histogram import Histogram
from calib.table import CalibrationTable
from trtpipe.quantization.calibrate import counting
from trtpipe.quantization.partial import BatchTensors, Partial, roundings
from trtpipe.quantization.precision import ScaleTypes
from trtpipe.quantization.rounding import LEAST_MAGNITUDE
from trtpipe.values import Captured

#: An exact copy counts as this many dB.
MOST_DB = 120.0
#: A step must gain more than this, in dB, to be kept.
LEAST_GAIN_DB = 0.05
#: What an output must lose to be named.
SAID_DB = 0.5
#: A scaling must gain as many standard errors of the samples' mean gain: it costs room, which other samples may need.
SURE = 1.0


class Guard:
    """Float outputs of the model on samples kept apart, and how close a quantized graph comes to them."""

    def __init__(self, captured: Captured, batches: Sequence[BatchTensors]) -> None:
        self._batches = batches
        machine = Partial(captured.graph)
        self._wanted = [machine.finish(0, machine.inputs(b), {})[0] for b in batches]
        self._signal = [
            sum(float(o.double().square().sum()) for o in outputs) if outputs[0].is_floating_point() else 0.0
            for outputs in zip(*self._wanted, strict=True)
        ]

    @property
    def comparable(self) -> bool:
        """Whether there is a finite floating-point output that is not zero everywhere."""
        values = [o for outputs in self._wanted for o in outputs if o.is_floating_point()]
        return bool(values) and all(bool(o.isfinite().all()) for o in values) and any(bool(o.any()) for o in values)

    def measured(self, captured: Captured, amax: Mapping[str, float]) -> Score:
        """How close `captured` comes in INT8, with thresholds `amax`."""
        machine = Partial(captured.graph)
        exact = ScaleTypes()
        changed = roundings(captured.sites, amax, exact, captured.int8)
        rows, of_outputs = [], torch.zeros(len(self._signal), dtype=torch.float64)
        all_outputs = machine.side_by_side([machine.inputs(b) for b in self._batches], changed)
        for batch, wanted, outputs in zip(self._batches, self._wanted, all_outputs, strict=True):
            size = len(batch[0])
            noise = torch.zeros(size, dtype=torch.float64)
            for at, (want, got, signal) in enumerate(zip(wanted, outputs, self._signal, strict=True)):
                if signal > 0:
                    own = _by_sample((want - got).double().square(), size) / signal
                    of_outputs[at] += own.sum()
                    noise += own
            rows.append(noise)
        return Score(torch.cat(rows) / max(1, sum(s > 0 for s in self._signal)), of_outputs)


@dataclass(frozen=True, eq=False)
class Score:
    """Noise of each sample, as a share of the whole signal: float64 [S], in which outputs count alike; and that of each
    output over all samples, as a share of its own signal: float64 [O], 0 where that has none."""

    noise: torch.Tensor
    of_outputs: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def decibels(self) -> float:
        """Signal to quantization noise ratio over all samples and outputs."""
        total = float(self.noise.sum())
        if not math.isfinite(total):
            return -MOST_DB
        return min(MOST_DB, -10 * math.log10(max(total, 10 ** (-MOST_DB / 10))))

    def beats(self, other: Score) -> bool:
        """Whether all samples together gain over `LEAST_GAIN_DB`, and so does the mean of their own gains: in dB an odd
        sample, whose noise is most of all, is one of many. Nor do the outputs lose in the mean of theirs: the noisiest
        one is most of all noise, and what a precise one pays for it is nothing there.

        More is not asked for, but of scalings (`surely_beats`): gains of single samples scatter by some dB, so that a
        test of significance on a few of them takes back what pays half a dB.
        """
        if self.decibels <= other.decibels + LEAST_GAIN_DB:
            return False
        gain, of_outputs = self.mean_gain(other), self._mean_of_outputs(other)
        return (not math.isfinite(gain) or gain > LEAST_GAIN_DB) and of_outputs >= 0

    def surely_beats(self, other: Score) -> bool:
        """Whether it `beats` another, and the mean of the samples' own gains is over `SURE` of its standard errors."""
        gains = self._gains(other)
        error = float(gains.std()) / math.sqrt(len(gains))
        mean = float(gains.mean())
        return self.beats(other) and (not math.isfinite(error) or mean > SURE * error)

    def keeps_up(self, other: Score) -> bool:
        """Whether neither all samples together lose over `LEAST_GAIN_DB`, nor the mean of their own gains does, nor
        that of the outputs' gains: a loss that few samples have is seen in the first, one that most have in the second.
        """
        gain = self.mean_gain(other)
        lost = (math.isfinite(gain) and gain < -LEAST_GAIN_DB) or self._mean_of_outputs(other) < -LEAST_GAIN_DB
        return not lost and self.decibels >= other.decibels - LEAST_GAIN_DB

    def mean_gain(self, other: Score) -> float:
        """The mean over the samples of what each gains over `other`, dB; NaN or infinite where one of them is."""
        return float(self._gains(other).mean())

    def losses(self, other: Score, names: Sequence[str]) -> str:
        """Which of several outputs, by their `names`, lose over `SAID_DB` in place of `other`: the end of a line."""
        if len(names) < 2:
            return ""
        lost = [at for at, gain in enumerate(self._output_gains(other).tolist()) if gain < -SAID_DB]
        now, was = (_decibels(s.of_outputs).tolist() for s in (self, other))
        return "".join(f"; {names[at]} {was[at]:.1f} to {now[at]:.1f} dB" for at in lost)

    def _mean_of_outputs(self, other: Score) -> float:
        """The mean over the outputs of what each gains over `other`, dB; 0 where there are not several."""
        gains = self._output_gains(other)[(self.of_outputs > 0) | (other.of_outputs > 0)]
        mean = float(gains.mean()) if len(gains) > 1 else 0.0
        return mean if math.isfinite(mean) else 0.0

    def _output_gains(self, other: Score) -> torch.Tensor:
        return _decibels(self.of_outputs) - _decibels(other.of_outputs)

    def _gains(self, other: Score) -> torch.Tensor:
        return 10 * torch.log10(other.noise.clamp_min(LEAST_MAGNITUDE) / self.noise.clamp_min(LEAST_MAGNITUDE))


#: Whether a step's score is enough beside the one before it.
Gains = Callable[[Score, Score], bool]


class CrossGuard:
    """How close a graph comes with thresholds that have not seen the samples which judge: those of two halves of the
    samples, each held against the model on the other half.

    Scaled channels use up the room between their largest value and the tensor's threshold, so that samples which no
    threshold was made from lose by it what samples of the calibration never show.
    """

    def __init__(
        self, captured: Captured, halves: tuple[Sequence[BatchTensors], Sequence[BatchTensors]], judges: int
    ) -> None:
        """`judges`: batches of each half that judge, the last ones."""
        self._captured, self._halves, self._judges = captured, halves, [half[-judges:] for half in halves]
        self._guards = [Guard(captured, some) for some in self._judges]

    @cached_property
    def _of_turned(self) -> list[Guard]:
        judges = [[turned(batch, k * len(batch[0])) for k, batch in enumerate(some)] for some in self._judges]
        return [Guard(self._captured, some) for some in judges]

    def counted(self, captured: Captured) -> dict[str, Halves]:
        """What each of the graph's tensors holds, by its table's key, in each half of the samples."""
        prepared, histograms = counting(captured)
        for at, half in enumerate(self._halves):
            for histogram in histograms.values():
                histogram.half = at
            with torch.inference_mode():
                for batch in half:
                    prepared.graph(*batch)
        return {key: histogram.halves for key, histogram in histograms.items()}

    def measured(
        self, captured: Captured, amax: tuple[Mapping[str, float], Mapping[str, float]], *, turned: bool = False
    ) -> Score:
        """In INT8 with thresholds of each half, judged by samples of the other, `turned` or as they are."""
        guards = self._of_turned if turned else self._guards
        scores = [guard.measured(captured, other) for guard, other in zip(guards, reversed(amax), strict=True)]
        of_outputs = torch.stack([s.of_outputs for s in scores]).mean(0)
        return Score(torch.cat([s.noise for s in scores]) / len(scores), of_outputs)


def of_halves(table: CalibrationTable) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The thresholds that a table's algorithm chooses by each half of what was counted alone.

    Raises:
        calib.CalibError: a tensor was not seen in one of them.
    """
    counted = table.histograms or {}
    first, second = (
        {
            key: choose(key, (halves[at], Histogram.empty()), table.algorithm, table.percentile)[0]
            for key, halves in counted.items()
        }
        for at in (0, 1)
    )
    return first, second


def turned(batch: BatchTensors, first: int) -> BatchTensors:
    """A batch with its images mirrored along their last axis, along the one before, or transposed, in turn.

    They have features that the samples may lack, as those of another kind would. Channels that are quiet for the one
    kind which was calibrated look as if they had room, and scaled into it they are cut on all others: of small networks
    trained on digits, 10 to 19 dB over all ten classes, which those of the calibration never show. There a scaling
    loses 6 to 21 dB on transposed samples, and gains on them where all classes were calibrated.

    Args:
        batch: inputs [B, ...]. Images are those of floating point or uint8 with three axes or more in a sample, of
            which the first stays; the others stay as they are: what a column means, or which numbers it may hold, goes
            with its place.
        first: how many samples there are before this batch.
    """
    return [_turned(x, first) for x in batch]


def _turned(x: torch.Tensor, first: int) -> torch.Tensor:
    if x.dim() < 4 or not (x.is_floating_point() or x.dtype == torch.uint8):
        return x
    square = x.shape[-1] == x.shape[-2]
    ways = (x.flip(-1), x.flip(-2), x.transpose(-1, -2) if square else x.flip(-1, -2))
    return torch.stack([ways[(first + k) % len(ways)][k] for k in range(len(x))])


def _decibels(noise: torch.Tensor) -> torch.Tensor:
    """Signal to quantization noise ratios of shares of noise, dB, float64 of any shape."""
    return -10 * torch.log10(noise.clamp_min(10 ** (-MOST_DB / 10)))


def _by_sample(x: torch.Tensor, size: int) -> torch.Tensor:
    """Sums of each sample's elements; of the whole, spread evenly, where the first axis is not the batch's."""
    if x.dim() and len(x) == size:
        return x.reshape(size, -1).sum(1)
    return x.sum().expand(size) / size

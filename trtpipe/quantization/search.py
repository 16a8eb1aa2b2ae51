"""The search for the fewest modules to keep out of INT8 so that the limits are met. It knows no torch and no stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trtpipe.evaluation.limits import bounds, worst
from trtpipe.evaluation.metrics import BEST
from trtpipe.job.limits import Limits
from trtpipe.quantization.ranking import ModuleSensitivity, Sensitivity
from trtpipe.values import Metric

#: Full evaluations, each over all check samples, that one search may take.
EVALUATIONS = 10
#: FP16 or BF16 must be at least this much better than INT8 at a module's own output to be worth keeping it in.
HALF_MARGIN_DB = 6.0


@dataclass(frozen=True)
class Candidate:
    """What a trial keeps out of its format beyond what the job itself keeps, and how scales are chosen.

    `fp8` are modules in FP8 that would be in INT8 or 4 bits, `int8` in INT8 that would be in FP8 or 4 bits, `half` and
    `fp32` those in no number format at all.
    """

    algorithm: str
    half: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    int8: tuple[str, ...] = ()

    @property
    def kept(self) -> frozenset[str]:
        """All modules kept."""
        return frozenset(self.half + self.fp32 + self.fp8 + self.int8)


@dataclass(frozen=True)
class Trial:
    """One candidate, evaluated on all check samples.

    Attributes:
        passed: whether the check passed; `problems` says what else than a limit stood in the way.
        shortfall: by how much the worst limit is missed (see `shortfall`); 0 or less: none is.
        int8_share: share of the network's multiply-accumulates in INT8 or another number format, in [0, 1]; 0 where a
            build refuses the candidate, which then has no metrics, and the refusal in `problems`.
        size_bytes: of the quantized graph as ONNX, INT8 weights stored as such; None for a refused candidate.
        latency_ms: of the engine, at the optimal batch; None where no GPU could execute one.
    """

    candidate: Candidate
    passed: bool
    shortfall: float
    metrics: tuple[Metric, ...]
    problems: tuple[str, ...]
    int8_share: float
    size_bytes: int | None
    latency_ms: float | None = None

    @property
    def enough(self) -> bool:
        """Whether every limit is met: to keep more would not help, whatever else stands in the way."""
        return self.shortfall <= 0

    def metric(self, name: str) -> Metric | None:
        """The figure of that name, of several outputs the worst."""
        return worst(self.metrics).get(name)

    def value(self, name: str) -> float | None:
        """The value of `metric`."""
        metric = self.metric(name)
        return None if metric is None else metric.value


@dataclass(frozen=True)
class Preview:
    """What a few samples through the fake-quantized graph promise of a candidate: a guess, never a verdict."""

    shortfall: float
    sqnr_db: float


@dataclass(frozen=True)
class Tuned:
    """The best trial, all of them, and the ranking they came from (None where none was needed)."""

    best: Trial
    trials: tuple[Trial, ...]
    sensitivity: Sensitivity | None
    notes: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        """Whether the limits are met."""
        return self.best.passed


@dataclass(frozen=True)
class Laboratory:
    """What the search can ask for.

    evaluate: a full trial on all check samples. preview: a few samples, cheaply. rank: sensitivities under one
    calibration algorithm. algorithms: those that can be tried, the job's own first.
    """

    evaluate: Callable[[Candidate], Trial]
    preview: Callable[[Candidate], Preview]
    rank: Callable[[str], Sensitivity]
    algorithms: Sequence[str]


class _Spent(Exception):
    """No evaluation is left."""


def search(laboratory: Laboratory, allowance: int = EVALUATIONS) -> Tuned:
    """The candidate that meets the limits with the fewest modules out of INT8, within `allowance` full evaluations.

    1. The job as it is; if it passes, that is the answer.
    2. The calibration algorithm of the best preview, if that promises to pass with nothing kept.
    3. Modules ranked by sensitivity: how many of the worst must be kept, and under which algorithm are they fewest? The
       preview's answer is the first guess, its neighbour below the second, then follows a bisection: about log2 of the
       number of modules.
       When all of them are not enough, the same again with a step more, and so on to FP32.
    4. Each kept module takes a step back, the costliest first, where the preview allows it and the limits still hold.
       So a candidate that keeps what no limit is about, which leaves nothing that the control could damage, ends as one
       that passes.

    The steps of a module are the other of FP8 and INT8, then FP16 (or BF16), each unless it is hardly better than the
    one before at the module's own output, or overflows; and FP32 (`ladder`).

    Returns:
        The passing trial with the largest share of INT8; without one, the trial whose shortfall is smallest.
    """
    return _CandidateSearch(laboratory, allowance).run()


class _CandidateSearch:
    def __init__(self, laboratory: Laboratory, allowance: int) -> None:
        self.laboratory = laboratory
        self.algorithms = laboratory.algorithms
        self.allowance = allowance
        self.trials: list[Trial] = []
        self.sensitivity: Sensitivity | None = None
        self.notes: list[str] = []

    def run(self) -> Tuned:
        start = Candidate(self.laboratory.algorithms[0])
        try:
            if not self.evaluate(start).passed:
                self.improve(start)
            if not best_of(self.trials).passed:
                self.notes.append(
                    "at least one module stays quantized in each trial: where the limits need none, build without "
                    "precision.int8_mode, fp8_mode and weights"
                )
        except _Spent:
            might = "keep less" if best_of(self.trials).passed else "meet the limits"
            self.notes.append(f"the search ended at its {self.allowance} evaluations; a longer one might {might}")
        return Tuned(best_of(self.trials), tuple(self.trials), self.sensitivity, tuple(self.notes))

    def improve(self, start: Candidate) -> None:
        if self.other_algorithm(start):
            return
        ranked = self.ranked(start.algorithm)

        def of(algorithm: str) -> Callable[[int], Candidate]:
            return lambda count: keeping(replace(start, algorithm=algorithm), ranked[:count])

        base, guess = start, self.guess(of(start.algorithm), len(ranked))
        for algorithm in self.algorithms[1:]:
            if guess > 1 and self.promises(of(algorithm)(guess - 1)):
                base, guess = replace(start, algorithm=algorithm), self.guess(of(algorithm), guess - 1)
        if base != start:
            ranked = self.ranked(base.algorithm)
        steps = self.climb(base, ranked)
        if steps:
            self.give_back(base, ranked, steps)

    def evaluate(self, candidate: Candidate) -> Trial:
        known = next((t for t in self.trials if t.candidate == candidate), None)
        if known is not None:
            return known
        if len(self.trials) >= self.allowance:
            raise _Spent
        self.trials.append(self.laboratory.evaluate(candidate))
        return self.trials[-1]

    def other_algorithm(self, start: Candidate) -> bool:
        """Whether another algorithm alone is enough: the one of the best preview is tried, if that promises so."""
        previews = {a: self.laboratory.preview(replace(start, algorithm=a)) for a in self.algorithms[1:]}
        promising = [a for a, preview in previews.items() if preview.shortfall <= 0]
        if not promising:
            return False
        best = max(promising, key=lambda a: previews[a].sqnr_db)
        return self.evaluate(replace(start, algorithm=best)).passed

    def ranked(self, algorithm: str) -> list[ModuleSensitivity]:
        """The modules that can be kept, worst first by thresholds of `algorithm`; without them something is left."""
        self.sensitivity = self.laboratory.rank(algorithm)
        ranked = [m for m in self.sensitivity.modules if m.module]
        if len(ranked) < len(self.sensitivity.modules):
            outside = "operations outside any module cannot be named in precision.keep; they stay quantized"
            self.notes += [outside] if outside not in self.notes else []
            return ranked
        while ranked and not left(self.sensitivity.modules, [m.module for m in ranked]):
            ranked.pop()
        return ranked

    def climb(self, base: Candidate, ranked: Sequence[ModuleSensitivity]) -> dict[str, int]:
        """By module, how many steps of its `ladder` it takes: the fewest that meet the limits one step up; where
        not all do, the fewest, worst first, that do one more; empty where nothing does."""
        steps: dict[str, int] = {}
        todo = list(ranked)
        while todo:

            def make(count: int, steps: dict[str, int] = steps, todo: list[ModuleSensitivity] = todo) -> Candidate:
                return kept_at(base, ranked, up(steps, todo[:count]))

            if found := self.bracket(make, len(todo), self.guess(make, len(todo))):
                return up(steps, todo[:found])
            steps = up(steps, todo)
            todo = [m for m in ranked if steps[m.module] < len(ladder(m))]
            todo.sort(key=lambda m: at_output(m, ladder(m)[steps[m.module] - 1][1]))
        return {}

    def bracket(self, make: Callable[[int], Candidate], most: int, guess: int) -> int:
        """The least number up to `most`, about `guess`, whose candidate meets the limits; 0 when none does."""
        lowest, highest, at = 0, most + 1, guess
        while lowest + 1 < highest:
            if self.evaluate(make(at)).enough:
                highest = at
                at = at - 1 if at == guess and at - 1 > lowest else (lowest + highest) // 2
            else:
                lowest = at
                at = min(most, 2 * at) if highest > most else (lowest + highest) // 2
        return highest if highest <= most else 0

    def guess(self, make: Callable[[int], Candidate], high: int) -> int:
        """The least number whose candidate passes by the preview alone, in 1..high."""
        low, high = 0, max(1, high)
        while low + 1 < high:
            middle = (low + high) // 2
            if self.promises(make(middle)):
                high = middle
            else:
                low = middle
        return high

    def promises(self, candidate: Candidate) -> bool:
        """Whether the candidate meets every limit on the preview's few samples."""
        return self.laboratory.preview(candidate).shortfall <= 0

    def give_back(self, base: Candidate, ranked: Sequence[ModuleSensitivity], steps: Mapping[str, int]) -> None:
        """Let modules take a step less, one by one, as long as the limits hold."""
        kept = [m for m in ranked if steps.get(m.module)]
        for module in sorted(kept, key=lambda m: -m.macs):
            fewer = {**steps, module.module: steps[module.module] - 1}
            if not any(fewer.values()):
                return
            candidate = kept_at(base, ranked, fewer)
            if self.promises(candidate) and self.evaluate(candidate).enough:
                steps = fewer


#: What a module can be kept in, beside its own format.
Wider = Literal["fp8", "int8", "half", "fp32"]


def ladder(module: ModuleSensitivity) -> tuple[tuple[Wider, float], ...]:
    """What a module can be kept in, and its SQNR in dB there: the other of FP8 and INT8, half precision, each where it
    is clearly better than the one before, and FP32."""
    found: list[tuple[Wider, float]] = []
    least = module.own_sqnr_db + HALF_MARGIN_DB
    offered: tuple[tuple[Wider, float | None], ...] = (
        ("fp8", module.fp8_sqnr_db), ("int8", module.int8_sqnr_db), ("half", module.half_sqnr_db)
    )  # fmt: skip
    for name, db in offered:
        if db is not None and db >= least:
            found.append((name, db))
            least = db + HALF_MARGIN_DB
    return (*found, ("fp32", math.inf))


def at_output(module: ModuleSensitivity, own_db: float) -> float:
    """The SQNR in dB at the model's outputs of a module that has `own_db` at its own: as much more as there."""
    gained = own_db - module.own_sqnr_db
    return math.inf if math.isnan(gained) else module.sqnr_db + gained


def up(steps: Mapping[str, int], modules: Iterable[ModuleSensitivity]) -> dict[str, int]:
    """`steps` with one more for each of the modules."""
    return {**steps, **{m.module: steps.get(m.module, 0) + 1 for m in modules}}


def kept_at(base: Candidate, ranked: Iterable[ModuleSensitivity], steps: Mapping[str, int]) -> Candidate:
    """`base` with each module kept so many steps up its `ladder`; what lies in a module that is kept wider is kept with
    that one, and not named."""
    kept: dict[Wider, list[str]] = {
        "fp8": [*base.fp8], "int8": [*base.int8], "half": [*base.half], "fp32": [*base.fp32]
    }  # fmt: skip
    for m in ranked:
        if taken := steps.get(m.module):
            kept[ladder(m)[taken - 1][0]].append(m.module)
    half = _outside(kept["half"], kept["fp32"])
    fp8, int8 = (_outside(kept[name], [*half, *kept["fp32"]]) for name in ("fp8", "int8"))
    return replace(base, fp8=fp8, int8=int8, half=half, fp32=tuple(kept["fp32"]))


def _outside(modules: Iterable[str], containers: Sequence[str]) -> tuple[str, ...]:
    return tuple(m for m in modules if not any(m.startswith(f"{c}.") for c in containers))


def keeping(base: Candidate, modules: Sequence[ModuleSensitivity]) -> Candidate:
    """`base` with the modules kept one step up."""
    return kept_at(base, modules, up({}, modules))


def left(modules: Sequence[ModuleSensitivity], kept: Sequence[str]) -> list[ModuleSensitivity]:
    """The modules that stay in INT8; a kept module keeps all inside it."""
    return [m for m in modules if not any(m.module == k or m.module.startswith(f"{k}.") for k in kept)]


def best_of(trials: Sequence[Trial]) -> Trial:
    """Of those that passed the one with most in INT8 and the least noise; else the one that misses least."""
    passed = [t for t in trials if t.passed]
    if passed:
        return max(passed, key=lambda t: (t.int8_share, -len(t.candidate.kept), -t.shortfall))
    return min(trials, key=lambda t: (t.shortfall, -t.int8_share))


def pareto(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Trials that no other beats or equals in quantized MACs, size, SQNR and latency (where it was measured) while
    beating it in one; NaN never stays, nor what a build refuses."""
    trials = [t for t in trials if t.size_bytes is not None]

    def figures(t: Trial) -> tuple[float, ...]:
        speed = 0.0 if t.latency_ms is None else -t.latency_ms
        return (t.int8_share, -float(t.size_bytes or 0), t.value("sqnr_db") or 0.0, speed)

    def beaten(t: Trial) -> bool:
        mine = figures(t)
        return any(
            all(a >= b for a, b in zip(figures(o), mine, strict=True)) and figures(o) != mine
            for o in trials
            if o is not t
        )

    return tuple(t for t in trials if not beaten(t) and t.value("sqnr_db") == t.value("sqnr_db"))


def shortfall(metrics: Sequence[Metric], limits: Limits) -> float:
    """By how much the worst limit is missed, in units of what the limit allows; infinite where a figure is missing.

    A cosine, an agreement or an accuracy drop may be off by 1 - limit (the drop: by limit; at least 0.001), a
    difference by its limit, an SQNR is counted in tens of dB, a metric of the job's own in its limit. At 0 or below
    every limit holds.
    """
    worst = -float("inf")
    for bound in bounds(limits):
        limit, larger_is_better = bound.limit, bound.larger_is_better
        values = [m.value for m in metrics if m.name == bound.metric]
        if not values or any(v != v for v in values):
            return float("inf")
        best = BEST.get(bound.metric, 0.0)
        unit = 10.0 if math.isinf(best) else max(abs(best - limit), 1e-3)
        off = [limit - v if larger_is_better else v - limit for v in values]
        worst = max(worst, max(off) / unit)
    return worst if worst > -float("inf") else 0.0

"""The result of a night as one value, its lines for a terminal or a log, and its JSON. `page` renders its page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from calib.errors import some_of
from trtpipe.errors import FAILED, SUCCESS, Cancelled, ExitCode
from trtpipe.jsontext import json_text, plain
from trtpipe.pipeline.cache.sources import UNWATCHED
from trtpipe.values import Metric, shortcomings

#: built: made tonight; reused: nothing had changed; error: no bundle; cancelled: the night was stopped before it.
Outcome = Literal["built", "reused", "error", "cancelled"]
#: Those after which the bundle is there, whatever its check says.
THERE: tuple[Outcome, ...] = ("built", "reused")
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
#: What a job's night comes to at a glance, the worst first, by which jobs are listed everywhere.
Standing = Literal["regression", "failed check", "error", "drift", "cancelled", "built", "reused"]
STANDINGS: tuple[Standing, ...] = get_args(Standing)
#: Those of a night that is not green.
TROUBLES: tuple[Standing, ...] = STANDINGS[: STANDINGS.index("built")]
#: What a job is seen to do: it waits, is built, or has ended.
State = Literal["waiting", "running"] | Standing
#: What the note of a regression that was accepted begins with.
ACCEPTED = "accepted: "


@dataclass(frozen=True)
class Comparison:
    """One figure of tonight beside the past.

    `before` is that of the last green run, `trend` the median of the latest green runs (None: there is none). `limit`
    is how much worse it may be than either: a share of it when `relative`, else in the figure's own unit. `worse_by` is
    in the same terms, negative when tonight is better, and None where nothing says which way is worse, as of a metric
    of the job's own. `limit` is None where it is not judged.
    """

    metric: str
    output: str
    before: float | None
    trend: float | None
    now: float
    worse_by: float | None
    limit: float | None
    relative: bool
    regressed: bool


@dataclass(frozen=True)
class Drift:
    """What building one job several times without any cache showed.

    `engines` is the SHA-256 of each build's engine. `max_abs` is the largest difference between outputs of two builds
    on the golden inputs; None where nothing could execute them.
    """

    engines: tuple[str, ...]
    max_abs: float | None
    notes: tuple[str, ...] = ()

    @property
    def distinct(self) -> int:
        """How many different engines came out."""
        return len(set(self.engines))

    @property
    def outputs_differ(self) -> bool:
        """Whether the outputs of two builds differ. Different engines often give the same outputs (TensorRT-RTX)."""
        return self.max_abs is not None and self.max_abs != 0


@dataclass(frozen=True)
class JobOutcome:
    """One job's night.

    Attributes:
        name, file: of the job; for a file that is no job, `name` is the file's.
        outcome, exit_code, error: how it ended; the exit code is that of `trtpipe build`, 0 when the check passed.
        reasons: why it was built ("weights changed"); empty when it was reused.
        key: digest of everything that goes in; the same key means nothing to do.
        fingerprint: the manifest's.
        bundle: path of the bundle; empty when there is none.
        engine_sha256, size_bytes: of the engine file.
        executed, runner, samples, metrics, problems: of the check, as in `values.CheckReport`.
        seconds: by stage; of the night it was built in, when it was reused.
        stages_reused: stages whose result was taken from the cache.
        where: the worker that built it; `attempts` says what went wrong on others before.
        regressions: one line each; empty is good. `comparisons` are the figures behind them.
    """

    name: str
    file: str
    outcome: Outcome
    exit_code: ExitCode = SUCCESS
    error: str = ""
    reasons: tuple[str, ...] = ()
    key: str = ""
    fingerprint: str = ""
    bundle: str = ""
    engine_sha256: str = ""
    size_bytes: int | None = None
    target: str = ""
    executed: str = ""
    runner: str = ""
    samples: int = 0
    metrics: tuple[Metric, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    stages_reused: tuple[str, ...] = ()
    where: str = ""
    attempts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    regressions: tuple[str, ...] = ()
    drift: Drift | None = None

    @property
    def green(self) -> bool:
        """Whether it has a bundle that passed its check, and nothing became worse than it may."""
        return self.outcome in THERE and self.exit_code == SUCCESS and not self.regressions

    @property
    def standing(self) -> Standing:
        """What it comes to at a glance: the worst that is true of it."""
        if self.regressions:
            return "regression"
        if self.exit_code == FAILED:
            return "failed check"
        if self.drift is not None and self.drift.outputs_differ and self.outcome in THERE:
            return "drift"
        return self.outcome

    @property
    def accepted(self) -> bool:
        """Whether regressions of it were declared the new normal: earlier figures say nothing any more."""
        return any(note.startswith(ACCEPTED) for note in self.notes)

    @property
    def total_seconds(self) -> float:
        """Of all stages."""
        return sum(self.seconds.values())


def stopped(outcomes: Iterable[JobOutcome]) -> bool:
    """Whether a run was stopped: it is complete only when every job that was planned has an outcome of its own."""
    return any(o.outcome == "cancelled" for o in outcomes)


@dataclass(frozen=True)
class NightlyReport:
    """One run over many jobs. `began` is UTC, ISO 8601; `seconds` is wall time of this process."""

    run: int
    began: str
    seconds: float
    outcomes: tuple[JobOutcome, ...]
    resumed: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: tuple[str, ...] = ()
    cache_bytes: int = 0
    cache_entries: int = 0
    evicted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether it was `stopped`."""
        return stopped(self.outcomes)

    @property
    def exit_code(self) -> ExitCode:
        """130 interrupted; 1 a regression, a failed check or outputs that drift; else the errors' highest; 0 green."""
        if self.interrupted:
            return Cancelled.exit_code
        if self._named("regression", "failed check", "drift"):
            return FAILED
        return max((o.exit_code for o in self.outcomes), default=SUCCESS)

    def count(self, outcome: Outcome) -> int:
        """How many jobs ended so."""
        return sum(o.outcome == outcome for o in self.outcomes)

    @property
    def headline(self) -> str:
        """The one line to read: of regressions, failed checks, errors, drift and interruption the first that is."""
        worst = [f"{o.name}: {r}" for o in self.outcomes for r in o.regressions]
        if worst:
            more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
            return f"REGRESSION {worst[0]}{more}"
        for standing in TROUBLES:
            if standing == "cancelled" and self.interrupted:
                left = f"{self.count('cancelled')} of {len(self.outcomes)}"
                return f"INTERRUPTED with {left} jobs to do: go on with --resume"
            if named := self._named(standing):
                return f"{standing.upper()} {some_of(named)}"
        count = len(self.outcomes)
        all_of_them = "the job" if count == 1 else f"all {count} jobs"
        if any(o.drift is not None for o in self.outcomes):  # of --repeat
            return f"{all_of_them} passed, built several times; nothing was compared with earlier nights"
        return f"{all_of_them} {'is' if count == 1 else 'are'} green"

    def _named(self, *standings: Standing) -> list[str]:
        """The jobs that come to one of these."""
        return [o.name for o in self.outcomes if o.standing in standings]


def lines(report: NightlyReport) -> Iterator[str]:
    """The report as text, the headline first; what was reused is counted and not listed."""
    yield report.headline
    counts = ", ".join(f"{report.count(o)} {o}" for o in OUTCOMES if report.count(o))
    yield f"run {report.run} of {report.began}: {len(report.outcomes)} jobs, {counts or 'none'}, {report.seconds:.2f} s"
    for outcome in report.outcomes:
        shown = list(_of(outcome))
        if shown:
            yield f"{outcome.name}:"
            yield from (f"  {line}" for line in shown)
    yield from (f"note: {note}" for note in report.notes)
    unwatched: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        for note in (n for n in outcome.notes if n.endswith(UNWATCHED)):
            unwatched.setdefault(note, []).append(outcome.name)
    yield from (f"note: {some_of(names)}: {note}" for note, names in unwatched.items())
    if report.evicted:
        yield f"cache: {len(report.evicted)} entries evicted, least recently used first"


def _of(o: JobOutcome) -> Iterator[str]:
    yield from (f"REGRESSION {r}" for r in o.regressions)
    if o.error:
        yield from o.error.splitlines()
    if o.exit_code == FAILED and not o.error:
        yield "check failed: " + "; ".join(shortcomings(o.metrics, o.problems))
    if o.reasons:
        yield ("built: " if o.outcome == "built" else "to be built: ") + "; ".join(o.reasons)
    if o.stages_reused:
        yield "from the cache: " + ", ".join(o.stages_reused)
    yield from o.attempts
    if o.drift is not None:
        yield drift_line(o.drift)


def drift_line(drift: Drift) -> str:
    """Whether engines and outputs differed between builds, and its notes."""
    count = len(drift.engines)
    notes = f" ({'; '.join(drift.notes)})" if drift.notes else ""
    same = (
        f"{count} builds, one engine" if drift.distinct == 1 else f"{count} builds, {drift.distinct} different engines"
    )
    if drift.max_abs is None:
        return f"drift: {same}; outputs were not compared{notes}"
    return f"drift: {same}; outputs differ by at most {drift.max_abs:.3g}{notes}"


def to_json(report: NightlyReport) -> str:
    """The report as JSON; NaN and infinities are text."""
    raw = plain(report)
    raw |= {"exit_code": report.exit_code, "headline": report.headline, "interrupted": report.interrupted}
    return json_text(raw)


def worst_first(outcome: JobOutcome) -> tuple[int, str]:
    """Key by which jobs are listed: what each comes to, the worst first; then by name."""
    return STANDINGS.index(outcome.standing), outcome.name

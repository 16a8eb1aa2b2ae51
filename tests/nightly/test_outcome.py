"""A night's report as lines of text."""

from __future__ import annotations

import pytest

from trtpipe.nightly.outcome import Drift, JobOutcome, NightlyReport, drift_line, lines
from trtpipe.nightly.transport import unreachable
from trtpipe.pipeline.cache.sources import UNWATCHED


@pytest.mark.parametrize(
    ("drift", "line"),
    [
        (Drift(("a", "a"), None), "drift: 2 builds, one engine; outputs were not compared"),
        (Drift(("a", "b", "c"), 0.25), "drift: 3 builds, 3 different engines; outputs differ by at most 0.25"),
    ],
)
def test_whether_builds_differ(drift: Drift, line: str) -> None:
    assert drift_line(drift) == line


@pytest.mark.parametrize(
    ("drift", "count", "said"),
    [
        (None, 1, "the job is green"),
        (None, 3, "all 3 jobs are green"),
        (Drift(("a", "a"), 0.0), 1, "the job passed, built several times; nothing was compared with earlier nights"),
        (Drift(("a", "b"), 0.0), 2, "all 2 jobs passed, built several times; nothing was compared with earlier nights"),
    ],
)
def test_only_what_was_held_against_earlier_nights_is_green(drift: Drift | None, count: int, said: str) -> None:
    """A job that became worse could be called green by --repeat, which looks for differences between its builds."""
    jobs = tuple(JobOutcome(f"j{k}", f"j{k}.yaml", "built", drift=drift) for k in range(count))
    report = NightlyReport(1, "2026-11-21T02:00:00Z", 0.0, jobs)
    assert (report.headline, report.exit_code) == (said, 0)


def test_what_the_cache_gave_up_is_said() -> None:
    report = NightlyReport(1, "2026-11-21T02:00:00Z", 0.0, (), evicted=("a", "b"))
    assert list(lines(report))[-1] == "cache: 2 entries evicted, least recently used first"


def test_what_no_key_holds_is_said_where_people_read() -> None:
    """A job that reads an environment variable is reused when that changes: the page alone said so."""
    note = f"the job's code reads environment variables (SEED){UNWATCHED}"
    jobs = tuple(JobOutcome(name, f"{name}.yaml", "reused", notes=("another", note)) for name in ("a", "b"))
    assert list(lines(NightlyReport(1, "2026-11-21T02:00:00Z", 0.0, jobs)))[-1] == f"note: a, b: {note}"


@pytest.mark.parametrize(
    ("address", "error", "step"),
    [
        ("tls://a:1", "timed out", "Run: dask scheduler"),
        ("tls://a:1", "in <d.TLSConnector object at 0x7f>: ConnectionRefusedError: [Errno 111]", "Run: dask scheduler"),
        ("tls://a:1", "in <TLS (closed) remote=tls://a:1>: gaierror: Name unknown", "Run: dask scheduler"),
        ("tls://a:1", "in <d.TLSConnector object at 0x7f>: SSLError: unknown ca", "and the clocks right."),
        ("tcp://a:1", "timed out", "Run: dask scheduler"),
        ("tcp://a:1", "connection reset by peer", "Where the scheduler uses TLS, give its tls:// address and --tls."),
    ],
)
def test_a_scheduler_that_does_not_answer_has_a_next_step(address: str, error: str, step: str) -> None:
    said = str(unreachable(address, OSError(error), "--scheduler"))
    assert said.endswith(step)
    assert "in <" not in said

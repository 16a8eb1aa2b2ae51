import contextlib
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import nights
import pytest

from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.evaluation.metrics import BEST
from trtpipe.nightly import history as history_file
from trtpipe.nightly.history import History, Past
from trtpipe.nightly.history_plot import rows, svg
from trtpipe.nightly.outcome import TROUBLES, Drift, JobOutcome, NightlyReport, Standing, lines, to_json
from trtpipe.nightly.regressions import EXACT_DB, LIMITS, OWN_LIMIT, compare, declared_normal, limit_of, parse_limits
from trtpipe.outputs import open_database
from trtpipe.values import Metric


def outcome(name="a", accuracy=0.9, sqnr=30.0, size=1_000_000, seconds=100.0, **changes):
    metrics = (
        Metric("accuracy_engine", "logits", accuracy),
        Metric("sqnr_db", "logits", sqnr),
        Metric("cosine", "logits", 0.99, 0.9, True),
    )
    values = {"outcome": "built", "metrics": metrics, "size_bytes": size, "seconds": {"compile": seconds}, "key": "k"}
    return JobOutcome(**{"name": name, "file": f"{name}.yaml", **values, **changes})


def record(history, *results, green=True):
    run = history.begin({"jobs": []})
    for each in results:
        history.record(run, each, {"weights": "x"}, green=green)
    history.end(run, "done")
    return run


def test_what_was_recorded_comes_back(tmp_path):
    with History(tmp_path / "h.sqlite") as history:
        odd = outcome(sqnr=math.inf, accuracy=math.nan)
        run = record(history, odd, outcome("b"))
        found = history.of_run(run)["a"]
        assert found.parts == {"weights": "x"}
        assert found.outcome.metrics[1].value == math.inf
        assert math.isnan(found.outcome.metrics[0].value)
        assert found.outcome.metrics[2] == Metric("cosine", "logits", 0.99, 0.9, True)
        assert history.names() == ("a", "b")


def test_greens_and_latest_are_of_earlier_runs(tmp_path):
    with History(tmp_path / "h.sqlite") as history:
        runs = [record(history, outcome(accuracy=0.1 * k)) for k in range(12)]
        record(history, outcome(accuracy=0.0), green=False)
        record(history, outcome("a", outcome="error", metrics=()), green=False)
        assert [p.run for p in history.greens(99)["a"]] == list(range(12, 2, -1))
        assert [p.run for p in history.greens(runs[2])["a"]] == [2, 1]
        assert history.latest(99)["a"].run == 13  # the one that has a bundle
        assert history.latest(1) == {}


def test_a_run_that_was_not_ended_is_the_one_to_resume(tmp_path):
    with History(tmp_path / "h.sqlite") as history:
        assert history.unfinished() is None
        record(history, outcome())
        assert history.unfinished() is None
        run = history.begin({"jobs": ["x"]})
        assert history.unfinished() == (run, {"jobs": ["x"]})
        history.end(run, "interrupted")
        assert history.unfinished() == (run, {"jobs": ["x"]})
        history.end(run, "done")
        assert history.unfinished() is None


def test_a_file_that_is_no_history_or_a_newer_one_is_refused(tmp_path):
    path = tmp_path / "h.sqlite"
    path.write_bytes(b"no database, but long enough to look at " * 10)
    with pytest.raises(InputError, match=r"h.sqlite: must be a history of trtpipe \(got: file is not a database\)"):
        History(path)
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=2")
    with pytest.raises(InputError, match=r"must be a history of version 1 \(got 2\). Update trtpipe."):
        History(path)


@pytest.mark.parametrize("at", range(100, 24_000, 1_000))
def test_damage_anywhere_in_the_file_is_said_and_is_no_bug(tmp_path, at):
    path = tmp_path / "h.sqlite"
    with History(path) as history:
        for k in range(20):
            record(history, outcome(f"j{k}"))
    content = bytearray(path.read_bytes())
    content[at : at + 2_000] = b"\xff" * len(content[at : at + 2_000])
    path.write_bytes(content)
    said = ""
    try:
        with History(path) as history:
            assert history.names() is not None
            history.unfinished()
            history.latest(99)
            history.greens(99)
            history.recent(99)
            history.of_job("j1")
            history.of_run(1)
            record(history, outcome("new"))
    except InputError as error:
        said = str(error)
    assert not said or said.startswith(f"{path}: the history is damaged (")
    assert not said or said.endswith(
        "). Put a copy of it in its place, or choose another --history, which begins without earlier nights."
    )


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"metrics": 3}', '{"nothing": 1}'])
def test_a_row_that_trtpipe_did_not_write_is_said(tmp_path, text):
    path = tmp_path / "h.sqlite"
    with History(path) as history:
        record(history, outcome("j"))
        history._db.execute("UPDATE results SET data = ?", (text,))
        for ask in (lambda: history.of_job("j"), lambda: history.latest(99), lambda: history.recent(99)):
            with pytest.raises(
                InputError,
                match=r"h\.sqlite: the history is damaged \(a row that trtpipe cannot read: .*\)\. Put a copy",
            ):
                ask()


def test_a_lock_that_stays_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("trtpipe.nightly.history.LOCKED_S", 0)
    path = tmp_path / "h.sqlite"
    with History(path) as history, History(path) as other:
        history._db.execute("BEGIN IMMEDIATE")
        with pytest.raises(InputError) as caught:
            other.begin({})
    assert str(caught.value) == (
        f"{path}: another program has locked the history for over 0 s. End that program, or choose another --history."
    )


def test_a_killed_writer_loses_nothing_that_was_recorded(tmp_path):
    script = f"""
import sys
import threading
import time
from pathlib import Path
sys.path[:0] = {[os.path.dirname(m.__file__) for m in (sys.modules[__name__], nights)]!r}
from test_history import outcome
from trtpipe.evaluation.metrics import BEST
from trtpipe.nightly import history as history_file
from trtpipe.nightly.history import History
history = History(Path({str(tmp_path / "h.sqlite")!r}))
run = history.begin({{}})
for k in range(100000):
    history.record(run, outcome(f"j{{k}}"), {{}}, green=True)
    print(k, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=nights.environment()
    )
    for _ in range(200):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0].split()
    last = int(rest[-1]) if rest else last
    with History(tmp_path / "h.sqlite") as history:
        assert history.unfinished() == (1, {})
        assert {f"j{k}" for k in range(last + 1)} <= set(history.of_run(1))


@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_fails_its_check_is_not_accepted_and_says_so(exit_code):
    """Its figures would not be held against the next night's, in which all its regressions came back."""
    found, lines = declared_normal(outcome(exit_code=exit_code), ("it is worse",))
    assert lines == (() if exit_code == 0 else ("it is worse",))
    assert found.accepted is (exit_code == 0)
    refused = "--accept is for what passed its check: repair the job, or change its check.limits"
    assert found.notes == (("accepted: it is worse",) if exit_code == 0 else (refused,))
    again, _ = declared_normal(found, ("it is worse",)) if exit_code == 0 else (found, ())
    assert again.notes == found.notes  # --resume judges it once more


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_another_programs_database_is_left_as_it_is(tmp_path, mode):
    """Tables and a version of ours were written into it, and `history` said nothing."""
    path = tmp_path / "app.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA journal_mode={mode}")
        other.execute("CREATE TABLE t (a)")
        other.commit()
    before = path.read_bytes()
    refused = (
        r"app\.sqlite: must be a history of trtpipe \(got a database with the table 't'\)\. Choose another --history\."
    )
    with pytest.raises(InputError, match=refused):
        History(path)
    assert path.read_bytes() == before


def test_history_of_an_empty_file_says_so_and_leaves_it(tmp_path, capsys):
    path = tmp_path / "h.sqlite"
    path.touch()
    assert main(["history", "--history", str(path)]) == 2
    said = f"{path}: is empty: no night is in it. Run `trtpipe nightly`, or give --history."
    assert said in capsys.readouterr().err
    assert path.stat().st_size == 0


def test_an_empty_file_is_told_from_none(tmp_path):
    (tmp_path / "cut.sqlite").touch()
    for name, was_empty in (("cut.sqlite", True), ("new.sqlite", False), ("cut.sqlite", False)):
        with History(tmp_path / name) as history:
            assert history.was_empty is was_empty


def test_a_history_that_another_night_is_making_is_not_taken_for_an_emptied_one(tmp_path, monkeypatch):
    """Its file is there, without a byte, before its tables are."""
    made, seen = threading.Event(), []

    def slowly(path, patience_s):
        database = open_database(path, patience_s)
        path.touch()
        made.set()
        time.sleep(0.3)
        return database

    def second():
        made.wait()
        with History(tmp_path / "h.sqlite") as history:
            seen.append(history.was_empty)

    monkeypatch.setattr(history_file, "open_database", slowly)
    other = threading.Thread(target=second)
    other.start()
    with History(tmp_path / "h.sqlite") as history:
        seen.append(history.was_empty)
    other.join()
    assert seen == [False, False]


def test_nothing_is_compared_without_a_past():
    assert compare(outcome(), (), LIMITS) == ((), ())


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (outcome(accuracy=0.885),
         "accuracy_engine of logits 0.9 -> 0.885, worse by 0.015 than the last green run (limit 0.01)"),
        (outcome(sqnr=26.0), "sqnr_db of logits 30 -> 26, worse by 4 than the last green run (limit 3)"),
        (outcome(sqnr=math.nan), "sqnr_db of logits 30 -> nan, worse by inf than the last green run (limit 3)"),
        (outcome(size=1_100_000), "size_bytes 1e+06 -> 1.1e+06, worse by 10 % than the last green run (limit 5 %)"),
        (outcome(seconds=250.0), "build_s 100 -> 250, worse by 150 % than the last green run (limit 100 %)"),
        (outcome(exit_code=1), "passed its check and now fails it"),
        (outcome(metrics=(Metric("sqnr_db", "logits", 30.0), Metric("cosine", "logits", 0.99))),
         "accuracy_engine of logits was measured and no longer is"),
    ],
)  # fmt: skip
def test_what_became_worse_than_it_may_is_a_line(now, line):
    assert compare(now, [outcome()], LIMITS)[1] == (line,)


def test_what_a_network_answers_comes_before_what_it_takes():
    """A job's own metrics stood below size and time, though they are what it is for."""
    names = [n for n in (*LIMITS, "max_abs", "top5_drop") if n not in ("size_bytes", "build_s")]
    before = outcome(metrics=tuple(Metric(n, "y", 100.0) for n in reversed(names)))
    larger_is_better = {n for n, limit in LIMITS.items() if limit.larger_is_better}
    metrics = tuple(Metric(n, "y", 10.0 if n in larger_is_better else 1000.0) for n in names)
    now = outcome(metrics=metrics, size=9_000_000, seconds=900.0, exit_code=1)
    first, *lines = compare(now, [before], LIMITS)[1]
    assert first == "passed its check and now fails it"
    figures = [line.partition(" ")[0] for line in lines]
    assert figures == [
        "accuracy_engine", "accuracy_baseline", "top1_agreement", "cosine", "sqnr_db", "top5_drop",
        "size_bytes", "latency_ms", "build_s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "now",
    [
        outcome(accuracy=0.895),
        outcome(accuracy=1.0, sqnr=99.0, size=10, seconds=1.0),
        outcome(size=1_004_000),
        outcome(seconds=150.0),
        outcome(seconds=1000.0, stages_reused=("graph",)),
        outcome(outcome="reused", seconds={"compile": 1000.0}),
        outcome(outcome="cancelled", metrics=()),
        *(outcome(outcome="error", metrics=(), size_bytes=None, error="no", exit_code=code) for code in (2, 3, 4, 70)),
    ],
)
def test_what_is_within_its_limit_is_none(now):
    assert compare(now, [outcome()], LIMITS)[1] == ()


def test_float32_noise_is_no_regression():
    assert compare(outcome(sqnr=140.0), [outcome(sqnr=math.inf)], LIMITS)[1] == ()


@pytest.mark.parametrize("right", range(2, 101))
def test_a_figure_that_is_worse_by_what_it_may_be_is_no_regression(right):
    """0.93 less 0.92 of binary numbers is more than the 0.01 that a night allows."""
    before, limits = outcome(accuracy=right / 100), parse_limits(("accuracy_engine=0.01",))
    assert compare(outcome(accuracy=(right - 1) / 100), [before], limits)[1] == ()
    assert len(compare(outcome(accuracy=(right - 2) / 100), [before], limits)[1]) == 1


@pytest.mark.parametrize("name", [*BEST, "size_bytes", "latency_ms", "build_s", "miou_drop", "miou_engine"])
@pytest.mark.parametrize("judged", [True, False])
def test_every_figure_says_by_how_much_it_is_worse_whether_it_is_judged_or_not(name, judged):
    """What has no limit was called the same as before, whatever it was. Of a job's own metric nothing says which way
    is worse."""
    limits = LIMITS if judged else parse_limits([f"{n}=off" for n in (*LIMITS, "miou_drop")])

    def at(value):
        if name == "size_bytes":
            return outcome(size=int(value))
        if name == "build_s":
            return outcome(seconds=value)
        return replace(outcome(), metrics=(Metric(name, "y", value),))

    low, high = {"size_bytes": (1e6, 2e6), "build_s": (100.0, 500.0), "sqnr_db": (20.0, 60.0)}.get(name, (0.2, 0.6))
    found = {
        (before, now): next(c for c in compare(at(now), [at(before)], limits)[0] if c.metric == name)
        for before in (low, high)
        for now in (low, high)
    }
    worse = {pair: c.worse_by for pair, c in found.items()}
    if name == "miou_engine":
        assert set(worse.values()) == {None}
        return
    assert worse[low, low] == worse[high, high] == 0
    down, up = worse[high, low], worse[low, high]
    assert (down < 0 < up) if BEST.get(name, 0.0) == 0 else (up < 0 < down)
    assert {c.limit is not None for c in found.values()} == {judged and name in {*LIMITS, "miou_drop"}}
    assert any(c.regressed for c in found.values()) == (judged and name in {*LIMITS, "miou_drop"})


def test_what_is_too_small_to_count_is_shown_as_what_it_is():
    """920 bytes of 4394 are a fifth, and no regression; 4096 bytes are the first that count."""
    for more, counts in ((920, False), (4095, False), (4096, True), (4606, True)):
        compared, _ = compare(outcome(size=4394 + more), [outcome(size=4394)], LIMITS)
        (found,) = [c for c in compared if c.metric == "size_bytes"]
        assert (found.worse_by, found.regressed) == (pytest.approx(more / 4394), counts)


def test_a_slow_decline_is_caught_by_the_trend():
    """Each step is within the limit of 0.01; against the median of the past it is not."""
    past = [outcome(accuracy=a) for a in (0.885, 0.892, 0.9, 0.9, 0.9)]  # the latest first
    found, line = compare(outcome(accuracy=0.878), past, LIMITS)
    assert line == ("accuracy_engine of logits 0.9 -> 0.878, worse by 0.022 than the trend (limit 0.01)",)
    assert (found[0].before, found[0].trend, found[0].regressed) == (0.885, 0.9, True)
    assert compare(outcome(accuracy=0.878), past[:1], LIMITS)[1] == ()


def test_limits_are_read():
    limits = parse_limits(["accuracy_engine=0.05", "build_s=off"])
    assert limits["accuracy_engine"].worse_by == 0.05
    assert limit_of("build_s", limits) is None
    assert limits["cosine"] == LIMITS["cosine"]
    with pytest.raises(
        InputError, match=r"--limit: must name one of .* \(got 'acuracy_engine'\). Did you mean accuracy_engine\?"
    ):
        parse_limits(["acuracy_engine=1"])
    with pytest.raises(InputError, match=r"--limit: cosine must be a number from 0 up, or off \(got '-1'\)\."):
        parse_limits(["cosine=-1"])


def test_what_a_metric_of_the_job_loses_is_compared():
    def with_drop(value):
        return replace(outcome(), metrics=(*outcome().metrics, Metric("miou_drop", "y", value)))

    assert compare(with_drop(0.009), [with_drop(0.0)], LIMITS)[1] == ()
    line = "miou_drop of y 0 -> 0.02, worse by 0.02 than the last green run (limit 0.01)"
    assert compare(with_drop(0.02), [with_drop(0.0)], LIMITS)[1] == (line,)
    assert compare(with_drop(0.0), [with_drop(0.02)], LIMITS)[1] == ()
    assert compare(with_drop(0.02), [with_drop(0.0)], parse_limits(["miou_drop=0.03"]))[1] == ()
    assert compare(with_drop(0.02), [with_drop(0.0)], parse_limits(["miou_drop=off"]))[1] == ()
    assert compare(outcome(), [with_drop(0.0)], LIMITS)[1] == ("miou_drop of y was measured and no longer is",)
    with pytest.raises(InputError, match=r"or METRIC_drop of a metric of check\.metrics \(got 'accuracy_drop'\)"):
        parse_limits(["accuracy_drop=1"])


def test_the_report_says_the_worst_first_and_counts_the_rest():
    bad = outcome("bad", regressions=("accuracy fell", "size rose"))
    report = NightlyReport(
        3, "2026-01-01T00:00:00Z", 2.0, (bad, outcome("error", outcome="error", exit_code=4), outcome("c"))
    )
    text = list(lines(report))
    assert text[0] == "REGRESSION bad: accuracy fell (and 1 more)"
    assert text[1] == "run 3 of 2026-01-01T00:00:00Z: 3 jobs, 2 built, 1 error, 2.00 s"
    assert report.exit_code == 1
    assert json.loads(to_json(report))["exit_code"] == 1


def test_the_command_shows_a_jobs_past_and_draws_it(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with History(tmp_path / "h.sqlite") as history:
        record(history, outcome(reasons=("first build",)), outcome("other"))
        record(history, outcome(accuracy=0.5, reasons=("weights changed",), exit_code=1), green=False)
        record(history, outcome(reasons=("--repeat",)), green=False)  # compared with nothing, and nothing with it
        worse = outcome(accuracy=0.8, reasons=("weights changed",), regressions=("accuracy 0.9 to 0.8",))
        record(history, worse, green=False)
    where = ["--history", str(tmp_path / "h.sqlite")]
    plot = tmp_path / "a.svg"
    assert main(["history", "a", *where, "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[2:4] == ["built", "0.9"]
    assert shown[1].endswith("first build")
    assert shown[2].split()[2:5] == ["built", "!", "0.5"]
    assert shown[2].endswith("weights changed")
    assert shown[3].split()[2:4] == ["built", "0.9"]
    assert shown[4].split()[2:4] == ["built", "!"]
    assert shown[4].endswith("accuracy 0.9 to 0.8; weights changed")
    assert shown[5] == "! not green: a failed check, a regression, or outputs that drifted"
    text = plot.read_text()
    assert text.startswith("<?xml")
    assert "accuracy" in text
    first = plot.read_bytes()
    assert main(["history", "a", *where, "--plot", str(plot)]) == 0
    assert plot.read_bytes() == first
    capsys.readouterr()
    assert main(["history", "a", *where, "--plot", str(plot.with_suffix(".png"))]) == 2
    assert "a.png: must end in .svg (got .png)." in capsys.readouterr().err
    assert main(["history", *where]) == 0
    assert capsys.readouterr().out.split() == ["a", "other"]
    assert main(["history", "othr", *where]) == 2
    assert "NAME: must be a job with a past (got 'othr'). Did you mean other?" in capsys.readouterr().err
    assert main(["history", "a", "--history", str(tmp_path / "no.sqlite")]) == 2
    err = capsys.readouterr().err
    assert "no.sqlite: there is no such file. Run `trtpipe nightly`, or give --history." in err


@pytest.mark.parametrize("standing", get_args(Standing))
def test_the_past_marks_what_a_night_calls_a_trouble(standing):
    """An error says so by its name."""
    made = {
        "regression": {"regressions": ("accuracy fell",)}, "failed check": {"exit_code": 1},
        "error": {"outcome": "error", "exit_code": 4, "error": "no"}, "cancelled": {"outcome": "cancelled"},
        "drift": {"drift": Drift(("a" * 64, "b" * 64), 0.5)}, "built": {}, "reused": {"outcome": "reused"},
    }[standing]  # fmt: skip
    result = outcome(**made)
    assert result.standing == standing
    past = [
        Past(1, "2026-01-01T00:00:00Z", True, {}, outcome()), Past(2, "2026-01-02T00:00:00Z", False, {}, result),
    ]  # fmt: skip
    marked = standing in TROUBLES and standing != "error"
    _, _, line, *legend = rows(past)
    assert (f"{result.outcome} !" in line) == bool(legend) == marked
    without = svg("a", [past[0], replace(past[1], outcome=outcome(outcome="reused"))])
    assert (svg("a", past).count(b"#cc3311") > without.count(b"#cc3311")) == (standing in TROUBLES)


def test_the_table_of_the_docs_has_each_limit_and_its_figure():
    page = (Path(__file__).resolve().parents[2] / "docs" / "nightly.md").read_text()
    rows = re.findall(r"^\| (`.+`) \| ([\d.]+)( %)?", page.partition("may be worse by |")[2].partition("\n\n")[0], re.M)
    written = {
        name: float(figure) / (100 if percent else 1)
        for names, figure, percent in rows
        for name in re.findall(r"`(\w+)`", names)
        if name != "check"
    }
    assert written == {name: limit.worse_by for name, limit in LIMITS.items()}
    assert f"`<metric>_drop` of `check.metrics` | {OWN_LIMIT.worse_by}," in page
    assert f"(above {EXACT_DB:.0f} dB all count as equal)" in page

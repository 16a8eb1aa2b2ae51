import dataclasses
import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trtpipe.cli import console, interrupts
from trtpipe.cli.console import Console
from trtpipe.cli.interrupts import STOPPING
from trtpipe.errors import BuildError, Cancelled
from trtpipe.progress import Reporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Make stderr a terminal; called in the test itself, since pytest sets stderr after its fixtures."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by two seconds at each look."""
    times = iter(range(0, 10000, 2))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(times)))


def test_it_is_a_reporter():
    reporter: Reporter = Console()
    assert not reporter.cancelled()


def test_a_stage_is_one_line_in_a_log(capsys, ticking):
    with Console().watching() as reporter:
        with reporter.stage("calibrate"):
            for done in range(0, 512, 32):
                reporter._stages[0].done, reporter._stages[0].unit = done + 32, "samples"
            reporter.note("2 samples skipped")
        with reporter.stage("export"):
            pass
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "  note: 2 samples skipped",
        "calibrate                2.00 s  512 samples, 256/s",
        "export                   2.00 s",
    ]


def test_steps_are_counted(capsys):
    with Console().watching() as reporter, reporter.stage("check"):
        reporter.step(8, 16, "samples")
        reporter.step(16, 16, "samples")
    assert "  16 samples" in capsys.readouterr().err


def test_stages_within_stages_are_indented(capsys, ticking):
    with Console().watching() as reporter, reporter.stage("outer"), reporter.stage("inner"):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("  inner ")
    assert lines[1].startswith("outer ")


def test_a_failed_stage_says_so(capsys):
    with pytest.raises(BuildError), Console().watching() as reporter, reporter.stage("export"):
        raise BuildError("no")
    assert "export                   failed after " in capsys.readouterr().err


@pytest.mark.parametrize("end", [BrokenPipeError, SystemExit])
def test_a_reader_that_has_had_enough_is_no_failure(capsys, end):
    with pytest.raises(end), Console().watching() as reporter, reporter.stage("run"):
        raise end
    assert re.fullmatch(r"run +ended early after \d+\.\d\d s\n", capsys.readouterr().err)


def test_quiet_shows_no_stage_and_no_note(capsys):
    with Console(quiet=True).watching() as reporter, reporter.stage("export"):
        reporter.note("x")
    assert capsys.readouterr().err == ""


def test_bars_are_drawn_on_a_terminal_only(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setattr(console, "_BAR_EVERY_S", 0)
    with Console().watching() as reporter, reporter.stage("calibrate"):
        reporter.step(3, 7, "samples")
        assert reporter._bars is not None
        reporter._bars.refresh()
    text = stream.getvalue()
    assert "3/7" in text
    assert "\x1b[" in text
    assert text.count("calibrate") >= 2


def test_a_dumb_terminal_gets_lines(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with Console().watching() as reporter, reporter.stage("calibrate"):
        reporter.step(3, 7, "samples")
    assert "\x1b" not in stream.getvalue()


def test_no_color_is_honoured(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(console, "_BAR_EVERY_S", 0)
    with Console().watching() as reporter, reporter.stage("calibrate"):
        reporter.step(3, 7, "samples")
        reporter._bars.refresh()
    assert "3/7" in stream.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue())


def test_verbose_shows_what_is_logged_and_only_then(capsys):
    for verbose in (False, True):
        with Console(verbose=verbose).watching():
            logging.getLogger("trtpipe.trt").info("tactic chosen")
            logging.getLogger("trtpipe.trt").warning("careful")
        lines = capsys.readouterr().err.splitlines()
        assert lines == ["trtpipe.trt: tactic chosen"] * verbose + ["trtpipe.trt: careful"]


def test_an_interrupt_stops_a_stage_that_does_not_poll_where_it_is(capsys):
    reached = []
    with pytest.raises(KeyboardInterrupt), Console().watching() as reporter, reporter.stage("calibrate"):
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after")
    assert reached == []
    assert "calibrate                interrupted after" in capsys.readouterr().err


def test_an_interrupt_that_native_code_turned_into_an_error_of_its_own_is_an_interrupt(capsys):
    with pytest.raises(Cancelled) as caught, Console().watching() as reporter, reporter.stage("capture"):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:
            raise TypeError("argument 'size' failed to unpack") from error
    assert isinstance(caught.value.__cause__, TypeError)
    assert "capture                  interrupted after" in capsys.readouterr().err


@pytest.mark.parametrize("number", STOPPING)
def test_a_stage_that_polls_stops_by_itself(number, capsys):
    reached = []
    with pytest.raises(Cancelled), Console().watching() as reporter, reporter.stage("build"):
        assert not reporter.cancelled()
        os.kill(os.getpid(), number)
        reached.append(reporter.cancelled())
    assert reached == [True]
    assert "interrupted after" in capsys.readouterr().err


def test_a_second_interrupt_always_interrupts(capsys, monkeypatch):
    reached = []
    monkeypatch.setattr(interrupts, "_ONCE_S", -1.0)
    with pytest.raises(KeyboardInterrupt), Console().watching() as reporter, reporter.stage("build"):
        reporter.cancelled()
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the first")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the second")
    assert reached == ["the first"]
    assert "interrupted after" in capsys.readouterr().err


def test_one_that_comes_so_soon_is_the_same(monkeypatch):
    """It was sent to both processes of a command."""
    reached = []
    monkeypatch.setattr(interrupts, "_ONCE_S", 3600.0)
    with pytest.raises(Cancelled), Console().watching() as reporter, reporter.stage("build"):
        reporter.cancelled()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(reporter.cancelled())
    assert reached == [True]


def test_the_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Console().watching():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Console().watching() as reporter, reporter.stage("model"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _interrupts_as_a_terminal_has_them():
    """Python's own handler, also where the tests run in the background, with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_rich_is_not_loaded_for_a_log():
    code = "from trtpipe.cli.console import Console\nwith Console().watching() as c, c.stage('x'): pass\n"
    code += "import sys; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_jsonable(capsys):
    @dataclasses.dataclass
    class Point:
        x: float
        at: Path

    value = {"p": Point(math.nan, Path("a/b")), "n": np.float32(0.5), "a": np.arange(3), "t": (1, None, True), 5: b"ab"}
    console.out_json(value)
    assert json.loads(capsys.readouterr().out) == {
        "p": {"x": "NaN", "at": "a/b"},
        "n": 0.5,
        "a": [0, 1, 2],
        "t": [1, None, True],
        "5": "2 bytes",
    }


def test_an_interrupt_inside_a_destructor_is_not_printed_and_not_lost(capsys):
    class Sticky:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with Console().watching() as reporter, pytest.raises(Cancelled), reporter.stage("work"):
        Sticky()
    assert "Traceback" not in capsys.readouterr().err

"""Output of commands: results on stdout, everything else on stderr, bars only on a terminal.

In a log file a stage is one line, written when it ends. rich is imported only where a bar is drawn.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from calib.user_code import OURS
from trtpipe import __version__
from trtpipe.cli.interrupts import interrupted_by
from trtpipe.cli.results import discard_results, results
from trtpipe.errors import Cancelled
from trtpipe.jsontext import LATE_CONTROLS, json_line, plain
from trtpipe.outputs import naming
from trtpipe.progress import EndedEarly, duration, per_second

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

#: Below a traceback.
A_BUG = f"this is a bug in trtpipe {__version__}; please report it with the lines above"
_BAR_EVERY_S = 0.05
#: What a terminal would obey instead of showing: names of files and texts of bundles are anybody's.
_UNSEEN = {c: f"\\x{c:02x}" for c in (*range(32), *LATE_CONTROLS) if chr(c) not in "\n\t"}


def out(text: str) -> None:
    """Print one result on stdout. Where the reader has closed that, the command goes on to its verdict unheard."""
    with naming("standard output"):
        try:
            print(visible(text), file=results(), flush=True)
        except BrokenPipeError:
            discard_results()


def can_draw() -> bool:
    """Whether what shows messages is a terminal that can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def out_json(value: object) -> None:
    """Print one result as JSON on stdout: UTF-8, two spaces, a newline at the end."""
    out(json_line(jsonable(value), indent=2))


def err(text: str) -> None:
    """Print one line on stderr."""
    if (stream := sys.stderr or sys.__stderr__) is not None:
        print(visible(text), file=stream, flush=True)


def visible(text: str) -> str:
    """`text` with control characters spelt out, all but the end of a line and a tab."""
    return text.translate(_UNSEEN)


def one_line(value: Any) -> Any:
    """`value`, as `jsonable` gives it, with every text in it on one line: no text of a file passes for another line."""
    if isinstance(value, str):
        return "\\n".join(value.splitlines())
    if isinstance(value, dict):
        return {one_line(k): one_line(v) for k, v in value.items()}
    return [one_line(v) for v in value] if isinstance(value, list) else value


def jsonable(value: object) -> Any:
    """`plain`; bytes become their size, and anything else that JSON has no form for its `str`."""
    return plain(value, lambda v: f"{len(v)} bytes" if isinstance(v, bytes) else str(v))


class Console:
    """A `progress.Reporter` for a terminal or a log.

    A stage that polls `cancelled` (a TensorRT build, which runs in native code) is left to stop by itself on the
    first interrupt; any other is interrupted where it is. A second interrupt always interrupts.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._draw = can_draw() and not quiet and not verbose
        self._stages: list[_Stage] = []
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._drawn_at = 0.0
        self._cancelled = False
        self._polled = False

    @contextmanager
    def watching(self) -> Iterator[Console]:
        """Handle interrupts, draw bars and, when verbose, show what is logged, until the end of the block."""
        with self._interrupts(), self._logging(), self._drawing():
            yield self

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show one stage: its bar while it runs, its time when it ends.

        Raises:
            Cancelled: the user asked to stop while it ran.
        """
        stage = _Stage(name, time.monotonic())
        self._stages.append(stage)
        self._polled = False
        self._task = None if self._bars is None else self._bars.add_task(name, total=None, unit="", rate="")
        outcome = "failed after "
        try:
            yield
            if self._cancelled:
                raise Cancelled
            outcome = ""
        except (KeyboardInterrupt, Cancelled):
            self._cancelled = True
            raise
        except (BrokenPipeError, SystemExit, EndedEarly):  # whoever reads this has enough, or another stage failed
            outcome = "ended early after "
            raise
        except Exception as error:  # native code makes errors of its own of an interrupt that is raised below it
            if self._cancelled:
                raise Cancelled from error
            raise
        finally:
            self._polled = False
            self._stages.pop()
            outcome = "interrupted after " if outcome and self._cancelled else outcome
            if self._bars is not None and self._task is not None:
                self._bars.remove_task(self._task)
            self._task = None
            spent = time.monotonic() - stage.began
            self._line(f"{'  ' * len(self._stages)}{name:<24} {outcome}{duration(spent)}{stage.throughput(spent)}")

    def step(self, done: int, total: int | None, unit: str) -> None:
        """`done` of `total` `unit`s of the current stage are finished."""
        if not self._stages:
            return
        stage = self._stages[-1]
        stage.done, stage.unit = done, unit
        now = time.monotonic()
        if self._bars is None or self._task is None or (now - self._drawn_at < _BAR_EVERY_S and done != total):
            return
        self._drawn_at = now
        spent = now - stage.began
        counts = done and spent > 0.5 and unit and not unit.startswith("%")
        rate = f"{per_second(done / spent)} {unit}/s" if counts else ""
        self._bars.update(self._task, completed=done, total=total, unit=unit, rate=rate)

    def note(self, message: str) -> None:
        """Show something a reader of the log should know now."""
        self._line(f"{'  ' * len(self._stages)}note: {message}")

    def cancelled(self) -> bool:
        """Whether the user has asked to stop."""
        self._polled = True
        return self._cancelled

    def _line(self, text: str) -> None:
        if self._quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            err(text)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        if not self._draw:
            yield
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<22}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]} {task.fields[rate]}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=RichConsole(stderr=True), transient=True) as self._bars:
            try:
                yield
            finally:
                self._bars = None

    @contextmanager
    def _logging(self) -> Iterator[None]:
        """With -v, what trtpipe, calib and TensorRT log goes to stderr; without, only warnings."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.setLevel(logging.DEBUG if self._verbose else logging.ERROR if self._quiet else logging.WARNING)
        before = {}
        for name in OURS:
            logger = logging.getLogger(name)
            before[logger] = (logger.level, logger.propagate)
            logger.addHandler(handler)
            logger.propagate = False
            if self._verbose:
                logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            for logger, (level, propagate) in before.items():
                logger.removeHandler(handler)
                logger.setLevel(level)
                logger.propagate = propagate

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        def interrupt(number: int, frame: FrameType | None) -> None:
            first, self._cancelled = not self._cancelled, True
            if not (first and self._polled):
                raise KeyboardInterrupt

        with interrupted_by(interrupt):
            yield


@dataclasses.dataclass
class _Stage:
    """A stage while it runs. Mutable: each step counts."""

    name: str
    began: float
    done: int = 0
    unit: str = ""

    def throughput(self, seconds: float) -> str:
        """`  512 samples, 160/s`, or nothing for a stage that took no steps."""
        if not self.done or not self.unit or self.unit.startswith("%"):
            return ""
        rate = f", {per_second(self.done / seconds)}/s" if seconds > 0 else ""
        return f"  {self.done} {self.unit}{rate}"


def relative(path: Path) -> str:
    """`path` from the current folder when it is inside it, else as it is."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

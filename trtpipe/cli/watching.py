"""What a terminal or a log shows of many jobs at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, Literal

from trtpipe.cli.console import can_draw, err
from trtpipe.cli.interrupts import interrupted_by
from trtpipe.nightly.outcome import THERE, TROUBLES, State
from trtpipe.progress import duration

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


class Jobs:
    """Shows many jobs at once: a live table on a terminal, a line for each that ends in a log.

    The first interrupt asks running jobs to stop; the second ends them.
    """

    #: States that end a job, and how a terminal colours them.
    COLOURS: ClassVar[Mapping[State | Literal[""], str]] = {
        "regression": "bold red",
        "failed check": "red",
        "error": "red",
        "drift": "red",
        "cancelled": "yellow",
        "built": "green",
        "reused": "dim",
    }
    #: Rows are in this order.
    ORDER: ClassVar[Sequence[State | Literal[""]]] = ("running", *TROUBLES, "waiting", *THERE, "")
    #: Rows of the table; more jobs than fit are counted.
    ROWS = 20

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._draw = can_draw() and not quiet
        self._states: dict[str, tuple[State | Literal[""], str]] = {}
        self._began: dict[str, float] = {}
        self._live: Live | None = None
        self._cancelled = False

    @contextmanager
    def watching(self) -> Iterator[Jobs]:
        """Handle interrupts and draw, until the end of the block."""
        with self._interrupts(), self._drawing():
            yield self

    def planned(self, names: Sequence[str]) -> None:
        """These jobs are shown."""
        self._states = dict.fromkeys(names, ("", ""))

    def state(self, name: str, state: State, detail: str = "") -> None:
        """A job's state now."""
        if state == "running":
            self._began.setdefault(name, time.monotonic())
        self._states[name] = (state, detail)
        if self._live is not None:
            self._live.update(self._table())
        elif not self._quiet and (state in self.COLOURS and state != "reused"):
            spent = f" in {duration(time.monotonic() - self._began[name])}" if name in self._began else ""
            done = sum(s in self.COLOURS for s, _ in self._states.values())
            err(f"[{done}/{len(self._states)}] {name}: {state}{spent}{': ' + detail if detail else ''}")

    def note(self, message: str) -> None:
        """Show something a reader of the log should know now."""
        if self._live is not None:
            self._live.console.print(f"note: {message}", highlight=False, markup=False)
        elif not self._quiet:
            err(f"note: {message}")

    def cancelled(self) -> bool:
        """Whether the user has asked to stop."""
        return self._cancelled

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("job", "state", "time", ""):
            table.add_column(title, no_wrap=True)
        rows = sorted(self._states.items(), key=lambda item: self.ORDER.index(item[1][0]))
        for name, (state, detail) in rows[: self.ROWS]:
            spent = duration(time.monotonic() - self._began[name]) if state == "running" else ""
            table.add_row(Text(name), Text(state, self.COLOURS.get(state, "")), spent, Text(detail, "dim"))
        done = sum(s in self.COLOURS for s, _ in self._states.values())
        hidden = f", {len(rows) - self.ROWS} not shown" if len(rows) > self.ROWS else ""
        table.caption = f"{done} of {len(rows)} done{hidden}"
        return table

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        if not self._draw:
            yield
            return
        from rich.console import Console as RichConsole
        from rich.live import Live

        with Live(console=RichConsole(stderr=True), refresh_per_second=4, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        def interrupt(number: int, frame: FrameType | None) -> None:
            again, self._cancelled = self._cancelled, True
            if again:
                raise KeyboardInterrupt
            self.note("stopping; running jobs end at their next step. Once more ends them now.")

        with interrupted_by(interrupt):
            yield

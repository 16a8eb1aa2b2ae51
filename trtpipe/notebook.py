"""Progress and results in a notebook. IPython is used where it is already running, and never imported otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from trtpipe.progress import Reporter, Silent

if TYPE_CHECKING:
    from trtpipe.values import CheckReport

#: Seconds between two drawings of a bar.
EVERY_S = 0.2


@contextmanager
def watching(given: Reporter | None) -> Iterator[Reporter]:
    """The Reporter given; without one a bar in a notebook, and one that shows nothing anywhere else."""
    if given is not None:
        yield given
    elif (display := _display()) is not None:
        yield NotebookReporter(display)
    else:
        yield Silent()


def _display() -> Any | None:
    """IPython's `display` module where a kernel with a front end runs this, or None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    import importlib

    return importlib.import_module("IPython.display")


class NotebookReporter:
    """A Reporter that draws one line for each finished stage and a bar for the one that runs.

    Args:
        display: what `IPython.display` is: `display(value, display_id=True)` and `HTML(text)`.
    """

    def __init__(self, display: Any) -> None:
        self._html = display.HTML
        self._finished: list[str] = []
        self._notes: list[str] = []
        self._running: tuple[str, float] | None = None
        self._drawn_at = 0.0
        self._handle = display.display(display.HTML(""), display_id=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Draw one stage while it runs and its seconds when it ends."""
        self._running = (name, time.monotonic())
        self._draw()
        outcome = " failed"
        try:
            yield
            outcome = ""
        finally:
            began = self._running[1] if self._running else time.monotonic()
            self._finished.append(f"{name}{outcome} {time.monotonic() - began:.2f} s")
            self._running = None
            self._draw()

    def step(self, done: int, total: int | None, unit: str) -> None:
        """Draw the bar, a few times a second."""
        now = time.monotonic()
        if now - self._drawn_at >= EVERY_S or done == total:
            self._drawn_at = now
            self._draw(done, total, unit)

    def note(self, message: str) -> None:
        """Keep a note on view."""
        self._notes.append(message)
        self._draw()

    def cancelled(self) -> bool:
        """Never: a notebook interrupts with KeyboardInterrupt."""
        return False

    def _draw(self, done: int = 0, total: int | None = None, unit: str = "") -> None:
        parts = [escape(text) for text in self._finished]
        if self._running is not None:
            size = f' value="{done}" max="{total}"' if total else ""
            count = f" {done} of {total} {unit}" if total else ""
            parts.append(f"{escape(self._running[0])} <progress{size}></progress>{escape(count)}")
        parts += [f"<em>{escape(note)}</em>" for note in self._notes]
        self._handle.update(self._html("<br>".join(parts)))


def check_html(report: CheckReport) -> str:
    """A check as a small table."""
    word = "passed" if report.passed else "failed"
    rows = "".join(
        f"<tr><td>{escape(m.output)}</td><td>{escape(m.name)}</td><td>{m.value:.6g}</td>"
        f"<td>{'' if m.limit is None else f'{m.limit:g}'}</td>"
        f"<td>{'' if m.passed is None else 'met' if m.passed else 'missed'}</td></tr>"
        for m in report.metrics
    )
    problems = "".join(f"<p>{escape(p)}</p>" for p in report.problems)
    return (
        f"<p><strong>{word}</strong>: {report.executed} executed by {escape(report.runner)} on {report.samples} "
        f"samples</p>{problems}<table><thead><tr><th>output</th><th>metric</th><th>value</th><th>limit</th><th></th>"
        f"</tr></thead><tbody>{rows}</tbody></table>"
    )


def page_html(page: str, height: int = 720) -> str:
    """A whole page inside another, without any right to reach it."""
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'

"""Progress and results in a notebook. IPython is used where it is already running, and never imported otherwise."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from types import ModuleType

from trtpipe.progress import Reporter, Silent

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


def _display() -> ModuleType | None:
    """IPython's `display` module where a kernel with a front end runs this, or None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    return importlib.import_module("IPython.display")


class NotebookReporter:
    """A Reporter that draws one line for each finished stage and a bar for the one that runs.

    Args:
        display: what `IPython.display` is: `display(value, display_id=True)` and `HTML(text)`.
    """

    def __init__(self, display: ModuleType) -> None:
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


def table_html(verdict: str, problems: Sequence[str], header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A line that begins with `verdict`, a paragraph for each problem, and a small table; all given as plain text.

    Args:
        verdict: "word: the rest"; the word is set in bold.
        problems: one paragraph each.
        header: the columns' titles.
        rows: as many cells as the header has.
    """
    word, _, rest = verdict.partition(":")
    titles = "".join(f"<th>{escape(title)}</th>" for title in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    paragraphs = "".join(f"<p>{escape(problem)}</p>" for problem in problems)
    return (
        f"<p><strong>{escape(word)}</strong>:{escape(rest)}</p>{paragraphs}"
        f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    )


def page_html(page: str) -> str:
    """A whole page inside another, without any right to reach it."""
    style = "width:100%;height:720px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'

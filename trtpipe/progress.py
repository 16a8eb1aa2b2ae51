"""How a stage reports its progress, and rates, sizes and times as text. Only `cli` knows a terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """Receives the steps of a running stage."""

    def step(self, done: int, total: int | None, unit: str) -> None:
        """`done` of `total` (None: unknown) `unit`s of the current stage are finished."""

    def note(self, message: str) -> None:
        """Something a reader of the log should know now; it must also be in the stage's value."""

    def cancelled(self) -> bool:
        """Whether the user has asked to stop; long native calls (a TensorRT build) poll it."""


class Reporter(Progress, Protocol):
    """A Progress that also knows where stages begin and end; `pipeline` takes one."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Context manager around one stage."""


class EndedEarly(Exception):
    """A stage that has not failed ends, since what it was for has: its cause is that error."""


class Silent:
    """A Reporter that shows nothing and is never cancelled."""

    def step(self, done: int, total: int | None, unit: str) -> None:
        """Ignore the step."""

    def note(self, message: str) -> None:
        """Ignore the note."""

    def cancelled(self) -> bool:
        """Never."""
        return False

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Run a stage without showing it."""
        return nullcontext()


def per_second(rate: float) -> str:
    """A rate in as many digits as it needs to say something: `1,600`, `1.4`, `0.08`."""
    return f"{rate:,.0f}" if rate >= 9.5 else f"{rate:.2g}"


def size(count: int) -> str:
    """Bytes as text, like `29.6 MB`; 1 MB = 1,000,000 bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """`0.42 s`, `12.3 s`, `3 min 07 s` or `2 h 05 min`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"

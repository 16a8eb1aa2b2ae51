"""The Progress of a stage while another process compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trtpipe.errors import Cancelled, TrtpipeError
from trtpipe.progress import EndedEarly, Progress

if TYPE_CHECKING:
    from trtpipe.routes.onnx import Compiler

#: Wraps the Progress of a stage.
Watched = Callable[[Progress], Progress]


class Watching:
    """Passes on what a stage reports, and at each of its steps the compiler's notes.

    Raises:
        EndedEarly: from its step, of the error with which compiling has ended.
    """

    def __init__(self, compiling: Compiler, progress: Progress) -> None:
        self._compiling, self._progress = compiling, progress
        self.note, self.cancelled = progress.note, progress.cancelled

    def step(self, done: int, total: int | None, unit: str) -> None:
        """Of the stage; the compiler's own are not shown beside them."""
        try:
            self._compiling.look(_Unstepped(self._progress))
        except Cancelled:
            raise
        except TrtpipeError as error:
            raise EndedEarly from error
        self._progress.step(done, total, unit)


class _Unstepped:
    """A Progress without its steps."""

    def __init__(self, progress: Progress) -> None:
        self.note, self.cancelled = progress.note, progress.cancelled

    def step(self, done: int, total: int | None, unit: str) -> None:
        """Show nothing."""

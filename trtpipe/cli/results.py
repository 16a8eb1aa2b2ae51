"""stdout is for results alone, whatever else is printed while a command runs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

#: Where results go while `results_apart` keeps them from what else is printed; None: to `sys.stdout`.
_RESULTS: ContextVar[TextIO | None] = ContextVar("results", default=None)


def results() -> TextIO:
    """The stream of results: what the caller of the command has as stdout.

    Raises:
        OSError: the caller has closed it.
    """
    stream: TextIO | None = _RESULTS.get() or sys.stdout
    if stream is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "standard output")
    return stream


def fill_closed_streams() -> None:
    """Open /dev/null in the place of each standard stream that whoever called the program has closed.

    Else the next files that are opened take their descriptors, and native code that prints writes into those. Results
    still need a standard output (`results`); what else is said goes nowhere, as the caller wants it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def discard_results() -> None:
    """Let further results go nowhere: nobody reads them."""
    _RESULTS.set(open(os.devnull, "w"))  # noqa: SIM115


@contextmanager
def results_apart() -> Iterator[None]:
    """Keep stdout for results until the end of the block: what the job's code, or native code, prints goes to stderr.

    The file descriptor is kept too, so that neither a write to 1 nor a child process reaches the results. A character
    that the encoding of stdout lacks (in a file name that is no UTF-8) is written as `\\udcff`, as JSON spells it.
    """
    given = sys.stdout
    if given is None:  # closed by whoever called the command
        yield
        return
    given.flush()
    kept = printed = None
    stream, other = given, sys.stderr
    if _descriptor(given) == 1 and _descriptor(sys.stderr) is not None:
        kept, printed = os.dup(1), os.dup(2)
        how: dict[str, Any] = {"encoding": given.encoding, "errors": "backslashreplace"}
        stream = open(kept, "w", closefd=False, **how)  # noqa: SIM115  # closed below, where that may fail
        other = open(printed, "w", buffering=1, closefd=False, **how)  # noqa: SIM115
        os.dup2(2, 1)
    token = _RESULTS.set(stream)
    sys.stdout = other
    try:
        yield
    finally:
        _RESULTS.reset(token)
        sys.stdout = given
        if kept is not None and printed is not None:
            with suppress(OSError, ValueError):  # said when it was written; the job's code may have closed the other
                other.flush()
            with suppress(OSError):
                stream.close()
            os.dup2(kept, 1)
            os.close(kept)
            os.close(printed)


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):  # a stream in memory, or a closed one
        return None

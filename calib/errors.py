"""What can go wrong for a user of calib; the message alone is shown."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

#: By errno, what a system has no more of, and what gives more of it, a sentence without its full stop.
EXHAUSTED: Mapping[int, tuple[str, str]] = {
    errno.EMFILE: ("too many open files", "Raise the limit (`ulimit -n 4096`)"),
    errno.ENFILE: ("too many open files on this machine", "End other programs"),
    errno.EAGAIN: ("no more processes or threads can be started", "Raise `ulimit -u`"),
}


class CalibError(ValueError):
    """Bad data, a bad table or a bad option. Form: ``<where>: <what must hold> (got <value>). <next step>``."""


class CalibCancelled(CalibError):
    """The caller's progress asked to stop; nothing was written."""


def text_of(raised: BaseException) -> str:
    """What an exception says, without the spaces around it; empty where it cannot say it: its `__str__` may be a
    user's code."""
    try:
        return str(raised).strip()
    except Exception:  # noqa: BLE001  # whatever that raises
        return ""


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and how many more there are: `a, b and 7 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

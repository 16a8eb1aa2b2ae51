"""What can go wrong for a user of calib; the message alone is shown."""

from __future__ import annotations

from collections.abc import Sequence


class CalibError(ValueError):
    """Bad data, a bad table or a bad option. Form: ``<where>: <what must hold> (got <value>). <next step>``."""


class CalibCancelled(CalibError):
    """The caller's progress asked to stop; nothing was written."""


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and how many more there are: `a, b and 7 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

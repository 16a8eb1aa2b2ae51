"""What can go wrong for a user of calib; the message alone is shown."""

from __future__ import annotations


class CalibError(ValueError):
    """Bad data, a bad table or a bad option. Form: ``<where>: <what must hold> (got <value>). <next step>``."""


class CalibCancelled(CalibError):
    """The caller's progress asked to stop; nothing was written."""

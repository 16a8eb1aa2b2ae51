"""What can go wrong for a user. Each class carries its exit code; anything else is a bug with a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class TrtpipeError(Exception):
    """A user error: the message alone is shown. Form: ``<where>: <what must hold> (got <value>). <next step>``."""

    exit_code = 1


class InputError(TrtpipeError):
    """A job, a file or data given by the user is bad."""

    exit_code = 2


class MissingError(TrtpipeError):
    """A dependency, a driver or a device that this step needs is not here."""

    exit_code = 3


class BuildError(TrtpipeError):
    """The compiler (TensorRT, a frontend, the exporter) could not make the engine."""

    exit_code = 4


class Cancelled(TrtpipeError):
    """The user interrupted; nothing half written is left behind."""

    exit_code = 130


def did_you_mean(got: object, legal: Sequence[str], cutoff: float = 0.6) -> str:
    """`Did you mean x?` for the nearest legal word, or nothing."""
    lowered = {word.lower(): word for word in reversed(legal)}
    near = difflib.get_close_matches(str(got).lower().replace("-", "_"), list(lowered), n=1, cutoff=cutoff)
    return f"Did you mean {lowered[near[0]]}?" if near else ""


def either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"

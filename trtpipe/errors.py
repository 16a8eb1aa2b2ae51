"""What can go wrong for a user. Each class carries its exit code; anything else is a bug with a traceback."""

from __future__ import annotations


class TrtpipeError(Exception):
    """A user error: the message alone is shown. Form: ``<where>: <what must hold> (got <value>). <next step>``."""

    exit_code = 1


class CheckFailed(TrtpipeError):
    """The result was built, compared with its baseline, and is too far off."""

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

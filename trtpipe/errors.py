"""User errors. Each class carries its exit code; any other exception is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NewType

from calib.errors import EXHAUSTED, CalibCancelled, CalibError, text_of
from trtpipe.import_errors import fault_behind, package_fault

#: What a command ends with. Its numbers stand here: mypy refuses an int in its place. `__main__` has some too, as this
#: module may not be there yet.
ExitCode = NewType("ExitCode", int)
#: All is well; a check failed, or a figure is worse than it may be; a bug in trtpipe.
SUCCESS, FAILED, BUG = ExitCode(0), ExitCode(1), ExitCode(70)
#: The reader of the output closed it before a command was done: 128 and the number of SIGPIPE.
UNREAD = ExitCode(141)


class TrtpipeError(Exception):
    """A user error: the message alone is shown. Form: ``<where>: <what must hold> (got <value>). <next step>``."""

    exit_code = FAILED

    def __reduce__(self) -> tuple[object, ...]:
        """How pickle makes it again, in a pool's parent: as it is, whatever its own class is made of."""
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[TrtpipeError], args: tuple[object, ...]) -> TrtpipeError:
    return kind.__new__(kind, *args)


class InputError(TrtpipeError):
    """A job, a file or data given by the user is bad."""

    exit_code = ExitCode(2)


class MissingError(TrtpipeError):
    """A dependency, a driver or a device that this step needs is not here."""

    exit_code = ExitCode(3)


class BuildError(TrtpipeError):
    """No engine can be made of the model: an exporter, a frontend or the compiler refuses what it computes.

    A model that cannot be loaded or run, or that does not repeat itself, is an InputError."""

    exit_code = ExitCode(4)


class Cancelled(TrtpipeError):
    """The user interrupted; nothing half written is left behind."""

    exit_code = ExitCode(130)

    def __init__(self, message: str = "interrupted") -> None:
        super().__init__(message)


def titled(module: str) -> str:
    """A module's path as a message names it; the path of the model's own operations is empty."""
    return module or "the model itself"


def first_line(said: BaseException | str) -> str:
    """The first line of a text, or of what an error says, with the next where it ends in a colon; the name of its type
    where it says nothing."""
    text = said if isinstance(said, str) else text_of(said)
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines:
        return said if isinstance(said, str) else type(said).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


_LESS_MEMORY = "Use a machine with more memory; in a job, a smaller batch_size or fewer workers."
#: By errno: the reason in words, and the next step. Others get the system's own text.
_REFUSED: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("no space left on the disk", "Free some space, or choose another place."),
    errno.EDQUOT: ("the disk quota is used up", "Free some space, or choose another place."),
    errno.EFBIG: ("the file is larger than the file system or `ulimit -f` allows", "Choose another place."),
    errno.EROFS: ("the file system is read-only", "Choose another place, or mount it writable."),
    errno.EACCES: ("permission denied", "Change its permissions, or choose another place."),
    errno.EPERM: ("the operation is not permitted", "Change its permissions, or choose another place."),
    errno.ENOENT: ("no such file or folder", "Check the path."),
    errno.ENOTDIR: ("a part of this path is a file, not a folder", "Check the path."),
    errno.EISDIR: ("is a folder, not a file", "Give the path of a file."),
    errno.EEXIST: ("exists already", "Remove it, or choose another name."),
    errno.ENOTEMPTY: ("the folder is not empty", "Remove it, or choose another name."),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "Choose a shorter one."),
    errno.ELOOP: ("symbolic links lead in a circle", "Repair the links."),
    errno.EBADF: ("is closed", "Open it, or send what is written there to /dev/null."),
    errno.EIO: ("input/output error of the disk", "Look at the system's log (`dmesg`), or choose another place."),
    errno.EBUSY: ("is in use by another program", "End that program, or choose another place."),
    errno.ETXTBSY: ("is in use by another program", "End that program, or choose another place."),
    errno.ESTALE: ("the network file system has lost it", "Mount it again."),
    errno.ENOMEM: ("out of memory", _LESS_MEMORY),
    **{code: (reason, f"{step}.") for code, (reason, step) in EXHAUSTED.items()},
}


def user_error(error: BaseException) -> TrtpipeError | None:
    """`error` as a user error, or None where it is a bug: the one place where others' exceptions become messages.

    calib's own errors keep their text. A refusal of the operating system (OSError with an errno) is its path, what
    was refused in words, and what to do; exit code 2. Running out of memory is a MissingError, and so is a package that
    is missing, hidden by another file, or raises anything while it is imported (`package_fault`), by code of a job too.
    """
    if isinstance(error, InputError | CalibError) and (fault := fault_behind(error)) is not None:
        return MissingError(fault)
    if isinstance(error, TrtpipeError):
        return error
    if (fault := package_fault(error)) is not None:
        return MissingError(fault)
    if isinstance(error, CalibCancelled):
        return Cancelled(str(error))
    if isinstance(error, CalibError):
        return InputError(str(error))
    if isinstance(error, MemoryError):
        return MissingError(f"out of memory. {_LESS_MEMORY}")
    if isinstance(error, OSError) and error.errno is not None:
        return _refused(error)
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # pathlib's, before Python 3.13
        return _refused(OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(error).split("'")[1]))
    if isinstance(error, ValueError) and str(error).startswith("embedded null "):
        return InputError("a path must not hold a NUL character (\\0). Check the paths of the command and of the job.")
    return None


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Around what the Python API does: others' exceptions are the user errors that they are (`user_error`), caused by
    them; bugs and refusals of the operating system stay as they are.

    Raises:
        TrtpipeError: in place of another's exception.
    """
    try:
        yield
    except Exception as error:
        found = None if isinstance(error, OSError) else user_error(error)
        if found is None or found is error:
            raise
        raise found from error


def _refused(error: OSError) -> InputError | None:
    """The message of a refusal; None where there is neither a path nor a known reason."""
    code = error.errno or 0
    reason, step = _REFUSED.get(code, (_system_text(error), "Check the path."))
    if error.filename is None:
        if code not in _REFUSED:
            return None
        detail = "" if error.strerror in (None, os.strerror(code)) else f" ({error.strerror})"
        return InputError(f"{reason}{detail}. {step}")
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return InputError(f"{path}: {reason}. {step}")


def _system_text(error: OSError) -> str:
    text = error.strerror or os.strerror(error.errno or 0)
    return text[:1].lower() + text[1:]


def did_you_mean(got: object, legal: Sequence[str], cutoff: float = 0.6) -> str:
    """`Did you mean x?` for the nearest legal word, or nothing."""
    lowered = {word.lower(): word for word in reversed(legal)}
    near = difflib.get_close_matches(str(got).lower().replace("-", "_"), list(lowered), n=1, cutoff=cutoff)
    return f"Did you mean {lowered[near[0]]}?" if near else ""


def shell(*words: object) -> str:
    """`trtpipe run 'my bundle'`: a command as it is to be pasted into a shell."""
    return shlex.join(map(str, words))


def either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"

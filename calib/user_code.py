"""Calls of the user's code: its exceptions become errors that show the user's own frames."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from calib.errors import CalibError, text_of
from calib.process_state import put_back

#: Frames shown, the innermost ones.
MAX_FRAMES = 6
#: Characters of an exception's own text.
MAX_TEXT = 2000
#: Exceptions of a group that are named, and characters of each.
MAX_MEMBERS, MAX_MEMBER_TEXT = 5, 200

#: A frame as TorchScript's interpreter tells of it.
_TOLD = re.compile(r"^(\S.*\.py)\((\d+)\): (\w+)$", re.MULTILINE)
_ROOT = Path(__file__).resolve().parent.parent
#: The packages whose frames are not the user's.
OURS = ("calib", "trtpipe")
_OURS = tuple(f"{_ROOT / package}/" for package in OURS)
_EXAMPLES = f"{_ROOT / 'trtpipe' / 'examples'}/"  # they are to be copied: users' code
#: Folders that hold installed packages, by the names that Python and Debian give these.
PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")
_STANDARD = tuple(dict.fromkeys(sysconfig.get_paths()[name] + "/" for name in ("stdlib", "platstdlib")))


@contextmanager
def user_code(what: str, error: Callable[[str], Exception] = CalibError) -> Iterator[None]:
    """Around a call of the user's code, and nothing else.

    Args:
        what: the key of the job and the callable, like `model.factory: net:build`.
        error: makes the exception that is raised instead of theirs.

    Raises:
        error: the code raised, be it a SystemExit or a panic of a package in Rust; KeyboardInterrupt alone passes. A
            process that the code has forked ends there instead, with or without an exception.
    """
    own = os.getpid()
    try:
        yield
    except KeyboardInterrupt:
        _end_forked(own, 1)
        raise
    except BaseException as raised:
        _end_forked(own, 1)
        raise error(f"{what} raised {described(raised)}") from raised
    else:
        _end_forked(own, 0)


def _end_forked(own: int, code: int) -> None:
    """End a process that the code has forked: it goes no further than the code."""
    if os.getpid() != own:
        os._exit(code)


@contextmanager
def user_data(what: str) -> Iterator[None]:
    """As `user_code` around a call for samples, and `undone`."""
    with undone(), user_code(what):
        yield


def undone() -> AbstractContextManager[None]:
    """Put back what code of the user's that gives samples changes of the whole process: another thread may be compiling
    meanwhile, and corrections are fitted next."""
    return put_back(_noted, of_a_call=True)


@functools.cache
def _noted(what: str) -> None:
    """Log it, once for all samples."""
    logging.getLogger("calib").warning(what)


def described(raised: BaseException) -> str:
    """The exception's type and text, those of the first exceptions in a group, then the user's own frames, the one that
    raised last.

    Frames of the standard library and of installed packages are left out, unless there are no others.
    """
    text = text_of(raised)
    kind = type(raised).__name__
    frames = _frames(raised)
    if "Traceback of TorchScript" in text:
        text, frames = _of_torchscript(text, frames)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} ..."
    if not frames and raised.__cause__ is not None:  # a StopIteration inside a generator
        frames = _frames(raised.__cause__)
    own = [f for f in frames if not _is_installed(f.filename)]
    lines = [f"{kind}: {text}" if text else kind, *_members(raised)]
    if isinstance(raised, SyntaxError) and raised.filename:
        lines.append(f"  File {raised.filename}, line {raised.lineno}")
    elif not own:
        own = frames[-1:]
    for frame in own[-MAX_FRAMES:]:
        lines.append(f"  File {frame.filename}, line {frame.lineno}, in {frame.name}")
        if frame.line:
            lines.append(f"    {frame.line}")
    return "\n".join(lines)


def _members(raised: BaseException) -> list[str]:
    """A line for each of the first exceptions in a group, and in groups within it."""
    members: list[BaseException] = []
    groups = [raised]
    for group in groups:
        for member in _group(group):
            (groups if _group(member) else members).append(member)
    lines = []
    for member in members[:MAX_MEMBERS]:
        own = [f for f in _frames(member) if not _is_installed(f.filename)]
        place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        text = text_of(member).partition("\n")[0][:MAX_MEMBER_TEXT]
        lines.append(f"  - {type(member).__name__}{f': {text}' if text else ''}{place}")
    more = len(members) - MAX_MEMBERS
    return [*lines, f"  - and {more} more"] if more > 0 else lines


def _group(raised: BaseException) -> tuple[BaseException, ...]:
    """The exceptions of an ExceptionGroup, which Python has from 3.11 on and a package before; of others, none."""
    if not any(kind.__name__ == "BaseExceptionGroup" for kind in type(raised).__mro__):
        return ()
    exceptions: tuple[BaseException, ...] = raised.exceptions  # type: ignore[attr-defined]
    return exceptions


def _of_torchscript(text: str, frames: list[traceback.FrameSummary]) -> tuple[str, list[traceback.FrameSummary]]:
    """The reason, which TorchScript's interpreter gives last, and the frames that it tells of beside those of Python.

    It tells the innermost first, and after those of the model the ones of whoever recorded the program.
    """
    reason = text.splitlines()[-1].removeprefix("RuntimeError: ")
    told = takewhile(lambda found: not is_ours(found[0]), _TOLD.findall(text))
    recorded = [traceback.FrameSummary(file, int(line), name) for file, line, name in told]
    return reason, [*frames, *reversed(recorded)]


def import_callable(reference: str, where: str, error: Callable[[str], Exception] = CalibError) -> Callable[..., Any]:
    """The object that `package.module:callable` names.

    Args:
        reference: what the job says.
        where: the key that says it.
        error: makes the exceptions.

    Raises:
        error: another form, a module that is not there or raises when it is imported, a name that is not in it or
            cannot be called.
    """
    module, _, name = reference.partition(":")
    if not module or not name:
        raise error(f"{where}: must read package.module:callable (got {reference!r}).")
    with user_code(f"{where}: importing {module}", error):
        try:
            target: object = importlib.import_module(module)
        except ModuleNotFoundError as raised:
            absent = raised.name or ""
            if module != absent and not module.startswith(f"{absent}."):
                raise
            target = None
    top = module.partition(".")[0]
    if target is None:
        step = hidden_step(module) or f"Put {top}.py beside the job file, or install its package."
        raise error(f"{where}: must name a module that can be imported (got {reference!r}). {step}")
    with user_code(f"{where}: looking up {name} in {module}", error):
        for part in name.split("."):
            target = getattr(target, part, None)
    if not callable(target):
        step = hidden_step(module) or "Check the name after the colon."
        raise error(f"{where}: must be package.module:callable (got {reference!r}). {step}")
    return target


def hidden_step(module: str) -> str:
    """What to do where a package of ours hides the module that was looked for, by its name; empty for other names."""
    top = module.partition(".")[0]
    return f"{top} is a package of trtpipe's own: rename yours, if it is called so." if top in OURS else ""


def _frames(raised: BaseException) -> list[traceback.FrameSummary]:
    """Where it was raised, less the frames of trtpipe and of Python's import machinery."""
    frames = traceback.extract_tb(raised.__traceback__)
    return [f for f in frames if not f.filename.startswith("<frozen") and not is_ours(f.filename)]


def is_ours(file: str) -> bool:
    """Whether a file of code is one of calib's or trtpipe's, whose examples are users' code."""
    return file.startswith(_OURS) and not file.startswith(_EXAMPLES)


def _is_installed(file: str) -> bool:
    return in_packages(file) or file.startswith(_STANDARD)


def in_packages(path: str) -> bool:
    """Whether a path is in a folder of installed packages."""
    return any(folder in path for folder in PACKAGE_FOLDERS)

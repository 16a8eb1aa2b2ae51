"""What an error says of a package of others: that it is missing, damaged, or hidden by another file.

No more than the standard library is needed, nor `calib`: the program says so too where it cannot be imported itself.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from types import ModuleType

from trtpipe.packages import OWN_FOLDERS, broken, hider, not_installed


def package_fault(error: BaseException) -> str | None:
    """What is wrong with a package, and what repairs it, by an error of its import or of what was asked of it; None for
    any other error. A SystemExit is one of an import too: a module may call sys.exit.
    """
    importing = failed_import(error)
    asked = _asked(error)
    for module in dict.fromkeys(filter(None, (asked, importing, *OWN_FOLDERS))):
        if hider(module) is not None:
            return broken(module, error)
    if isinstance(error, ModuleNotFoundError) and "." not in (error.name or "."):
        with suppress(KeyError):  # a module that trtpipe does not name is the user's own, or a bug
            return not_installed(error.name or "")
    return None if importing is None else broken(importing, error)


def failed_import(error: BaseException) -> str | None:
    """The package of others whose import raised `error`: it is damaged, or of another release than what it needs.

    That is the first module below the last frame of trtpipe or calib whose own code was being executed, whatever the
    error's type: torchvision raises a RuntimeError beside another torch, libraries that lack a symbol an OSError.
    """
    if not isinstance(error, Exception | SystemExit):
        return None
    inner: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in OWN_FOLDERS:
            inner = None
        elif inner is None and frame.f_code.co_name == "<module>" and package != "__main__":
            inner = package
    if inner is None and isinstance(error, SyntaxError):  # its module has no frame yet
        inner = _module_at(error.filename or "")
    return None if inner in OWN_FOLDERS else inner


def _module_at(file: str) -> str | None:
    """The top-level module that a file is of, by the folders in which Python looks for modules."""
    folders = [f for f in map(os.path.abspath, sys.path) if file.startswith(f"{f}{os.sep}")]
    return os.path.relpath(file, max(folders, key=len)).split(os.sep)[0].partition(".")[0] if folders else None


def _asked(error: BaseException) -> str:
    """The top-level module that lacks what was asked of it; empty where the error says none."""
    name: str | None = None
    if isinstance(error, ImportError):
        name = error.name
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
    return (name or "").partition(".")[0]

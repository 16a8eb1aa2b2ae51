"""Packages of others that are missing, damaged, or hidden by another file: by what an error says of them, by the files
that they have lost, and by trying to import them.

No more than the standard library is needed, nor `calib`: the program says so too where it cannot be imported itself.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import all_suffixes
from types import ModuleType

from trtpipe.packages import (
    OWN_FOLDERS,
    RUN,
    hider,
    install_command,
    listed_files,
    not_installed,
    package,
    pip_install,
    present,
    reinstall_command,
)

_SUFFIXES = tuple(all_suffixes())
#: How names of files begin that slim images leave out, and that nothing imports.
_SPARED = ("conftest", "test")


def package_fault(error: BaseException) -> str | None:
    """What is wrong with a package, and what repairs it, by an error of its import or of what was asked of it; None for
    any other error. A SystemExit is one of an import too: a module may call sys.exit.
    """
    importing = failed_import(error)
    asked = _asked(error)
    for module in dict.fromkeys(filter(None, (asked, importing, *OWN_FOLDERS))):
        if hider(module) is not None:
            return broken(module, error)
    if asked and (lost := loss(asked, exact=True)):  # somebody's repair may have another size, where nothing fails
        return broken(asked, lost)
    if isinstance(error, ModuleNotFoundError) and "." not in (error.name or "."):
        with suppress(KeyError):  # a module that trtpipe does not name is the user's own, or a bug
            return not_installed(error.name or "")
    return None if importing is None else broken(importing, error)


def fault_behind(error: BaseException) -> str | None:
    """`package_fault` of what `error` was raised from, where a package that trtpipe names could not be imported: a
    job's own module may be the first that needs it."""
    cause = error.__cause__
    if cause is None or (importing := failed_import(cause)) is None:
        return None
    try:
        install_command(importing)
    except KeyError:
        return None
    return package_fault(cause)


def broken(module: str, reason: object) -> str:
    """Why a module that is installed, or that a file hides, cannot be used, and what repairs it; `reason` is the error
    of its import, or of what it lacks."""
    said = _reason_of(reason) if isinstance(reason, BaseException) else str(reason)
    if (path := hider(module)) is not None:
        away = "Rename it, or take its folder off Python's path (PYTHONPATH, or the current folder)."
        return f"{path} hides the package {module} ({said}). {away}"
    if (lacked := _lacked(said)) not in (None, module):
        return f"{module} cannot be imported, as {lacked} is not installed.{RUN}{_installing(lacked)}"
    cannot = f"{module} is installed and cannot be imported ({said})."
    if any(sign in said for sign in ("failed to map segment", "Cannot allocate memory", "MemoryError")):
        return f"{cannot} There is too little memory or address space for it: see `free -m` and `ulimit -v`."
    if re.search(r"\bdriver\b", said, re.IGNORECASE):  # the same package again would be no better
        return f"{cannot} It does not fit the NVIDIA driver: update that, or install a release for its CUDA."
    return f"{cannot} It is damaged, or does not fit the packages that it needs.{RUN}{reinstall_command(module)}"


def _lacked(said: str) -> str | None:
    """The top-level module, of no part of Python, that an import did not find, where no file of it and no metadata is
    there."""
    missing = re.search(r"No module named '(\w+)'", said)
    if missing is None or missing[1] in sys.stdlib_module_names:
        return None
    return missing[1] if package(missing[1]) is None and not present(missing[1]) else None


def _installing(module: str) -> str:
    try:
        return install_command(module)
    except KeyError:  # what another package needs
        return pip_install(module)


def _reason_of(error: BaseException) -> str:
    """What an import raised, on one line: `ImportError: libfoo.so.9 is not here`. Of an error that gives pages of
    advice (NumPy's) it is the one that caused it."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    if "\n" in str(error).strip() and error.__cause__ is not None:
        return _reason_of(error.__cause__)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def failed_import(error: BaseException) -> str | None:
    """The package of others whose import raised `error`: it is damaged, or of another release than what it needs.

    That is the innermost module below the last frame of trtpipe or calib whose own code was being executed, and which
    is not Python's own, whatever the error's type: torchvision raises a RuntimeError beside another torch, libraries
    that lack a symbol an OSError.
    """
    if not isinstance(error, Exception | SystemExit):
        return None
    inner: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in OWN_FOLDERS:
            inner = None
        elif frame.f_code.co_name == "<module>" and package not in {"__main__", *sys.stdlib_module_names}:
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


def loss(module: str, *, exact: bool = False) -> str:
    """The file of an installed package that is no longer there or is empty, `exact`: or has another size, in words;
    empty where there is none. Of its modules only those right in its folder are looked at, which is done once.
    """
    return _loss(module, exact, tuple(sys.path))


@functools.cache
def _loss(module: str, exact: bool, path: tuple[str, ...]) -> str:
    for file in listed_files(module):
        needed = file.name.endswith(_SUFFIXES) and not file.name.startswith(_SPARED)
        if len(file.parts) == 2 and file.parts[0] == module and file.size and needed:
            try:
                size = os.stat(str(file.locate())).st_size
            except OSError:
                return f"its file {file} is not there"
            if size == 0 or (exact and size != file.size):
                return f"its file {file} is {'empty' if size == 0 else 'not the one that was installed'}"
    return ""


#: How long an import may take before it is given up, in seconds.
IMPORT_S = 60.0
#: What these packages have, and a folder of the same name has not.
_HELD = {
    "torch": "nn", "torchvision": "transforms", "torchao": "quantization", "onnx": "ModelProto", "onnxscript": "values",
    "onnxruntime": "InferenceSession", "onnx_ir": "Model", "numpy": "ndarray", "tensorrt": "Builder",
    "tensorrt_rtx": "Builder", "numba": "njit", "networkx": "DiGraph", "jinja2": "Environment", "sympy": "Symbol",
    "ml_dtypes": "bfloat16", "markupsafe": "Markup",
}  # fmt: skip
#: Imports each module named, and prints a line of JSON for each: null, or its error; SIGALRM ends what takes longer. It
#: ends before one that an earlier one has put another in place of: Torch-TensorRT-RTX has TensorRT-RTX as `tensorrt`.
_TRY_IMPORTS = """
import importlib, json, os, signal, sys
from importlib.machinery import PathFinder
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
limit_s, path, held, *modules = sys.argv[1:]
held = json.loads(held)
sys.path[:] = json.loads(path)
for module in modules:
    if module in sys.modules and module != modules[0]:
        own, here = PathFinder.find_spec(module), getattr(sys.modules[module], "__spec__", None)
        if own is not None and own.origin != getattr(here, "origin", None):
            break
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, float(limit_s))
    try:
        made = importlib.import_module(module)
        lacks = not hasattr(made, held.get(module, "__name__"))
        print(json.dumps(f"it has no {held[module]}" if lacks else None), file=out)
    except Exception as error:
        while "\\n" in str(error).strip() and error.__cause__:  # as `_reason_of` has it
            error = error.__cause__
        print(json.dumps(f"{type(error).__name__}: {' '.join(str(error).split())}"), file=out)
"""


def import_failures(modules: Sequence[str]) -> Mapping[str, str]:
    """Why modules that are installed cannot be imported, by module; tried in a process of its own, each for `IMPORT_S`
    seconds at most. One that has lost files (`loss`) may be importable."""
    failed = {module: lost for module in modules if (lost := loss(module))}
    left = [module for module in modules if module not in failed]
    while left:
        command = (sys.executable, "-c", _TRY_IMPORTS, str(IMPORT_S), json.dumps(sys.path), json.dumps(_HELD), *left)
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        answers = [json.loads(line) for line in ran.stdout.splitlines()]
        failed |= {module: answer for module, answer in zip(left, answers, strict=False) if answer}
        if answers and len(answers) < len(left) and ran.returncode == 0:  # the next one needs a process of its own
            left = left[len(answers) :]
            continue
        if len(answers) < len(left):  # the next one took the process with it
            late = hasattr(signal, "SIGALRM") and ran.returncode == -signal.SIGALRM
            why = f"did not end within {IMPORT_S:g} s" if late else f"ended the process (exit code {ran.returncode})"
            failed[left[len(answers)]] = f"its import {why}"
        left = left[len(answers) + 1 :]
    return failed


def unimportable(module: str) -> str | None:
    """Why a module that is installed cannot be used, as `broken` says it; None where it can be imported, which is tried
    once."""
    return _unimportable(module, tuple(sys.path))


@functools.cache
def _unimportable(module: str, path: tuple[str, ...]) -> str | None:
    failed = import_failures((module,))
    return broken(module, failed[module]) if failed else None

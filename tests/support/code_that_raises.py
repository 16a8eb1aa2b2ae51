"""Modules of users that raise: whatever can be raised, and where to put it."""

from __future__ import annotations

import builtins
import itertools
from pathlib import Path

#: How each built-in exception is raised; the ones that need arguments have them.
_ARGUMENTS = {
    "UnicodeDecodeError": "'utf-8', b'x', 0, 1, 'why'",
    "UnicodeEncodeError": "'utf-8', 'x', 0, 1, 'why'",
    "UnicodeTranslateError": "'x', 0, 1, 'why'",
    "BaseExceptionGroup": "'several', [SystemExit('a')]",
    "ExceptionGroup": "'several', [ValueError('a')]",
}
RAISED = sorted(
    f"{name}({_ARGUMENTS.get(name, repr('oh'))})"
    for name, found in vars(builtins).items()
    if isinstance(found, type) and issubclass(found, BaseException) and found is not KeyboardInterrupt
)
OWN = (
    "type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "type('Empty', (Exception,), {})()",
    "type('PanicException', (BaseException,), {})('a package in Rust')",
    "ValueError('x' * 100000)",
    "ValueError('two\\nlines')",
    "ModuleNotFoundError('No module named torch', name='torch')",
    "__import__('calib.errors').errors.CalibError('mine')",
)
_NUMBERS = itertools.count()


def module(folder: Path, body: str, raised: str) -> str:
    """A module of the user's; returns `name:make`."""
    name = f"users_{next(_NUMBERS)}"
    (folder / f"{name}.py").write_text(f"def boom():\n    raise {raised}\n\n{body}\n")
    return f"{name}:make"

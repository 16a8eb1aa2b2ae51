"""Imports of a Python source and the environment variables that it reads, found without running it."""

from __future__ import annotations

import ast
import itertools
import os
import sys

from trtpipe.job.importable import find_module, is_installed

#: What is said of the environment where it does not show which variable was read.
SOME = "some"

#: The end of a note on what the job's code reads and no key holds.
UNWATCHED = "; use --force when these change"


def imported(source: bytes, name: str, package: bool) -> list[str]:
    """Absolute names of the modules that a source imports, anywhere in it, and of the packages that they are in, which
    run first; `from a import b` may mean a.b."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = name.split(".")[: len(name.split(".")) - node.level + (1 if package else 0)] if node.level else []
            stem = ".".join([*parent, *([node.module] if node.module else [])])
            if stem:
                names += [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
    within = (name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1))
    return list(dict.fromkeys(within))


def environment_variables(source: bytes) -> tuple[str, ...]:
    """Names of the environment variables that a source reads, SOME where it takes them from the environment in a way
    that does not show which: any mention of `environ`, `getenv` or `expandvars` counts that does not only set one.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    names: list[str] = []
    named: set[ast.AST] = set()  # mentions whose variable is known; a node comes before those inside it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [SOME for alias in node.names if alias.name in _ENVIRONMENT and alias.asname]
            continue
        holder, key = _asked(node)
        if _word(holder) in _ENVIRONMENT:
            assert holder is not None
            named.add(holder)
            if not isinstance(node, ast.Subscript) or isinstance(node.ctx, ast.Load):
                names.append(key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else SOME)
        elif _word(node) in _ENVIRONMENT and node not in named:
            names.append(SOME)
        elif _word(node) == "expanduser" or (_word(node) == "home" and _word(getattr(node, "value", None)) == "Path"):
            names.append("HOME")
    return tuple(dict.fromkeys(names))


#: What gives environment variables, in os and os.path.
_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "expandvars"}


def _asked(node: ast.AST) -> tuple[ast.AST | None, ast.expr | None]:
    """What is asked for a variable, and which: `environ["X"]`, `environ.get("X")`, `getenv("X")`, `"X" in environ`."""
    if isinstance(node, ast.Subscript):
        return node.value, node.slice
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
        return node.comparators[0], node.left
    if isinstance(node, ast.Call) and node.args:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("get", "pop", "setdefault"):
            return function.value, node.args[0]
        return (None, None) if _word(function) == "expandvars" else (function, node.args[0])
    return None, None


def _word(node: ast.AST | None) -> str:
    """The last name of `os.environ`, or of `environ`."""
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def has_native_code(package: str) -> bool:
    """Whether an installed package, which is not imported, has extension modules; Python's own are none of those."""
    spec = None if package in sys.stdlib_module_names else find_module(package)
    if spec is None or not is_installed(spec.origin or ""):
        return False
    folders = spec.submodule_search_locations or ()
    names = (name for folder in folders for _, _, inside in os.walk(folder) for name in inside)
    return any(name.endswith((".so", ".pyd")) for name in itertools.chain((spec.origin or "",), names))

"""Imports of a Python source and the environment variables that it reads, found without running it."""

from __future__ import annotations

import ast
import os
import sys

from trtpipe.job.importable import find_module, is_installed


def imported(source: bytes, name: str, package: bool) -> list[str]:
    """Absolute names of the modules that a source imports, anywhere in it; `from a import b` may mean a.b."""
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
    return list(dict.fromkeys(names))


def environment_variables(source: bytes) -> tuple[str, ...]:
    """Names of the environment variables that a source reads: of `environ["X"]`, `environ.get("X")`, `getenv("X")`."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    names: list[str] = []
    for node in ast.walk(tree):
        holder: ast.expr | None = None
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            holder, key = node.value, node.slice
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            holder = function.value if isinstance(function, ast.Attribute) and function.attr == "get" else function
            key = node.args[0]
        word = getattr(holder, "attr", None) or getattr(holder, "id", None)
        if word in ("environ", "getenv"):
            names.append(key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "some")
    return tuple(dict.fromkeys(names))


def has_native_code(package: str) -> bool:
    """Whether an installed package, which is not imported, has extension modules; Python's own are none of those."""
    spec = None if package in sys.stdlib_module_names else find_module(package)
    if spec is None or not is_installed(spec.origin or ""):
        return False
    folders = spec.submodule_search_locations or ()
    names = [spec.origin or "", *(name for folder in folders for _, _, inside in os.walk(folder) for name in inside)]
    return any(name.endswith((".so", ".pyd")) for name in names)

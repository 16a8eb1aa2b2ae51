"""What a Python source says of itself without being run: what it imports, which environment variables it reads."""

from __future__ import annotations

import ast


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

"""What a benchmark imports from trtpipe, inside functions too, where no type checker and no other test looks."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def imported(program: Path) -> list[tuple[str, str]]:
    """(module, name) of everything that a program imports from this project, wherever in it."""
    found = [n for n in ast.walk(ast.parse(program.read_text())) if isinstance(n, ast.ImportFrom) and not n.level]
    return [
        (n.module, a.name)
        for n in found
        if n.module and n.module.split(".")[0] in ("trtpipe", "calib")
        for a in n.names
    ]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_what_a_benchmark_imports_is_there(program: Path) -> None:
    for module, name in imported(program):
        if not hasattr(importlib.import_module(module), name):
            assert importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"

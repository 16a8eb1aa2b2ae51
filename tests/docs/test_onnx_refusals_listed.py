"""docs/onnx.md lists every refusal of a node of an ONNX file, in the words of its error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted((ROOT / "trtpipe" / "model" / "onnx").glob("*.py"))


def refusals() -> Iterator[str]:
    """What each call of `refused` and its like says of a node, as far as it is the same for every node."""
    for path in CODE:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
            if name in ("refused", "refused_in_training"):
                what = call.args[0]  # type: ignore[attr-defined]
                first = what.values[0] if isinstance(what, ast.JoinedStr) else what
                if isinstance(first, ast.Constant):
                    yield str(first.value).rstrip(" (")


EVERY = sorted({*refusals()})


def test_they_are_found() -> None:
    assert len(EVERY) > 12


@pytest.mark.parametrize("words", EVERY)
def test_the_page_lists_it(words: str) -> None:
    page = " ".join((ROOT / "docs" / "onnx.md").read_text(encoding="utf-8").split())
    assert f'"{words}"' in page

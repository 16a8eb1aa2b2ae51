"""What an error says in one line."""

from __future__ import annotations

import pytest

from trtpipe.errors import first_line


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("one", "one"),
        ("\n one\ntwo", "one"),
        (ValueError("one\n\ntwo"), "one"),
        (ValueError("backend raised:\n\nCppError: no\nmore"), "backend raised: CppError: no"),
        ("alone:", "alone:"),
        ("", ""),
        (ValueError(), "ValueError"),
        (ValueError(" \n"), "ValueError"),
    ],
)
def test_a_line_says_what_an_error_is(said: BaseException | str, line: str) -> None:
    assert first_line(said) == line

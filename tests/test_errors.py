"""What an error says in one line, and what the operating system refuses as a message."""

from __future__ import annotations

import errno
import os

import pytest

from trtpipe.errors import InputError, first_line, user_error


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


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            errno.ENOMEM,
            "out of memory. Use a machine with more memory; in a job, a smaller batch_size or fewer workers.",
        ),
        (errno.EAGAIN, "no more processes or threads can be started. Raise `ulimit -u`."),
    ],
)
def test_what_the_system_has_no_more_of_is_a_users_error(code: int, message: str) -> None:
    error = user_error(OSError(code, os.strerror(code)))
    assert isinstance(error, InputError)
    assert str(error) == message

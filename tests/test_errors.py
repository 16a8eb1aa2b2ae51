"""What an error says in one line, and what the operating system refuses as a message."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from trtpipe.bundle.format import Replaced
from trtpipe.errors import BuildError, Cancelled, InputError, MissingError, TrtpipeError, first_line, user_error
from trtpipe.job.load import JobErrors
from trtpipe.job.problems import Problem


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


def _kinds(kind: type[TrtpipeError]) -> list[type[TrtpipeError]]:
    return [kind, *(k for below in kind.__subclasses__() for k in _kinds(below))]


def test_every_error_comes_through_a_pool_as_it_is(imported: None) -> None:
    """pickle calls a class with the message alone, where that does not say how else it is made."""
    problem = Problem("job.yaml", 2, 3, "precision.int8", "it must be a key", missing=True)
    special = {JobErrors: JobErrors([problem]), Replaced: Replaced(Path("out/net")), Cancelled: Cancelled()}
    made = [special.get(kind) or kind("where: must be so (got else). Do that.") for kind in _kinds(TrtpipeError)]
    assert {type(e) for e in made} >= {JobErrors, Replaced, Cancelled, BuildError, MissingError}
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.exit_code) == (type(error), str(error), error.exit_code)
        assert vars(again) == vars(error)
    assert pickle.loads(pickle.dumps(special[JobErrors])).problems == (problem,)

"""What an error says in one line, and what the operating system refuses as a message."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import nets
import pytest
import torch

from trtpipe.bundle.format import Replaced
from trtpipe.errors import BuildError, Cancelled, InputError, MissingError, TrtpipeError, first_line, user_error
from trtpipe.job.load import JobErrors
from trtpipe.job.problems import Problem
from trtpipe.model.capture import capture


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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (InputError, "the job, a file or a path is bad, or the user's own code raised"),
        (MissingError, "a package, a device or memory is missing"),
        (BuildError, "no engine can be made of the model: an exporter (torch.export, torch.onnx), a frontend or the"),
        (Cancelled, "interrupted"),
    ],
)
def test_the_docs_say_what_each_kind_ends_with(kind: type[TrtpipeError], said: str) -> None:
    docs = (Path(__file__).parent.parent / "docs" / "README.md").read_text()
    assert f"{kind.exit_code} {said}" in " ".join(docs.split())


def test_a_model_that_torch_export_refuses_is_one_that_no_engine_can_be_made_of() -> None:
    class Deciding(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))

    with pytest.raises(BuildError, match=r"^capture: the model decides by the values of a tensor") as caught:
        capture(nets.loaded(Deciding(), out_shape=("N", 3)))
    assert caught.value.exit_code == 4

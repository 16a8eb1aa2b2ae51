"""trtpipe worker: what it refuses before it says that it is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtpipe.cli.main import main


@pytest.mark.parametrize("tag", ["two words", "a,b", "tab\tin"])
def test_a_refused_worker_does_not_say_that_it_works(
    tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = main(["worker", "tcp://127.0.0.1:1", "--tag", tag, "--cache", str(tmp_path / "cache")])
    out, err = capsys.readouterr()
    assert (ended, out) == (2, "")
    assert err == f"--tag: must be one word without commas (got {tag!r}).\n"

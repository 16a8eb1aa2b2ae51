"""trtpipe worker: what it refuses before it says that it is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtpipe.cli.main import main
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver


@pytest.mark.parametrize("tag", ["two words", "a,b", "tab\tin"])
def test_a_refused_worker_does_not_say_that_it_works(
    tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = main(["worker", "tcp://127.0.0.1:1", "--tag", tag, "--cache", str(tmp_path / "cache")])
    out, err = capsys.readouterr()
    assert (ended, out) == (2, "")
    assert err == f"--tag: must be one word without commas (got {tag!r}).\n"


def test_a_worker_of_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would join the fleet as a machine without one."""
    monkeypatch.setenv(driver.VISIBLE, "0,1")  # put back afterwards, too
    monkeypatch.setattr(
        driver, "probe", lambda: Driver(problem=f"{driver.VISIBLE}={os.environ[driver.VISIBLE]} leaves no GPU")
    )
    ended = main(["worker", "tcp://127.0.0.1:1", "--gpu", "5", "--cache", str(tmp_path / "cache")])
    out, err = capsys.readouterr()
    assert (ended, out) == (3, "")
    assert err == (
        "--gpu: must be a GPU of this machine (got 5; CUDA_VISIBLE_DEVICES=5 leaves no GPU). Leave it out for a worker "
        "without one.\n"
    )
    assert not (tmp_path / "cache").exists()

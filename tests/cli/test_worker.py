"""trtpipe worker: what it refuses before it says that it is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtpipe.cli.main import main
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver, Gpu


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
    monkeypatch.setenv(driver.VISIBLE, "x")  # put back afterwards, too
    monkeypatch.delenv(driver.VISIBLE)
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


@pytest.mark.parametrize(("visible", "number"), [("0,1", 5), ("", 0), ("GPU-6f4e", 1)])
def test_a_worker_of_a_gpu_that_the_process_may_not_see_is_refused(
    visible: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared machine it is another's."""
    monkeypatch.setenv(driver.VISIBLE, visible)
    monkeypatch.setattr(driver, "probe", lambda: Driver("13.0", (Gpu(0, "NVIDIA H100", "9.0", 1 << 36),)))
    ended = main(["worker", "tcp://127.0.0.1:1", "--gpu", str(number), "--cache", str(tmp_path / "cache")])
    count = len(list(filter(None, visible.split(","))))
    assert (ended, capsys.readouterr().err) == (
        3, f"--gpu: must be one of the {count} GPUs of CUDA_VISIBLE_DEVICES (got {number}).\n",
    )  # fmt: skip
    assert os.environ[driver.VISIBLE] == visible

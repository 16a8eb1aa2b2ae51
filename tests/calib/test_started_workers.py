"""What the operating system refuses while worker processes are started, in words and without a traceback."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from calib.errors import CalibError
from calib.loading import in_workers, starting

#: By errno: what is said of it.
SAID = [
    (errno.ENOSPC, "no space left in /dev/shm). Free some there, enlarge it (docker run --shm-size=1g)"),
    (errno.EACCES, "/dev/shm is not there or not writable). Mount it, writable for all"),
    (errno.EMFILE, "too many open files). Raise the limit (`ulimit -n 4096`)"),
    (errno.ENFILE, "too many open files on this machine). End other programs"),
    (errno.EAGAIN, "no more processes or threads can be started). Raise `ulimit -u`"),
    (errno.ENOMEM, "out of memory). End other programs"),
]
#: What of multiprocessing a loader begins with, and how often it is had before it is refused.
REFUSED = [("Queue", 0), ("Event", 0), ("Queue", 1), ("Queue", 2), ("Process", 0), ("Process", 1)]


def refusing(real: Callable[..., object], calls: int, code: int) -> Callable[..., object]:
    """A function that works so often, and is then refused."""
    left = iter(range(calls))

    def call(*arguments: object, **named: object) -> object:
        if next(left, None) is None:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    return call


@pytest.mark.parametrize(("code", "said"), SAID)
@pytest.mark.parametrize(("what", "calls"), REFUSED)
def test_what_workers_lack(what, calls, code, said, monkeypatch, capfd):
    from torch import multiprocessing

    printed = Mock()
    monkeypatch.setattr("sys.unraisablehook", printed)
    monkeypatch.setattr(multiprocessing, what, refusing(getattr(multiprocessing, what), calls, code))
    with pytest.raises(CalibError) as raised:
        list(in_workers([1, 2, 3], 2))
    assert str(raised.value) == (
        f"workers: 2 worker processes cannot be started ({said}, or use fewer workers: 0 starts none."
    )
    del raised
    gc.collect()
    printed.assert_not_called()
    assert capfd.readouterr().err == ""


def test_what_is_no_refusal_of_theirs_stays_what_it_is():
    for error in (FileNotFoundError(errno.ENOENT, "no", "/a"), OSError(errno.EIO, "no"), RuntimeError("no")):
        with pytest.raises(type(error)) as raised, starting(1):
            raise error
        assert raised.value is error
    with (
        pytest.raises(CalibError, match=r"^workers: 1 worker process cannot be started \(no more processes or threads"),
        starting(1),
    ):
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("cores", [1, 2])
def test_workers_do_the_work(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More workers than cores are the user's choice: torch's warning of them was printed with `--quiet` too."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(in_workers([1, 2, 3], 2)) == [1, 2, 3]


#: Loads for ever by two workers, each of which says its process; what they load fills their pipe.
LOADING = """
import os
import numpy as np
from calib.loading import in_workers

class Endless:
    def __len__(self):
        return 1 << 40
    def __getitem__(self, at):
        if at < 2:
            print(os.getpid(), flush=True)
        return bytes(1 << 20)

for _ in in_workers(Endless(), 2):
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process can ask to end with its parent")
def test_workers_end_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as loading:
        try:
            assert loading.stdout is not None
            workers = [Path("/proc", loading.stdout.readline().strip()) for _ in range(2)]
        finally:
            loading.kill()
    deadline = time.monotonic() + 30
    while left := [w.name for w in workers if w.exists() and "State:\tZ" not in (w / "status").read_text()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)

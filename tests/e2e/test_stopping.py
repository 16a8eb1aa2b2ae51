"""A build that is stopped at any moment leaves a whole bundle or none, and the next one succeeds."""

import random
import signal
import subprocess
import sys
import time

import pytest

from trtpipe.bundle.format import read_bundle
from trtpipe.cli.interrupts import STOPPING
from trtpipe.cli.starter import starter

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    starter(folder / "first")
    return folder


def start(folder):
    """A build of its own process; its exit code is negative when a signal ended it."""
    command = [sys.executable, "-m", "trtpipe", "build", "first", "-o", "out"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def seconds(folder):
    """How long an undisturbed build takes."""
    began = time.monotonic()
    process = start(folder)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return time.monotonic() - began


def whole(folder):
    """Every visible entry of the output folder is read as a bundle; how many there are."""
    visible = [path for path in (folder / "out").iterdir() if not path.name.startswith(".")]
    for path in visible:
        assert read_bundle(path).manifest.name == "first"
    return len(visible)


def test_killed_at_20_random_moments(folder, seconds):
    moments = random.Random(7)
    for _ in range(20):
        process = start(folder)
        time.sleep(moments.uniform(0, seconds))
        process.kill()
        process.communicate(timeout=60)
        assert whole(folder) == 1
    process = start(folder)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert [path.name for path in (folder / "out").iterdir() if "first" in path.name and path.is_dir()] == ["first"]


STAGES = ("model", "baseline", "capture", "calibrate", "quantize", "export")
#: All signals have one handler.
AFTER = {signal.SIGINT: STAGES, signal.SIGTERM: STAGES[::2], signal.SIGHUP: STAGES[1::2]}


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.usefixtures("seconds")
def test_interrupted_in_every_stage(number, folder):
    moments = random.Random(11)
    for stage in AFTER[number]:
        process = start(folder)
        for line in process.stderr:  # a stage that ended: the others are yet to come, however fast the machine is
            if line.startswith(stage):
                break
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert whole(folder) == 1
        # An interrupt that strikes inside code run by C makes Python end by the signal itself: a shell says 130 too.
        assert process.returncode in (130, -signal.SIGINT), errors
        assert "Traceback" not in errors
        assert errors.rstrip().splitlines()[-1].startswith("interrupted")
        hidden = [path.name for path in (folder / "out").iterdir() if path.name.startswith(".") and path.is_dir()]
        assert hidden == []

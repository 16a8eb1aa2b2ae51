"""The order in which an engine is timed; its GPU, its driver and its TensorRT are stand-ins, so no time is checked."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from trtpipe.errors import MissingError
from trtpipe.trt import timing
from trtpipe.trt.calls import Binding
from trtpipe.trt.timing import TimedEngine


class Cuda:
    """The driver functions that events need; each call is logged."""

    def __init__(self, log, failing=""):
        self.log, self.failing = log, failing

    def __getattr__(self, name):
        def call(*arguments):
            self.log.append(name)
            if name == "cuEventElapsedTime":
                arguments[0]._obj.value = 1.25
            return 700 if name == self.failing else 0

        return call


class Execution:
    """What the engine runs in; each call is logged."""

    memory = SimpleNamespace(stream=7)

    def __init__(self, log):
        self.log = log

    def prepare(self, profile, arrays):
        self.log.append(f"prepare {profile} {arrays['x'].shape}")
        return False

    def upload(self):
        self.log.append("upload")

    def enqueue(self, changed):
        self.log.append(f"execute {changed}")

    def download(self):
        self.log.append("download")

    def close(self):
        self.log.append("close")


@pytest.fixture
def engine(monkeypatch):
    log = []
    monkeypatch.setattr(timing.ctypes, "CDLL", lambda name: Cuda(log))
    made = TimedEngine(b"plan")
    made.bindings = (
        Binding("x", "float32", (-1, 3), True, (((1, 3), (2, 3), (4, 3)),)),
        Binding("y", "float16", (-1, 5), False, ()),
    )
    made._engine, made.profiles, made._idle = object(), 1, [Execution(log)]
    return made, log


def test_only_the_execution_lies_between_the_events(engine):
    made, log = engine
    assert made.milliseconds({"x": np.zeros((2, 3), np.float32)}, transfers=False) == 1.25
    assert [line for line in log if "Create" not in line and "Destroy" not in line] == [
        "prepare 0 (2, 3)", "upload", "cuEventRecord", "execute False", "cuEventRecord", "cuEventSynchronize",
        "cuEventElapsedTime",
    ]  # fmt: skip
    assert log.count("cuEventDestroy_v2") == 2


def test_with_transfers_the_copies_lie_between_them_too(engine):
    made, log = engine
    made.milliseconds({"x": np.zeros((2, 3), np.float32)}, transfers=True)
    first, last = log.index("cuEventRecord"), len(log) - 1 - log[::-1].index("cuEventRecord")
    assert log[first + 1 : last] == ["upload", "execute False", "download"]


def test_a_driver_that_refuses_is_said(engine, monkeypatch):
    made, log = engine
    monkeypatch.setattr(timing.ctypes, "CDLL", lambda name: Cuda(log, "cuEventRecord"))
    with pytest.raises(MissingError, match=r"^bench: cuEventRecord: CUresult 700\. Stop other programs on the GPU\.$"):
        made.milliseconds({"x": np.zeros((2, 3), np.float32)}, transfers=False)
    assert ctypes.c_float(1.25).value == 1.25

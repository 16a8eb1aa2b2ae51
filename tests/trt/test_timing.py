"""The order in which an engine is timed; its GPU, its driver and its TensorRT are stand-ins, so no time is checked."""

import ctypes

import numpy as np
import pytest

from trtpipe.errors import MissingError
from trtpipe.trt import timing
from trtpipe.trt.runtime import Binding
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


class Memory:
    stream = 7

    def __init__(self, log):
        self.log = log

    def upload(self, buffer, array):
        self.log.append(f"upload {buffer}")

    def download(self, buffer, array):
        self.log.append(f"download {buffer} {array.shape} {array.dtype}")


class Calls:
    def shape_of(self, name):
        return (2, 5)


@pytest.fixture
def engine(monkeypatch):
    log = []
    monkeypatch.setattr(timing.ctypes, "CDLL", lambda name: Cuda(log))
    made = TimedEngine(b"plan")
    made.bindings = (
        Binding("x", "float32", (-1, 3), True, (((1, 3), (2, 3), (4, 3)),)),
        Binding("y", "float16", (-1, 5), False, ()),
    )
    made._memory, made._calls, made._buffers = Memory(log), Calls(), {"x": "X", "y": "Y"}
    made._execute = lambda changed: log.append(f"execute {changed}")
    return made, log


def test_only_the_execution_lies_between_the_events(engine):
    made, log = engine
    assert made.milliseconds({"x": np.zeros((2, 3), np.float32)}, transfers=False) == 1.25
    assert [line for line in log if "Create" not in line and "Destroy" not in line] == [
        "upload X", "cuEventRecord", "execute False", "cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime"
    ]  # fmt: skip
    assert log.count("cuEventDestroy_v2") == 2


def test_with_transfers_the_copies_lie_between_them_too(engine):
    made, log = engine
    made.milliseconds({"x": np.zeros((2, 3), np.float32)}, transfers=True)
    first, last = log.index("cuEventRecord"), len(log) - 1 - log[::-1].index("cuEventRecord")
    assert log[first + 1 : last] == ["upload X", "execute False", "download Y (2, 5) float16"]


def test_a_driver_that_refuses_is_said(engine, monkeypatch):
    made, log = engine
    monkeypatch.setattr(timing.ctypes, "CDLL", lambda name: Cuda(log, "cuEventRecord"))
    with pytest.raises(MissingError, match=r"^bench: cuEventRecord must succeed \(got CUresult 700\)\. Check"):
        made.milliseconds({"x": np.zeros((2, 3), np.float32)}, transfers=False)
    assert ctypes.c_float(1.25).value == 1.25

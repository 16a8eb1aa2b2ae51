"""What the contract cases share: a pytest plugin with the stubbed world, and TensorRT's side of its callbacks."""

from __future__ import annotations

import ctypes

import pytest
import tensorrt as trt
import tensorrt_libs as stub
from world import GPU, MODEL, World, build

from trtpipe.progress import Silent
from trtpipe.trt import driver
from trtpipe.trt.builder import build_engine


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: GPU)
    made = World()
    yield made
    failed, stub.failures[:] = list(stub.failures), []
    assert not failed


def engine_of(**options):
    return build_engine(MODEL, build(**options), progress=Silent())


def flag(enum, name):
    """What a bit mask or an enum argument holds for this name, as this release numbers it."""
    return int(getattr(getattr(trt, enum), name))


def texts(*texts):
    return [ctypes.create_string_buffer(t.encode()) for t in texts]


def logger_address():
    """The native logger is the first argument of the entry point that makes a builder."""
    entry = stub.entries.index("createInferBuilder_INTERNAL")
    return next(row[2] for row in reversed(stub.calls()) if row[0] == -1 and row[1] == entry)

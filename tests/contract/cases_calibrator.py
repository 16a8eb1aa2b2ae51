"""calib's native calibrators on real bindings over stub libraries; run by test_contract.py once for each release.

The builder config hands the stub the C++ object behind a calibrator. These cases call its virtual methods as TensorRT
does, so the trampolines that turn Python's answers into C++'s are the real ones.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import tensorrt as trt
import tensorrt_libs as stub
from world import VERSION

from calib.algorithms import BASES
from calib.data import open_source
from calib.errors import CalibError
from calib.samples import DataSpec, InputSpec
from calib.trt_calibrator import make_calibrator

#: From 10 on, IInt8Calibrator is a versioned interface: four slots come before its own.
FIRST_SLOT = 0 if VERSION < (10,) else 4
BATCH_SIZE, GET_BATCH, READ_CACHE, WRITE_CACHE = range(FIRST_SLOT, FIRST_SLOT + 4)
TEXT = b"TRT-8601-EntropyCalibration2\nx: 3f800000\n"
CALIBRATORS = VERSION < (11,)
#: 10.1 deprecated calibrators, and says so whenever one is set.
pytestmark = pytest.mark.filterwarnings("ignore:.*Deprecated in TensorRT 10.1:DeprecationWarning")
needs_calibrators = pytest.mark.skipif(not CALIBRATORS, reason="TensorRT 11 has no calibrators")


@pytest.fixture
def source(tmp_path):
    arrays = {"x": np.arange(10, dtype=np.float32).reshape(5, 2), "y": np.ones((5, 1), np.float32)}
    np.savez(tmp_path / "s.npz", **arrays)
    return open_source(
        DataSpec(arrays=str(tmp_path / "s.npz")), [InputSpec("x", "float32", (2,)), InputSpec("y", "float32", (1,))]
    )


def in_memory(array):
    return array.ctypes.data, array


class Native:
    """The C++ object behind a calibrator, as a builder config receives it."""

    def __init__(self, calibrator):
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        config = builder.create_builder_config()
        config.int8_calibrator = calibrator
        self.alive = builder, config, calibrator
        self.this = stub.calls()[-1][2]

    def call(self, slot, result, *args):
        table = ctypes.cast(self.this, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
        kinds = [type(a) if isinstance(a, ctypes._SimpleCData) else ctypes.c_void_p for a in args]
        method = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *kinds)(table[slot])
        return method(
            self.this, *(a if isinstance(a, ctypes._SimpleCData) else ctypes.cast(a, ctypes.c_void_p) for a in args)
        )

    def get_batch(self, *names):
        bindings = (ctypes.c_void_p * len(names))()
        texts = (ctypes.c_char_p * len(names))(*(n.encode() for n in names))
        more = self.call(GET_BATCH, ctypes.c_bool, bindings, texts, ctypes.c_int32(len(names)))
        return list(bindings) if more else None

    def read_cache(self):
        length = ctypes.c_size_t(0)
        address = self.call(READ_CACHE, ctypes.c_void_p, ctypes.pointer(length))
        return ctypes.string_at(address, length.value) if address else None

    def write_cache(self, data):
        self.call(WRITE_CACHE, None, ctypes.create_string_buffer(data, len(data)), ctypes.c_size_t(len(data)))


def floats(address, count):
    return list((ctypes.c_float * count).from_address(address))


@needs_calibrators
@pytest.mark.parametrize("algorithm", BASES)
def test_tensorrt_reads_every_batch(source, algorithm):
    calibrator = make_calibrator(trt, source, batch_size=2, algorithm=algorithm, place=in_memory)
    assert isinstance(calibrator, getattr(trt, BASES[algorithm]))
    native = Native(calibrator)
    assert native.call(BATCH_SIZE, ctypes.c_int32) == 2
    assert native.read_cache() is None
    expected = [b.arrays["x"].reshape(-1).tolist() for b in source.batches(2)]
    expected[-1] += expected[0][:2]
    for values in expected:
        y, x = native.get_batch("y", "x")
        assert floats(x, 4) == values
        assert floats(y, 2) == [1.0, 1.0]
    assert native.get_batch("y", "x") is None
    native.write_cache(TEXT)
    assert native.read_cache() == TEXT
    calibrator.finish()


@needs_calibrators
def test_an_exception_is_raised_after_the_build(source):
    def fail(array):
        raise MemoryError("device is full")

    calibrator = make_calibrator(trt, source, batch_size=2, place=fail)
    assert Native(calibrator).get_batch("x", "y") is None
    with pytest.raises(MemoryError, match="device is full"):
        calibrator.finish()


@needs_calibrators
def test_the_cache_file_is_read_back(source, tmp_path):
    first = make_calibrator(trt, source, batch_size=5, cache=tmp_path / "c", place=in_memory)
    native = Native(first)
    while native.get_batch("x", "y"):
        pass
    native.write_cache(TEXT)
    first.finish()
    again = make_calibrator(trt, source, batch_size=5, cache=tmp_path / "c", place=in_memory)
    assert Native(again).read_cache() == TEXT
    again.finish()


@pytest.mark.skipif(CALIBRATORS, reason="8.6 to 10.x have calibrators")
def test_tensorrt_11_is_refused(source):
    with pytest.raises(CalibError, match=r"has no calibrators: only 8.6 to 10.x have them\. Use Q/DQ"):
        make_calibrator(trt, source, batch_size=2, place=in_memory)

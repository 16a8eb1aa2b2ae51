"""build.quantization implicit on real bindings over stub libraries: TensorRT's side of a calibration, played."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import tensorrt as trt
import tensorrt_libs as stub
from world import GPU, LAYERS, MODEL, VERSION, World, build

from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from trtpipe import errors
from trtpipe.job.sections import KeepGlobs, Precision
from trtpipe.progress import Silent
from trtpipe.trt import driver, implicit
from trtpipe.trt.builder import build_engine
from trtpipe.trt.implicit import NativeCalibration
from trtpipe.trt.options import refusals

INT8 = Precision(int8_mode=True, fp16_mode=True)
CACHE = b"TRT-8601-EntropyCalibration2\nimage: 3c010a14\n"
#: Slots of IInt8Calibrator: from 10 on it is a versioned interface, whose own four come first.
BATCH_SIZE, GET_BATCH, READ_CACHE, WRITE_CACHE = range(4) if VERSION < (10,) else range(4, 8)

pytestmark = pytest.mark.skipif(VERSION >= (11,), reason="11 has no calibrators")


class Placed:
    """Stands for device memory: every array gets the next address, and is counted while something holds it."""

    def __init__(self):
        self.arrays = {}

    def place(self, array):
        address = 0x1000 * (len(self.arrays) + 1)
        self.arrays[address] = np.array(array)
        return address, object()


@pytest.fixture
def placed(monkeypatch):
    memory = Placed()
    monkeypatch.setattr(implicit, "open_memory", lambda: memory)
    return memory


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: GPU)
    made = World()
    made.layers(tuple((n, "CONVOLUTION", "FLOAT", o, i) for n, _, _, o, i in LAYERS))
    made.seen.clear()
    yield made
    failed, stub.failures[:] = list(stub.failures), []
    assert not failed


@pytest.fixture
def source(tmp_path):
    images = np.arange(5 * 3 * 8 * 8, dtype=np.float32).reshape(5, 3, 8, 8)
    np.save(tmp_path / "image.npy", images)
    return open_source(DataSpec(arrays=str(tmp_path / "image.npy")), [InputSpec("image", "float32", (3, 8, 8))])


def quantized(calibration):
    return build_engine(
        MODEL, build(quantization="implicit"), progress=Silent(), precision=INT8, calibration=calibration
    )


class Native:
    """TensorRT's side of a calibration."""

    def __init__(self, world):
        self.world, self.batches, self.cache, self.batch_size = world, [], None, None

    def calibrate(self):
        calibrator = self.world.calibrator[-1]
        self.batch_size = stub.invoke(calibrator, BATCH_SIZE) & 0xFFFFFFFF
        length = ctypes.c_size_t(0)
        found = stub.invoke(calibrator, READ_CACHE, ctypes.addressof(length))
        self.cache = ctypes.string_at(found, length.value) if found else None
        if self.cache is not None:
            return
        name = ctypes.create_string_buffer(b"image")
        names, addresses = (ctypes.c_void_p * 1)(ctypes.addressof(name)), (ctypes.c_void_p * 1)()
        while stub.invoke(calibrator, GET_BATCH, ctypes.addressof(addresses), ctypes.addressof(names), 1) & 0xFF:
            self.batches.append(addresses[0])
        text = ctypes.create_string_buffer(CACHE, len(CACHE))
        stub.invoke(calibrator, WRITE_CACHE, ctypes.addressof(text), len(CACHE))


def test_every_batch_is_read_and_the_cache_is_written(world, source, placed, tmp_path):
    native = Native(world)
    world.during_build(native.calibrate)
    file = tmp_path / "scales.cache"
    engine = quantized(NativeCalibration(source=source, batch_size=2, file=str(file)))
    assert native.batch_size == 2
    assert native.batches == [0x1000, 0x2000, 0x3000]
    assert [a.shape for a in placed.arrays.values()] == [(2, 3, 8, 8)] * 3
    # five samples in batches of two: the first fills up the last batch, and the engine says so
    assert np.array_equal(placed.arrays[0x3000][1], placed.arrays[0x1000][0])
    assert any("used twice" in note for note in engine.notes)
    assert CACHE in file.read_bytes()


def test_flags_and_profile(world, source, placed):
    native = Native(world)
    world.during_build(native.calibrate)
    quantized(NativeCalibration(source=source, batch_size=2))
    assert world.flags() == {"TF32", "INT8", "FP16"}
    assert world.asked("create_network") == [(0 if VERSION >= (10,) else 1,)]
    assert ("image", "opt", (2, 3, 8, 8)) in world.asked("set_shape")
    assert world.names().index("int8_calibrator") < world.names().index("set_calibration_profile")
    assert world.names().index("set_calibration_profile") < world.names().index("build")


def test_an_error_in_the_data_is_raised_after_the_build(world, source, placed, monkeypatch):
    def broken(array):
        raise OSError("the disk is gone")

    monkeypatch.setattr(placed, "place", broken)
    native = Native(world)
    world.during_build(native.calibrate)
    with pytest.raises(OSError, match="the disk is gone"):
        quantized(NativeCalibration(source=source, batch_size=2))
    assert native.batches == []


def test_without_ranges_nothing_is_built(world):
    with pytest.raises(errors.InputError, match=r"implicit has no samples\. Give the job a calibration section\.$"):
        quantized(None)
    assert "build" not in world.names()


@pytest.mark.parametrize("algorithm", ["entropy_2", "entropy", "minmax", "percentile"])
def test_every_algorithm_of_tensorrt(world, source, placed, algorithm):
    native = Native(world)
    world.during_build(native.calibrate)
    quantized(NativeCalibration(source=source, batch_size=5, algorithm=algorithm))
    assert native.batches == [0x1000]


def test_what_implicit_cannot_honour_is_refused():
    def refused(precision, **options):
        return dict(refusals(build(quantization="implicit", **options), precision, "tensorrt", trt.__version__))

    assert refused(INT8) == {}
    assert refused(Precision())["build.quantization"] == (
        "build.quantization: precision.int8_mode must be on for implicit (got off). Turn it on, or use explicit."
    )
    kept = Precision(int8_mode=True, keep=KeepGlobs(fp32=("head.*",)))
    assert "must be empty with build.quantization implicit (got head.*)" in refused(kept)["precision.keep"]

from __future__ import annotations

import ctypes
import threading

import pytest

from trtpipe.errors import MissingError
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver, Gpu, probe, require


class Cuda:
    """libcuda with these devices: (name, major, minor, bytes); `status` is what each function returns by name."""

    def __init__(self, devices, **status):
        self.devices, self.status, self.called = devices, status, []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.called.append(name)
            if name in self.status:
                return self.status[name]
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        return call

    @staticmethod
    def _set(reference, value):
        reference._obj.value = value

    def _cuDriverGetVersion(self, out):
        self._set(out, 12060)

    def _cuDeviceGetCount(self, out):
        self._set(out, len(self.devices))

    def _cuDeviceGet(self, out, index):
        self._set(out, index)

    def _cuDeviceGetName(self, buffer, size, handle):
        buffer.value = self.devices[handle.value][0].encode()

    def _cuDeviceGetAttribute(self, out, attribute, handle):
        self._set(out, self.devices[handle.value][{75: 1, 76: 2}[attribute]])

    def _cuDeviceTotalMem_v2(self, out, handle):
        self._set(out, self.devices[handle.value][3])

    def _cuGetErrorName(self, status, out):
        self._set(out, b"CUDA_ERROR_NO_DEVICE")


@pytest.fixture
def library(monkeypatch):
    def use(cuda):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
        return cuda

    return use


def test_devices(library):
    library(Cuda([("NVIDIA L4", 8, 9, 24 << 30), ("Orin", 8, 7, 8 << 30)]))
    assert probe() == Driver(
        "12.6", (Gpu(0, "NVIDIA L4", "8.9", 24 << 30), Gpu(1, "Orin", "8.7", 8 << 30)), ""
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "is not on this machine"),
        ("libcuda.so.1: file too short", "cannot be loaded: libcuda.so.1: file too short"),
    ],
)
def test_no_library(said, problem, monkeypatch):
    def missing(name):
        raise OSError(said)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    installed = "No such file" not in said
    assert probe() == Driver(problem=f"libcuda.so.1, the NVIDIA driver's library, {problem}", installed=installed)


@pytest.mark.parametrize("absent", driver._FUNCTIONS)
def test_another_library_of_that_name_is_no_driver(absent, library):
    class Other(Cuda):
        def __getattr__(self, name):
            if name == absent:
                raise AttributeError(name)
            return super().__getattr__(name)

    library(Other([]))
    assert probe() == Driver(problem=f"libcuda.so.1 is not the NVIDIA driver's library: it has no {absent}")


def test_an_error_in_another_encoding_is_shown(library):
    class Odd(Cuda):
        def _cuGetErrorName(self, status, out):
            self._set(out, b"\xff\xfe")

    library(Odd([], cuInit=999))
    assert probe().problem == "the NVIDIA driver does not start: \ufffd\ufffd"


def test_gpus_that_are_hidden_are_no_fault_of_the_driver(library, monkeypatch):
    monkeypatch.setenv(driver.VISIBLE, "5")
    library(Cuda([], cuInit=100))
    assert probe() == Driver(problem="CUDA_VISIBLE_DEVICES=5 leaves no GPU")


def test_a_driver_that_does_not_start_is_asked_nothing_more(library, monkeypatch):
    monkeypatch.delenv(driver.VISIBLE, raising=False)
    cuda = library(Cuda([], cuInit=100))
    assert probe() == Driver(problem="the NVIDIA driver does not start: CUDA_ERROR_NO_DEVICE")
    assert cuda.called == ["cuInit", "cuGetErrorName"]


def test_no_gpu(library):
    library(Cuda([]))
    assert probe() == Driver("12.6", problem="the NVIDIA driver sees no GPU")


@pytest.mark.parametrize(
    "call",
    ["cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
     "cuDeviceTotalMem_v2"],
)  # fmt: skip
def test_a_call_that_fails_is_named(library, call):
    """A GPU of compute capability 0.0, without memory or name, was described instead, and the bundle blamed."""
    library(Cuda([("RTX 4090", 8, 9, 24 << 30)], **{call: 3}))
    problem = f"the NVIDIA driver does not tell of its GPUs: {call} gives CUDA_ERROR_NO_DEVICE"
    assert probe() == Driver("" if call == "cuDriverGetVersion" else "12.6", problem=problem)


def test_require(monkeypatch):
    monkeypatch.setattr(driver, "probe", lambda: Driver("12.6", problem="the NVIDIA driver sees no GPU"))
    with pytest.raises(MissingError) as raised:
        require("build.target with TensorRT 10.3.0", "build elsewhere")
    assert str(raised.value) == (
        "build.target with TensorRT 10.3.0: there is no usable NVIDIA GPU here (the NVIDIA driver sees no "
        "GPU). Run it on the machine the engine is for, or build elsewhere."
    )
    with pytest.raises(MissingError, match=r"sees no GPU\). Run it on the machine the engine is for.$"):
        require("engine")


def test_a_gpu_is_one_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(driver.VISIBLE, raising=False)
    assert (driver.listed(), driver.visible(1, "--gpu")) == (None, "1")
    monkeypatch.setenv(driver.VISIBLE, "3, 5")
    assert (driver.listed(), driver.visible(0, "--gpu"), driver.visible(1, "--gpu")) == (("3", "5"), "3", "5")


def test_a_driver_that_does_not_answer_is_waited_for_once(library, monkeypatch):
    answered = threading.Event()

    class Stuck(Cuda):
        def _cuInit(self, flags):
            answered.wait(60)

    monkeypatch.setattr(driver, "PATIENCE", 0.2)
    cuda = library(Stuck([("L4", 8, 9, 1)]))
    problem = "the NVIDIA driver does not answer (waited 0 s)"
    assert [probe().problem, probe().problem] == [problem, problem]
    assert cuda.called == ["cuInit"]
    answered.set()
    driver._asking[0].join()
    assert probe().problem == ""

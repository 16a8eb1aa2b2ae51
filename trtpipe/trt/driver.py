"""The NVIDIA driver and its GPUs, by the CUDA driver API.

TensorRT must not be the first to use it: without a driver some of its releases crash the process (the lean runtime of
10.16 does), so everything here goes through ``ctypes`` to the CUDA driver API, whose functions return error codes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from trtpipe.errors import MissingError
from trtpipe.packages import install_command, pip_install
from trtpipe.version_numbers import of_cuda

#: CUdevice_attribute values, part of the driver's ABI (cuda.h): they are not TensorRT enums and do not move.
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76

#: The CUresult (cuda.h) of a machine without a GPU, and of a process that may see none.
_NO_DEVICE = 100

#: The driver's library, as the system's loader finds it.
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

#: What is called of the driver's library.
_FUNCTIONS = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2", "cuGetErrorName",
)  # fmt: skip

#: The environment variable by which CUDA is told what GPUs a process may see.
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What `memory_command` comes after, where nothing that is installed gives device memory.
INSTALL_ONE = "Install one: "


#: Seconds that the driver has to answer; one that starts a GPU of a large machine takes some.
PATIENCE = 60.0
#: The thread that asks it, in which a driver that does not answer stays.
_asking: list[threading.Thread] = []


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it; `compute_capability` is like "8.6", memory is in bytes."""

    index: int
    name: str
    compute_capability: str
    memory_bytes: int

    @property
    def file_name(self) -> str:
        """The name as part of a file's."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-")


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver. `problem` is empty when at least one GPU can be used; `cuda` is like "12.6"; `installed` is
    whether its library is on the machine."""

    cuda: str = ""
    devices: tuple[Gpu, ...] = ()
    problem: str = ""
    installed: bool = True


def probe() -> Driver:
    """The driver's CUDA version and GPUs, or the reason why there are none. Never raises.

    It calls cuInit: a process that will fork workers which use CUDA must not probe before it forks. A driver whose
    kernel module is stuck answers never: it is waited for once in a process, for `PATIENCE`.
    """
    found: list[Driver] = []
    if not any(thread.is_alive() for thread in _asking):
        _asking[:] = [threading.Thread(target=lambda: found.append(_probed()), name="probe", daemon=True)]
        _asking[0].start()
        _asking[0].join(PATIENCE)
    return found[0] if found else Driver(problem=f"the NVIDIA driver does not answer (waited {PATIENCE:.0f} s)")


def _probed() -> Driver:
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError as error:
        if "No such file" in str(error) or sys.platform == "win32":
            return Driver(problem=f"{LIBRARY}, the NVIDIA driver's library, is not on this machine", installed=False)
        return Driver(problem=f"{LIBRARY}, the NVIDIA driver's library, cannot be loaded: {error}")
    if missing := next((f for f in _FUNCTIONS if not hasattr(cuda, f)), None):
        return Driver(problem=f"{LIBRARY} is not the NVIDIA driver's library: it has no {missing}")
    if status := cuda.cuInit(0):
        if status == _NO_DEVICE and (names := os.environ.get(VISIBLE)) is not None:
            return Driver(problem=f"{VISIBLE}={names} leaves no GPU")
        return Driver(problem=f"the NVIDIA driver does not start: {error_name(cuda, status)}")
    number, count, version = ctypes.c_int(), ctypes.c_int(), ""
    try:
        _called(cuda, "cuDriverGetVersion", ctypes.byref(number))
        version = of_cuda(number.value)
        _called(cuda, "cuDeviceGetCount", ctypes.byref(count))
        devices = tuple(_gpu(cuda, i) for i in range(count.value))
    except _RefusedError as error:
        return Driver(version, problem=f"the NVIDIA driver does not tell of its GPUs: {error}")
    return Driver(version, devices, "" if devices else "the NVIDIA driver sees no GPU")


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether this is a Jetson: JetPack's release file, or the board's own name for itself."""
    if (root / "etc/nv_tegra_release").exists():
        return True
    try:
        return "jetson" in (root / "proc/device-tree/model").read_text(errors="replace").lower()
    except OSError:
        return False


def listed() -> tuple[str, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in order; None where it is not set and all are visible.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables": what follows a name that is none does not count.
    """
    names = os.environ.get(VISIBLE)
    given = None if names is None else (n.strip() for n in names.split(","))
    return None if given is None else tuple(itertools.takewhile(re.compile(r"\d+$|GPU-|MIG-").match, given))


def visible(index: int, option: str) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for that one of the GPUs that are visible now to be the only one.

    Raises:
        MissingError: the process may not see so many; `option` is what the number was given by.
    """
    names = listed()
    if names is not None and index >= len(names):
        raise MissingError(f"{option}: must be one of the {len(names)} GPUs of {VISIBLE} (got {index}).")
    return str(index) if names is None else names[index]


def memory_command(cuda: str) -> str:
    """The command that installs a package for device memory: the newest cuda-python whose CUDA a driver of `cuda`, like
    "12.6", does for, since one of a later CUDA asks for a later driver.
    """
    major = int(cuda.partition(".")[0] or 0)
    return pip_install(f"cuda-python<{major + 1}") if major else install_command("cuda")


def require(what: str, instead: str = "") -> Driver:
    """The driver.

    Raises:
        MissingError: without a usable GPU; `what` says what needed it, `instead` what else the user can do.
    """
    gpu = probe()
    if gpu.problem:
        raise MissingError(f"{what}: {absent(gpu, instead)}")
    return gpu


def absent(gpu: Driver, instead: str = "") -> str:
    """What a machine without a usable GPU is told; `instead` is what else than another machine helps."""
    step = "Run it on the machine the engine is for"
    return f"there is no usable NVIDIA GPU here ({gpu.problem}). {step}{instead and f', or {instead}'}."


class _RefusedError(Exception):
    """A call of the driver failed."""


def _called(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    if status := getattr(cuda, name)(*arguments):
        raise _RefusedError(f"{name} gives {error_name(cuda, status)}")


def error_name(cuda: ctypes.CDLL, status: int) -> str:
    """The driver's own name for a CUresult."""
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(text))
    return text.value.decode(errors="replace") if text.value else f"CUresult {status}"


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    _called(cuda, "cuDeviceGet", ctypes.byref(handle), index)
    _called(cuda, "cuDeviceGetName", name, len(name), handle)
    _called(cuda, "cuDeviceGetAttribute", ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, handle)
    _called(cuda, "cuDeviceGetAttribute", ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, handle)
    _called(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    return Gpu(index, name.value.decode(errors="replace"), f"{major.value}.{minor.value}", memory.value)

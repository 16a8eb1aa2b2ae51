"""The machine that is to run a bundle, as one value."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtpipe import packages
from trtpipe.machine import available_bytes
from trtpipe.trt import driver, flavour
from trtpipe.trt.platforms import machine_name
from trtpipe.version_numbers import parse_version

_ON_CPU = "not used: onnxruntime computes on the CPU"


@dataclass(frozen=True)
class Device:
    """What decides whether an engine runs here.

    `os` is `sys.platform`; `machine` like "x86_64" or "aarch64"; `versions` maps target to the version of its runtime
    here, and "torch" to PyTorch's; `compute_capability` is like "8.6", None without a usable GPU, and `gpu` is then the
    reason, a fault of the machine's where its NVIDIA driver is there (`has_driver`); `jetson` is whether this is a
    JetPack system; memory in bytes, None when it is not known; `others` are the GPUs after the first, which is the one
    that is used; `cuda` is the driver's, like "12.6", and `built_for` the major of CUDA that a target's runtime here is
    built for, where that is known.
    """

    os: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    compute_capability: str | None = None
    gpu: str = "no GPU"
    jetson: bool = False
    memory_bytes: int | None = None
    others: tuple[driver.Gpu, ...] = ()
    cuda: str = ""
    built_for: Mapping[str, int] = field(default_factory=dict)
    has_driver: bool = False


def device_of(target: str) -> Device:
    """This machine as an engine for `target` sees it: ONNX Runtime computes on the CPU, and no CUDA driver is asked."""
    return _device(driver.Driver(problem=_ON_CPU)) if target == "onnxruntime" else this_device()


def this_device() -> Device:
    """This machine. From package metadata and the CUDA driver; imports no TensorRT and no torch."""
    return _device(driver.probe())


def _device(gpus: driver.Driver) -> Device:
    versions: dict[str, str] = {str(name): version for name, (_, version) in flavour.installed().items()}
    versions |= {
        name: installed for name in ("onnxruntime", "torch") if (installed := packages.version(name)) is not None
    }
    first = gpus.devices[0] if gpus.devices else None
    jetson = driver.is_jetson()
    return Device(
        os=sys.platform,
        machine=machine_name(platform.machine()),
        versions=versions,
        compute_capability=first.compute_capability if first else None,
        gpu=first.name if first else gpus.problem,
        has_driver=gpus.installed,
        jetson=jetson,
        memory_bytes=_memory(jetson, first),
        others=gpus.devices[1:],
        cuda=gpus.cuda,
        built_for={n: major for n in versions if (major := packages.cuda_major(n)) is not None},
    )


def outdated_driver(target: str, cuda: str, needed: int | None) -> str:
    """Why a driver of this CUDA, like "12.6", does not do for a target's runtime, which needs that major; empty where
    it does, or where that is not known."""
    if needed is None or not cuda or parse_version(cuda)[0] >= needed:
        return ""
    return f"what is installed of {target} must have a driver of CUDA {needed} (got CUDA {cuda})"


def _memory(jetson: bool, gpu: driver.Gpu | None) -> int | None:
    """What an engine may use at most: of a discrete GPU all of it, of a system's own memory what is available now."""
    if gpu is not None and not jetson:
        return gpu.memory_bytes
    return available_bytes()

"""The machine that is to run a bundle, as one value."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtpipe import packages
from trtpipe.trt import driver, flavour
from trtpipe.trt.platforms import machine_name


@dataclass(frozen=True)
class Device:
    """What decides whether an engine runs here.

    `os` is `sys.platform`; `machine` like "x86_64" or "aarch64"; `versions` maps target to the version of its runtime
    here, and "torch" to PyTorch's; `compute_capability` is like "8.6", None without a usable GPU, and `gpu` is then the
    reason; `jetson` is whether this is a JetPack system; memory in bytes, None when it is not known; `others` are the
    GPUs after the first, which is the one that is used.
    """

    os: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    compute_capability: str | None = None
    gpu: str = "no GPU"
    jetson: bool = False
    memory_bytes: int | None = None
    others: tuple[driver.Gpu, ...] = ()


def this_device() -> Device:
    """This machine. From package metadata and the CUDA driver; imports no TensorRT and no torch."""
    versions: dict[str, str] = {str(name): version for name, (_, version) in flavour.installed().items()}
    versions |= {
        name: installed for name in ("onnxruntime", "torch") if (installed := packages.version(name)) is not None
    }
    gpus = driver.probe()
    first = gpus.devices[0] if gpus.devices else None
    jetson = is_jetson()
    return Device(
        os=sys.platform,
        machine=machine_name(platform.machine()),
        versions=versions,
        compute_capability=first.compute_capability if first else None,
        gpu=first.name if first else gpus.problem,
        jetson=jetson,
        memory_bytes=_memory(jetson, first),
        others=gpus.devices[1:],
    )


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether this is a Jetson: JetPack's release file, or the board's own name for itself."""
    if (root / "etc/nv_tegra_release").exists():
        return True
    try:
        return "jetson" in (root / "proc/device-tree/model").read_text(errors="replace").lower()
    except OSError:
        return False


def _memory(jetson: bool, gpu: driver.Gpu | None) -> int | None:
    """What an engine may use at most: of a discrete GPU all of it, of a system's own memory what is available now."""
    if gpu is not None and not jetson:
        return gpu.memory_bytes
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((line for line in lines if line.startswith("MemAvailable:")), "")
    digits = "".join(c for c in available if c.isdigit())
    return int(digits) * 1024 if digits else None

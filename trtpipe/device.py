"""The machine that is to run a bundle, as one value; a test can say what it likes about it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: `platform.machine()` spells the same processors in several ways.
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Device:
    """What decides whether an engine runs here.

    `os` is `sys.platform`; `machine` like "x86_64" or "aarch64"; `versions` maps target to the version of its runtime
    here; `compute_capability` is like "8.6", None without a usable GPU, and `gpu` is then the reason; `jetson` is
    whether this is a JetPack system; memory in bytes, None when nobody could tell.
    """

    os: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    compute_capability: str | None = None
    gpu: str = "no GPU"
    jetson: bool = False
    free_memory_bytes: int | None = None


def machine_name(raw: str) -> str:
    """One spelling of a processor architecture."""
    return _MACHINES.get(raw.lower(), raw.lower())


def this_device() -> Device:
    """This machine. Asks package metadata and the CUDA driver; imports no TensorRT and no torch."""
    from trtpipe.trt import driver, flavour

    versions = {str(name): version for name, (_, version) in flavour.installed().items()}
    onnxruntime = _onnxruntime_version()
    if onnxruntime:
        versions["onnxruntime"] = onnxruntime
    found = driver.probe()
    first = found.devices[0] if found.devices else None
    jetson = is_jetson()
    return Device(
        os=sys.platform,
        machine=machine_name(platform.machine()),
        versions=versions,
        compute_capability=first.compute_capability if first else None,
        gpu=first.name if first else found.problem,
        jetson=jetson,
        free_memory_bytes=_free_memory(jetson, first.index if first else None),
    )


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether this is a Jetson: JetPack's release file, or the board's own name for itself."""
    if (root / "etc/nv_tegra_release").exists():
        return True
    try:
        return "jetson" in (root / "proc/device-tree/model").read_text(errors="replace").lower()
    except OSError:
        return False


def _onnxruntime_version() -> str | None:
    """The version of an installed ONNX Runtime, whichever of its packages brought it."""
    import importlib.metadata

    for distribution in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _free_memory(jetson: bool, index: int | None) -> int | None:
    """Free memory of the GPU in bytes; on a Jetson, where it is the system's own, and without a GPU, of the system."""
    if index is None or jetson:
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None
    from trtpipe.trt import driver

    return driver.free_memory_bytes(index) if hasattr(driver, "free_memory_bytes") else None

"""The command that installs a TensorRT which a machine's driver and GPU can use."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from trtpipe.packages import JETPACKS, RUN, absence, distributions, install_command, pip_install, versions
from trtpipe.trt import driver
from trtpipe.trt.flavour import INSTALLED_SPANS
from trtpipe.trt.platforms import BY_CAPABILITY, machine_name
from trtpipe.version_numbers import parse_version

#: Major of CUDA -> what there is for it on PyPI: flavour -> [first release, first that is no more).
_WHEELS: Mapping[int, Mapping[str, tuple[str, str]]] = {
    11: {"tensorrt": ("10.0.1", "10.14")},
    12: {"tensorrt": ("10.0.1", ""), "tensorrt_rtx": ("1.4", "")},
    13: {"tensorrt": ("10.13.2", ""), "tensorrt_rtx": ("1.4", "")},
}
#: Of these, what has no wheels for aarch64.
_X86_ALONE = {(12, "tensorrt_rtx")}


def tensorrt_command(target: str, cuda: str, compute_capability: str = "", *, jetson: bool) -> str:
    """The command that installs it; "" where PyPI has none that this driver and this GPU can use.

    Args:
        target: which TensorRT.
        cuda: of the driver, like "12.6"; "" where it is not known.
        compute_capability: of the GPU, like "8.9"; "" where it is not known.
        jetson: whether this is a Jetson, whose TensorRT comes with JetPack.
    """
    if jetson:
        return JETPACKS if target == "tensorrt" else ""  # there is no TensorRT-RTX for Jetsons
    if not cuda:
        return install_command(target)
    abilities = BY_CAPABILITY.get(compute_capability)
    since, until = abilities.releases if abilities and target == "tensorrt" else ("", "")
    for major in sorted(_WHEELS, reverse=True):
        first, last = _WHEELS[major].get(target, ("", "0"))
        lacking = (major, target) in _X86_ALONE and machine_name(platform.machine()) == "aarch64"
        if major > parse_version(cuda)[0] or lacking:
            continue
        for lowest, below in INSTALLED_SPANS[target]:
            lower = max(filter(None, (lowest, since, first)), key=parse_version)
            upper = min(filter(None, (below, until, last)), key=parse_version)
            if parse_version(lower) < parse_version(upper):
                return pip_install(f"{distribution(target, major)}>={lower},<{upper}", versions(distributions(target)))
    return ""


def not_here(target: str) -> str:
    """`tensorrt is not installed. Run: ...`, with the command for this machine's driver and its first GPU."""
    gpu = driver.probe()
    here = (gpu.cuda, gpu.devices[0].compute_capability) if gpu.devices else ("", "")
    command = tensorrt_command(target, *here, jetson=driver.is_jetson())
    none = "PyPI has none for this GPU and its driver: choose another build.target."
    return f"{absence(target)}.{RUN}{command}" if command else f"{absence(target)}. {none}"


def distribution(target: str, cuda_major: int) -> str:
    """The distribution of a TensorRT for one major of CUDA, like tensorrt-rtx-cu12."""
    return f"{target.replace('_', '-')}-cu{cuda_major}"

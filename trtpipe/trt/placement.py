"""What builder options ask of the device that an engine is for, and what a device lacks of it.

`NAMING_A_DLA` is the one table of what is for a DLA alone: `options.OPTIONS` refuses it where the release has no DLA,
`misplaced` where the device has none, `unplaced` where no layer is on one. `FROM_AMPERE` is that of what older GPUs
lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trtpipe.job.build_options import BuildOptions, TensorFormat
from trtpipe.job.sections import Precision
from trtpipe.trt.platforms import (
    BY_CAPABILITY,
    OLDEST_PORTABLE,
    PLATFORMS,
    same_capability,
    takes_portable,
    too_old_or_new,
    unable,
)

#: "Only for DLA" in the table of TensorRT's documentation under "I/O Formats" (`SOURCE_URLS`).
DLA_FORMATS: tuple[TensorFormat, ...] = ("chw16", "dla_linear", "dla_hwc4")
#: "Only for NVIDIA Ampere GPUs and later" there.
AMPERE_FORMATS: tuple[TensorFormat, ...] = ("hwc16",)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _among(bindings: Mapping[str, tuple[str, ...]], formats: tuple[TensorFormat, ...]) -> str:
    return _listed(f for allowed in bindings.values() for f in allowed if f in formats)


#: Field of `BuildOptions` to what of its value is for a DLA alone, as a message shows it; "" where nothing is.
NAMING_A_DLA: Mapping[str, Callable[[Any], str]] = {
    "memory_pools": lambda limits: _listed(pool for pool in limits if pool.startswith("dla_")),
    "tensor_formats": lambda bindings: _among(bindings, DLA_FORMATS),
    "default_device_type": lambda device: device if device == "dla" else "",
    "dla_core": lambda core: "" if core is None else str(core),
    "gpu_fallback": lambda on: "true" if on else "",
    "device_types": lambda devices: _listed(f"{glob}: dla" for glob, device in devices.items() if device == "dla"),
}

#: The same for GPUs of compute capability 8.0 on: their 2:4 sparse Tensor Cores came with Ampere (`SOURCE_URLS`).
FROM_AMPERE: Mapping[str, Callable[[Any], str]] = {
    "sparse_weights": lambda on: "2:4 sparse kernels" if on else "",
    "tensor_formats": lambda bindings: _among(bindings, AMPERE_FORMATS),
}


def _asked(table: Mapping[str, Callable[[Any], str]], build: BuildOptions) -> dict[str, str]:
    """The values of a build section that a table names, by option path."""
    found = {f"build.{field}": of(getattr(build, field)) for field, of in table.items()}
    return {path: got for path, got in found.items() if got}


def naming_a_dla(build: BuildOptions) -> dict[str, str]:
    """What a build section has for a DLA alone, by option path."""
    return _asked(NAMING_A_DLA, build)


def needing_dla(field: str) -> Callable[[Any], tuple[str, ...]]:
    """The capability that a value of this field asks of a release by naming a DLA."""
    return lambda value: ("dla",) if NAMING_A_DLA[field](value) else ()


def unplaced(build: BuildOptions) -> Iterator[tuple[str, str]]:
    """(option path, message) of what is for a DLA, on a platform that may have one, while no layer is on it."""
    if build.uses_dla or (build.platform is not None and not PLATFORMS[build.platform].dla):
        return
    for path, got in naming_a_dla(build).items():
        yield (
            path,
            f"{path}: must go with layers on a DLA (got {got}, and every layer on the GPU). Set "
            "build.default_device_type or build.device_types to dla, or leave this out.",
        )


def refusals(build: BuildOptions) -> tuple[tuple[str, str], ...]:
    """The same of what the job's platform cannot do for TensorRT proper; of a job for a DLA and no platform in
    particular, what no platform with a DLA can."""
    if build.platform is not None:
        p = PLATFORMS[build.platform]
        return misplaced(p.title, p.compute_capability, p.jetson, build, dla=p.dla)
    if not build.uses_dla:
        return ()
    of_each = [
        dict(misplaced("A device with a DLA", p.compute_capability, p.jetson, build))
        for p in PLATFORMS.values()
        if p.dla and not p.ends
    ]
    return tuple((path, text) for path, text in of_each[0].items() if all(path in other for other in of_each))


def misplaced(
    title: str, compute_capability: str, jetson: bool, build: BuildOptions, *, dla: bool = True
) -> tuple[tuple[str, str], ...]:
    """The same of a GPU, or a system, that cannot do what these options ask TensorRT proper for.

    Args:
        title: of the GPU or platform.
        compute_capability: its own.
        jetson: whether it is a JetPack system.
        build: the job's build section.
        dla: whether it has a DLA, or may have one.
    """
    problems = []
    old = not takes_portable(compute_capability)
    if build.hardware_compatibility == "ampere_plus" and (jetson or old):
        least = "on JetPack" if jetson else f"before compute capability {OLDEST_PORTABLE}"
        message = f"{title} must have an engine of its own, as none of ampere_plus runs {least} (got ampere_plus)"
        problems.append(("build.hardware_compatibility", f"{message}. Leave it out."))
    if build.runtime_platform != "same_as_build" and jetson:
        message = f"{title} must have an engine for its own system (got {build.runtime_platform}). Leave it out."
        problems.append(("build.runtime_platform", message))
    for path, got in _asked(FROM_AMPERE, build).items() if old else ():
        message = f"{title} must be of compute capability {OLDEST_PORTABLE} or later for {got}"
        problems.append((path, f"{message} (got {compute_capability}). Leave it out."))
    for path, got in naming_a_dla(build).items() if not dla else ():
        problems.append((path, f"{title} has no DLA (got {got}). Leave it out."))
    return tuple((path, f"{path}: {message}") for path, message in problems)


def refused_here(
    title: str,
    compute_capability: str,
    jetson: bool,
    build: BuildOptions,
    precision: Precision | None,
    version: str | None,
) -> tuple[tuple[str, str], ...]:
    """All of that for the GPU that TensorRT proper builds on, which the engine has to be for.

    Args:
        title: of the GPU.
        compute_capability: its own.
        jetson: whether this is a JetPack system.
        build: the job's build section.
        precision: the job's precision section; None judges the rest alone.
        version: of TensorRT; None where it is not installed.
    """
    if build.platform is not None:
        platform = PLATFORMS[build.platform]
        if not same_capability(platform.compute_capability, compute_capability):
            message = (
                f"build.platform: {platform.title}, of compute capability {platform.compute_capability}, must be where "
                f"the engine is built (got {title}, {compute_capability}). Build it there."
            )
            return (("build.platform", message),)
    old = too_old_or_new(title, compute_capability, version) if version else ()
    narrow = unable(title, compute_capability, precision) if precision else ()
    dla = compute_capability not in BY_CAPABILITY or any(
        p.dla and same_capability(p.compute_capability, compute_capability) for p in PLATFORMS.values()
    )
    return (*old, *narrow, *misplaced(title, compute_capability, jetson, build, dla=dla))

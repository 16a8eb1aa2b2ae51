"""The header of a serialized engine, read without TensorRT.

A plan of TensorRT-RTX begins with ``vtrt``, one of TensorRT with ``ftrt``. At byte 16 stands the file's length (u64,
little-endian), at 24 to 27 major, minor, patch and build of the version that wrote it, and in an RTX plan at byte 32 a
mask of compute capabilities (observed with TensorRT-RTX 1.7.1; the ``ftrt`` layout is read from trtexec's source, which
knows it for serialization version 0, the u32 at byte 4). A plan that carries its own lean runtime begins with ``ptrt``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from trtpipe.errors import BuildError, InputError
from trtpipe.trt.flavour import FlavourName, same_release, title
from trtpipe.trt.platforms import OLDEST_PORTABLE, RTX_COMPUTE_CAPABILITIES, takes_portable
from trtpipe.version_numbers import parse_version

HEADER_BYTES = 33
_FLAVOURS: dict[bytes, FlavourName] = {
    b"vtrt": "tensorrt_rtx",
    b"ftrt": "tensorrt",
    b"ptrt": "tensorrt",
}
#: What plans begin with.
MAGICS = tuple(_FLAVOURS)
#: Bit of the mask at byte 32, one after the other, observed by building for each capability in turn.
_CAPABILITY_BITS = {name: 1 << place for place, name in enumerate(RTX_COMPUTE_CAPABILITIES)}
_PORTABLE = 0x7E
_REBUILD = "Build the engine for this GPU."


@dataclass(frozen=True)
class PlanHeader:
    """The fields of a plan's header.

    `version` is like "1.7.1.116", empty where its place is not known, and `length` is in bytes, None for TensorRT
    proper, of whose header it is not known for all releases.
    `compute_capabilities` are like "8.6"; they are empty when `portable` (Ampere and later), and empty for TensorRT
    proper, whose header does not name its GPU.
    """

    flavour: FlavourName
    version: str
    compute_capabilities: tuple[str, ...]
    length: int | None
    portable: bool = False


def read_header(data: bytes, where: str = "engine") -> PlanHeader:
    """The header at the start of `data`, which is the whole plan.

    Raises:
        InputError: when this is no plan, has no whole header, is shorter or longer than that says (of TensorRT-RTX), or
            names compute capabilities that trtpipe does not know.
    """
    start = bytes(data[:HEADER_BYTES])
    flavour = _FLAVOURS.get(start[:4])
    if flavour is None:
        raise InputError(f"{where}: a plan must begin with ftrt, vtrt or ptrt (got {start[:4]!r}).{_prefix_hint(data)}")
    if len(start) < HEADER_BYTES:
        raise InputError(
            f"{where}: a plan must hold at least {HEADER_BYTES} bytes (got {len(data)}). Copy the file again."
        )
    (length,) = struct.unpack_from("<Q", start, 16)
    version = ".".join(str(b) for b in start[24:28])
    if start[:4] == b"ptrt" or (flavour == "tensorrt" and start[4:8] != bytes(4)):
        version = ""
    if flavour == "tensorrt":
        return PlanHeader(flavour, version, (), None)
    if length != len(data):
        raise InputError(
            f"{where}: the plan must be {length} bytes long, as its header says (got {len(data)}). Copy the file again."
        )
    mask = start[32]
    if mask == _PORTABLE:
        return PlanHeader(flavour, version, (), length, portable=True)
    known = {name: bit for name, bit in _CAPABILITY_BITS.items() if mask & bit}
    if sum(known.values()) != mask or not mask:
        raise InputError(
            f"{where}: the plan must be for compute capabilities among {', '.join(_CAPABILITY_BITS)} "
            f"(got mask {mask:#04x}). It was written by a newer TensorRT-RTX: update trtpipe."
        )
    return PlanHeader(flavour, version, tuple(known), length)


def own_header(data: bytes, name: str, version: str, capabilities: Sequence[str] | None = None) -> PlanHeader:
    """The header of a plan that has just been compiled, which must say by which TensorRT, as far as it says anything.

    Args:
        data: the plan.
        name: "tensorrt" or "tensorrt_rtx", the one that was loaded.
        version: of it, like "10.3.0": as many numbers as it has must be the plan's.
        capabilities: the compute capabilities that were asked for, like "8.6", where any were.

    Raises:
        BuildError: it was compiled by another TensorRT, or for other GPUs.
    """
    header = read_header(data)
    numbers = parse_version(version)[:4]  # a plan has room for these
    same = not header.version or parse_version(header.version)[: len(numbers)] == numbers
    wanted = None if capabilities is None else tuple(sorted(capabilities, key=parse_version))
    if header.flavour == name and same and wanted in (None, header.compute_capabilities):
        return header

    def described(flavour: str, version: str, capabilities: Sequence[str]) -> str:
        of = "" if wanted is None else f" for {', '.join(capabilities) or 'no compute capability in particular'}"
        return title(flavour, version) + of

    raise BuildError(
        f"engine: the plan's header must say {described(name, version, wanted or ())} "
        f"(got {described(header.flavour, header.version or version, header.compute_capabilities)}). "
        "Another TensorRT's library was loaded: check LD_LIBRARY_PATH."
    )


def require_fit(
    header: PlanHeader, name: str, version: str, compute_capability: str, *, version_compatible: bool = False
) -> None:
    """InputError with all that `misfits` finds."""
    if problems := misfits(header, name, version, compute_capability, version_compatible=version_compatible):
        raise InputError("\n".join(f"engine: {p}" for p in problems))


def misfits(
    header: PlanHeader, name: str, version: str, compute_capability: str, *, version_compatible: bool = False
) -> tuple[str, ...]:
    """Why a plan cannot be loaded by this TensorRT on this GPU, by its header; empty when the header allows it.

    Args:
        header: the plan's.
        name: "tensorrt" or "tensorrt_rtx", the one at hand.
        version: of it, like "10.3.0".
        compute_capability: of the GPU, like "8.6".
        version_compatible: the plan was built with build.version_compatible, which lets other releases of TensorRT
            proper load it: which they are, TensorRT says itself.
    """
    if header.flavour != name:
        return (f"the plan must be one of {name} (got one of {header.flavour}). Load it with {header.flavour}.",)
    problems = []
    any_release = version_compatible and name == "tensorrt"
    if header.version and not any_release and not same_release(header.version, version):
        problems.append(
            f"{name} must be {header.version}, which wrote the plan (got {version}). "
            "Install that version, or build the engine here."
        )
    wanted = header.compute_capabilities
    if wanted and compute_capability not in wanted:
        problems.append(
            f"the GPU must be of compute capability {', '.join(wanted)} (got {compute_capability}). {_REBUILD}"
        )
    if header.portable and not takes_portable(compute_capability):
        least = f"{OLDEST_PORTABLE} or later"
        problems.append(f"the GPU must be of compute capability {least} (got {compute_capability}). {_REBUILD}")
    return tuple(problems)


def split_prefix(data: bytes) -> tuple[bytes, bytes]:
    """(JSON text, plan) of a file to which a tool prepended a 4-byte length and JSON; (b"", data) of a bare plan."""
    if data[:4] in _FLAVOURS or len(data) < 8:
        return b"", data
    (length,) = struct.unpack_from("<I", data)
    if data[4:5] == b"{" and data[4 + length : 8 + length] in _FLAVOURS:
        return data[4 : 4 + length], data[4 + length :]
    return b"", data


def _prefix_hint(data: bytes) -> str:
    text, _ = split_prefix(data)
    if text:
        return f" A length and {len(text)} bytes of JSON stand before the plan, as some tools write: cut them off."
    return " Give the engine file itself."

"""What NVIDIA's platforms can compute, by compute capability: the support matrix that a job is held against.

The precisions are those of the "Hardware and Precision" tables of NVIDIA's support matrices, the compute capabilities
those of NVIDIA's list of CUDA GPUs (`SOURCE_URLS`). A platform can do what TensorRT accelerates on it: INT8 that a GPU
would emulate is not counted.

Whether TensorRT-RTX runs its engines on a GPU is decided by `rtx_support` alone: `doctor`, `verify`, the options of
a job and the page in the docs use it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtpipe.job.build_options import PlatformName
from trtpipe.trt.flavour import is_within
from trtpipe.version_numbers import parse_version

if TYPE_CHECKING:
    from trtpipe.job.sections import Precision

#: `platform.machine()` spells the same processors in several ways.
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}

SOURCE_URLS: Mapping[str, str] = {
    "matrix 8.6": "https://docs.nvidia.com/deeplearning/tensorrt/archives/tensorrt-861/support-matrix/index.html",
    "notes 8.5": "https://docs.nvidia.com/deeplearning/tensorrt/archives/tensorrt-852/release-notes/tensorrt-8.html",
    "8.6 and Maxwell": "https://github.com/NVIDIA/TensorRT/issues/3589",
    "matrix 8.2": "https://docs.nvidia.com/deeplearning/tensorrt/archives/tensorrt-825/support-matrix/index.html",
    "matrix 10": "https://docs.nvidia.com/deeplearning/tensorrt/latest/getting-started/support-matrix-10/10.14.1.html",
    "matrix RTX": "https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/getting-started/support-matrix.html",
    "matrix Thor": "https://developer.nvidia.com/docs/drive/drive-os/7.0.3/public/drive-os-tensorrt-release-notes/"
    "release-properties.html",
    # INT4: "Ampere and later"; FP4: "Blackwell and later".
    "matrix ModelOpt": "https://nvidia.github.io/Model-Optimizer/guides/0_support_matrix.html",
    "notes 10.5": "https://docs.nvidia.com/deeplearning/tensorrt/latest/getting-started/release-notes-10/10.5.0.html",
    "notes 10.8": "https://docs.nvidia.com/deeplearning/tensorrt/latest/getting-started/release-notes-10/10.8.0.html",
    "types RTX": "https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/inference-library/work-quantized-types.html",
    "CUDA GPUs": "https://developer.nvidia.com/cuda-gpus",
    "2:4 sparsity": "https://developer.nvidia.com/blog/accelerating-inference-with-sparsity-using-ampere-and-tensorrt",
    "I/O formats": "https://docs.nvidia.com/deeplearning/tensorrt/10.16.1/inference-library/io-formats-sparsity.html",
}


@dataclass(frozen=True)
class Abilities:
    """What GPUs of one compute capability accelerate, and where that is written (keys of `SOURCE_URLS`).

    `releases`: the versions of TensorRT proper that build for them, [since, until); an empty bound is open.
    """

    precisions: frozenset[str]
    sources: tuple[str, ...]
    releases: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Platform:
    """One kind of device.

    `dla`: whether it has a Deep Learning Accelerator. `ends`: its last software, where no TensorRT that trtpipe builds
    for runs on it. `note` is for `doctor` and the docs.
    """

    name: PlatformName
    title: str
    compute_capability: str
    dla: bool = False
    ends: str = ""
    note: str = ""

    @property
    def jetson(self) -> bool:
        """Whether its software is JetPack."""
        return self.name.startswith("jetson_")

    @property
    def precisions(self) -> frozenset[str]:
        """Some of `PRECISIONS`."""
        return BY_CAPABILITY[self.compute_capability].precisions


def _can(precisions: str, *sources: str, since: str = "", until: str = "") -> Abilities:
    narrow = {"int4": ("matrix ModelOpt",), "fp4": ("notes 10.8", "types RTX")}
    more = [s for name in precisions.split() for s in narrow.get(name, ())]
    return Abilities(frozenset(precisions.split()), (*sources, *more, "CUDA GPUs"), (since, until))


_AMPERE = "fp32 fp16 bf16 int8 int4"
_ADA = f"{_AMPERE} fp8"
_BLACKWELL = f"{_ADA} fp4"

#: All that a GPU may have, in the order that pages and messages list it.
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "fp8", "fp4")

#: What every release has; of the others `flavour.CAPABILITIES` says which has them, by the same names.
ALWAYS = frozenset({"fp32", "fp16", "int8"})
#: Key of `precision` -> what comes nearest to it, best first; and how a job asks for each.
_NEAREST = {
    "int8_mode": ("fp16",),
    "fp16_mode": ("int8",),
    "bf16_mode": ("fp16",),
    "fp8_mode": ("int8", "fp16"),
    "nvfp4_mode": ("fp8", "int8", "fp16"),
    "weights": ("int4", "int8", "fp16"),
}
_ASKED_BY = {name: f"precision.{name}_mode" for name in ("fp16", "int8", "fp8")} | {"int4": "precision.weights: int4"}

#: Compute capability to what it accelerates, and the releases for it: TensorRT 10 needs 7.0 or later, and 7.5 from
#: 10.5 on; Blackwell needs 10.8.
BY_CAPABILITY: Mapping[str, Abilities] = {
    "5.3": _can("fp32 fp16", "matrix 8.2", "notes 8.5", "8.6 and Maxwell", until="8.6"),
    "6.0": _can("fp32 fp16", "matrix 8.6", until="10.0"),
    "6.1": _can("fp32 int8", "matrix 8.6", until="10.0"),
    "6.2": _can("fp32 fp16", "matrix 8.2", "notes 8.5", until="8.6"),
    "7.0": _can("fp32 fp16 int8", "matrix 8.6", "notes 10.5", until="10.5"),
    "7.2": _can("fp32 fp16 int8", "matrix 8.6", until="10.0"),
    "7.5": _can("fp32 fp16 int8", "matrix 8.6", "matrix RTX"),
    "8.0": _can(_AMPERE, "matrix 10"),
    "8.6": _can(_AMPERE, "matrix 10", "matrix RTX"),
    "8.7": _can(_AMPERE, "matrix 10"),
    "8.9": _can(_ADA, "matrix 10", "matrix RTX"),
    "9.0": _can(_ADA, "matrix 10"),
    "10.0": _can(_BLACKWELL, "matrix 10", "notes 10.8", since="10.8"),
    "10.1": _can(_BLACKWELL, "matrix Thor", since="10.8"),
    "10.3": _can(_BLACKWELL, "matrix 10", "notes 10.8", since="10.8"),
    "11.0": _can(_BLACKWELL, "matrix Thor", since="10.8"),
    "12.0": _can(_BLACKWELL, "matrix 10", "matrix RTX", since="10.8"),
    "12.1": _can(_BLACKWELL, "matrix 10", "notes 10.8", since="10.8"),
}

#: What TensorRT-RTX 1.7 builds for by name; an engine that names none is for all of them from `OLDEST_PORTABLE` on.
RTX_COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")

#: Those for which TensorRT-RTX 1.7.1 compiles no matrix product of FP32 tensors, in INT8 neither: "Cannot compile
#: operation for Turing (SM75): FP32 GEMM is not supported". It does compile FP32 convolutions, and products in FP16.
RTX_WITHOUT_FP32_PRODUCTS = ("7.5",)

#: The oldest compute capability that engines made for several run on: portable ones of TensorRT-RTX, and ampere_plus.
OLDEST_PORTABLE = "8.0"


def takes_portable(compute_capability: str) -> bool:
    """Whether GPUs of a compute capability run engines that are made for several, by `OLDEST_PORTABLE` alone."""
    return parse_version(compute_capability) >= parse_version(OLDEST_PORTABLE)


#: Of other compute capabilities, what was seen when its portable engine was loaded and run there: whether it ran, and
#: TensorRT-RTX's own words. `benchmarks/rtx_loads.py` measures it and writes the result to a file.
RTX_SEEN: Mapping[str, tuple[bool, str]] = {
    "9.0": (False, "on an H200 1.7.1 said: Supported compute capabilities: 8.0 8.6 8.9 12.0 12.1 >12.0"),
}


@dataclass(frozen=True)
class RtxSupport:
    """Whether TensorRT-RTX runs its engines on GPUs of one compute capability; None where that is not known.

    `why` is a clause without a full stop, to follow a colon or a comma.
    """

    runs: bool | None
    why: str


def rtx_support(compute_capability: str) -> RtxSupport:
    """The support of a GPU, by TensorRT-RTX's own list, else by what was observed, `RTX_SEEN`."""
    if compute_capability in RTX_COMPUTE_CAPABILITIES:
        return RtxSupport(True, f"TensorRT-RTX builds for compute capability {compute_capability}")
    if not takes_portable(compute_capability):
        return RtxSupport(False, f"a portable engine is for compute capability {OLDEST_PORTABLE} and later")
    unnamed = f"TensorRT-RTX does not name compute capability {compute_capability}"
    support = RTX_SEEN.get(compute_capability)
    if support is None:
        return RtxSupport(None, f"{unnamed}; whether a portable engine runs there is not known")
    runs, words = support
    verb = "runs" if runs else "does not run"
    return RtxSupport(runs, f"{unnamed}; a portable engine {verb} there{f' ({words})' if words else ''}")


#: TensorRT 8.6 dropped Maxwell (5.x) and CUDA 10.2, which is what JetPack 4 has.
_LAST_4, _LAST_5 = ("JetPack 4.6", "TensorRT 8.2"), ("JetPack 5.1", "TensorRT 8.5")
_ENDS_AT_4, _ENDS_AT_5 = (f"{jetpack} as its last, with {tensorrt}" for jetpack, tensorrt in (_LAST_4, _LAST_5))
_JETPACK_4, _JETPACK_5 = (
    f"{jetpack} is its last, with {tensorrt}: older than trtpipe builds for" for jetpack, tensorrt in (_LAST_4, _LAST_5)
)
_JETPACK_6 = "JetPack 6 has TensorRT 8.6 or 10.3"

PLATFORMS: Mapping[PlatformName, Platform] = {
    p.name: p
    for p in (
        Platform("jetson_nano", "Jetson Nano", "5.3", ends=_ENDS_AT_4, note=_JETPACK_4),
        Platform("jetson_tx2", "Jetson TX2", "6.2", ends=_ENDS_AT_4, note=_JETPACK_4),
        Platform("jetson_xavier_nx", "Jetson Xavier NX", "7.2", dla=True, ends=_ENDS_AT_5, note=_JETPACK_5),
        Platform("jetson_agx_xavier", "Jetson AGX Xavier", "7.2", dla=True, ends=_ENDS_AT_5, note=_JETPACK_5),
        Platform("jetson_orin_nano", "Jetson Orin Nano", "8.7", note=_JETPACK_6),
        Platform("jetson_orin_nx", "Jetson Orin NX", "8.7", dla=True, note=_JETPACK_6),
        Platform("jetson_agx_orin", "Jetson AGX Orin", "8.7", dla=True, note=_JETPACK_6),
        Platform("jetson_thor", "Jetson Thor", "11.0", note="JetPack 7 has TensorRT 10; CUDA 12 calls it 10.1"),
        Platform("t4", "T4", "7.5"),
        Platform("a10", "A10", "8.6"),
        Platform("a100", "A100", "8.0"),
        Platform("l4", "L4", "8.9"),
        Platform("h100", "H100", "9.0"),
        Platform("h200", "H200", "9.0"),
        Platform("b200", "B200", "10.0"),
        Platform("rtx_20", "GeForce RTX 20", "7.5"),
        Platform("rtx_30", "GeForce RTX 30", "8.6"),
        Platform("rtx_40", "GeForce RTX 40", "8.9"),
        Platform("rtx_50", "GeForce RTX 50", "12.0"),
    )
}


def same_capability(one: str, other: str) -> bool:
    """Whether two compute capabilities are of the same GPU: Thor is 10.1 to CUDA 12 and 11.0 to CUDA 13."""
    thor = {"10.1", "11.0"}
    return one == other or {one, other} == thor


def instead(key: str, can: Collection[str]) -> str:
    """What a job turns on where `precision.<key>` cannot be had, and `can` (of `PRECISIONS`) can."""
    return next((_ASKED_BY[name] for name in _NEAREST[key] if name in can), "FP32")


def refusals(
    platform: Platform, precision: Precision, release: Collection[str] = PRECISIONS
) -> tuple[tuple[str, str], ...]:
    """(dotted option path, message) of the precisions a job asks for and this platform cannot do, and of its end.

    Args:
        platform: a row of `PLATFORMS`.
        precision: the job's precision section.
        release: of `PRECISIONS`, those of the TensorRT that is to build.
    """
    problems = list(unable(platform.title, platform.compute_capability, precision, release))
    if platform.ends:
        message = f"{platform.title} must have TensorRT 8.6 or later (got {platform.ends}). Use a Jetson Orin or Thor."
        problems.append(("build.platform", f"build.platform: {message}"))
    return tuple(problems)


def releases_wanted(compute_capability: str, version: str) -> str:
    """The releases of TensorRT proper that build for GPUs of this compute capability, like "10.8 or later", where
    `version` is none of them; else ""."""
    abilities = BY_CAPABILITY.get(compute_capability)
    since, until = abilities.releases if abilities else ("", "")
    if is_within(parse_version(version), since, until):
        return ""
    return f"{since} or later" if since else f"before {until}"


def too_old_or_new(title: str, compute_capability: str, version: str) -> tuple[tuple[str, str], ...]:
    """The same for a GPU that this release of TensorRT proper does not build for.

    Args:
        title: of the GPU or platform.
        compute_capability: its own.
        version: of TensorRT, like "10.3.0".
    """
    wanted = releases_wanted(compute_capability, version)
    if not wanted:
        return ()
    message = (
        f"{title} (compute capability {compute_capability}) must have TensorRT {wanted} (got {version}). "
        "Build with such a release."
    )
    return (("build.target", f"build.target: {message}"),)


def unable(
    title: str, compute_capability: str, precision: Precision, release: Collection[str] = PRECISIONS
) -> tuple[tuple[str, str], ...]:
    """The same for a GPU of this compute capability; nothing is refused on one that the table does not know."""
    abilities = BY_CAPABILITY.get(compute_capability)
    if abilities is None:
        return ()
    problems = []
    weights = {"int4": "int4", "nvfp4": "fp4", None: ""}[precision.weights]
    for key, name in (
        ("int8_mode", "int8" if precision.int8_mode else ""),
        ("fp16_mode", "fp16" if precision.fp16_mode else ""),
        ("bf16_mode", "bf16" if precision.bf16_mode else ""),
        ("fp8_mode", "fp8" if precision.fp8_mode else ""),
        ("nvfp4_mode", "fp4" if precision.nvfp4_mode else ""),
        ("weights", weights),
    ):
        if name and name not in abilities.precisions:
            can = ", ".join(p.upper() for p in PRECISIONS if p in abilities.precisions)
            message = (
                f"{title} (compute capability {compute_capability}) must compute in {name.upper()} "
                f"(got a platform with {can}). Use {instead(key, abilities.precisions.intersection(release))}."
            )
            problems.append((f"precision.{key}", f"precision.{key}: {message}"))
    return tuple(problems)


def machine_name(raw: str) -> str:
    """One spelling of a processor architecture."""
    return _MACHINES.get(raw.lower(), raw.lower())

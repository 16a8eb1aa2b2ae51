"""What this machine can build and run, what it lacks, and how to get it.

Versions come from package metadata. Whether a package can be imported is tried in a process of its own, so that nothing
heavy is imported into this one, and a library that ends its process does not end the diagnosis.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trtpipe.import_errors import broken, import_failures
from trtpipe.model.torch_versions import building_modules, misfit, unsupported
from trtpipe.model.torch_versions import release as parse_release
from trtpipe.packages import (
    BUILDING,
    CAPTURE,
    IMAGES,
    RUN,
    TORCH_TENSORRT,
    absence,
    core_modules,
    cuda_major,
    install_command,
    lacking,
    pip_install,
    unfit,
    version,
    without,
)
from trtpipe.routes import options as route_options
from trtpipe.routes.options import FRONTENDS, REQUIREMENTS, unfit_release
from trtpipe.runtime import device_memory
from trtpipe.runtime.device import outdated_driver
from trtpipe.trt import driver, flavour
from trtpipe.trt.driver import INSTALL_ONE, Driver, Gpu
from trtpipe.trt.install import tensorrt_command
from trtpipe.trt.platforms import (
    BY_CAPABILITY,
    PLATFORMS,
    PRECISIONS,
    RTX_COMPUTE_CAPABILITIES,
    machine_name,
    releases_wanted,
    rtx_support,
    same_capability,
)

#: Packages that decide what can be done here: (shown name, module).
PACKAGES: tuple[tuple[str, str], ...] = (
    ("torch", "torch"),
    ("torchvision", "torchvision"),
    ("torchao", "torchao"),
    ("onnx", "onnx"),
    ("onnxscript", "onnxscript"),
    ("onnxruntime", "onnxruntime"),
    ("torch_tensorrt", "torch_tensorrt"),
    ("torch2trt", "torch2trt"),
    ("cuda-python", "cuda"),
    ("pycuda", "pycuda"),
)


@dataclass(frozen=True)
class Ability:
    """Whether something can be done here; `reason` says why not, or on what; `install` is a command that would help."""

    what: str
    possible: bool
    reason: str
    install: str = ""


def _ability(what: str, possible: bool, reason: str, install: str) -> Ability:
    return Ability(what, possible, reason, "" if possible else install)


@dataclass(frozen=True)
class GpuAbility:
    """A GPU and the precisions that it accelerates; none for one that the support matrix does not list."""

    name: str
    compute_capability: str
    memory_bytes: int
    precisions: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`. `tensorrts` maps targets to "distribution version", `packages` names to versions."""

    python: str
    system: str
    jetson: bool
    driver: str
    gpus: tuple[GpuAbility, ...]
    tensorrts: Mapping[str, str]
    packages: Mapping[str, str | None]
    abilities: tuple[Ability, ...]
    notes: tuple[str, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """Each command that would add an ability, once."""
        return tuple(dict.fromkeys(a.install for a in self.abilities if a.install))


def examine() -> Diagnosis:
    """What this machine can do, from package metadata, imports that were tried, and the CUDA driver."""
    gpu, packages = driver.probe(), {name: version(module) for name, module in PACKAGES}
    tensorrts = flavour.installed()
    jetson = driver.is_jetson()
    used = [m for m in (*core_modules(), *CAPTURE, *IMAGES, *BUILDING, "torch_tensorrt") if version(m)]
    memory = device_memory.no_memory() if gpu.devices and tensorrts else ""
    failed = import_failures((*used, *map(str, tensorrts)))
    return Diagnosis(
        python=platform.python_version(),
        system=f"{sys.platform} {machine_name(platform.machine())}",
        jetson=jetson,
        driver=f"CUDA {gpu.cuda}" if not gpu.problem else gpu.problem,
        gpus=tuple(
            GpuAbility(d.name, d.compute_capability, d.memory_bytes, _precisions(d.compute_capability))
            for d in gpu.devices
        ),
        tensorrts={str(name): f"{distribution} {version}" for name, (distribution, version) in tensorrts.items()},
        packages=packages,
        abilities=_with_core(
            failed,
            _importable(_capture(packages), building_modules(packages["torch"]), failed),
            _importable(_by_packages("calibrate and check on images", "torchvision", IMAGES), IMAGES, failed),
            *(_importable(a, ("onnxruntime",), failed) for a in _onnxruntime(packages)),
            *(_importable(a, ("tensorrt_rtx",), failed) for a in _rtx(gpu, tensorrts, memory, jetson=jetson)),
            *(_importable(a, ("tensorrt",), failed) for a in _tensorrt(gpu, tensorrts, memory, jetson=jetson)),
            *(
                _importable(a, ("torch", "torch_tensorrt"), failed)
                for a in _routes(gpu, tensorrts, packages, memory, jetson=jetson)
            ),
        ),
        notes=_notes(gpu, tensorrts),
    )


def _with_core(failed: Mapping[str, str], *abilities: Ability) -> tuple[Ability, ...]:
    """The abilities, none of which is one without what trtpipe itself requires."""
    if not (absent := lacking()):
        return tuple(_importable(a, core_modules(), failed) for a in abilities)
    why, command = absence(*absent), install_command(absent[0])
    return tuple(Ability(a.what, False, why, command) for a in abilities)


def _importable(ability: Ability, needed: Sequence[str], failed: Mapping[str, str]) -> Ability:
    """The ability, unless a module that it needs is installed and cannot be imported."""
    reason = next((broken(module, failed[module]) for module in needed if module in failed), "")
    if not ability.possible or not reason:
        return ability
    why, _, command = reason.partition(RUN)
    return Ability(ability.what, False, why, command)


def _precisions(compute_capability: str) -> tuple[str, ...]:
    abilities = BY_CAPABILITY.get(compute_capability)
    return tuple(p for p in PRECISIONS if abilities and p in abilities.precisions)


def _capture(packages: dict[str, str | None]) -> Ability:
    torch, torchao = packages["torch"], packages["torchao"]
    wrong = None if torch is None else unsupported(torch) or (misfit(torch, torchao) if torchao else None)
    return _by_packages("capture, calibrate and export a model", f"torch {torch}", building_modules(torch), wrong)


def _by_packages(what: str, fact: str, modules: Sequence[str], wrong: str | None = None) -> Ability:
    missing = [n for n in modules if version(n) is None]
    reason = absence(*missing) if missing else wrong or next(filter(None, map(unfit, modules)), fact)
    why, _, command = reason.partition(RUN)
    return _ability(what, reason == fact, why, command or install_command("torch"))


def _onnxruntime(packages: dict[str, str | None]) -> tuple[Ability, ...]:
    release = packages["onnxruntime"]
    reason = f"onnxruntime {release}, on the CPU" if release else absence("onnxruntime")
    return (_ability("run a graph (target onnxruntime)", release is not None, reason, pip_install("onnxruntime")),)


def _rtx(gpu: Driver, tensorrts: flavour.Installed, memory: str, *, jetson: bool) -> tuple[Ability, ...]:
    build, run = "build an engine (target tensorrt_rtx)", "run an engine (target tensorrt_rtx)"
    install = tensorrt_command("tensorrt_rtx", gpu.cuda, jetson=jetson)
    if "tensorrt_rtx" not in tensorrts:
        reason = "there is no TensorRT-RTX for Jetsons" if jetson else absence("tensorrt_rtx")
        return Ability(build, False, reason, install), Ability(run, False, reason, install)
    _, release = tensorrts["tensorrt_rtx"]
    if why := flavour.unsupported("tensorrt_rtx", release):
        reason = f"tensorrt_rtx {why}"
        return Ability(build, False, reason, install), Ability(run, False, reason, install)
    titled = flavour.title("tensorrt_rtx", release)
    built = Ability(build, True, f"{titled}, for any GPU: {', '.join(RTX_COMPUTE_CAPABILITIES)}")
    if gpu.problem:
        return built, Ability(run, False, gpu.problem)

    def on(here: Gpu) -> Ability:
        support = rtx_support(here.compute_capability)
        if not support.runs:
            return Ability(run, False, f"{here.name}: {support.why}")
        if why := outdated_driver("tensorrt_rtx", gpu.cuda, cuda_major("tensorrt_rtx")):
            return Ability(run, False, why, install)
        known = here.compute_capability in RTX_COMPUTE_CAPABILITIES
        return Ability(run, True, f"{titled} on {here.name}{'' if known else f': {support.why}'}")

    runs = _on_any(gpu, on)
    if memory and (names := ", ".join(_tried_on(gpu))):
        but = f"but for this {names} only where device memory works: the check executes the engine"
        built = Ability(build, True, f"{built.reason}; {but}")
    return built, _with_memory(runs, memory) if runs.possible else runs


def _tried_on(gpu: Driver) -> tuple[str, ...]:
    """The GPUs here on which the check executes a TensorRT-RTX engine, also where nobody knows whether one runs."""
    if outdated_driver("tensorrt_rtx", gpu.cuda, cuda_major("tensorrt_rtx")):
        return ()
    return tuple(dict.fromkeys(d.name for d in gpu.devices if rtx_support(d.compute_capability).runs is not False))


def _on_any(gpu: Driver, on: Callable[[Gpu], Ability]) -> Ability:
    """What at least one of the GPUs is able to, with what holds for each, the able first."""
    each = sorted(dict.fromkeys(map(on, gpu.devices)), key=lambda a: not a.possible)
    return replace(each[0], reason="; ".join(dict.fromkeys(a.reason for a in each)))


def _tensorrt(gpu: Driver, tensorrts: flavour.Installed, memory: str, *, jetson: bool) -> tuple[Ability, ...]:
    both = "build and run an engine (target tensorrt)"
    if gpu.problem:
        return (Ability(both, False, f"it builds on the GPU that the engine is for, and {gpu.problem}"),)

    def on(here: Gpu) -> Ability:
        install = tensorrt_command("tensorrt", gpu.cuda, here.compute_capability, jetson=jetson)
        if "tensorrt" not in tensorrts:
            wanted = releases_wanted(here.compute_capability, str(flavour.NEWEST_MAJOR["tensorrt"]))
            this = f"{wanted}, which {here.name} (compute capability {here.compute_capability}) must have"
            none = "" if install else f", and PyPI has none {this if wanted else 'for this driver'}"
            return Ability(both, False, absence("tensorrt") + none, install)
        distribution, release = tensorrts["tensorrt"]
        if why := flavour.unsupported("tensorrt", release):
            return Ability(both, False, f"tensorrt {why}", install)
        if distribution.startswith("tensorrt-lean"):
            return Ability(both, False, "tensorrt-lean only runs engines that were built elsewhere", install)
        if wanted := releases_wanted(here.compute_capability, release):
            reason = f"{here.name} (compute capability {here.compute_capability}) must have TensorRT {wanted}"
            return Ability(both, False, f"{reason} (got {release})", install)
        if why := outdated_driver("tensorrt", gpu.cuda, cuda_major("tensorrt")):
            return Ability(both, False, why, "" if jetson else install)
        return Ability(both, True, f"TensorRT {release} on {here.name}")

    able = _on_any(gpu, on)
    return (_with_memory(able, memory) if able.possible else able,)


def _with_memory(ability: Ability, lacking: str) -> Ability:
    """The ability to run an engine, which needs device memory too; `lacking` is what `device_memory.no_memory` says."""
    why, _, command = lacking.partition(f" {INSTALL_ONE}")
    return Ability(ability.what, False, why, command.removesuffix(".")) if lacking else ability


def _routes(
    gpu: Driver, tensorrts: flavour.Installed, packages: dict[str, str | None], memory: str, *, jetson: bool
) -> tuple[Ability, ...]:
    first = _torch_tensorrt(gpu, tensorrts, packages["torch"], memory, jetson=jetson)
    torch2trt = packages["torch2trt"]
    what = "build by route torch2trt"
    release = tensorrts["tensorrt"][1] if "tensorrt" in tensorrts else ""
    if release and (why := unfit_release("torch2trt", "tensorrt", release)):
        return first, Ability(what, False, why)
    if gpu.problem:
        return first, Ability(what, False, f"it runs the model on a GPU, and {gpu.problem}")
    if not release:
        needed = REQUIREMENTS["torch2trt"].releases["tensorrt"].said
        return first, Ability(what, False, f"it must have TensorRT {needed}, and none is installed")
    if torch2trt is None:
        return first, Ability(what, False, absence("torch2trt"), install_command("torch2trt"))
    able = Ability(what, True, f"torch2trt {torch2trt} with TensorRT {release}")
    return first, _for_target(able, "tensorrt", gpu, tensorrts, memory, jetson=jetson)


def _for_target(
    ability: Ability, target: str, gpu: Driver, tensorrts: flavour.Installed, memory: str, *, jetson: bool
) -> Ability:
    """The ability to build by a route, which is none where engines for its target cannot be built and executed."""
    if target == "tensorrt":
        (needed,) = _tensorrt(gpu, tensorrts, memory, jetson=jetson)
    else:
        needed, _ = _rtx(gpu, tensorrts, "", jetson=jetson)
        if needed.possible and _tried_on(gpu):
            needed = _with_memory(needed, memory)
    return ability if needed.possible else Ability(ability.what, False, needed.reason, needed.install)


def _torch_tensorrt(
    gpu: Driver, tensorrts: flavour.Installed, torch: str | None, memory: str, *, jetson: bool
) -> Ability:
    """Route torch_tensorrt needs a GPU even to build: Torch-TensorRT reads every engine back after building it."""
    what = "build by route torch_tensorrt"
    frontend = route_options.installed_frontend()
    if gpu.problem:
        return Ability(what, False, f"Torch-TensorRT loads each engine on a GPU, and {gpu.problem}")
    if frontend is None:
        needed = REQUIREMENTS["torch_tensorrt"].releases["tensorrt"]
        if wanted := releases_wanted(gpu.devices[0].compute_capability, ".".join(map(str, needed.first))):
            return Ability(what, False, f"it must have TensorRT {needed.said}, and {gpu.devices[0].name} one {wanted}")
        if torch is not None and parse_release(torch) != parse_release(TORCH_TENSORRT):
            reason = f"Torch-TensorRT {TORCH_TENSORRT}, whose arguments are known, needs torch "
            return Ability(what, False, f"{reason}{TORCH_TENSORRT} (got {torch})")
        if "tensorrt" in tensorrts and (why := unfit_release("torch_tensorrt", "tensorrt", tensorrts["tensorrt"][1])):
            return Ability(what, False, why)  # to install it would replace the TensorRT that is here
        return Ability(what, False, absence("torch_tensorrt"), install_command("torch-tensorrt"))
    here = {str(name): release for name, (_, release) in tensorrts.items()}.get(frontend.target)
    if here is None:
        reason = f"{frontend.distribution} {frontend.version} needs {frontend.target}, which is not installed"
        install = tensorrt_command(frontend.target, gpu.cuda, gpu.devices[0].compute_capability, jetson=jetson)
        return Ability(what, False, reason, install)
    if why := route_options.unknown_frontend(frontend.version):
        return Ability(what, False, why, install_command(FRONTENDS[frontend.target]))
    if why := unfit_release("torch_tensorrt", frontend.target, here):
        return Ability(what, False, why)
    reason = f"{frontend.distribution} {frontend.version} for target {frontend.target} on {gpu.devices[0].name}"
    return _for_target(Ability(what, True, reason), frontend.target, gpu, tensorrts, memory, jetson=jetson)


def _notes(gpu: Driver, tensorrts: flavour.Installed) -> tuple[str, ...]:
    notes = []
    if "tensorrt" in tensorrts and tensorrts["tensorrt"][0].endswith("-bindings"):
        notes.append(
            f"{tensorrts['tensorrt'][0]} holds no TensorRT libraries: they must come from the system, as JetPack's do"
        )
    if gpu.devices:
        here = gpu.devices[0].compute_capability
        notes += dict.fromkeys(
            p.note for p in PLATFORMS.values() if p.note and same_capability(p.compute_capability, here)
        )
    if gpu.problem and "tensorrt_rtx" in tensorrts:
        notes.append(
            "without a GPU, a job for tensorrt_rtx is built here and checked by executing its graph (executed: graph)"
        )
    return tuple(notes)


def lines(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The diagnosis as text, one line each."""
    shown = [
        f"python       {diagnosis.python}, {diagnosis.system}{', a Jetson' if diagnosis.jetson else ''}",
        f"driver       {diagnosis.driver}",
    ]
    for gpu in diagnosis.gpus:
        can = ", ".join(p.upper() for p in gpu.precisions) or "not in the support matrix"
        shown.append(
            f"gpu          {gpu.name}, compute capability {gpu.compute_capability}, "
            f"{gpu.memory_bytes / 2**30:.1f} GiB, {can}"
        )
    for target in ("tensorrt", "tensorrt_rtx"):
        shown.append(f"{target:<12} {diagnosis.tensorrts.get(target) or without(target)}")
    have = [f"{n} {v}" for n, v in diagnosis.packages.items() if v]
    lack = [n for n, v in diagnosis.packages.items() if not v]
    shown.append(f"packages     {', '.join(have) or 'none'}")
    if lack:
        shown.append(f"missing      {', '.join(lack)}")
    shown.append("")
    shown += [f"{'yes' if a.possible else 'no ':<3}  {a.what}: {a.reason}" for a in diagnosis.abilities]
    if diagnosis.notes:
        shown += ["", *(f"note: {n}" for n in diagnosis.notes)]
    if diagnosis.commands:
        shown += ["", "to add what is missing:", *(f"  {c}" for c in diagnosis.commands)]
    return tuple(shown)

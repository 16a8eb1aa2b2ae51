"""Whether a bundle may run on a device: every mismatch in one line, before anything of the engine is deserialized.

The rules are NVIDIA's:

- Versions. "By default, TensorRT engines are compatible only with the version of TensorRT used to build them"; a
  version-compatible engine runs on later releases of its major, and across majors only 8 (from 8.6) on 10, and 10 on 11
  (TensorRT documentation, "Engine Compatibility" 11.1 and "Support Matrix" 11.4.1). "TensorRT-RTX engines are not
  compatible between different releases of TensorRT-RTX" (TensorRT-RTX documentation, "Engine Compatibility").
- Hardware. Without hardware compatibility an engine is for the model of GPU it was built on; on another model of the
  same architecture TensorRT warns that it "is not recommended and is likely to affect performance or even cause
  errors". AMPERE_PLUS runs on Ampere and later, but neither on DRIVE OS nor on JetPack; SAME_COMPUTE_CAPABILITY on
  every GPU of that compute capability (TensorRT documentation, "Hardware Compatibility"; HardwareCompatibilityLevel in
  its API reference).
- Platform. "Serialized engines are not portable across platforms" (Support Matrix).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from trtpipe.bundle.format import Bundle, read_bundle
from trtpipe.bundle.manifest import ENGINE, EngineInfo, Manifest
from trtpipe.bundle.signing import check_signature, checking
from trtpipe.errors import MissingError, titled
from trtpipe.job.sections import Build
from trtpipe.packages import distributions, pip_install
from trtpipe.runtime.device import Device, outdated_driver
from trtpipe.trt import driver
from trtpipe.trt.flavour import TARGET_TITLES, same_build, same_release, unsupported
from trtpipe.trt.formats import lacking
from trtpipe.trt.install import distribution, tensorrt_command
from trtpipe.trt.options import binding_refusals, refusals
from trtpipe.trt.parser import too_new_an_opset
from trtpipe.trt.placement import refused_here
from trtpipe.trt.platforms import OLDEST_PORTABLE, RTX_COMPUTE_CAPABILITIES, rtx_support, takes_portable
from trtpipe.values import computed_in
from trtpipe.version_numbers import parse_version

_REBUILD = "or build the bundle for this device"

#: (major of the builder, major of the runtime) where a version-compatible engine crosses majors.
_CROSSINGS = {(8, 10), (10, 11)}


def problems(manifest: Manifest, device: Device) -> tuple[str, ...]:
    """One line for each reason why the bundle cannot run on `device`; none when it can.

    A kit is compared with the TensorRT that is to compile it.
    """
    engine = manifest.engine
    if engine is None:
        return _kit_problems(manifest, device)
    misfits = [*_platform(engine, device), *_version(engine, device)]
    if engine.fallback:
        misfits += _pytorch(manifest, engine, device)
    if engine.target != "onnxruntime":
        misfits += [*_driver(engine.target, device), *_hardware(engine, device, computed_in(manifest.layers))]
    misfits += _memory(manifest, engine, device)
    return tuple(misfits)


def placement_problems(engine: EngineInfo, device: Device, precisions: Collection[str] = ()) -> tuple[str, ...]:
    """One line for each reason why an engine that was just built cannot run on the machine that built it.

    The TensorRT that compiled it is there; but it may have been built for other GPUs, or another operating system.

    Args:
        engine: what is known of it.
        device: the machine.
        precisions: those that the engine's operations compute in.
    """
    return (*_platform(engine, device), *_driver(engine.target, device), *_hardware(engine, device, precisions))


def elsewhere(build: Build, device: Device) -> tuple[str, ...]:
    """The same of the engine that a job asks for and this machine, with a GPU and the target's TensorRT, would build;
    empty where a GPU or that TensorRT is not here."""
    target, here = build.target, device.compute_capability
    release = device.versions.get(target)
    if target == "onnxruntime" or here is None or release is None:
        return ()
    named = build.compute_capability if target == "tensorrt_rtx" else (here,)
    system, _ = build.other_platform or (None, None)
    asked = EngineInfo(file=ENGINE, target=target, version=release, compute_capabilities=named, os=system, machine=None)
    return placement_problems(asked, device)


def failure(manifest: Manifest) -> str:
    """Why the bundle's check failed when it was built; empty where it passed, or is yet to come."""
    report = manifest.check
    if report is None or not manifest.failed:
        return ""
    return f"its check failed when it was made: {'; '.join(report.why)}"


def remarks(manifest: Manifest, device: Device) -> tuple[str, ...]:
    """Remarks on running the bundle on `device` that are no reason against it.

    ONNX Runtime loads older files always, yet its releases round a quantized graph differently: the quickstart's,
    checked with 1.31 at an accuracy of 0.9972, has 0.9917 with 1.23.
    """
    engine = manifest.engine
    if engine is None:
        return ()
    lines = [line] if (line := another_model(engine, device)) else []
    if engine.target == "tensorrt_rtx" and not engine.compute_capabilities:
        lines += _rtx_remarks(device)
    if engine.fallback:
        lines += _remarks_on_pytorch(manifest, engine, device)
    here, then = device.versions.get("onnxruntime"), engine.version
    if engine.target == "onnxruntime" and here is not None and parse_version(here)[:2] != parse_version(then)[:2]:
        lines.append(
            f"ONNX Runtime is {here} here and was {then} when the bundle was checked: outputs may differ in "
            "a few samples. The golden check measures it."
        )
    return tuple(lines)


def another_model(engine: EngineInfo | None, device: Device) -> str:
    """What TensorRT warns of as it loads an engine on another model of GPU than the one that it was built on, of the
    same compute capability; empty where that is not so, or not known."""
    if engine is None or engine.gpu in (None, device.gpu) or engine.hardware_compatibility != "none":
        return ""
    return (
        f"The engine was built on {engine.gpu}, for that model alone, and this is {device.gpu}: TensorRT advises "
        "against it, as it may be slower, or fail. Build the bundle for this device, or with "
        "build.hardware_compatibility."
    )


def _rtx_remarks(device: Device) -> tuple[str, ...]:
    """Of a portable engine on a GPU that TensorRT-RTX does not name, whether anybody knows that it runs there."""
    here = device.compute_capability
    if here is None or here in RTX_COMPUTE_CAPABILITIES or (support := rtx_support(here)).runs is False:
        return ()
    after = "" if support.runs else ". The golden check says it"
    return (f"{device.gpu}: {support.why}{after}.",)


def require_fit(manifest: Manifest, device: Device) -> None:
    """Raise MissingError with every line of `problems`, if there are any."""
    misfits = problems(manifest, device)
    if misfits:
        raise MissingError("\n".join(misfits))


def admit(path: Path, key: Path | None) -> tuple[Bundle, str]:
    """The bundle or kit at `path`, whole and signed as `key` demands, and one line about its signature.

    Raises:
        InputError: it is not.
    """
    bundle = read_bundle(path, checking(path, key))
    return bundle, check_signature(path, bundle.manifest_bytes, bundle.signature, key)


def _platform(engine: EngineInfo, device: Device) -> list[str]:
    misfits = []
    if engine.os is not None and engine.os != device.os:
        misfits.append(
            f"os: the engine must run on {engine.os}, where it was built (got {device.os}). "
            f"Engines do not move between operating systems: use a {engine.os} device {_REBUILD}."
        )
    if engine.machine is not None and engine.machine != device.machine:
        misfits.append(
            f"platform: the engine must run on {engine.machine} (got {device.machine}). "
            f"Engines do not move between platforms: use a {engine.machine} device {_REBUILD}."
        )
    return misfits


def _version(engine: EngineInfo, device: Device) -> list[str]:
    title, here = TARGET_TITLES[engine.target], device.versions.get(engine.target)
    if here is None:
        return [f"runtime: {title} {engine.version} is not installed. {_install(engine.target, device)}."]
    if engine.target == "onnxruntime" or same_build(engine.version, here):
        return []
    built, runs = parse_version(engine.version), parse_version(here)
    if engine.target == "tensorrt_rtx":
        return [
            f"version: TensorRT-RTX must be {engine.version}, as engines never run on another release (got {here}). "
            f"Install that release {_REBUILD}."
        ]
    if not engine.version_compatible and same_release(engine.version, here):
        return [
            f"version: TensorRT must be {engine.version}, the build that the engine is proven with (got {here}). "
            f"Install that build {_REBUILD}."
        ]
    if not engine.version_compatible:
        return [
            f"version: TensorRT must be {engine.version}, as the engine is not version compatible (got {here}). "
            f"Install that version {_REBUILD}, with build.version_compatible if the device may be updated."
        ]
    if runs < built[: len(runs)] or runs < (8, 6) or built < (8, 6):
        return [
            f"version: TensorRT must be {engine.version} or later, and at least 8.6 (got {here}). Update it {_REBUILD}."
        ]
    if built[0] != runs[0] and (built[0], runs[0]) not in _CROSSINGS:
        return [
            f"version: TensorRT must be {built[0]}, or 10 for an engine of 8, or 11 for one of 10 (got {here}). "
            f"Install such a version {_REBUILD}."
        ]
    return []


def _pytorch(manifest: Manifest, engine: EngineInfo, device: Device) -> list[str]:
    """What a hybrid engine needs beside its TensorRT."""
    if "torch" in device.versions:
        return []
    modules = ", ".join(sorted({titled(f.module) for f in engine.fallback})[:3])
    return [
        f"runtime: PyTorch with CUDA is not installed, and {_operations(engine)} of this hybrid engine "
        f"{_run(engine)} in it, of {modules}. Install it: {pip_install(f'torch{_release(manifest)}')}; or build "
        "without build.allow_torch_fallback."
    ]


def _remarks_on_pytorch(manifest: Manifest, engine: EngineInfo, device: Device) -> tuple[str, ...]:
    here = device.versions.get("torch")
    line = (
        f"The engine is hybrid: {_operations(engine)} {_run(engine)} in PyTorch, which every device that runs it has "
        "to have."
    )
    if here is None or parse_version(here)[:2] == parse_version(manifest.environment.get("torch", here))[:2]:
        return (line,)
    built = manifest.environment["torch"]
    return line, f"PyTorch is {here} here and was {built} when the bundle was built: outputs may differ a little."


def _operations(engine: EngineInfo) -> str:
    count = len(engine.fallback)
    return f"{count} operation{'' if count == 1 else 's'}"


def _run(engine: EngineInfo) -> str:
    return "runs" if len(engine.fallback) == 1 else "run"


def _release(manifest: Manifest) -> str:
    """The release of PyTorch that built the bundle, as pip takes it, or nothing where that is not known."""
    version = ".".join(str(n) for n in parse_version(manifest.environment.get("torch", ""))[:3])
    return f"=={version}" if version else ""


def _install(target: str, device: Device) -> str:
    """What the user of a device does who lacks the runtime of a target."""
    if target == "onnxruntime":
        return f"Install it: {pip_install('onnxruntime')}"
    if target == "tensorrt_rtx":
        command = tensorrt_command(target, device.cuda, jetson=device.jetson)
        return f"Install it: {command}" if command else "There is none for this machine and its driver"
    return "Install it (on a Jetson it comes with JetPack)"


def _driver(target: str, device: Device) -> list[str]:
    why = outdated_driver(target, device.cuda, device.built_for.get(target))
    if not why:
        return []
    other = distribution(target, parse_version(device.cuda)[0])
    step = f", or install {other} of the same release instead" if other in distributions(target) else ""
    return [f"driver: {why}. Update the driver{step}."]


def _hardware(engine: EngineInfo, device: Device, precisions: Collection[str]) -> list[str]:
    """Why the first GPU does not do, with another one of this machine that does."""
    problems = _on_first_gpu(engine, device, precisions)
    for gpu in device.others if problems else ():
        other = replace(device, compute_capability=gpu.compute_capability, gpu=gpu.name)
        if not _on_first_gpu(engine, other, precisions):
            hint = f"Or use {gpu.name}, which is here too: set {driver.VISIBLE}={driver.visible(gpu.index, 'gpu')}."
            return [f"{problem} {hint}" for problem in problems]
    return problems


def _on_first_gpu(engine: EngineInfo, device: Device, precisions: Collection[str]) -> list[str]:
    here = device.compute_capability
    if here is None:
        return [
            f"gpu: there is no usable NVIDIA GPU ({device.gpu}). Check its driver, or have its graph executed on the "
            "CPU: trtpipe run --graph."
        ]
    built = ", ".join(engine.compute_capabilities)
    if engine.hardware_compatibility == "ampere_plus":
        if device.jetson:
            return [
                "compute capability: ampere_plus engines do not run on JetPack "
                f"(got {here} on a Jetson). Build the bundle for this device."
            ]
        portable = True
    elif engine.target == "tensorrt" and not engine.compute_capabilities:
        return [
            "compute capability: the manifest must say which GPU the engine is for (it does not). "
            "Build the bundle for this device."
        ]
    else:
        portable = not engine.compute_capabilities
    if portable:
        least = engine.minimum_compute_capability or OLDEST_PORTABLE
        if parse_version(here) < parse_version(least):
            what = f"{least} (Ampere)" if least == OLDEST_PORTABLE else f"{least}, whose number formats it needs,"
            return [
                f"compute capability: the engine runs on {what} and later (got {here}). "
                f"Build the bundle for this device{_otherwise(precisions, here)}."
            ]
        if engine.target == "tensorrt_rtx" and (support := rtx_support(here)).runs is False:
            return [
                f"compute capability: TensorRT-RTX does not run its engines on this GPU ({device.gpu}: {support.why}). "
                "Build the bundle for target tensorrt on this device."
            ]
        return []
    if here not in engine.compute_capabilities:
        return [
            f"compute capability: the engine must run on {built} (got {here}, {device.gpu}). "
            f"{_other_gpu(engine, device, here, precisions)}"
        ]
    return []


def _other_gpu(engine: EngineInfo, device: Device, here: str, precisions: Collection[str]) -> str:
    """What makes an engine for a GPU of another compute capability."""
    otherwise = _otherwise(precisions, here)
    if engine.target == "tensorrt":
        able = all(map(takes_portable, (here, *engine.compute_capabilities)))
        common = able and not lacking(precisions, OLDEST_PORTABLE)
        both = ", or with ampere_plus" if common and not device.jetson else ""
        return f"Build the bundle for this device{otherwise or both}."
    if here in RTX_COMPUTE_CAPABILITIES:
        return f"Build the bundle with {here} in build.compute_capability{otherwise}."
    return f"Build the bundle for target tensorrt on this device{otherwise}."


def _otherwise(precisions: Collection[str], here: str) -> str:
    """What a bundle for a GPU has to be built without, as the GPU does not have it."""
    absent = lacking(precisions, here)
    return f", without {' and '.join(absent)}, which {here} does not have" if absent else ""


def _memory(manifest: Manifest, engine: EngineInfo, device: Device) -> list[str]:
    """The activations of one context have to fit, and the weights, which are about the file, unless they are streamed
    from the memory of the host: a Jetson has but one."""
    entry, streamed = manifest.files.get(engine.file), engine.options.get("weight_streaming") and not device.jetson
    needed = (entry.size if entry and not streamed else 0) + (engine.device_memory_bytes or 0)
    free = device.memory_bytes
    if free is None or needed <= free:
        return []
    what = "activations" if streamed else "weights and activations"
    most, least = math.ceil(needed / 2**20), math.floor(free / 2**20)  # which differ, however near the two are
    return [f"memory: {what} need {most} MiB (got {least} MiB). Stop other programs, or build for a smaller batch."]


def _kit_problems(manifest: Manifest, device: Device) -> tuple[str, ...]:
    target = manifest.build.target
    if target not in device.versions:
        return (
            f"runtime: {TARGET_TITLES[target]} is not installed, and this kit is built with it. "
            f"{_install(target, device)}.",
        )
    if target == "onnxruntime":
        return ()
    misfits: list[str] = []
    if target == "tensorrt":
        misfits += _driver(target, device)
        if not misfits and device.compute_capability is None:
            misfits.append(f"gpu: TensorRT builds on the GPU it is for (got: {device.gpu}). Check its driver.")
    version = device.versions[target]
    if why := unsupported(target, version):
        return (*misfits, f"runtime: {why}. {_install(target, device)}.")
    if why := too_new_an_opset(target, version, manifest.opset):
        return (*misfits, why)  # and not what that TensorRT lacks, as the kit is for another
    dtypes = {f"inputs.{s.name}": s.dtype for s in manifest.inputs}
    dtypes |= {f"outputs.{s.name}": s.dtype for s in manifest.outputs}
    refused = refusals(manifest.build, manifest.precision, target, version)
    refused += binding_refusals(dtypes, target, version)
    if target == "tensorrt" and device.compute_capability is not None:
        gpu = device.gpu, device.compute_capability, device.jetson
        refused += refused_here(*gpu, manifest.build, manifest.precision, version)
    return (*misfits, *(message for _, message in refused))

"""Plan-time checks: what is wrong with a job on this machine and for its target, building nothing.

No torch, ONNX or TensorRT is imported; what is installed is read from package metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from trtpipe.errors import InputError
from trtpipe.job.importable import find_module, missing
from trtpipe.job.job import Job
from trtpipe.job.load import JobErrors, JobFile, job_files
from trtpipe.job.problems import Problem, said
from trtpipe.routes.options import FRONTENDS, TORCH2TRT, job_refusals
from trtpipe.routes.options import INSTALL as INSTALL_FRONTEND
from trtpipe.trt import driver
from trtpipe.trt.flavour import INSTALL, installed
from trtpipe.trt.options import platform_refusals, refusals
from trtpipe.trt.platforms import unable

#: What torchvision's ImageFolder reads.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def validate(
    path: str | Path, overrides: Iterable[str] = (), *, here: bool = True, version: str | None = None
) -> tuple[Problem, ...]:
    """Every problem of a job file, in the order of the file; empty when it can be built.

    Args:
        path: the YAML file.
        overrides: `section.key=value` each, as in `job.load_job`.
        here: also what this machine lacks: files and folders the job names, modules, packages.
        version: of the TensorRT the job is for, like "10.3.0"; the one installed here when None, and the GPU here.
            Where none is installed, only build.platform is judged: a release that is not known refuses nothing.

    Raises:
        InputError: `version` is no version.
    """
    return _all_of(judge(path, overrides, here=here, version=version))


def plan(path: str | Path, overrides: Iterable[str] = (), *, compiles: bool = True) -> tuple[Job, ...]:
    """The jobs in a file, if all of them can be built here: what `build` starts from.

    Args:
        path: the YAML file.
        overrides: as in `validate`.
        compiles: False for a kit, whose engine another machine compiles: this one needs no TensorRT, and its release
            says nothing of that machine's.

    Raises:
        JobErrors: with all problems found, in the order of the file.
    """
    judged = judge(path, overrides, compiles=compiles)
    if problems := _all_of(judged):
        raise JobErrors(problems)
    return tuple(job for job, _ in judged if job is not None)


def judge(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    here: bool = True,
    version: str | None = None,
    compiles: bool = True,
) -> tuple[tuple[Job | None, tuple[Problem, ...]], ...]:
    """Each job in a file with its problems; arguments as of `validate` and `plan`. None for what is no job.

    Raises:
        InputError: `version` is no version.
    """
    if version is not None and not re.fullmatch(r"\d+(\.\d+)*", version):
        raise InputError(f"--for: must be a version like 10.3.0 (got {version!r}).")
    files = job_files(path, paths_exist=here)
    return tuple(_judged(file, Path(path), overrides, here, version, compiles) for file in files)


def _judged(
    file: JobFile, path: Path, overrides: Iterable[str], here: bool, version: str | None, compiles: bool
) -> tuple[Job | None, tuple[Problem, ...]]:
    job = file.read(overrides)
    if job is not None:
        if here:
            for option, text in (*_modules(job, path), *_images(job), *(_gpu(job) if version is None else ())):
                file.add(tuple(option.split(".")), text)
            for option, text in (*_packages(job, path), *(_compiler(job) if compiles else ())):
                file.add(tuple(option.split(".")), text, missing=True)
        for option, text in _refusals(job, version) if compiles else ():
            file.add(tuple(option.split(".")), text)
    return job, file.problems


def _all_of(judged: Iterable[tuple[Job | None, tuple[Problem, ...]]]) -> tuple[Problem, ...]:
    """Every problem; one that several jobs of a matrix share once."""
    return tuple(dict.fromkeys(problem for _, problems in judged for problem in problems))


#: (dotted path, what `problems.said` makes of it)
_Found = Iterator[tuple[str, str]]


#: Packages that a job's callables are often of, and the extra that brings each.
EXTRAS = {"torch": "build", "torchvision": "build", "timm": "examples", "sklearn": "examples"}


def _modules(job: Job, path: Path) -> _Found:
    for option, target in _callables(job).items():
        found = missing(target, _folders(path))
        if found and not _in_extra(target, path):
            yield option, said(*found)


def _folders(path: Path) -> tuple[Path, Path]:
    return path.resolve().parent, Path.cwd()


def _in_extra(target: str, path: Path) -> bool:
    """Whether a callable is of a package that is not here and that an extra brings."""
    top = target.partition(":")[0].partition(".")[0]
    return top in EXTRAS and find_module(top, _folders(path)) is None


def _callables(job: Job) -> dict[str, str]:
    """Every `package.module:callable` of a job, by its dotted path."""
    targets = {"model.factory": job.model.factory}
    for name, data in (("calibration", job.calibration), ("check", job.check)):
        if data is not None:
            targets[f"{name}.factory"] = data.factory
            targets[f"{name}.transform.callable"] = data.transform.callable if data.transform else None
    return {option: target for option, target in targets.items() if target is not None}


def _images(job: Job) -> _Found:
    for name, data in (("calibration", job.calibration), ("check", job.check)):
        if data is not None and data.images is not None and Path(data.images).is_dir() and not _any_image(data.images):
            text = said(f"hold images ({', '.join(IMAGE_SUFFIXES)})", "none", "One folder for each class.")
            yield f"{name}.images", text


def _any_image(folder: str) -> bool:
    return any(name.lower().endswith(IMAGE_SUFFIXES) for _, _, names in os.walk(folder) for name in names)


def _packages(job: Job, path: Path) -> _Found:
    """Distributions that building this job imports, by the key that asks for them."""
    for option, target in _callables(job).items():
        if _in_extra(target, path):
            top = target.partition(":")[0].partition(".")[0]
            yield option, said(f"have {top} installed", "nothing", f"Run: pip install 'trtpipe[{EXTRAS[top]}]'")
    needed = [("model", name, "build") for name in ("torch", "onnx", "onnxscript", "onnxruntime", "safetensors")]
    if job.check.images is not None or (job.calibration is not None and job.calibration.images is not None):
        needed.append(("check.images", "torchvision", "build"))
    if job.precision.quantized:
        mode = next((m for m in ("int8_mode", "fp8_mode", "nvfp4_mode") if getattr(job.precision, m)), "weights")
        needed.append((f"precision.{mode}", "torchao", "build"))
    absent: dict[tuple[str, str], list[str]] = {}
    for option, name, extra in needed:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.setdefault((option, extra), []).append(name)
    for (option, extra), names in absent.items():
        *most, last = names
        listed = f"{', '.join(most)} and {last}" if most else last
        yield option, said(f"have {listed} installed", "nothing", f"Run: pip install 'trtpipe[{extra}]'")


def _compiler(job: Job) -> _Found:
    """The TensorRT that is to compile the engine here."""
    yield from _frontend(job)
    target = job.build.target
    if target != "onnxruntime" and target not in installed():
        yield "build.target", said(f"have {target} installed", "nothing", f"Run: {INSTALL[target]}")


def _frontend(job: Job) -> _Found:
    """The package that the job's route goes through."""
    packages = {"torch_tensorrt": FRONTENDS.get(job.build.target), "torch2trt": "torch2trt"}
    if name := packages.get(job.build.route):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            step = TORCH2TRT if name == "torch2trt" else INSTALL_FRONTEND[job.build.target]
            yield "build.route", said(f"have {name} installed", "nothing", f"Run: {step}; or use route onnx.")


def _refusals(job: Job, version: str | None) -> _Found:
    """Options that the route or the target's release cannot honour, as `routes.options` and `trt.options` say them."""
    target = job.build.target
    if target == "onnxruntime":
        return
    here = installed().get(target)
    release = version or (here[1] if here else None)
    for option, message in job_refusals(job, release):
        yield option, message.removeprefix(f"{option}: ")
    if release is not None:
        found = refusals(job.build, job.precision, target, release)
    else:
        found = platform_refusals(job.build, job.precision)
    for option, message in found:
        yield option, message.removeprefix(f"{option}: ")


def _gpu(job: Job) -> _Found:
    """What the GPU here cannot do, where the engine is built on the GPU that it is for."""
    if job.build.target != "tensorrt" or job.build.platform is not None:
        return
    for device in driver.probe().devices[:1]:
        for option, message in unable(device.name, device.compute_capability, job.precision):
            yield option, message.removeprefix(f"{option}: ")

"""Plan-time checks: what is wrong with a job on this machine and for its target, building nothing.

No torch, ONNX or TensorRT is imported; what is installed is read from package metadata, and whether a TensorRT that is
to compile can be imported is tried in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from calib.errors import CalibError
from calib.folders import has_images
from calib.once import read_once
from calib.samples import IMAGE_SUFFIXES
from trtpipe.errors import InputError
from trtpipe.evaluation.check import without_labels
from trtpipe.evaluation.judges import judge as judge_of
from trtpipe.figures import exact
from trtpipe.import_errors import broken, loss, unimportable
from trtpipe.job.importable import find_module, missing
from trtpipe.job.job import Job
from trtpipe.job.load import JobErrors, JobFile, by_job, job_files
from trtpipe.job.problems import Problem, violation
from trtpipe.model.data import require_data
from trtpipe.model.onnx.external import data_names, require_inside
from trtpipe.model.torch_versions import misfit
from trtpipe.model.torch_versions import unsupported as unsupported_torch
from trtpipe.packages import EXTRAS, cuda_major, install_command, not_installed, unfit
from trtpipe.packages import version as package_version
from trtpipe.pipeline.required import folding, required
from trtpipe.pipeline.tables import require_transform, table_as_asked
from trtpipe.routes.options import REQUIREMENTS, job_refusals, needs_gpu, without_gpu
from trtpipe.runtime.compatibility import elsewhere
from trtpipe.runtime.device import outdated_driver, this_device
from trtpipe.runtime.device_memory import lacking_memory
from trtpipe.streams import folder_of
from trtpipe.trt import driver
from trtpipe.trt.flavour import installed, require_version, unsupported
from trtpipe.trt.install import not_here
from trtpipe.trt.options import binding_refusals, refusals, without_driver
from trtpipe.trt.placement import refused_here
from trtpipe.trt.versions import RELEASES as KNOWN_RELEASES


def validate(
    path: str | Path, overrides: Iterable[str] = (), *, here: bool = True, version: str | None = None
) -> tuple[Problem, ...]:
    """Every problem of a job file, in the order of the file; empty when it can be built.

    Args:
        path: the YAML file.
        overrides: `section.key=value` each, as in `read_job`.
        here: also what this machine lacks: files and folders the job names, modules, packages, a GPU.
        version: of the TensorRT the job is for, like "10.3.0"; the one installed here when None, and the GPU here.
            Where none is installed, only build.platform is judged: a release that is not known refuses nothing.

    Raises:
        InputError: `version` is no version.
    """
    return _all_of(judge(path, overrides, here=here, version=version))


#: What a job is judged for: to be built here, to be prepared as a kit for another machine, to be measured here (`tune`
#: and `bench`), or only to be calibrated.
Purpose = Literal["build", "prepare", "measure", "calibrate"]


def plan(
    path: str | Path, overrides: Iterable[str] = (), *, purpose: Purpose = "build", version: str | None = None
) -> tuple[Job, ...]:
    """The jobs in a file, if all of them can be built (or prepared, or calibrated) here.

    Args:
        path: the YAML file.
        overrides: as in `validate`.
        purpose: a kit's engine is compiled by another machine, so this one needs no TensorRT; but what no release of
            the target can finish is refused. To measure a job needs no TensorRT either, as its graph runs in ONNX
            Runtime; what `build` would refuse of it is refused. Calibration asks nothing of the target.
        version: of the TensorRT the jobs are for; for a kit, the device's.

    Raises:
        JobErrors: with all problems found, in the order of the file.
    """
    judged = judge(path, overrides, purpose=purpose, version=version)
    if problems := _all_of(judged):
        raise JobErrors(problems)
    return tuple(job for job, _ in judged if job is not None)


def plan_one(path: str | Path, overrides: Iterable[str] = (), *, purpose: Purpose = "build") -> Job:
    """The job in a file of one; arguments as of `plan`.

    Raises:
        JobErrors: with all problems found, in the order of the file.
        InputError: the file has a matrix of several.
    """
    jobs = plan(path, overrides, purpose=purpose)
    if len(jobs) > 1:
        raise InputError(f"{path}: must be one job (got a matrix of {len(jobs)}). Give the file to `trtpipe build`.")
    return jobs[0]


@read_once()
def judge(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    here: bool = True,
    version: str | None = None,
    purpose: Purpose = "build",
) -> tuple[tuple[Job | None, tuple[Problem, ...]], ...]:
    """Each job in a file with its problems; arguments as of `validate` and `plan`. None for what is no job.

    Raises:
        InputError: `version` is no version.
    """
    if version is not None:
        require_version(version)
    files = job_files(path, paths_exist=here)
    jobs = [_judged(file, Path(path), overrides, here, version, purpose) for file in files]
    return tuple(zip(jobs, by_job(files), strict=True))


def _judged(
    file: JobFile, path: Path, overrides: Iterable[str], here: bool, version: str | None, purpose: Purpose
) -> Job | None:
    job = file.read(overrides)
    if job is not None:
        if here:
            on_this_gpu = version is None and purpose in ("build", "measure")
            for option, text in (
                *_modules(job, path),
                *(_external_data(job) if find_module("onnx", ()) else ()),
                *_data(job),
                *_metrics(job),
                *_table(job),
                *(_gpu(job) if on_this_gpu else ()),
            ):
                file.add(tuple(option.split(".")), text)
            compiled_here = (*_compiler(job), *(_gpu_absent(job) if on_this_gpu else ())) if purpose == "build" else ()
            for option, text in (*_packages(job, path), *compiled_here):
                file.add(tuple(option.split(".")), text, missing=True)
        refused: Iterable[tuple[str, str]] = ()
        wrong = None if version is None else unsupported(job.build.target, version)
        if wrong is not None:
            file.add(("build", "target"), f"{wrong}. Give a release with --for that is.")
        elif purpose != "calibrate":
            refused = kit_refusals(job, version) if purpose == "prepare" else _refusals(job, version)
        for option, text in refused:
            file.add(tuple(option.split(".")), text)
    return job


def _all_of(judged: Iterable[tuple[Job | None, tuple[Problem, ...]]]) -> tuple[Problem, ...]:
    """Every problem; one that several jobs of a matrix share once."""
    return tuple(dict.fromkeys(problem for _, problems in judged for problem in problems))


#: (dotted path, text of `problems.violation`)
_Problems = Iterator[tuple[str, str]]


def _modules(job: Job, path: Path) -> _Problems:
    for option, target in job.callables.items():
        absent = missing(target, _folders(path))
        if absent and not _in_extra(target, path):
            yield option, violation(*absent)


def _folders(path: Path) -> tuple[Path, Path]:
    return folder_of(path), Path.cwd()


def _in_extra(target: str, path: Path) -> bool:
    """Whether a callable is of a package that is not here and that an extra brings."""
    top = target.partition(":")[0].partition(".")[0]
    return top in EXTRAS and find_module(top, _folders(path)) is None


def _external_data(job: Job) -> _Problems:
    """Whether the files that hold an ONNX file's weights are beside it."""
    path = Path(job.model.onnx or "")
    try:
        for name in data_names(path) if path.is_file() else ():
            require_inside(path.parent, name)
    except InputError as error:
        option, _, text = str(error).partition(": ")
        yield option, text


def _image_fault(folder: str | None) -> str:
    none = f"holds no image ({', '.join(IMAGE_SUFFIXES)}). Put the images of each class in a folder."
    try:
        return none if folder and os.path.isdir(folder) and not has_images(folder) else ""
    except CalibError as error:
        return str(error)


def _data(job: Job) -> _Problems:
    """What the names and headers of the job's files show of its samples and their labels."""
    named = {"calibration.images": job.calibration, "check.images": job.check}
    read = [data for data in named.values() if data is not None]
    yield from (faults := [(k, why) for k, d in named.items() if d is not None and (why := _image_fault(d.images))])
    if faults:
        return
    files = [path for path in (*(data.arrays for data in read), job.check.labels) if path]
    if not all(os.path.isdir(d.images) for d in read if d.images) or not all(map(os.path.exists, files)):
        return  # said of the job itself
    try:
        source = require_data(job)
    except InputError as error:
        option, _, text = str(error).partition(": ")
        yield option, text
        return
    if source is not None and source.labels is None:
        yield from ((f"check.limits.{limit}", text) for limit, text in without_labels(job.check.limits).items())


def _metrics(job: Job) -> _Problems:
    """What the built-in metrics do not take; whether there are labels, only the data say."""
    for name, metric in job.check.metrics.items():
        if metric.built_in:
            try:
                judge_of(name, metric, labelled=True)
            except InputError as error:
                option, _, text = str(error).partition(": ")
                yield option, text


def _table(job: Job) -> _Problems:
    """Whether the table that the job names can be read; whose it is, only its model says."""
    data = job.calibration
    if data is not None and job.precision.calibrated and data.table is not None and Path(data.table).is_file():
        try:
            require_transform(job, table_as_asked(data))
        except CalibError as error:
            yield "calibration.table", str(error)


def _packages(job: Job, path: Path) -> _Problems:
    """Distributions that building this job imports, by the key that asks for them."""
    for option, target in job.callables.items():
        if _in_extra(target, path):
            yield option, not_installed(target.partition(":")[0].partition(".")[0])
    torch, torchao = package_version("torch"), package_version("torchao")
    if torch is not None and (outside := unsupported_torch(torch)):
        yield "model", f"{outside}. Run: {install_command('torch')}"
    elif torch is not None and torchao is not None and (wrong := misfit(torch, torchao)):
        yield folding(job), wrong
    absent: dict[str, list[str]] = {}
    for name, option in required(job).items():
        if package_version(name) is None:
            absent.setdefault(option, []).append(name)
        elif wrong := broken(name, loss(name)) if loss(name) else unfit(name):
            yield option, wrong
    for option, names in absent.items():
        yield option, not_installed(*names)


def _compiler(job: Job) -> _Problems:
    """The TensorRT that is to compile the engine here."""
    yield from _frontend(job)
    target = job.build.target
    here = installed()
    if target == "onnxruntime":
        return
    if target not in here:
        yield "build.target", not_here(target)
    elif why := unsupported(target, here[target][1]):
        yield "build.target", f"{why}. Run: {install_command(target)}"
    elif damaged := unimportable(target):
        yield "build.target", damaged


_ELSEWHERE = (
    "cannot be engine on this machine, whose GPU does not run the engine that the job asks for ({}). Leave it out, and "
    "have the graph checked."
)


def _gpu_absent(job: Job) -> _Problems:
    """What asks for a GPU in order to be built, where there is none, or one that what is installed cannot use."""
    target, route = job.build.target, job.build.route
    if target == "onnxruntime":
        return
    if not (gpu := driver.probe()).problem:
        if target == "tensorrt" and (why := outdated_driver(target, gpu.cuda, cuda_major(target))):
            yield "build.target", f"{why}. Update the driver, or install what trtpipe doctor names."
        elif why := lacking_memory(job.build, this_device()):
            yield "build.target", why
        elif job.check.require == "engine" and (problems := elsewhere(job.build, this_device())):
            yield "check.require", _ELSEWHERE.format("; ".join(problems).rstrip("."))
        return
    if job.check.require == "engine":
        yield "check.require", driver.absent(gpu, "leave out check.require: engine, and have the graph checked")
    for option in needs_gpu(job.build):
        by_route = option == "build.route"
        yield option, without_gpu(route, gpu.problem) if by_route else driver.absent(gpu, without_driver(option))


def _frontend(job: Job) -> _Problems:
    """The package that the job's route goes through."""
    name = REQUIREMENTS[job.build.route].packages.get(job.build.target)
    if name and package_version(name) is None:
        yield "build.route", f"{not_installed(name)}; or use route onnx."


def _refusals(job: Job, version: str | None) -> _Problems:
    """Options that the route or the target's release cannot honour, as `routes.options` and `trt.options` say them."""
    target = job.build.target
    if target == "onnxruntime":
        return
    here = installed().get(target)
    release = version or (here[1] if here else None)
    for option, message in job_refusals(job, release):
        yield option, message.removeprefix(f"{option}: ")
    if release is not None:
        for option, message in _by_release(job, release):
            yield option, message.removeprefix(f"{option}: ")
    else:
        yield from _whatever_the_release(job)


def _by_release(job: Job, release: str) -> tuple[tuple[str, str], ...]:
    """What a release of the target cannot honour."""
    dtypes = {f"inputs.{n}": b.dtype for n, b in job.inputs.items()}
    dtypes |= {f"outputs.{n}": b.dtype for n, b in job.outputs.items()}
    target = job.build.target
    return (*refusals(job.build, job.precision, target, release), *binding_refusals(dtypes, target, release))


def kit_refusals(job: Job, version: str | None) -> _Problems:
    """What keeps every device from finishing a kit of this job, as (dotted option path, message).

    With a `version`, like "8.6.1", every device that has that release of TensorRT.
    """
    build, target = job.build, job.build.target
    if build.route != "onnx":
        yield (
            "build.route",
            f"must be onnx to prepare a kit (got {build.route}), whose graph is ONNX. Build where its GPU is.",
        )
    if build.quantization == "implicit":
        yield (
            "build.quantization",
            "must be explicit to prepare a kit (got implicit): TensorRT would calibrate on the device, and a kit holds "
            "no calibration samples. Use explicit, or build where its GPU is.",
        )
    if build.plugins:
        yield (
            "build.plugins",
            f"must be left out to prepare a kit (got {Path(build.plugins[0]).name}): ONNX Runtime, which checks a "
            "kit's graph, has no plugins. Build where its GPU is.",
        )
    if build.error_on_timing_cache_miss:
        yield (
            "build.error_on_timing_cache_miss",
            "must be left out to prepare a kit (got true): a kit takes no timing cache to its device. Build the job "
            "where its GPU is.",
        )
    if (speedup := job.check.limits.speedup_over_fp16_min) is not None:
        yield (
            "check.limits.speedup_over_fp16_min",
            f"must be left out to prepare a kit (got {exact(speedup)}): a device has one engine to time. "
            "Build the job where its GPU is.",
        )
    if target == "onnxruntime":
        return
    for option, message in _whatever_the_release(job, version):
        if (option, build.quantization) != ("build.quantization", "implicit"):  # which is refused above
            yield option, message


def _whatever_the_release(job: Job, version: str | None = None) -> _Problems:
    """What no release that is known can honour: what one cannot do another may, what none can no device does.

    With a `version` what that release cannot.
    """
    target = job.build.target
    releases = [
        dict(_by_release(job, release))
        for release in ([version] if version else [r for name, r in KNOWN_RELEASES if name == target])
    ]
    for option in dict.fromkeys(o for refused in releases for o in refused):
        if all(option in refused for refused in releases):
            yield option, releases[-1][option].removeprefix(f"{option}: ")


def _gpu(job: Job) -> _Problems:
    """What the GPU here cannot do, where the engine is built on the GPU that it is for."""
    if job.build.target != "tensorrt":
        return
    here = installed().get("tensorrt")
    for device in driver.probe().devices[:1]:
        gpu = device.name, device.compute_capability, driver.is_jetson()
        for option, message in refused_here(*gpu, job.build, job.precision, here[1] if here else None):
            yield option, message.removeprefix(f"{option}: ")

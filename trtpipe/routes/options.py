"""What the routes torch_tensorrt and torch2trt can honour of a job, judged at plan time; nothing heavy is imported.

`refusals` adds to `trt.options`, which knows what the TensorRT itself can do: here is what the frontend in front of it
can pass on, by the rows of `routes.support`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trtpipe.job.job import Job
from trtpipe.job.sections import Build
from trtpipe.packages import TORCH_TENSORRT, install_command
from trtpipe.routes.support import ROUTE_OPTIONS
from trtpipe.trt.options import asked, in_words, needs_driver
from trtpipe.values import Route
from trtpipe.version_numbers import parse_version


def without_gpu(route: str, problem: str) -> str:
    """What a machine without an NVIDIA GPU is told of a route that compiles on one."""
    return (
        f"{route} needs an NVIDIA GPU and its driver ({problem}). "
        "Use build.route onnx, which builds TensorRT-RTX engines without one."
    )


#: Distribution of Torch-TensorRT by the target it is made for.
FRONTENDS: Mapping[str, str] = {"tensorrt": "torch-tensorrt", "tensorrt_rtx": "torch-tensorrt-rtx"}


@dataclass(frozen=True)
class Releases:
    """The releases of TensorRT that a route works with, from `first` on and below `end`; `said` with the reason."""

    first: tuple[int, ...]
    end: tuple[int, ...]
    said: str


@dataclass(frozen=True)
class Requirements:
    """What a route needs: a distribution, by the job's target; whether a GPU; releases by target, any where absent."""

    packages: Mapping[str, str]
    gpu: bool
    releases: Mapping[str, Releases] = field(default_factory=dict)


REQUIREMENTS: Mapping[Route, Requirements] = {
    "onnx": Requirements({}, gpu=False),
    "torch_tensorrt": Requirements(
        FRONTENDS,
        gpu=True,
        releases={"tensorrt": Releases((11,), (12,), f"11, which Torch-TensorRT {TORCH_TENSORRT} is built for")},
    ),
    "torch2trt": Requirements(
        {"tensorrt": "torch2trt"},
        gpu=True,
        releases={"tensorrt": Releases((8, 6), (11,), "8.6 to 10, whose weak typing and calibrators it uses")},
    ),
}


def needs_gpu(build: Build) -> tuple[str, ...]:
    """Paths of the options for which a job cannot be built without an NVIDIA GPU; none where it can."""
    return ("build.route",) if REQUIREMENTS[build.route].gpu else needs_driver(build, build.target)


#: What build.allow_torch_fallback cannot go with, and why.
WHOLE_ONLY: Mapping[str, str] = {
    "strip_plan": "the weights of a hybrid module are in several engines, and no graph gives them back",
    "refit": "the weights of a hybrid module are in several engines, under names that Torch-TensorRT makes up",
    "default_device_type": "PyTorch runs on the GPU, and DLA engines between its operations are untried",
}
#: What torch2trt can give its bindings.
TORCH2TRT_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class Frontend:
    """An installed Torch-TensorRT, known by package metadata alone."""

    target: str
    distribution: str
    version: str


def installed_frontend() -> Frontend | None:
    """The Torch-TensorRT on this machine; that for TensorRT-RTX where both are, since it wins the import."""
    for target in ("tensorrt_rtx", "tensorrt"):
        try:
            return Frontend(target, FRONTENDS[target], importlib.metadata.version(FRONTENDS[target]))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def refusals(build: Build, route: Route, *, frontend: str | None = None) -> tuple[tuple[str, str], ...]:
    """(dotted option path, message) of every builder option that `route` cannot honour; empty when all is well.

    Args:
        build: the job's build section.
        route: a route; `onnx` refuses nothing here.
        frontend: version of Torch-TensorRT; None where it is not installed, which is another check's business.
    """
    if route == "onnx":
        return ()
    return tuple((path, f"{path}: {message}") for path, message in _refused(build, route, frontend))


def _refused(build: Build, route: Route, frontend: str | None) -> Iterator[tuple[str, str]]:
    wanted = asked(build)
    for support in ROUTE_OPTIONS:
        if support.field not in wanted:
            continue
        if refusal := getattr(support, route).rule(wanted[support.field], wanted):
            must, step = refusal
            yield f"build.{support.field}", f"{must} on route {route} (got {in_words(wanted[support.field])}). {step}"
        elif build.allow_torch_fallback and support.field in WHOLE_ONLY:
            yield (
                f"build.{support.field}",
                f"must be left out with build.allow_torch_fallback (got {in_words(wanted[support.field])}): "
                f"{WHOLE_ONLY[support.field]}. Remove one of the two.",
            )
    if route == "torch_tensorrt" and frontend is not None and (why := unknown_frontend(frontend)):
        yield "build.route", f"{why}. Run: {install_command(FRONTENDS.get(build.target, 'torch-tensorrt'))}"


def unknown_frontend(version: str) -> str:
    """Why this version of Torch-TensorRT is not used, a clause without a full stop; empty where it is."""
    if re.match(rf"{re.escape(TORCH_TENSORRT)}(\.|$)", version):
        return ""
    return f"torch_tensorrt must be version {TORCH_TENSORRT}, whose arguments are known (got {version})"


def job_refusals(job: Job, release: str | None) -> tuple[tuple[str, str], ...]:
    """(dotted option path, message) of everything in a job that its route cannot honour; empty when all is well.

    Args:
        job: the whole job.
        release: version of the TensorRT it is for, like "10.3.0"; None where that is not known.
    """
    build = job.build
    here = installed_frontend() if build.route == "torch_tensorrt" else None
    version = here.version if here is not None and here.target == build.target else None
    problems = [*_release(build, release), *refusals(build, build.route, frontend=version), *_on_dla(job)]
    if build.route == "torch2trt":
        problems += [(path, f"{path}: {message}") for path, message in _torch2trt(job, release)]
    return tuple(problems)


def _release(build: Build, release: str | None) -> Iterator[tuple[str, str]]:
    """A release of the target that the route does not work with; one that is not known is not refused."""
    if release is not None and (why := unfit_release(build.route, build.target, release)):
        yield "build.route", f"build.route: {why}. Use build.route onnx."


def unfit_release(route: Route, target: str, release: str) -> str:
    """Why a route does not work with a release of its target, a clause without a full stop; empty where it does."""
    needed = REQUIREMENTS[route].releases.get(target)
    if needed is None or needed.first <= parse_version(release) < needed.end:
        return ""
    return f"{route} must have TensorRT {needed.said} (got {release})"


def _on_dla(job: Job) -> Iterator[tuple[str, str]]:
    """NVIDIA: "DLA does not support dynamic dimensions" (TensorRT documentation, "Working with DLA")."""
    for key, wanted in (
        ("default_device_type", {job.build.default_device_type}),
        ("device_types", {*job.build.device_types.values()}),
    ):
        if "dla" in wanted and any(isinstance(d, str) for i in job.inputs.values() for d in i.shape):
            yield (
                f"build.{key}",
                f"build.{key}: must be gpu for inputs with dynamic dimensions (got dla). Declare numbers in "
                "inputs.*.shape.",
            )


def _torch2trt(job: Job, release: str | None) -> Iterator[tuple[str, str]]:
    """What torch2trt cannot do with this job, beyond the builder options taken alone."""
    build, precision = job.build, job.precision
    number = parse_version(release or "")
    if build.workspace is not None and number >= (10,):
        yield (
            "build.workspace",
            f"must not be set on route torch2trt with TensorRT 10, where it ignores it (got {build.workspace}). "
            "Leave it out, or use build.route onnx.",
        )
    for side, specs in (("inputs", job.inputs), ("outputs", job.outputs)):
        for name, spec in specs.items():
            if spec.dtype not in TORCH2TRT_DTYPES:
                legal = " or ".join(TORCH2TRT_DTYPES)
                yield (
                    f"{side}.{name}.dtype",
                    f"must be {legal} on route torch2trt, which drops others (got {spec.dtype}). Use build.route onnx.",
                )
    yield from _one_float(job)
    explicit = job.places_int8
    if explicit:
        yield from _explicit(job)
    for kind, globs in (("fp32", precision.keep.fp32), ("fp16", precision.keep.fp16)):
        # What is kept out of INT8 gets no Q/DQ; but no layer can be kept out of FP16 there.
        if globs and not (explicit and (kind == "fp16" or not precision.fp16_mode)):
            yield (
                f"precision.keep.{kind}",
                f"must be empty on route torch2trt (got {', '.join(globs)}): TensorRT chooses what runs in a lower "
                "precision there. Use build.route onnx.",
            )
    if precision.int8_mode and not explicit:
        yield from _calibrated(job)


def _one_float(job: Job) -> Iterator[tuple[str, str]]:
    """torch2trt converts no casts, so the bindings are all float32, or all float16 around a module in float16."""
    specs = {f"{s}.{n}.dtype": i.dtype for s, part in (("inputs", job.inputs), ("outputs", job.outputs))
             for n, i in part.items()}  # fmt: skip
    floats = {p: d for p, d in specs.items() if d in TORCH2TRT_DTYPES}
    first = next(iter(floats.values()), "float32")
    for path, dtype in floats.items():
        if dtype != first:
            yield (
                path,
                f"must be {first} as the other bindings are on route torch2trt, which converts no casts (got {dtype}). "
                "Use build.route onnx.",
            )
    for name, spec in job.inputs.items():
        if spec.normalize is not None and spec.dtype != "float32":
            yield (
                f"inputs.{name}.normalize",
                f"must be given only for float32 on route torch2trt (got {spec.dtype}). Normalize in the transform.",
            )


def _explicit(job: Job) -> Iterator[tuple[str, str]]:
    """What stands against Q/DQ on route torch2trt."""
    if job.build.use_onnx:
        yield (
            "build.use_onnx",
            "must be false for explicit INT8 on route torch2trt, whose Q/DQ go through its converters (got true). "
            "Leave it out, or use build.quantization implicit.",
        )
    if job.build.uses_dla:
        yield (
            "build.quantization",
            "must be implicit for INT8 on a DLA on route torch2trt (got explicit). Set it.",
        )


def _calibrated(job: Job) -> Iterator[tuple[str, str]]:
    """What TensorRT's own calibration under torch2trt cannot do."""
    data = job.calibration
    if data is None:
        return
    first = next(iter(job.inputs.values()))
    batch = first.shape[0]
    size = batch if isinstance(batch, int) else first.dims[batch].opt
    if data.batch_size != size:
        yield (
            "calibration.batch_size",
            f"must be {size}, the opt batch of the inputs, for implicit INT8 on route torch2trt, which calibrates with "
            f"the engine's own profile (got {data.batch_size}). Set it to {size}.",
        )

"""Versions of packages and machine, and the fingerprint over everything that can change an engine. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from calib.types import JsonObject
from calib.user_code import OURS
from trtpipe.bundle.manifest import UNRECORDED
from trtpipe.job.importable import find_module
from trtpipe.jsontext import json_digest
from trtpipe.packages import brought, distributions, versions
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.settings import ORDER, settings
from trtpipe.trt import driver as cuda
from trtpipe.values import Target

if TYPE_CHECKING:
    from trtpipe.job.job import Job

#: Distributions that a captured graph depends on, and that its ONNX file does besides.
CAPTURING, EXPORTING = ("trtpipe", "torch", "torchao", "torchvision", "numpy"), ("onnx", "onnxscript", "onnx-ir")
#: Distributions whose versions go into a manifest; those that can change an engine also go into the fingerprint.
DECIDING = (*CAPTURING, *EXPORTING, "pillow")
_OTHERS = ("numba", "safetensors")
#: A compiler's module that no distribution has brought counts by its files, under a name that no distribution can have.
_FILES_OF = "files of {}"
BUILDERS: Mapping[str, tuple[str, ...]] = {n: (*distributions(n), _FILES_OF.format(n)) for n in get_args(Target)}
ROUTE_PACKAGES: Mapping[str, tuple[str, ...]] = {"onnx": ()} | {
    n: (*distributions(n), _FILES_OF.format(n)) for n in ("torch_tensorrt", "torch2trt")
}
_LISTED = tuple(dict.fromkeys((*DECIDING, *_OTHERS, *chain(*BUILDERS.values(), *ROUTE_PACKAGES.values()))))
#: Job keys that change nothing in the result: they change speed and output.
WITHOUT_EFFECT = frozenset(
    {
        *(f"build.{option}" for option in UNRECORDED),
        "calibration.workers",
        "check.workers",
        "worker",
        "name",
    }
)


def environment() -> dict[str, str]:
    """Versions of Python, of the system and of the packages here that trtpipe builds with, for any target and route."""
    return {"python": platform.python_version(), "system": _system()} | versions(_LISTED)


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"


def portable_job(job: Job) -> str:
    """The job as JSON, without keys of `WITHOUT_EFFECT` but its name, paths relative to its own folder: the same job
    anywhere gives the same text."""
    folder = str(job.folder or Path.cwd())

    def relative(value: object) -> object:
        if isinstance(value, dict):
            return {k: relative(v) for k, v in value.items()}
        if isinstance(value, list):
            return [relative(v) for v in value]
        if isinstance(value, str) and os.path.isabs(value):
            return os.path.relpath(value, folder)
        return value

    sections = job.model_dump(mode="json", exclude_defaults=True)
    for section, value in sections.items():
        if isinstance(value, dict):
            sections[section] = {k: v for k, v in value.items() if f"{section}.{k}" not in WITHOUT_EFFECT}
    kept = {n: v for n, v in sections.items() if v != {} and (n == "name" or n not in WITHOUT_EFFECT)}
    return json.dumps(relative(kept), indent=1)


def source_fingerprint(job: Job, parts: Mapping[str, str | None]) -> str:
    """SHA-256 over all that decides the graph given to the compiler, and how it is asked to compile it.

    That is the job's sections, the versions of what makes the graph, and `parts` (digests of weights, graphs, data).
    A kit carries it, because its device has none of these inputs.
    """
    sections = {
        "name": job.name,
        "precision": job.precision.model_dump(mode="json"),
        "orders": {name: names for name, names in settings(job).items() if name.endswith(ORDER)},
        "build": job.build.model_dump(mode="json", exclude={*_build_without_effect(), "plugins"}),  # among the parts
        "inputs": {n: i.model_dump(mode="json") for n, i in job.inputs.items()},
        "outputs": {n: o.model_dump(mode="json") for n, o in job.outputs.items()},
        "versions": versions(DECIDING),
        "parts": dict(parts),
    }
    return json_digest(sections)


def _build_without_effect() -> set[str]:
    return {key.removeprefix("build.") for key in WITHOUT_EFFECT if key.startswith("build.")}


def fingerprint(source: str, target: str, route: str) -> str:
    """SHA-256 over everything that can change an engine: its source's fingerprint, and what compiles it here."""
    frontends = filter(ROUTE_PACKAGES.get, (route,))
    compiler = versions((*BUILDERS[target], *ROUTE_PACKAGES[route])) | _unpackaged(Digests(), (target, *frontends))
    sections: JsonObject = {"source": source, "versions": compiler}
    if target == "tensorrt":  # it times its kernels on the GPU that is here
        gpu = cuda.probe()
        sections["device"] = [gpu.cuda, *(f"{d.name} {d.compute_capability}" for d in gpu.devices[:1])]
    return json_digest(sections)


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that can change a result.

    `versions` are those of the distributions that take part, and digests of a compiler's files that belong to none.
    """

    versions: Mapping[str, str]
    python: str
    system: str
    source: str
    cuda: str
    gpu: str


def this_machine(digests: Digests) -> Machine:
    """The machine that this runs on; its CUDA driver is asked."""
    driver = cuda.probe()
    gpu = driver.devices[0] if driver.devices else None
    return Machine(
        versions=versions(_LISTED) | _unpackaged(digests, (*BUILDERS, *filter(ROUTE_PACKAGES.get, ROUTE_PACKAGES))),
        python=platform.python_version(),
        system=_system(),
        source=_own_source(digests),
        cuda=driver.cuda or "none",
        gpu="none" if gpu is None else f"{gpu.name} {gpu.compute_capability}",
    )


def _unpackaged(digests: Digests, modules: Iterable[str]) -> dict[str, str]:
    """Digests of the files of each of these packages that no distribution has brought, by `_FILES_OF`."""
    found = {}
    for module in modules:
        spec = find_module(module)
        if spec is not None and spec.origin and not brought(module, Path(spec.origin)):
            lines = _files(digests, module, Path(spec.origin).parent, "*")
            found[_FILES_OF.format(module)] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return found


def _own_source(digests: Digests) -> str:
    """Digest of the code of trtpipe and calib themselves: their version stays the same during development."""
    digest = hashlib.sha256()
    for package in OURS:
        spec = find_module(package)
        if spec is not None and spec.origin:
            digest.update("".join(_files(digests, package, Path(spec.origin).parent, "*.py")).encode())
    return digest.hexdigest()


def _files(digests: Digests, package: str, root: Path, pattern: str) -> Iterator[str]:
    """A line for each file of a package with its digest, but what Python writes beside them."""
    for path in sorted(root.rglob(pattern)):
        if path.is_file() and path.parent.name != "__pycache__":
            yield f"{package}/{path.relative_to(root).as_posix()} {digests.file(path)}\n"

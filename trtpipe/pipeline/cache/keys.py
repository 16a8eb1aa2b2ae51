"""Everything that goes into a job's bundle, found without importing torch or the model, and the cache keys it makes.

Each part has a name that a report can say ("weights", "version tensorrt_rtx") and a value: a content digest, a version
or a setting. A key is the SHA-256 of the parts that its stage depends on, so a new TensorRT changes the engine's key
and not the graph's, and new check images neither the calibration's nor the engine's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from calib.errors import CalibError
from calib.files import unreadable
from calib.folders import class_folders
from calib.user_code import OURS
from trtpipe import packages
from trtpipe.errors import InputError
from trtpipe.job.importable import find_module, is_installed
from trtpipe.jsontext import json_digest
from trtpipe.model.computing import cpu_asked
from trtpipe.model.onnx.external import data_files, data_names
from trtpipe.pipeline.cache.changes import ASKED, DISTRIBUTION, change, is_read, rank
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import (
    BUILDERS,
    CAPTURING,
    DECIDING,
    EXPORTING,
    ROUTE_PACKAGES,
    WITHOUT_EFFECT,
    Machine,
)
from trtpipe.pipeline.cache.kinds import BUILT
from trtpipe.pipeline.cache.paths import is_own
from trtpipe.pipeline.cache.reads import ABSENT, NAMES, WATCHED, Reads, recall
from trtpipe.pipeline.cache.settings import as_part, is_order, is_reordered, settings
from trtpipe.pipeline.cache.sources import UNWATCHED, environment_variables, has_native_code, imported
from trtpipe.routes.onnx import release as onnx_release
from trtpipe.routes.release import needs_lowering

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.pipeline.cache.store import Cache

#: Job keys that name a file or folder; its content counts, under this name.
CONTENTS: Mapping[str, str] = {
    "model.weights": "weights",
    "model.torchscript": "torchscript",
    "check.labels": "check labels",
    "model.program": "program",
    "model.onnx": "onnx",
    "calibration.images": "calibration data",
    "calibration.arrays": "calibration data",
    "calibration.table": "calibration table",
    "check.images": "check data",
    "check.arrays": "check data",
}
#: Settings that judge figures, and run no code of the job's.
_JUDGING = ("job check.limits", "job check.require", "job check.on_fail")


@dataclass(frozen=True)
class Ingredients:
    """The parts of one job by name, and notes on what could not be seen."""

    parts: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """SHA-256 hex over all of it: the same key, the same bundle."""
        return json_digest(self.parts)

    @property
    def unread(self) -> Ingredients:
        """Without what the job's code reads, which its first build shows: what two processes can agree on before."""
        return Ingredients({n: v for n, v in self.parts.items() if not is_read(n)})

    def changes(self, before: Mapping[str, str]) -> tuple[str, ...]:
        """What differs from `before`, as a report says it, each once (a source may be of several callables); digests
        are not shown, settings and versions are."""
        names = sorted({*self.parts, *before}, key=lambda n: (rank(n), n))
        pairs = {n: (before.get(n), self.parts.get(n)) for n in names}
        changed = [n for n, of in pairs.items() if of[0] != of[1] and (not is_order(n) or is_reordered(*of))]
        return tuple(dict.fromkeys(change(n, before.get(n), self.parts.get(n)) for n in changed))

    def reasons(self, before: Mapping[str, str]) -> tuple[str, ...]:
        """`changes` as reasons to build: of files that the code read before, and of which it is not known whether it
        still does, as that code never ran or the record is lost, nobody knows whether they changed."""
        known = {n: v for n, v in before.items() if n in self.parts or not is_read(n)}
        return self.changes(known) or ((UNKNOWN_READS,) if known != before else ())

    def moved_since(self, before: Mapping[str, str], written: Collection[str]) -> tuple[str, ...]:
        """`changes`, less what was not known to be read before, what was absent and is no longer looked for, and what
        the job's own code wrote since."""
        known = {n: v for n, v in self.parts.items() if n in before or not is_read(n)}
        own = {n for n in before if n.startswith(ASKED) or n in written}
        own |= {n for n, v in before.items() if is_read(n) and v == ABSENT and n not in self.parts}
        return Ingredients({n: v for n, v in known.items() if n not in own}).changes(
            {n: v for n, v in before.items() if n not in own}
        )


#: The reason to build where nothing else changed.
UNKNOWN_READS = "the record of what the job's code reads is lost"


@dataclass(frozen=True)
class StageKeys:
    """The cache key of each stage's result. `calibration` is None when nothing is calibrated."""

    model: str
    baseline: str
    calibration: str | None
    graph: str
    engine: str


def modules(module: str, folder: Path) -> dict[str, str]:
    """File by name of a module and of what it imports, as far as that is the user's own.

    trtpipe, what decides on its own version and the standard library are left out. Nothing is imported.
    """
    by_name: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in by_name or name.partition(".")[0] in _OWN:
            continue
        spec = find_module(name, (folder, Path.cwd()))
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            continue
        by_name[name] = spec.origin
        if spec.origin.endswith(".py") and not is_installed(spec.origin):
            todo += imported(Path(spec.origin).read_bytes(), name, bool(spec.submodule_search_locations))
    return by_name


class Survey:
    """Examines the files that jobs name; each is examined once, however many jobs name it.

    Args:
        digests: content digests.
        machine: where the jobs are to be built.
    """

    def __init__(self, digests: Digests, machine: Machine) -> None:
        self.digests, self.machine = digests, machine
        self._sources: dict[tuple[str, str], dict[str, str]] = {}
        self._variables: dict[str, tuple[str, ...]] = {}
        self._native: dict[str, tuple[str, ...]] = {}
        self._has_native: dict[str, bool] = {}

    def ingredients(self, job: Job, reads: Reads | None = None) -> Ingredients:
        """Everything that goes into the job's bundle.

        Args:
            job: the job.
            reads: what its code is known to read.

        Raises:
            InputError: a file it names cannot be read.
        """
        parts: dict[str, str] = {"name": job.name}
        notes: list[str] = []
        folder = job.folder or Path.cwd()
        for key, value in settings(job).items():
            if key == "build.plugins":
                parts |= {f"plugin {os.path.basename(path)}": self._content(key, path) for path in job.build.plugins}
            elif key in CONTENTS:
                value = str(value)
                content = self._content(key, value)
                # Of arrays each sample has the file's name, by which it is drawn and has its place.
                parts[CONTENTS[key]] = f"{os.path.basename(value)} {content}" if key.endswith(".arrays") else content
                parts[f"path {key}"] = os.path.relpath(value, folder)
                for name in data_names(Path(value)) if key == "model.onnx" else ():
                    parts[f"onnx data {name}"] = self._content(key, str(Path(value).parent / name))
            elif key not in WITHOUT_EFFECT:
                parts[f"job {key}"] = as_part(value)
        if job.calibration_images is not None:
            parts["calibration classes"] = json_digest([*class_folders(job.calibration_images)])
        for option, target in job.callables.items():
            prefix = "" if option == "model.factory" else f"{option.partition('.')[0]} "
            for module, digest in self.sources(target.partition(":")[0], folder).items():
                parts[f"{prefix}source {module}"] = digest
        reads = Reads() if reads is None else reads
        notes += self._unseen(parts, reads, folder)
        parts |= reads.values(folder, self.digests)
        notes += reads.notes
        machine = self.machine
        builders = BUILDERS[job.build.target] + ROUTE_PACKAGES[job.build.route]
        for name in dict.fromkeys((*DECIDING, *builders, *BUILDERS["onnxruntime"])):
            if name in machine.versions:
                parts[f"version {name}"] = machine.versions[name]
        parts["version python"] = machine.python
        parts["system"] = machine.system
        parts["trtpipe source"] = machine.source
        if job.build.target != "onnxruntime":
            parts["cuda driver"] = machine.cuda
            parts["gpu"] = machine.gpu
        if machine.gpu != "none" and not cpu_asked():
            parts["computed on"], parts["gpu"] = "GPU", machine.gpu
        parts["timing cache"] = "used" if job.build.timing_cache else "none"
        return Ingredients(parts, tuple(notes))

    def sources(self, module: str, folder: Path) -> dict[str, str]:
        """Digest by module name of a module's source and of what it imports, as far as that is the user's own.

        Of an installed package the module itself counts, and the version of each distribution that brings the package,
        under `DISTRIBUTION` and its name; trtpipe and the standard library do not, they are parts of their own. Nothing
        is imported.
        """
        known = (module, str(folder))
        if known not in self._sources:
            digests: dict[str, str] = {}
            for name, origin in modules(module, folder).items():
                digests[name] = self._file(origin)
                if is_installed(origin):
                    brought = packages.bringing(name.partition(".")[0])
                    digests |= {DISTRIBUTION + distribution: version for distribution, version in brought.items()}
                elif origin.endswith(".py"):
                    self._examine(name, origin)
            self._sources[known] = digests
        return self._sources[known]

    def _examine(self, name: str, origin: str) -> None:
        """Find what a source of the user's own mentions that may be read unseen."""
        if name in self._variables:
            return
        source = Path(origin).read_bytes()
        self._variables[name] = environment_variables(source)
        names = imported(source, name, os.path.basename(origin) == "__init__.py")
        self._native[name] = tuple(filter(self._reads_unseen, sorted({n.partition(".")[0] for n in names})))

    def _unseen(self, parts: Mapping[str, str], reads: Reads, folder: Path) -> list[str]:
        """Notes on inputs of the job's code whose content is not watched."""
        modules = {name.rpartition("source ")[2] for name in parts if "source " in name}
        for path in reads.modules(folder):  # imported by name: no source says so
            if is_own(path) and os.path.isfile(path):
                self._examine(path, path)
                modules.add(path)
        notes = [
            f"the job's code imports {name}, whose native code may read files unseen{UNWATCHED}"
            for name in sorted({n for m in modules for n in self._native.get(m, ())})
        ]
        variables = sorted({*reads.variables, *(v for m in modules for v in self._variables.get(m, ()))})
        if variables:
            notes.append(f"the job's code reads environment variables ({', '.join(variables)}){UNWATCHED}")
        return notes

    def files(self, job: Job) -> tuple[Path, ...]:
        """Files and folders whose content is among the job's ingredients, whatever its code reads."""
        named = (Path(str(value)) for key, value in settings(job).items() if key in CONTENTS)
        paths = [*map(Path, job.build.plugins), *named]
        paths += data_files(Path(job.model.onnx)) if job.model.onnx else ()
        folder = job.folder or Path.cwd()
        for target in job.callables.values():
            paths += [Path(o) for o in modules(target.partition(":")[0], folder).values() if not is_installed(o)]
        return tuple(paths)

    def _reads_unseen(self, package: str) -> bool:
        if package not in self._has_native:
            self._has_native[package] = has_native_code(package)
        return package not in WATCHED and self._has_native[package]

    def _content(self, key: str, path: str) -> str:
        try:
            return self.digests.folder(path) if os.path.isdir(path) else self.digests.file(path)
        except OSError as error:
            raise InputError(f"{key}: {unreadable(path, error)}") from error
        except CalibError as error:
            raise InputError(f"{key}: {error}") from error

    def _file(self, path: str) -> str:
        try:
            return self.digests.file(path)
        except OSError as error:
            raise InputError(unreadable(path, error)) from error


def stage_keys(job: Job, ingredients: Ingredients) -> StageKeys:
    """The key of each stage's result."""
    parts = ingredients.parts

    def chosen(*prefixes: str) -> dict[str, str]:
        return {
            n: v
            for n, v in parts.items()
            if any(n == p or n.startswith(p + " ") or n.startswith(p + ".") for p in prefixes)
        }

    computed = chosen("computed on", "gpu") if "computed on" in parts else {}
    #: What the job's code reads counts for all stages: whichever part of it reads.
    code = ("source", *NAMES.values())
    sources = ("weights", "program", "onnx", "trtpipe source")
    own = "job calibration.recalibrate"  # whether the model's own scales are kept
    model = chosen("job model", "job inputs", "job outputs", own, *sources, *code, "system")
    model |= {n: v for n, v in parts.items() if n in {f"version {v}" for v in ("python", *CAPTURING)}}
    if job.boxed:  # which outputs have no class a place, and so what labels are about
        model["outputs of boxes"] = ", ".join(sorted(job.boxed))
    script = model.pop("job model.baseline", "trace")
    data = {n: parts[n] for n in ("version pillow",) if n in parts}
    transform = chosen("job calibration.transform") | chosen("calibration source")
    checked = {n: v for n, v in chosen("job check").items() if not n.startswith((*_JUDGING, "job check.metrics"))}
    # Class folders are numbered by check.labels, or by calibration's folders.
    checked |= computed | chosen("check data", "check source", "check labels", "calibration classes") | transform | data
    baseline = {**model, **checked, "baseline": script, **chosen("torchscript", "job build.profiles")}
    calibration = ("job calibration", "calibration data", "calibration table", "calibration source")
    calibrated = model | data | computed | chosen(*calibration)
    if job.calibration is not None and job.calibration.table is None:  # what is in INT8 is corrected
        calibrated["job calibration.corrections"] = ", ".join(job.corrections)
        placed = ("fp16_mode", "bf16_mode", "placement", "keep") if job.corrections else ()
        calibrated |= chosen(*(f"job precision.{key}" for key in placed))
    # What gains from INT8 depends on the target, and who places it on `quantization`.
    graph = {**model, **chosen("job precision", "job build.target", "job build.quantization", "plugin")}
    if needs_lowering(release := onnx_release(job)):
        graph["onnx form"] = f"TensorRT {release}"
    if job.precision.quantized:
        graph |= calibrated
    if job.precision.fp16_mode:  # its ranges are observed on data
        graph |= calibrated if job.calibration is not None else checked
        graph |= checked if job.calibration is not None and job.calibration.table is not None else {}
    graph |= {n: v for n, v in parts.items() if n in {f"version {v}" for v in EXPORTING}}
    builders = {f"version {name}" for name in (*BUILDERS[job.build.target], *ROUTE_PACKAGES[job.build.route])}
    engine = graph | chosen("job build", "cuda driver", "gpu", "timing cache", *builders)
    return StageKeys(
        model=json_digest({"stage": "model", **model}),
        baseline=json_digest({"stage": "baseline", **baseline}),
        calibration=json_digest({"stage": "calibration", **calibrated}) if job.precision.calibrated else None,
        graph=json_digest({"stage": "graph", **graph}),
        engine=json_digest({"stage": "engine", **engine}),
    )


def code_key(ingredients: Ingredients) -> str:
    """The key of the record of the code's reads: over the sections and sources that decide which code runs."""
    sections = ("model", "inputs", "outputs", "calibration", "check")
    names = (*(f"job {section}" for section in sections), "source", "calibration source", "check source")
    deciding = {n: v for n, v in ingredients.parts.items() if not n.startswith(_JUDGING)}
    return json_digest(
        {n: v for n, v in deciding.items() if any(n == p or n.startswith((p + " ", p + ".")) for p in names)}
    )


def with_reads(
    survey: Survey, job: Job, cache: Cache, before: Mapping[str, str] = MappingProxyType({})
) -> tuple[Ingredients, Reads]:
    """The ingredients of a job with what its code reads, and that.

    The same code reads other files in another checkout, or where one of them says so. Of several records the one by
    which nothing has changed since `before` counts; else one by which the job is built; else the one most like
    `before`, the latest first.

    Args:
        survey: looks at the files.
        job: the job.
        cache: has the records.
        before: the parts of these ingredients when they were last taken; none where that was never.
    """
    if not job.callables:
        return survey.ingredients(job), Reads()
    records = recall(cache, code_key(survey.ingredients(job)), job.folder or Path.cwd())
    found = []
    for reads in records:
        found.append((survey.ingredients(job, reads), reads))
        if found[-1][0].parts == before:
            return found[-1]
    asked = {n for n in before if is_read(n)}
    nearest = min(found, key=lambda f: len(asked ^ {i.name for i in f[1].items}) if asked else 0)
    return next((f for f in found if len(found) > 1 and cache.get(BUILT, f[0].key) is not None), nearest)


_OWN = frozenset({*OURS, *packages.modules_of(DECIDING), *sys.stdlib_module_names})

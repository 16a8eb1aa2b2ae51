"""The job file: `read_job` reads one and reports every problem in it at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import fspath
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from calib.files import FETCH, LFS_POINTER, is_lfs_pointer, text_at_most
from calib.types import JsonObject
from trtpipe.errors import InputError, did_you_mean
from trtpipe.job import matrix, yamlfile
from trtpipe.job.broken import BrokenRules
from trtpipe.job.importable import is_job_file
from trtpipe.job.job import Job
from trtpipe.job.problems import Problem, dotted, explain, legal_keys, shown, violation
from trtpipe.job.rules import broken
from trtpipe.streams import folder_of
from trtpipe.values import ARCHIVE_SUFFIX

#: Every key that names a file or a folder, or a list of them: what must be there. `output` need not exist yet.
PATHS: Mapping[tuple[str, ...], str] = {
    ("model", "weights"): "file",
    ("model", "torchscript"): "file",
    ("check", "labels"): "file or folder",
    ("model", "program"): "file",
    ("model", "onnx"): "file",
    ("calibration", "images"): "folder",
    ("calibration", "arrays"): "file",
    ("calibration", "table"): "file",
    ("check", "images"): "folder",
    ("check", "arrays"): "file",
    ("build", "timing_cache"): "output",
    ("build", "calibration_cache"): "output",
    ("build", "plugins"): "file",
}


class JobErrors(InputError):
    """Everything that is wrong with a job file, one line each. Exit code 3: the job is good, this machine lacks."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        self.exit_code = min((p.exit_code for p in self.problems), default=InputError.exit_code)
        super().__init__("\n".join(map(str, self.problems)))


def read_job(path: str | Path, overrides: Iterable[str] = ()) -> Job:
    """The job in a file, its relative paths resolved against the folder the file is in.

    Args:
        path: the YAML file.
        overrides: `section.key=value` each, laid over the file; the value is YAML.

    Raises:
        JobErrors: with all problems found, in the order of the file.
    """
    file = JobFile(Path(path))
    job = file.read(overrides)
    if file.problems or job is None:
        raise JobErrors(file.problems)
    return job


def read_jobs(path: str | Path, overrides: Iterable[str] = (), *, paths_exist: bool = True) -> tuple[Job, ...]:
    """The jobs in a file: one, or one for each combination of its `matrix`.

    Raises:
        JobErrors: with all problems found, once each; what only some combinations have names those.
    """
    files = job_files(path, paths_exist=paths_exist)
    jobs = [file.read(overrides) for file in files]
    if problems := tuple(dict.fromkeys(p for problems in by_job(files) for p in problems)):
        raise JobErrors(problems)
    return tuple(job for job in jobs if job is not None)


def job_files(path: str | Path, *, paths_exist: bool = True) -> tuple[JobFile, ...]:
    """The file ready to be read, once for each job in it; a broken one is given as it is, and reading it says why."""
    path = Path(path)
    try:
        text = text_at_most(path, yamlfile.MAX_BYTES)
        document = yamlfile.parse(text)
    except (OSError, ValueError):  # text that is no UTF-8, too long, or no YAML
        return (JobFile(path, paths_exist=paths_exist),)
    if isinstance(document.data, dict) and not matrix.has_matrix(document):
        return (JobFile(path, paths_exist=paths_exist, parsed=(document, text)),)
    cells = matrix.expand(document)[0] if matrix.has_matrix(document) else ()
    if not cells:
        return (JobFile(path, paths_exist=paths_exist),)
    return tuple(
        JobFile(path, paths_exist=paths_exist, parsed=(cell.document, f"{text.rstrip()}\n# matrix {cell}\n"), cell=cell)
        for cell in cells
    )


def by_job(files: Sequence[JobFile]) -> tuple[tuple[Problem, ...], ...]:
    """The problems of each job of one file; one that others have not, whose value stands in the same place, names the
    combinations of the matrix that have it."""

    def naming_combinations(problem: Problem) -> Problem:
        having = [f for f in files if problem in f.problems]
        if not any(f.stands_at(problem, having[0]) for f in files if f not in having):
            return problem
        return replace(problem, text=f"{problem.text} In the matrix: {'; '.join(str(f.cell) for f in having)}.")

    return tuple(tuple(map(naming_combinations, file.problems)) for file in files)


class JobFile:
    """One job file while it is read; it knows the place of everything in it."""

    def __init__(
        self,
        path: Path,
        *,
        paths_exist: bool = True,
        parsed: tuple[yamlfile.Document, str] | None = None,
        cell: matrix.Cell | None = None,
    ) -> None:
        self.cell = cell
        self._path = path
        self._paths_exist = paths_exist
        self._parsed = parsed
        self._document = yamlfile.Document(None, {}, {}, {})
        self._text = ""
        self._texts: dict[yamlfile.KeyPath, str] = {}
        self._set: list[yamlfile.KeyPath] = []
        self._problems: list[Problem] = []
        self._paths: dict[Problem, yamlfile.KeyPath] = {}

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was found so far, in the order of the file; what came with --set last."""
        return tuple(sorted(self._problems, key=lambda p: (p.file is None, p.line or 0, p.column or 0)))

    def stands_at(self, problem: Problem, of: JobFile) -> bool:
        """Whether the value that is a problem in another job of the file stands in the same place in this one."""
        path = of._paths.get(problem)
        return path is not None and self._document.place(path) == of._document.place(path)

    def read(self, overrides: Iterable[str] = ()) -> Job | None:
        """The job, or None when it is not one; a job that names missing files is still returned."""
        data = self._load()
        if data is None:
            return None
        self._texts = dict(self._document.texts)
        for override in (overrides,) if isinstance(overrides, str) else overrides:
            self._override(data, override)
        _capabilities_as_written(data, self._texts)
        self._absolute(data)
        return self._validate(data)

    def add(self, path: yamlfile.KeyPath, text: str, *, missing: bool = False) -> None:
        """Report `text` (of `violation`) at `path`: as --set if the value came from there, else at its line."""
        made = path not in self._document.keys  # a mapping that only --set has
        place = self._document.place(path)
        problem = Problem(fspath(self._path), place.line, place.column, dotted(path), text, missing)
        if any(path[: len(s)] == s or (made and s[: len(path)] == path) for s in self._set):
            problem = replace(problem, file=None, line=None, column=None)
        self._problems.append(problem)
        self._paths[problem] = path

    def _load(self) -> JsonObject | None:
        if self._parsed is not None:
            self._document, self._text = self._parsed
            return dict(self._document.data)
        name = fspath(self._path)
        packed = "Of a packed kit make a folder first: trtpipe unpack." if name.endswith(ARCHIVE_SUFFIX) else ""
        try:
            text = text_at_most(self._path, yamlfile.MAX_BYTES)
            self._document = yamlfile.parse(text)
            self._text = text
        except yamlfile.YamlProblem as p:
            text = violation(p.must, p.got, p.hint)
            self._problems.append(Problem(name, p.place.line, p.place.column, dotted(p.path), text))
            return None
        except FileNotFoundError:
            got = "a link to nothing" if self._path.is_symlink() else "no such file"
            text = violation("be a job file", got, _beside(self._path))
            self._problems.append(Problem(name, None, None, "", text))
            return None
        except IsADirectoryError:
            self._problems.append(Problem(name, None, None, "", violation("be a job file", "a folder")))
            return None
        except UnicodeDecodeError as error:
            got = f"byte {error.object[error.start]:#04x} at {error.start}"
            self._problems.append(Problem(name, None, None, "", violation("be UTF-8 text", got, packed)))
            return None
        except ValueError as error:
            text = violation(f"be a job file of at most {yamlfile.MAX_BYTES} bytes", str(error), packed)
            self._problems.append(Problem(name, None, None, "", text))
            return None
        except OSError as error:
            text = violation("be readable", error.strerror or str(error))
            self._problems.append(Problem(name, None, None, "", text))
            return None
        if not isinstance(self._document.data, dict):
            got = "text" if isinstance(self._document.data, str) else shown(self._document.data)  # it may be a secret
            keys = ", ".join((*Job.model_fields, matrix.MATRIX_KEY))
            hint = f"Its keys are {keys}; `trtpipe init` writes one to start from."
            self._problems.append(Problem(name, 1, 1, "", violation("be a mapping", got, hint)))
            return None
        if matrix.has_matrix(self._document):
            _, problems = matrix.expand(self._document)
            hint = "Give it to `trtpipe build`, `validate` or `nightly`."
            for at, text in problems or (
                ((matrix.MATRIX_KEY,), violation("not be in the file of one job", "several jobs", hint)),
            ):
                self.add(at, text)
            return None
        return dict(self._document.data)

    def _override(self, data: JsonObject, override: str) -> None:
        key, equals, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            self._problems.append(Problem(None, None, None, "", violation("be SECTION.KEY=VALUE", shown(override))))
            return
        if path[0] == matrix.MATRIX_KEY:
            what = violation("be left to the file, which makes its jobs of it", shown(override), "Edit the file.")
            self._problems.append(Problem(None, None, None, key, what))
            return
        if self.cell is not None and (axis := matrix.setting(path, self.cell.sets)):
            hint = f"The names of its jobs say {{{axis}}}: edit the file."
            what = violation(f"be left to the matrix, whose axis {axis} sets it", shown(override), hint)
            self._problems.append(Problem(None, None, None, key, what))
            return
        if not text.strip():
            what = violation("have a value", "nothing", "Write null where it may be left out.")
            self._problems.append(Problem(None, None, None, key, what))
            return
        try:
            given = yamlfile.parse(text)
        except yamlfile.YamlProblem as p:
            self._problems.append(Problem(None, None, None, key, violation(p.must, p.got, p.hint)))
            return
        if lost := next((s for s in self._set if s[: len(path)] == path), None):
            got = f"{shown(override)} after {dotted(lost)}"
            what = violation("not replace what another --set gives", got, "Give one.")
            self._problems.append(Problem(None, None, None, key, what))
            return
        inner = data
        for i, part in enumerate(path[:-1]):
            inner[part] = below = dict(inner[part]) if isinstance(inner.get(part), dict) else inner.get(part, {})
            if below is None:
                inner[part] = below = {}
            if not isinstance(below, dict):
                text = violation("be a mapping", shown(below))
                self._problems.append(Problem(None, None, None, dotted(path[: i + 1]), text))
                return
            inner = below
        inner[path[-1]] = given.data
        self._texts = {at: text for at, text in self._texts.items() if at[: len(path)] != path}
        self._texts |= {(*path, *at): text for at, text in given.texts.items()}
        self._set.append(path)
        self._text = f"{self._text.rstrip()}\n# --set {override}\n"

    def _absolute(self, data: JsonObject) -> None:
        """Make every path of the job absolute, and report those that do not exist."""
        folder = folder_of(self._path)
        for (section, key), kind in PATHS.items():
            given = data.get(section)
            if not isinstance(given, dict):
                continue
            value = given.get(key)
            if isinstance(value, str):
                data[section] = given | {key: self._path_of((section, key), value, folder, kind)}
            elif isinstance(value, list):
                at = [self._path_of((section, key, i), v, folder, kind) for i, v in enumerate(value)]
                data[section] = given | {key: at}

    def _path_of(self, at: yamlfile.KeyPath, given: object, folder: Path, kind: str) -> object:
        """One path made absolute; what is no text is left for pydantic to refuse."""
        if not isinstance(given, str):
            return given
        here = Path(os.path.expanduser(given))  # which leaves a user that there is not as it is written
        path = folder / here
        there = (path.is_dir() and "folder" in kind) or (path.is_file() and "file" in kind)
        if self._paths_exist and kind != "output" and not there:
            got = f"{given!r}: {'not a ' + kind if path.exists() else 'nothing there'}"
            hint = f"It is {_normal(path)}{'' if here.is_absolute() else ', from the folder of the job file'}."
            self.add(at, violation(f"be a {kind} that exists", got, hint))
        elif self._paths_exist and there and path.is_file() and is_lfs_pointer(path):
            self.add(at, violation("be the file itself", f"{given!r}: {LFS_POINTER}", FETCH))
        return str(_normal(path))

    def _validate(self, data: JsonObject) -> Job | None:
        try:
            return Job.model_validate(data).read_from(folder_of(self._path), self._text)
        except ValidationError as error:
            structural = [e for e in error.errors() if not isinstance(e.get("ctx", {}).get("error"), BrokenRules)]
        for e in structural:
            loc = _in_file(e["loc"], data)
            text = explain(e, _as_written(legal_keys(Job, e["loc"]), loc, in_file=loc in self._document.keys))
            self.add(loc, text)
        at = {_in_file(e["loc"], data) for e in structural}
        for b in broken(_readable(data, at)):
            if not any(path[: len(b.path)] == b.path or path == b.path[: len(path)] for path in at):
                self.add(b.path, violation(b.must, b.got, b.hint))
        return None


def _normal(path: Path) -> Path:
    """Without `..` and `.`; symbolic links are left, since the user named them."""
    return Path(os.path.normpath(path))


def _beside(path: Path) -> str:
    """The YAML file in the same folder whose name is nearest."""
    if not path.parent.is_dir():
        return ""
    names = sorted(p.name for p in path.parent.iterdir() if is_job_file(p) and p != path)
    return did_you_mean(path.name, names)


def _capabilities_as_written(data: JsonObject, texts: Mapping[yamlfile.KeyPath, str]) -> None:
    """Compute capabilities are versions: 12.10 must not pass for 12.1, so they are taken as they were written."""
    build = data.get("build")
    path: yamlfile.KeyPath = ("build", "compute_capability")
    if not isinstance(build, dict):
        return
    values = build.get(path[1])
    if isinstance(values, list):
        kept = [texts.get((*path, i), v) if isinstance(v, float) else v for i, v in enumerate(values)]
        data["build"] = build | {path[1]: kept}


def _in_file(loc: tuple[int | str, ...], data: JsonObject) -> yamlfile.KeyPath:
    """Pydantic's location as the path in the file: ranges stand beside `shape`, not under `dims`."""
    if len(loc) >= 4 and loc[0] == "inputs" and loc[2] == "dims":
        spec = data["inputs"][loc[1]]
        if loc[3] not in (spec.get("dims") or {}):
            return (*loc[:2], *loc[3:])
    return loc


def _as_written(keys: tuple[str, ...], loc: yamlfile.KeyPath, *, in_file: bool) -> tuple[str, ...]:
    """The legal keys as a writer of job files knows them: `dims` is for Python callers, `matrix` for files alone."""
    if len(loc) == 1 and in_file:
        return (*keys, matrix.MATRIX_KEY)
    return tuple(k for k in keys if k != "dims") if loc[:1] == ("inputs",) else keys


def _readable(data: JsonObject, wrong: Iterable[yamlfile.KeyPath]) -> JsonObject:
    """The sections that can be read once every wrong value is left out; the rules are run on those."""
    pruned: Any = _copied(data)
    for loc in sorted(wrong, key=len, reverse=True):
        inner = pruned
        for part in loc[:-1]:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(loc[-1], None)
    return dict(_sections(pruned))


def _copied(value: object) -> object:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _sections(data: JsonObject) -> Iterator[tuple[str, object]]:
    for name, field in Job.model_fields.items():
        if name not in data:
            if not field.is_required():
                yield name, field.get_default()
            continue
        try:
            kind: Any = field.annotation
            value = TypeAdapter[object](kind).validate_python(data[name])
        except ValidationError:
            continue
        if value or value is None:  # no binding is left of inputs or outputs whose only ones could not be read
            yield name, value


def same_name(path: Path, first: Path, name: str) -> JobErrors:
    """The error that two jobs of one run have the same name: they would write the same bundle."""
    must = violation(f"be another than that of {first}", repr(name), "Rename one job.")
    return JobErrors([Problem(str(path), None, None, "name", must)])


def distinct_names(jobs: Iterable[tuple[Path, str]]) -> tuple[Problem, ...]:
    """What is wrong with the names of jobs and kits of one run, each given behind its file or folder."""
    seen: dict[str, Path] = {}
    pairs = [(path, seen.setdefault(name, path), name) for path, name in jobs]
    return tuple(p for path, first, name in pairs if first != path for p in same_name(path, first, name).problems)

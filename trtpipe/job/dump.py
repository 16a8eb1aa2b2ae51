"""A job as the text of a job file: what `read_job` reads back as the same job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

from calib.types import JsonObject
from trtpipe.atomic import write_whole
from trtpipe.errors import InputError
from trtpipe.job.importable import find_module
from trtpipe.job.job import Job
from trtpipe.job.load import PATHS, JobErrors, JobFile
from trtpipe.job.yamlfile import parse, scalar


def job_text(job: Job, folder: Path) -> str:
    """YAML of every value that is not a default, with paths relative to `folder`, ranges beside their shapes."""
    data: JsonObject = job.model_dump(mode="json", exclude_defaults=True)
    for section, key in PATHS:
        given = data[section].get(key) if isinstance(data.get(section), dict) else None
        if isinstance(given, list):
            data[section][key] = [os.path.relpath(path, folder) for path in given]
        elif given is not None:
            data[section][key] = os.path.relpath(given, folder)
    for spec in data["inputs"].values():
        spec.update(spec.pop("dims", {}))
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    return text


def require_same_code(job: Job, folder: Path) -> None:
    """Refuse a folder from which the job's callables are others, or none: they are found beside a job's file.

    Raises:
        InputError: one is found elsewhere than from the job's own folder.
    """
    for key, target in job.callables.items():
        module = target.partition(":")[0]
        here, there = (_places(module, of) for of in (job.folder or Path.cwd(), folder))
        if here and here != there:
            raise InputError(
                f"{key}: must be found from {folder} as it is from the job's own folder (got {here[0]}, and from there "
                f"{there[0] if there else 'nothing'}). Write beside the job, or set PYTHONPATH."
            )


def _places(module: str, folder: Path) -> list[str]:
    """Where a module is found, from whatever the current folder is: its file, or a namespace package's folders."""
    told = [os.path.normpath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p)]
    elsewhere = [p for p in map(os.path.abspath, sys.path) if p in told or p != os.getcwd()]
    spec = find_module(module, (folder,), elsewhere)
    if spec is None:
        return []
    return [os.path.realpath(p) for p in ([spec.origin] if spec.origin else spec.submodule_search_locations or ())]


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as something else: PyYAML writes for YAML 1.1, to which `1e3` is text."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = isinstance(scalar(text), str) and text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def write_job(job: Job, path: Path, comment: str) -> None:
    """Write the job to `path`, below `comment`, once it can be read back; else `path` is as it was.

    Raises:
        JobErrors: the job cannot be read back from there: a bug, or a path that has gone.
        AssertionError: it reads back as another job.
    """
    folder = path.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    text = head + job_text(job, folder)
    file = JobFile(path, parsed=(parse(text), text))
    again = file.read()
    if file.problems:
        raise JobErrors(file.problems)
    if again is None or again.model_dump() != job.model_dump():
        raise AssertionError(f"{path} reads back as another job")
    write_whole(path, text)

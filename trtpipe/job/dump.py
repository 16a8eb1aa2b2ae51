"""A job as the text of a job file: what `load_job` reads back as the same job."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from calib.types import JsonObject
from trtpipe.atomic import write_whole
from trtpipe.job.job import Job
from trtpipe.job.load import PATHS, load_job


def job_text(job: Job, folder: Path) -> str:
    """YAML of every value that is not a default, with paths relative to `folder`, ranges beside their shapes."""
    data: JsonObject = job.model_dump(mode="json", exclude_defaults=True)
    for section, key in PATHS:
        if isinstance(data.get(section), dict) and isinstance(data[section].get(key), str):
            data[section][key] = os.path.relpath(data[section][key], folder)
    for spec in data["inputs"].values():
        spec.update(spec.pop("dims", {}))
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def write_job(job: Job, path: Path, comment: str) -> None:
    """Write the job to `path`, below `comment`, and read it back.

    Raises:
        JobErrors: the job cannot be read back from there: a bug, or a path that has gone.
        AssertionError: it reads back as another job.
    """
    folder = path.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    write_whole(path, head + job_text(job, folder))
    again = load_job(path)
    if again.model_dump() != job.model_dump():
        raise AssertionError(f"{path} reads back as another job")

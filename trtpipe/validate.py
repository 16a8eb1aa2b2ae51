"""Plan-time checks: what is wrong with a job on this machine and for its target, building nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trtpipe.job import Problem, read_job


def validate(path: str | Path, overrides: Iterable[str] = ()) -> tuple[Problem, ...]:
    """Every problem of a job file; empty when it can be built here.

    Args:
        path: the YAML file.
        overrides: `section.key=value` each, as in `job.load_job`.
    """
    _, problems = read_job(path, overrides)
    return problems

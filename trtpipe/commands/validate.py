"""trtpipe validate."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.commands.options import job_files, jobs_argument, json_option, set_option


@click.command("validate")
@jobs_argument
@set_option
@json_option
def command(jobs: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> int:
    """Say every problem of each JOB (files or folders) on this machine and for its target, building nothing."""
    from trtpipe import console
    from trtpipe.validate import validate

    found = {path: validate(path, overrides) for path in job_files(jobs)}
    for path, problems in found.items():
        for problem in problems:
            console.err(str(problem))
        if not problems and not as_json:
            console.out(f"{path}: ok")
    if as_json:
        listed = [
            {"job": str(path), "ok": not problems, "problems": [p.as_dict() for p in problems]}
            for path, problems in found.items()
        ]
        console.out_json(listed)
    return 2 if any(found.values()) else 0

"""trtpipe validate."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.cli import console
from trtpipe.cli.commands.options import job_files, jobs_argument, json_option, set_option
from trtpipe.errors import SUCCESS, ExitCode, TrtpipeError
from trtpipe.job.importable import on_path
from trtpipe.job.load import distinct_names, read_jobs
from trtpipe.pipeline.deep import deep_problems
from trtpipe.pipeline.validate import plan, validate
from trtpipe.trt.flavour import without_effect


@click.command("validate", short_help="Say every problem of jobs, building nothing.")
@jobs_argument
@set_option
@click.option("--job-only", is_flag=True, help="Leave out what this machine lacks: data, modules, packages, a GPU.")
@click.option("--deep", is_flag=True, help="Run the model on zeros too, and export it; needs PyTorch.")
@click.option("--for", "version", metavar="VERSION", help="Judge for this TensorRT, like 10.3.0, not the one here.")
@json_option
@on_path(None)
def command(
    jobs: tuple[Path, ...], overrides: tuple[str, ...], job_only: bool, deep: bool, version: str | None, as_json: bool
) -> ExitCode:
    """Say every problem of each JOB (files or folders) on this machine and for its target, building nothing."""
    if deep and (job_only or version is not None):
        raise click.UsageError("--deep must not be given with --job-only or --for: it runs the model here.")
    problems_by_job = {path: validate(path, overrides, here=not job_only, version=version) for path in job_files(jobs)}
    good = [path for path, problems in problems_by_job.items() if not problems]
    jobs_of = {path: read_jobs(path, overrides, paths_exist=False) for path in good}
    for problem in distinct_names((path, job.name) for path, several in jobs_of.items() for job in several):
        problems_by_job[Path(str(problem.file))] += (problem,)
    faults: dict[Path, tuple[TrtpipeError, ...]] = {}
    for path, problems in problems_by_job.items():
        for problem in problems:
            console.err(str(problem))
        if deep and not problems:
            faults[path] = tuple(error for job in plan(path, overrides) for error in deep_problems(job))
            for error in faults[path]:
                console.err(f"{path}: {error}")
        useless = [without_effect("a job", job.build.target, version) for job in jobs_of.get(path, ())]
        if useless and all(useless):  # of a matrix it may be for some
            console.err(f"{path}: note: {useless[0]}")
        if not problems and not faults.get(path) and not as_json:
            console.out(f"{path}: ok")
        if any(p.missing for p in problems) and not validate(path, overrides, here=False, version=version):
            lacks = "data, modules, packages or a GPU that are not here (--job-only leaves those out)"
            console.err(f"{path}: the job is right but for {lacks}.")
    if as_json:
        listed = [
            {
                "job": str(path),
                "ok": not problems and not faults.get(path),
                "problems": [p.as_dict() for p in problems] + [{"message": str(e)} for e in faults.get(path, ())],
            }
            for path, problems in problems_by_job.items()
        ]
        console.out_json(listed)
    codes = [problem.exit_code for problems in problems_by_job.values() for problem in problems]
    return min([*codes, *(error.exit_code for errors in faults.values() for error in errors)], default=SUCCESS)

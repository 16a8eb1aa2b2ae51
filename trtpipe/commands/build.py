"""trtpipe build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtpipe.commands.options import job_files, jobs_argument, json_option, set_option

if TYPE_CHECKING:
    from trtpipe.job import Job
    from trtpipe.values import CheckReport


@click.command("build", short_help="Build jobs, check each engine, write bundles.")
@jobs_argument
@click.option(
    "-o",
    "--out",
    default=Path("out"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder the bundles go to, each under the name of its job.",
)
@set_option
@json_option
@click.option("-v", "--verbose", count=True, help="Show what TensorRT and the stages log; -vv all of it.")
@click.option("-q", "--quiet", is_flag=True, help="Show only the verdict.")
def command(
    jobs: tuple[Path, ...], out: Path, overrides: tuple[str, ...], as_json: bool, verbose: int, quiet: bool
) -> int:
    """Build each JOB (files or folders), check the engine against its baseline, and write a bundle."""
    from trtpipe import console
    from trtpipe.errors import Cancelled, TrtpipeError
    from trtpipe.job import JobErrors, Problem
    from trtpipe.validate import plan

    if verbose and quiet:
        raise click.UsageError("--verbose must not be given with --quiet.")
    loaded: dict[Path, Job] = {}
    problems: list[Problem] = []
    for path in job_files(jobs):
        try:
            loaded[path] = _logged(plan(path, overrides), verbose)
        except JobErrors as error:
            problems.extend(error.problems)
    if problems:
        raise JobErrors(problems)
    _distinct_names(loaded)

    from trtpipe.pipeline import build

    codes: list[int] = []
    results: list[dict[str, Any]] = []
    with console.Console(quiet=quiet or as_json, verbose=verbose > 0).watching() as reporter:
        for path, job in loaded.items():
            try:
                built = build(job, out, reporter)
            except Cancelled:
                raise
            except TrtpipeError as error:
                if len(loaded) == 1:
                    raise
                console.err(f"{path}: {error}")
                codes.append(error.exit_code)
                results.append({"job": str(path), "error": str(error), "exit_code": error.exit_code})
                continue
            codes.append(0 if built.report.passed else 1)
            results.append(
                {"job": str(path), "bundle": str(built.bundle.path), "exit_code": codes[-1], "check": built.report}
            )
            if not as_json:
                console.out("\n".join(verdict(job.name, built.bundle.path, built.report)))
    if as_json:
        console.out_json(results)
    return max(codes)


def _logged(job: Job, verbose: int) -> Job:
    """The job with TensorRT's log level as -v and -vv ask; without them it is the job's own."""
    if not verbose:
        return job
    build = job.build.model_copy(update={"log_level": "info" if verbose == 1 else "verbose"})
    return job.model_copy(update={"build": build})


def _distinct_names(loaded: dict[Path, Any]) -> None:
    """Two jobs of one name would write the same bundle."""
    from trtpipe.errors import InputError

    seen: dict[str, Path] = {}
    for path, job in loaded.items():
        first = seen.setdefault(job.name, path)
        if first != path:
            raise InputError(f"{path}: name: must be another than that of {first} (got {job.name!r}). Rename one job.")


def verdict(name: str, bundle: Path, report: CheckReport) -> list[str]:
    """The result of a build in a few lines: what was executed, each figure beside its limit, where the bundle is."""
    from trtpipe import console

    word = "passed" if report.passed else "FAILED"
    lines = [f"{name}: {word}, {report.executed} executed by {report.runner} on {report.samples} samples"]
    several = len({m.output for m in report.metrics}) > 1
    for metric in report.metrics:
        label = f"{metric.output}.{metric.name}" if several else metric.name
        mark = "" if metric.passed is None else "ok" if metric.passed else "FAILED"
        limit = "" if metric.limit is None else f"limit {metric.limit:g}"
        lines.append(f"  {label:<28} {metric.value:<12.6g} {limit:<14} {mark}".rstrip())
    lines += [f"  problem: {problem}" for problem in report.problems]
    engine = next((bundle / f for f in ("model.engine", "model.onnx") if (bundle / f).is_file()), None)
    if engine is not None:
        lines.append(f"  {engine.name}: {console.size(engine.stat().st_size)}")
    if report.executed == "graph":
        lines.append("  The graph was executed, not the engine: run `trtpipe check` on the bundle where its GPU is.")
    lines.append(f"  bundle: {console.relative(bundle)}")
    return lines

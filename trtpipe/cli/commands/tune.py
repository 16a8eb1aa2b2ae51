"""trtpipe tune."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.atomic import write_whole
from trtpipe.cli import console
from trtpipe.cli.commands.options import (
    InputPath,
    OutputFile,
    device_option,
    json_option,
    loudness_options,
    out_option,
    set_option,
)
from trtpipe.errors import FAILED, SUCCESS, ExitCode
from trtpipe.job.dump import require_same_code, write_job
from trtpipe.job.importable import on_path
from trtpipe.outputs import require_apart, require_writable_file
from trtpipe.pipeline.tune import tune
from trtpipe.pipeline.validate import plan_one
from trtpipe.quantization.search import EVALUATIONS
from trtpipe.report import tune_page


@click.command("tune", short_help="Meet the accuracy budget with most in 8 bits.")
@click.argument("job", type=InputPath())
@out_option("out", "Folder for the trials (resumed from there) and their table.")
@click.option(
    "--write",
    type=OutputFile(),
    help="The tuned job file. [default: JOB with .tuned before its suffix, beside it]",
)
@click.option(
    "--evaluations",
    default=EVALUATIONS,
    show_default=True,
    type=click.IntRange(1),
    help="At most this many full trials.",
)
@device_option
@set_option
@json_option
@loudness_options
@on_path(None)
def command(
    job: Path,
    out: Path,
    write: Path | None,
    evaluations: int,
    overrides: tuple[str, ...],
    as_json: bool,
    verbose: int,
    quiet: bool,
) -> ExitCode:
    """Meet check.limits of JOB with as little as possible out of its number formats; write the job that does.

    Exits with 1 when no trial meets the limits; the job that came closest is written all the same.
    """
    loaded = plan_one(job, overrides, purpose="measure")
    target = write or job.with_name(f"{job.stem}.tuned{job.suffix}")
    require_apart(target, job)
    require_writable_file(target)
    require_same_code(loaded, target.resolve().parent)
    with console.Console(quiet=quiet or as_json, verbose=verbose > 0).watching() as reporter:
        tuned = tune(loaded, out, reporter, evaluations=evaluations)
    limits = loaded.check.limits
    line = tune_page.verdict(tuned.tuned)
    write_job(tuned.job, target, f"Written by `trtpipe tune {job.name}`.\n{line}")
    page = out / f"{loaded.name}.trials.md"
    write_whole(page, tune_page.page(loaded.name, tuned.tuned, limits))
    if as_json:
        console.out_json(
            {
                "met": tuned.tuned.met,
                "job": str(target),
                "trials_file": str(tuned.trials),
                "best": tuned.tuned.best,
                "trials": tuned.tuned.trials,
                "sensitivity": tuned.tuned.sensitivity,
                "notes": tuned.tuned.notes,
            }
        )
    else:
        console.out(f"{loaded.name}: {line}")
        console.out(tune_page.table(tuned.tuned.trials))
        for note in tuned.tuned.notes:
            console.out(f"note: {note}")
        console.out(f"job: {console.relative(target)}\ntrials: {console.relative(page)}")
    return SUCCESS if tuned.tuned.met else FAILED

"""trtpipe calibrate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calib.files import suffix_of
from calib.samples import copies
from trtpipe.cli import console
from trtpipe.cli.commands.build import load_jobs
from trtpipe.cli.commands.options import (
    OutputTables,
    device_option,
    jobs_argument,
    json_option,
    loudness_options,
    set_option,
)
from trtpipe.cli.each import Result, Work, each
from trtpipe.errors import SUCCESS, ExitCode
from trtpipe.job.importable import on_path
from trtpipe.outputs import naming
from trtpipe.pipeline.calibrate import make_table

if TYPE_CHECKING:
    from calib.table import CalibrationTable
    from trtpipe.job.job import Job
    from trtpipe.progress import Reporter


@click.command("calibrate", short_help="The calibration table of a job and its audit.")
@jobs_argument
@click.option(
    "-o",
    "--out",
    default=Path("."),
    show_default=True,
    type=OutputTables(),
    help="Folder the tables go to, each as <name of its job>.calibration.json; or, of one job, a file ending in .json.",
)
@device_option
@set_option
@json_option
@loudness_options
@on_path(None)
def command(
    jobs: tuple[Path, ...], out: Path, overrides: tuple[str, ...], as_json: bool, verbose: int, quiet: bool
) -> ExitCode:
    """Calibrate each JOB (files or folders) and write its table, which `calibration.table` of a job can name.

    Beside the table its histograms are written, from which tables are merged and other algorithms computed.
    """
    loaded = load_jobs(jobs, overrides, verbose, purpose="calibrate")
    single = suffix_of(out) == ".json"
    if single and len(loaded) > 1:
        raise click.UsageError(f"--out must be a folder for {len(loaded)} jobs (got the file {out}).")

    works = [
        Work(path, partial(_made, job, out if single else out / f"{job.name}.calibration.json", quiet), job)
        for path, job in loaded
    ]
    return each(works, as_json=as_json, verbose=verbose, quiet=quiet)


#: Of a job with implicit quantization.
_NOT_READ = (
    "with build.quantization: implicit the engine gets the ranges that TensorRT's own calibrator finds, and no build "
    "reads this table"
)


def _made(job: Job, path: Path, quiet: bool, reporter: Reporter) -> Result:
    table = make_table(job, reporter)
    for note in (*job.unused(), *([_NOT_READ] if job.build.quantization == "implicit" else [])):
        console.err(f"{job.name}: note: {note}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path)
    found = {"job": job.name, "table": str(path), "digest": table.digest, "audit": table.audit.model_dump()}
    lines = [] if quiet else audit_lines(table)
    return Result(SUCCESS, found, "\n".join([*lines, f"{job.name}: {console.relative(path)}"]))


def audit_lines(table: CalibrationTable) -> list[str]:
    """The audit as a table of one line a tensor, then the warnings."""
    audit = table.audit
    width = max((len(key) for key in table.amax), default=0)
    if not table.samples:
        own = (f"{key:<{width}} {amax:>10.4g}" for key, amax in table.amax.items())
        return [f"{len(table.amax)} scales of the quantized model itself, as amax", *own]
    lines = [
        f"{len(table.samples)} samples in {audit.batches} batches of up to {audit.batch_size}, {table.algorithm}",
        f"{'tensor':<{width}} {'amax':>10} {'seen up to':>10} {'clipped':>8} {'SQNR dB':>8} {'halves':>7}",
    ]
    for key, seen in audit.tensors.items():
        sqnr = "" if seen.sqnr_db is None else f"{seen.sqnr_db:.1f}"
        halves = "" if seen.stability is None else f"{100 * seen.stability:.1f} %"
        state = "" if seen.state == "live" else f" {seen.state}"
        figures = f"{table.amax[key]:>10.4g} {seen.max:>10.4g} {100 * seen.clipped:>6.2f} % {sqnr:>8} {halves:>7}"
        lines.append(f"{key:<{width}} {figures}{state}")
    return [*lines, *(f"warning: {w}" for w in (*audit.warnings, *copies(table.samples)))]

"""trtpipe bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from calib.files import suffix_of
from trtpipe.atomic import write_whole
from trtpipe.bundle.signing import trusted_key
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import key_option
from trtpipe.cli.commands.options import (
    InputPath,
    OutputFile,
    Seconds,
    device_option,
    json_option,
    refuse_cpu,
    refuse_unused,
    set_option,
)
from trtpipe.cli.results import results
from trtpipe.errors import SUCCESS, ExitCode, MissingError
from trtpipe.evaluation.bench import FEWEST
from trtpipe.job.importable import on_path
from trtpipe.outputs import require_apart
from trtpipe.pipeline import bench
from trtpipe.pipeline.validate import plan_one
from trtpipe.report import bench_page
from trtpipe.runtime.compatibility import admit

if TYPE_CHECKING:
    from trtpipe.evaluation.bench import Bench


@click.command("bench", short_help="Latency, throughput and loss of every mode side by side.")
@click.argument("target", type=InputPath(piped=True))
@click.option(
    "--rounds",
    default=bench.ROUNDS,
    show_default=True,
    type=click.IntRange(1),
    help="Timed runs of each mode.",
)
@click.option(
    "--seconds",
    default=bench.SECONDS,
    show_default=True,
    type=Seconds(),
    help=f"Stop timing after this long, but not before {FEWEST} rounds.",
)
@click.option(
    "--samples",
    default=bench.SAMPLES,
    show_default=True,
    type=click.IntRange(1),
    help="Check samples that each mode runs.",
)
@click.option("--save", type=OutputFile(piped=True), help="Write the result as JSON here.")
@click.option("--csv", "csv_path", type=OutputFile(piped=True), help="Write the table as CSV here.")
@click.option("--plot", "plot_path", type=OutputFile(piped=True), help="Draw it to this .png or .svg.")
@device_option
@set_option
@key_option
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Show only the table.")
def command(
    target: Path,
    rounds: int,
    seconds: float,
    samples: int,
    save: Path | None,
    csv_path: Path | None,
    plot_path: Path | None,
    overrides: tuple[str, ...],
    key: Path | None,
    as_json: bool,
    quiet: bool,
) -> ExitCode:
    """Time every mode that TARGET can run in here, in turns, and compare their outputs.

    TARGET is a job file, a bundle, or a .json of --save, which is shown again without measuring. Exit code 3 where no
    mode can run here.
    """
    if plot_path is not None:
        bench_page.require_plot(plot_path)
    for written in (save, csv_path, plot_path):
        if written is not None:
            require_apart(written, target)
    if suffix_of(target) == ".json" and target.is_file():
        refuse_unused(("rounds", "seconds", "samples", "device", "overrides", "key"), "with a .json of --save")
        result = bench_page.read_bench(target)
    else:
        result = _measure(target, rounds, seconds, samples, overrides, key, quiet or as_json)
    if save is not None:
        write_whole(save, bench_page.bench_text(result))
    if csv_path is not None:
        write_whole(csv_path, bench_page.table_csv(result))
    if plot_path is not None:
        bench_page.plot(result, plot_path)
    if as_json:
        console.out_json(result)
    else:
        shown = bench_page.terminal if results().isatty() else bench_page.markdown
        console.out(shown(result).rstrip())
    return MissingError.exit_code if all(row.skipped for row in result.rows) else SUCCESS


def _measure(
    target: Path,
    rounds: int,
    seconds: float,
    samples: int,
    overrides: tuple[str, ...],
    key: Path | None,
    quiet: bool,
) -> Bench:
    kind = bench.require_target(target)
    if kind == "bundle" and overrides:
        raise click.UsageError("--set must not be given with a bundle: its job is settled.")
    if kind != "bundle":
        refuse_unused(("key",), "without a bundle")
    else:
        refuse_cpu("with a bundle")
    with console.Console(quiet=quiet).watching() as reporter:
        if kind == "bundle":
            bundle, _ = admit(target, trusted_key(key))
            return bench.bench_bundle(bundle, reporter, rounds=rounds, seconds=seconds, samples=samples)
        with on_path(None):
            job = plan_one(target, overrides, purpose="measure")
            return bench.bench_job(job, reporter, rounds=rounds, seconds=seconds, samples=samples)

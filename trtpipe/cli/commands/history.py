"""trtpipe history."""

from __future__ import annotations

from pathlib import Path

import click

from calib.files import suffix_of
from trtpipe.atomic import write_whole
from trtpipe.cli import console
from trtpipe.cli.commands.options import InputPath, OutputFile, json_option
from trtpipe.errors import SUCCESS, ExitCode, InputError, did_you_mean
from trtpipe.nightly.history import History
from trtpipe.nightly.history_plot import rows, svg
from trtpipe.nightly.options import HISTORY
from trtpipe.outputs import require_apart


@click.command("history", short_help="Show the past of a job.")
@click.argument("name", required=False)
@click.option(
    "--history",
    "file",
    default=Path("out") / HISTORY,
    show_default=True,
    type=InputPath(dir_okay=False),
    help="The SQLite file that `trtpipe nightly` writes.",
)
@click.option("--plot", type=OutputFile(piped=True), help="Also write the figures over time to this .svg file.")
@json_option
def command(name: str | None, file: Path, plot: Path | None, as_json: bool) -> ExitCode:
    """Show every night of the job NAME, the earliest first; without NAME, which jobs have a past."""
    if plot is not None:
        if name is None:
            raise click.UsageError("NAME must be given with --plot.")
        require_apart(plot, file)
        if suffix_of(plot) not in (".svg", ""):  # a pipe has none
            raise InputError(f"{plot}: must end in .svg (got {suffix_of(plot)}).")
    if not file.is_file():
        raise InputError(f"{file}: there is no such file. Run `trtpipe nightly`, or give --history.")
    if not file.stat().st_size:
        raise InputError(f"{file}: is empty: no night is in it. Run `trtpipe nightly`, or give --history.")
    with History(file) as history:
        names = history.names()
        if name is None:
            if as_json:
                console.out_json(names)
            else:
                for each in names:
                    console.out(each)
            return SUCCESS
        past = history.of_job(name)
    if not past:
        hint = did_you_mean(name, names)
        raise InputError(f"NAME: must be a job with a past (got {name!r}). {hint or 'Without NAME they are listed.'}")
    if as_json:
        console.out_json([{"run": p.run, "recorded": p.recorded, "green": p.green, "result": p.outcome} for p in past])
    else:
        for line in rows(past):
            console.out(line)
    if plot is not None:
        write_whole(plot, svg(name, past))
        console.err(f"plot: {console.relative(plot)}")
    return SUCCESS

"""trtpipe doctor."""

from __future__ import annotations

import click

from trtpipe.cli import console
from trtpipe.cli.commands.options import json_option
from trtpipe.errors import SUCCESS, ExitCode
from trtpipe.runtime import doctor


@click.command("doctor", short_help="Say what this machine can build and run.")
@json_option
def command(as_json: bool) -> ExitCode:
    """Say what this machine can build and run, what it lacks, and the commands that would add it.

    Every package that trtpipe requires, or a build needs, is imported in another process, for 60 seconds at most.
    """
    diagnosis = doctor.examine()
    if as_json:
        console.out_json(console.jsonable(diagnosis) | {"commands": list(diagnosis.commands)})
    else:
        console.out("\n".join(doctor.lines(diagnosis)))
    return SUCCESS

"""trtpipe schema."""

from __future__ import annotations

import click

from trtpipe.cli import console
from trtpipe.cli.commands.options import json_option
from trtpipe.job.json_schema import job_markdown, job_schema


@click.command("schema", short_help="Print the JSON Schema of the job file.")
@json_option
@click.option("--markdown", is_flag=True, help="Print the reference of the job file instead.")
def command(as_json: bool, markdown: bool) -> None:
    """Print the JSON Schema of the job file, for editors. (It is JSON with or without --json.)"""
    if markdown and as_json:
        raise click.UsageError("--markdown must not be given with --json.")
    if markdown:
        console.out(job_markdown().rstrip())
    else:
        console.out_json(job_schema())

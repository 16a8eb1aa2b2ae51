"""trtpipe schema."""

from __future__ import annotations

import click

from trtpipe.commands.options import json_option


@click.command("schema")
@json_option
def command(as_json: bool) -> None:
    """Print the JSON Schema of the job file, for editors. (It is JSON with or without --json.)"""
    from trtpipe import console
    from trtpipe.schema import job_schema

    console.out_json(job_schema())

"""trtpipe check."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.cli import console
from trtpipe.cli.commands.bundles import bundle_argument, graph_option, key_option, report_lines
from trtpipe.cli.commands.options import json_option
from trtpipe.errors import FAILED, SUCCESS, ExitCode
from trtpipe.runtime.recheck import recheck
from trtpipe.runtime.session import load


@click.command("check", short_help="Compare a bundle's outputs with its baseline's, here.")
@bundle_argument
@key_option
@graph_option
@json_option
def command(bundle: Path, key: Path | None, graph: bool, as_json: bool) -> ExitCode:
    """Run BUNDLE's engine (or graph) here on its golden inputs and compare with its baseline's outputs."""
    with load(bundle, key=key, graph=graph, as_written=True) as model:
        report = recheck(model)
    if as_json:
        console.out_json(report)
    else:
        console.out("\n".join(report_lines(report)))
    return SUCCESS if report.passed else FAILED

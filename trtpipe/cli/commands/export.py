"""trtpipe export."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.bundle.manifest import GRAPH
from trtpipe.bundle.signing import trusted_key
from trtpipe.bundle.triton import export_triton, foreign_format, serves_graph
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import bundle_argument, graph_option, key_option
from trtpipe.cli.commands.options import OutputFolder
from trtpipe.outputs import require_apart
from trtpipe.runtime.compatibility import admit, failure
from trtpipe.runtime.executor import serving_optimization
from trtpipe.runtime.onnxruntime import Optimization


@click.command("export", short_help="Write a bundle into a server's model repository.")
@bundle_argument
@click.option("--to", "server", required=True, type=click.Choice(["triton"]), help="What is to serve it.")
@click.argument("directory", type=OutputFolder())
@key_option
@graph_option
def command(bundle: Path, server: str, directory: Path, key: Path | None, graph: bool) -> None:
    """Write BUNDLE into the model repository DIRECTORY of a server."""
    require_apart(directory, bundle)
    opened, _ = admit(bundle, trusted_key(key))
    require_apart(directory / opened.manifest.name, bundle)
    if failed := failure(opened.manifest):
        console.err(f"warning: {bundle}: {failed}")
    level: Optimization = "all"
    notes: tuple[str, ...] = ()
    served = serves_graph(opened, graph) and GRAPH in opened.manifest.files
    if served and not foreign_format(opened.manifest):
        level, notes = serving_optimization(opened)
    folder, model = export_triton(opened, directory, graph=graph, optimization=level)
    for note in (*model.notes, *notes):
        console.err(f"note: {note}")
    console.out(str(folder))

"""trtpipe refit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from trtpipe.bundle.signing import trusted_key
from trtpipe.cli.commands.build import work
from trtpipe.cli.commands.bundles import bundle_argument, key_option, sign_option, signing
from trtpipe.cli.commands.options import InputPath, json_option, loudness_options, out_option
from trtpipe.cli.each import each
from trtpipe.errors import ExitCode
from trtpipe.pipeline.refit import refit


@click.command("refit", short_help="Give a built engine other weights, on its GPU.")
@bundle_argument
@click.option(
    "--weights",
    metavar="KIT",
    required=True,
    type=InputPath(file_okay=False),
    help="Kit of the same job, prepared from the other weights.",
)
@out_option("out", "Folder the bundle goes to, under the name of the kit's job.")
@json_option
@sign_option
@key_option
@loudness_options
def command(
    bundle: Path,
    weights: Path,
    out: Path,
    as_json: bool,
    sign: Path | None,
    key: Path | None,
    verbose: int,
    quiet: bool,
) -> ExitCode:
    """Give the engine of BUNDLE the weights of a kit, without building it again, check it, and write a bundle.

    The engine must have been built with build.refit: all or individual. Run it where the engine's GPU is.
    """
    task = partial(refit, bundle, weights, out, key=trusted_key(key))
    return each([work(bundle, None, task, signing(sign))], as_json=as_json, verbose=verbose, quiet=quiet)

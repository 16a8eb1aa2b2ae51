"""trtpipe prepare."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from trtpipe.cli.commands.build import load_jobs, work
from trtpipe.cli.commands.bundles import sign_option, signing
from trtpipe.cli.commands.options import (
    device_option,
    diagnose_option,
    jobs_argument,
    json_option,
    loudness_options,
    out_option,
    set_option,
)
from trtpipe.cli.each import each
from trtpipe.errors import ExitCode
from trtpipe.job.importable import on_path
from trtpipe.pipeline.kit import write_kit
from trtpipe.trt.flavour import require_version


@click.command("prepare", short_help="All but the engine: a kit to build on a device.")
@jobs_argument
@out_option("kits", "Folder the kits go to, each under the name of its job.")
@device_option
@set_option
@json_option
@sign_option
@diagnose_option
@click.option(
    "--for", "release", metavar="VERSION", help="TensorRT of the device, like 8.6.1; one of 10 or later if not given."
)
@loudness_options
@on_path(None)
def command(
    jobs: tuple[Path, ...],
    out: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    sign: Path | None,
    diagnose_seconds: float,
    release: str | None,
    verbose: int,
    quiet: bool,
) -> ExitCode:
    """Do all of each JOB but the engine, check its graph, and write a kit.

    `trtpipe build KIT` finishes it on a device that has NumPy and its TensorRT, but neither torch nor the data.
    """
    if release is not None:
        require_version(release)
    loaded = load_jobs(jobs, overrides, verbose, purpose="prepare", version=release)
    signs = signing(sign)
    works = [
        work(
            path, job, partial(write_kit, job, out, release=release, diagnose_seconds=diagnose_seconds), signs, kit=True
        )
        for path, job in loaded
    ]
    return each(works, as_json=as_json, verbose=verbose, quiet=quiet)

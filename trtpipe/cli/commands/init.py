"""trtpipe init."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.cli import console
from trtpipe.cli.commands.options import InputPath, OutputFolder, json_option
from trtpipe.cli.starter import DATA, JOB, starter
from trtpipe.errors import shell
from trtpipe.job.importable import on_path


@click.command("init", short_help="Write a working job to start from.")
@click.argument("folder", metavar="DIR", type=OutputFolder())
@click.option("--from", "source", metavar="SOURCE", help="timm:<model> or package.module:callable.")
@click.option("--images", type=InputPath(), help="Your images: a folder, or one with train and val in it.")
@json_option
@on_path(None)
def command(folder: Path, source: str | None, images: Path | None, as_json: bool) -> None:
    """Write a commented job into DIR that validates and builds: with its own small model and a few made-up images, or
    with yours."""
    written = starter(folder, source, images)
    if as_json:
        console.out_json({"job": folder / JOB, "written": written})
        return
    pictures = sum(path.suffix == ".png" for path in written)
    for path in written:
        if path.suffix != ".png":
            console.out(f"wrote {console.relative(path)}")
    if pictures:
        console.out(f"wrote {pictures} made-up images in {console.relative(folder / DATA)}; put your own there")
    job = console.relative(folder / JOB)
    console.out(f"next: {shell('trtpipe', 'validate', job)} && {shell('trtpipe', 'build', job)}")

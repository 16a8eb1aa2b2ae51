"""trtpipe unpack."""

from __future__ import annotations

from pathlib import Path

import click

from calib.files import suffix_of
from trtpipe.bundle.archive import unpack
from trtpipe.bundle.signing import checking, trusted_key
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import key_option
from trtpipe.cli.commands.options import InputPath
from trtpipe.errors import InputError
from trtpipe.outputs import require_writable_folder
from trtpipe.values import ARCHIVE_SUFFIX


@click.command("unpack", short_help=f"Make a bundle of a {ARCHIVE_SUFFIX} file.")
@click.argument("archive", type=InputPath())
@click.argument("destination", required=False, type=click.Path(path_type=Path))
@key_option
def command(archive: Path, destination: Path | None, key: Path | None) -> None:
    """Make the bundle in ARCHIVE at DESTINATION, or beside the archive under its name without .trtb."""
    if destination is None and suffix_of(archive) != ARCHIVE_SUFFIX:
        raise InputError(f"{archive}: does not end in {ARCHIVE_SUFFIX}. Give DESTINATION.")
    target = destination or archive.with_suffix("")
    require_writable_folder(target.parent)
    unpack(archive, target, checking(archive, trusted_key(key)))
    console.out(str(target))

"""trtpipe pack."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.bundle.archive import pack
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import bundle_argument
from trtpipe.cli.commands.options import OutputFile
from trtpipe.outputs import has_name, require_apart, require_writable_file
from trtpipe.values import ARCHIVE_SUFFIX


@click.command("pack", short_help=f"Write a bundle as one {ARCHIVE_SUFFIX} file.")
@bundle_argument
@click.argument("archive", required=False, type=OutputFile())
def command(bundle: Path, archive: Path | None) -> None:
    """Write BUNDLE, or a kit, as one file: ARCHIVE, or the bundle's name with .trtb beside it."""
    # Of "." and "..", too, the directory's own name.
    place = bundle if has_name(bundle) else bundle.resolve()
    target = archive or Path(f"{place}{ARCHIVE_SUFFIX}")
    require_apart(target, bundle)
    require_writable_file(target)
    pack(bundle, target)
    console.out(str(target))

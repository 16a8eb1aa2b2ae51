"""trtpipe keygen."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.bundle.signing import generate_key, key_id, load_public_keys
from trtpipe.cli import console
from trtpipe.cli.commands.options import OutputFile


@click.command("keygen", short_help="Make a key to sign bundles.")
@click.argument("path", type=OutputFile())
def command(path: Path) -> None:
    """Make an Ed25519 key to sign bundles: PATH, for its owner alone, and PATH.pub, for the devices."""
    public = generate_key(path)
    console.err(f"private key: {path} (keep it; sign with: trtpipe build --sign {path})")
    console.err(f"public key: {public}, id {key_id(load_public_keys(public)[0])} (give it to the devices)")

"""trtpipe keygen."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.bundle.signing import generate_key, key_id, load_public_keys
from trtpipe.cli import console
from trtpipe.cli.commands.options import NewPath
from trtpipe.errors import shell
from trtpipe.nightly.transport import AUTHORITY, CERTIFICATE, KEY, ROLES, WITHOUT_PAGES, make_credentials


@click.command("keygen", short_help="Make a key to sign bundles, or certificates for a fleet.")
@click.argument("path", type=NewPath())
@click.option("--fleet", is_flag=True, help="Make certificates for a fleet: its scheduler, workers, planner.")
def command(path: Path, fleet: bool) -> None:
    """Make an Ed25519 key to sign bundles: PATH, for its owner alone, and PATH.pub, for the devices.

    With --fleet, PATH is a new folder with certificates for a scheduler, its workers and `trtpipe nightly`.
    """
    if fleet:
        until = make_credentials(path)
        console.err(f"certificates until {until:%Y-%m-%d}; copy each folder to its machines, and keep them secret:")
        scheduler, worker, own = (path / role for role in ROLES)
        files = (
            "--tls-ca-file",
            scheduler / AUTHORITY,
            "--tls-cert",
            scheduler / CERTIFICATE,
            "--tls-key",
            scheduler / KEY,
        )
        address = "tls://SCHEDULER:8786"
        console.err(f"scheduler: {shell('dask', 'scheduler', '--protocol', 'tls', *files, *WITHOUT_PAGES)}")
        console.err(f"each worker: {shell('trtpipe', 'worker', address, '--tls', worker)}")
        planner = shell("trtpipe", "nightly", "JOB...", "--scheduler", address, "--tls", own)
        console.err(f"planner: {planner}")
        return
    public = generate_key(path)
    console.err(f"private key: {path} (keep it; sign with: {shell('trtpipe', 'build', '--sign', path)})")
    console.err(f"public key: {public}, id {key_id(load_public_keys(public)[0])} (give it to the devices)")

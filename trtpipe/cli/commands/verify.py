"""trtpipe verify."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.bundle.signing import trusted_key
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import bundle_argument, key_option, report_lines
from trtpipe.cli.commands.options import json_option
from trtpipe.errors import FAILED, SUCCESS, ExitCode, MissingError
from trtpipe.runtime.compatibility import admit, another_model, failure, problems, remarks
from trtpipe.runtime.device import device_of
from trtpipe.runtime.device_memory import lacking_memory
from trtpipe.runtime.recheck import recheck
from trtpipe.runtime.session import open_model


@click.command("verify", short_help="Say whether a bundle is whole, signed and fit for this device.")
@bundle_argument
@key_option
@click.option("--no-run", is_flag=True, help="Do not execute the golden inputs, only compare what is written.")
@json_option
def command(bundle: Path, key: Path | None, no_run: bool, as_json: bool) -> ExitCode:
    """Say whether BUNDLE (or a kit) is whole, signed and fit for this device, and gives its baseline's outputs.

    Exit code 0: yes; 2: it is damaged or not signed; 3: it does not fit this device; 1: its outputs are too far off, or
    were where it was made.
    """
    opened, signature = admit(bundle, trusted_key(key))
    manifest = opened.manifest
    device = device_of(manifest.build.target)
    mismatches, notes = problems(manifest, device), remarks(manifest, device)
    if manifest.kind == "kit" and (why := lacking_memory(manifest.build, device)):
        mismatches += (why,)
    report = None
    if manifest.kind == "bundle" and not mismatches and not no_run:
        with open_model(opened, as_written=True) as model:
            report = recheck(model)
    failed = failure(manifest)
    far_off = failed or (report is not None and not report.passed)
    code = MissingError.exit_code if mismatches else FAILED if far_off else SUCCESS
    if as_json:
        result = {"bundle": str(bundle), "kind": manifest.kind, "signature": signature, "mismatches": mismatches}
        console.out_json({**result, "notes": notes, "failure": failed, "check": report, "exit_code": code})
        return code
    console.out(f"{bundle}: {manifest.kind} {manifest.name}, {len(manifest.files)} files whole, {signature}")
    for line in mismatches:
        console.out(f"mismatch: {line}")
    if not mismatches:
        sure = not another_model(manifest.engine, device)
        console.out("fits this device" if sure else "loads on this device, and is built for another model of GPU")
    for line in notes:
        console.out(f"note: {line}")
    if failed:
        console.out(f"FAILED: {failed}")
    if report is not None:
        console.out("\n".join(report_lines(report)))
    return code

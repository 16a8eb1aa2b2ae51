"""Signatures of a night: the bundle of a green job is signed, and no other."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from pathlib import Path

from trtpipe.bundle.format import Sign, set_signature
from trtpipe.bundle.manifest import SIGNATURE
from trtpipe.errors import InputError
from trtpipe.nightly.outcome import THERE, JobOutcome
from trtpipe.values import MANIFEST


def sign_green(outcomes: MutableMapping[str, JobOutcome], sign: Sign) -> tuple[str, ...]:
    """Sign the bundle of every green job, and take the signature of an earlier night from every other that was judged.

    A job that ended in an error, or was cancelled, leaves the bundle of an earlier night as it was.

    Args:
        outcomes: the night's, by job; where a bundle was damaged since it was checked, an error takes its place.
        sign: as for `write_bundle`.

    Returns:
        A note of how many are signed, and one that names those that are not.
    """
    judged = {name: o for name, o in outcomes.items() if o.outcome in THERE}
    for name, outcome in judged.items():
        wanted = sign if outcome.green else None
        try:
            if not _stands(Path(outcome.bundle), wanted):
                set_signature(Path(outcome.bundle), wanted)
        except (InputError, OSError) as error:
            code, why = InputError.exit_code, f"not signed: {error}"
            outcomes[name] = dataclasses.replace(outcome, outcome="error", exit_code=code, error=why)
    others = [name for name in judged if not outcomes[name].green]
    notes = [f"signed {len(judged) - len(others)} bundles"]
    if others:
        notes.append(f"not signed, as not green: {', '.join(others)}")
    return tuple(notes)


def _stands(bundle: Path, sign: Sign | None) -> bool:
    """Whether the bundle, which the night has found whole, has the signature it should have (Ed25519's are unique)."""
    signature = bundle / SIGNATURE
    if sign is None:
        return not signature.exists()
    return signature.is_file() and signature.read_bytes() == sign((bundle / MANIFEST).read_bytes())

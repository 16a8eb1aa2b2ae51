"""Signatures of a night: a bundle that the night stands behind gets one, and any other has none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trtpipe.bundle import Sign, give_signature
from trtpipe.manifest import MANIFEST, SIGNATURE
from trtpipe.nightly_report import JobOutcome


def sign_green(outcomes: Iterable[JobOutcome], sign: Sign) -> tuple[str, ...]:
    """Sign the bundle of every green job, and take the signature of an earlier night from every other that was judged.

    A job that ended in an error, or was cancelled, leaves the bundle of an earlier night as it was.

    Returns:
        A note of how many are signed, and one that names those that are not.

    Raises:
        InputError: a bundle was damaged since it was checked.
    """
    judged = [o for o in outcomes if o.outcome in ("built", "reused")]
    for outcome in judged:
        path = Path(outcome.bundle)
        if not _stands(path, sign if outcome.green else None):
            give_signature(path, sign if outcome.green else None)
    others = [o.name for o in judged if not o.green]
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

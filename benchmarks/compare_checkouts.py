"""Whether two checkouts of trtpipe build the same: engine, graph, table and manifest of four examples, byte for byte.

    python benchmarks/compare_checkouts.py BEFORE AFTER [--job quickstart ...] [--digits data/digits]

Each checkout builds with its own code and this Python, in a folder of its own but of the same name, so that paths tell
nothing, with one thread and from the same digits. What a rebuild may change is left out of the manifest: versions,
times, the digests of the files that are compared themselves, and the line numbers of the examples' own sources. The
report is a page for people, and is not compared. Exits with 1 when anything else differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Jobs of configs/ that between them use INT8 and FP16, several inputs, several outputs and attention.
JOBS = ("quickstart", "two-inputs", "detector", "vit-b16-int8")
#: Compared byte for byte.
FILES = ("model.engine", "model.onnx", "calibration.json", "golden.safetensors")
#: Of a manifest: what may differ.
MAY_DIFFER = ("environment", "created", "fingerprint", "files", "digest")


def main() -> int:
    """Build everything twice and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--job", action="append", choices=JOBS, help="only these")
    parser.add_argument("--digits", type=Path, help="the quickstart's data; made by BEFORE when absent")
    given = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, "place")
        for job in given.job or JOBS:
            digits = given.digits
            if digits is None and job == "quickstart":
                digits = Path(scratch, "digits")
                called(["-m", "trtpipe.examples.digits", "make", str(digits)], Path(scratch), settings(given.before))
            sides = [build(checkout.resolve(), job, place, digits) for checkout in (given.before, given.after)]
            lines = compared(*sides)
            different += bool(lines)
            print(f"{job}: {'the same' if not lines else 'different'}", flush=True)
            for line in lines:
                print(f"  {line}", flush=True)
    return int(different > 0)


def settings(checkout: Path) -> dict[str, str]:
    """The environment in which Python finds the code of a checkout; one thread, as sums depend on their number."""
    return os.environ | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


def build(checkout: Path, job: str, place: Path, digits: Path | None) -> dict[str, bytes]:
    """The files of the bundle that a checkout builds; the same folder is used each time."""
    place.mkdir()
    try:
        shutil.copytree(checkout / "configs", place / "configs")
        if digits is not None:
            shutil.copytree(digits, place / "data" / "digits")
        called(["-m", "trtpipe", "build", f"configs/{job}.yaml", "-q", "-o", "out"], place, settings(checkout))
        return {path.name: path.read_bytes() for path in sorted((place / "out" / job).iterdir())}
    finally:
        shutil.rmtree(place)


def called(arguments: list[str], place: Path, environment: dict[str, str]) -> None:
    """Run Python; its messages are shown when it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def compared(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """A line for each difference between two bundles."""
    lines = [f"{name}: only {'before' if name in before else 'after'}" for name in sorted(before.keys() ^ after.keys())]
    for name in FILES:
        if name in before and name in after and before[name] != after[name]:
            sums = [hashlib.sha256(side[name]).hexdigest()[:12] for side in (before, after)]
            lines.append(f"{name}: {sums[0]} ({len(before[name])} bytes) -> {sums[1]} ({len(after[name])} bytes)")
    one, other = (flat(json.loads(side["manifest.json"])) for side in (before, after))
    lines += [
        f"manifest {key}: {one.get(key, 'absent')!s:.100} -> {other.get(key, 'absent')!s:.100}"
        for key in sorted(one.keys() | other.keys())
        if key.split(".")[0] not in MAY_DIFFER and one.get(key) != other.get(key)
    ]
    return lines


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a JSON value by its dotted path."""
    if isinstance(value, dict):
        found = {k: v for key, each in value.items() for k, v in flat(each, f"{path}.{key}").items()}
    elif isinstance(value, list):
        found = {k: v for i, each in enumerate(value) for k, v in flat(each, f"{path}.{i}").items()}
    else:
        return {path.lstrip("."): str(value).partition(":")[0] if path.endswith(".source") else value}
    return found or {path.lstrip("."): value}


if __name__ == "__main__":
    raise SystemExit(main())

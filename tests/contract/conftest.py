"""One stub site a TensorRT release, made once and kept in .cache/, which git ignores."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from releases import NEWEST_PYTHON, RELEASES, ROOT

TOOL = Path(__file__).with_name("stub_trt.py")


def _impossible() -> str:
    """Why a stub site cannot be made on this machine; empty when it can."""
    missing = [tool for tool in ("g++", "readelf", "nm") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} must be installed to make stub libraries"
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the bindings' wheels are for x86-64 Linux"
    return ""


@pytest.fixture(scope="session")
def site():
    """A function from a release to the path of its stub site."""
    if reason := _impossible():
        if os.environ.get("TRTPIPE_NO_SKIPS"):
            pytest.fail(reason)
        pytest.skip(reason)

    def made(release: str) -> Path:
        newest = NEWEST_PYTHON.get(release)
        if newest is not None and sys.version_info[:2] > newest:
            pytest.skip(f"TensorRT {release} has no bindings for this Python; {newest[0]}.{newest[1]} is its last")
        key = hashlib.sha256(TOOL.read_bytes()).hexdigest()[:12]
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        place = ROOT / ".cache" / "stub_trt" / f"{release}-{tag}-{key}"
        if not place.exists():
            draft = place.with_name(f"{place.name}.{os.getpid()}")
            draft.mkdir(parents=True)
            command = [sys.executable, str(TOOL), release, str(draft), "--dist", RELEASES[release]]
            ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
            if ran.returncode:
                shutil.rmtree(draft)
                pytest.fail(f"the bindings of TensorRT {release} must be downloaded and stubbed: {ran.stdout[-2000:]}")
            try:
                draft.rename(place)
            except OSError:  # another process was first
                shutil.rmtree(draft)
        return place

    return made


@pytest.fixture(scope="session")
def contract(site):
    """A function that runs contract cases with a release's bindings; the finished process.

    `source` is the folder that holds trtpipe and calib: this repository, or a mutated copy. `cases` selects by name.
    """

    def run(release: str, *, source: Path = ROOT, cases: str = "") -> subprocess.CompletedProcess[str]:
        files = sorted(str(f) for f in Path(__file__).parent.glob("cases_*.py"))
        options = ["-q", "-p", "stubbed", "--tb=short", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
        command = [sys.executable, "-m", "pytest", *options, *(["-k", cases] if cases else []), *files]
        path = os.pathsep.join(map(str, (site(release), source, Path(__file__).parent)))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop(
            "TRTPIPE_NO_SKIPS", None
        )  # what one release lacks is skipped: test_contract looks at the reasons
        return subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, timeout=300)

    return run

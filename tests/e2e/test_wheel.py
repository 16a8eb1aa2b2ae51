"""What a release is: a wheel and an sdist that hold what they should, and work in an environment with nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import shipping

import trtpipe

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.acceptance


def called(*command: object, cwd: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRTPIPE_PUBLIC_KEY")}
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=kept, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> list[str]:
    """Files of the repository that a release is of."""
    return called("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the sdist that `make dist` makes of a commit, in a folder with a file that git does not look at."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"  # a copy, so that the build leaves nothing here
    for name in tracked():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    called(sys.executable, "-m", "venv", folder / "builder", cwd=folder)
    called(folder / "builder/bin/pip", "install", "--quiet", "hatchling>=1.25", cwd=folder)
    (folder / "builder/.installed").touch()
    called("git", "init", "--quiet", cwd=source)
    called("git", "add", "--all", "--force", cwd=source)
    called("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "all of it", cwd=source)
    (source / ".git/info/exclude").write_text("/trtpipe/of_my_own.py\n")
    (source / "trtpipe/of_my_own.py").write_text("SECRET = 1\n")
    called("make", "dist", f"VENV={folder / 'builder'}", cwd=source)
    return source / "dist"


def test_the_wheel_holds_the_packages_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"trtpipe-{trtpipe.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        metadata = archive.read(f"trtpipe-{trtpipe.__version__}.dist-info/METADATA").decode()
    assert names == {n for n in tracked() if n.startswith(("trtpipe/", "calib/"))}
    assert {"trtpipe/report/templates/report.html", "trtpipe/report/templates/sort.js", "trtpipe/py.typed"} <= names
    assert re.search(r"^Requires-Dist: numpy", metadata, re.M)
    assert "Provides-Extra: build" in metadata
    assert "License-File: LICENSE" in metadata


def test_the_sdist_holds_what_a_packager_needs(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    top = f"trtpipe-{trtpipe.__version__}/"
    with tarfile.open(sdist) as archive:
        names = {n.removeprefix(top) for n in archive.getnames()}
    inside = ("trtpipe/", "calib/", "tests/", "configs/", "docs/", "benchmarks/", "docker/")
    assert {n for n in names if n.startswith(inside)} == {n for n in tracked() if n.startswith(inside)}
    rest = {n for n in names if not n.startswith(inside)}
    assert rest == {n for n in tracked() if not n.startswith(inside)} | {"PKG-INFO"}


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_works_where_nothing_else_is(kind: str, dist: Path, tmp_path: Path) -> None:
    (package,) = dist.glob(kind)
    called(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    called(tmp_path / "venv/bin/pip", "install", "--quiet", package, "onnxruntime", cwd=tmp_path)
    program = tmp_path / "venv/bin/trtpipe"
    assert called(program, "--version", cwd=tmp_path) == f"trtpipe {trtpipe.__version__}\n"
    job = ROOT / "configs" / "detector.yaml"
    assert called(program, "validate", "--job-only", "--for", "1.7.1", job, cwd=tmp_path) == f"{job}: ok\n"
    shipping.bundle(tmp_path / "bundle")
    verified = json.loads(called(program, "verify", tmp_path / "bundle", "--json", cwd=tmp_path))
    assert verified["check"]["passed"] is True

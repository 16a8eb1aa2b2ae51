"""Every example is a working job: all are judged for their own target, the light ones are built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from digits_data import link_digits

from trtpipe.pipeline.validate import validate

CONFIGS = pages.ROOT / "configs"
JOBS = sorted(CONFIGS.glob("*.yaml"))
#: Those that a page of the docs or another test builds, those that are for a device, and those that are built here.
ELSEWHERE = {
    "quickstart": "README.md",
    "detector": "docs/examples.md",
    "two-inputs": "docs/shipping.md",
    "torch-free-edge": "docs/shipping.md",
    "segmentation": "tests/pipeline/test_metrics_line.py",
}
ON_A_DEVICE = (
    "datacenter-torch-tensorrt-int8",
    "jetson-orin-nano-torch2trt-fp16",
    "jetson-orin-torch2trt-int8-dla",
)
BUILT = (
    "custom-dataset",
    "onnx-file",
    "resnet50-int8-rtx",
    "efficientnet-b4-fp16",
    "bit-m-r101x1-fp16",
    "vit-b16-int8",
)
#: What is left out here of an example: the corrections of the largest, whose own time is that of all others together
#: (the quickstart, the detector and the starter are built with theirs), and samples of the slowest.
LESS = {
    "resnet50-int8-rtx": ("--set", "calibration.corrections=false", "--set", "check.samples=4"),
    "vit-b16-int8": ("--set", "calibration.corrections=false", "--set", "check.samples=4"),
    "bit-m-r101x1-fp16": ("--set", "check.samples=2"),
    "efficientnet-b4-fp16": ("--set", "check.samples=4"),
}


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_every_example_is_right_for_its_own_target(path: Path) -> None:
    text = path.read_text()
    named = re.search(r"--for ([\d.]+)", text)
    found = validate(path, (), here=False, version=None if named is None else named[1])
    assert [str(problem) for problem in found] == []


def test_every_example_is_built_or_says_for_which_device_it_is() -> None:
    assert sorted(p.stem for p in JOBS) == sorted((*ELSEWHERE, *ON_A_DEVICE, *BUILT))
    assert all(name in (pages.ROOT / file).read_text() for name, file in ELSEWHERE.items())
    assert all("target: tensorrt\n" in (CONFIGS / f"{name}.yaml").read_text() for name in ON_A_DEVICE)


def test_the_matrix_makes_six_right_jobs() -> None:
    assert [str(p) for p in validate(CONFIGS / "nightly" / "digits.yaml", (), here=False, version=None)] == []


@pytest.mark.parametrize("path", [*JOBS, *(CONFIGS / "nightly").glob("*.yaml")], ids=lambda p: p.stem)
def test_editors_find_the_schema_and_the_docs_the_example(path: Path) -> None:
    first, text = path.read_text().splitlines()[0], (pages.ROOT / "docs" / "examples.md").read_text()
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / schema).resolve() == (CONFIGS / "job.schema.json").resolve()
    assert f"](../{path.relative_to(pages.ROOT)})" in text
    if path.parent == CONFIGS:
        assert re.search(rf"^name: {re.escape(path.stem)}$", path.read_text(), re.M)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", BUILT)
def test_examples_build(name: str, tmp_path: Path, digits: Path) -> None:
    from trtpipe.examples.digits import write_onnx

    shutil.copytree(CONFIGS, tmp_path / "configs")
    if "digits" in (CONFIGS / f"{name}.yaml").read_text():
        link_digits(digits, tmp_path / "data" / "digits")
    if name == "onnx-file":
        write_onnx(tmp_path / "data" / "digits")
    command = [sys.executable, "-m", "trtpipe", "build", f"configs/{name}.yaml", "-q", *LESS.get(name, ())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=pages.environment(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / name / "report.html").stat().st_size > 10_000

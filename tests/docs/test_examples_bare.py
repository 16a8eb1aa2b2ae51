"""Every example is judged for its own target where nothing but the package is: no data, no PyTorch, no TensorRT.

Here with the imports and the metadata of everything else hidden; slowly, in a fresh environment from an index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest

CONFIGS = pages.ROOT / "configs"
EXAMPLES = sorted([*CONFIGS.glob("*.yaml"), *(CONFIGS / "nightly").glob("*.yaml")])
#: What the light core does not bring: modules and the distributions they come in.
ABSENT = ("torch", "torchvision", "torchao", "timm", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "jinja2", "matplotlib",
          "numba", "networkx", "sklearn", "scikit-learn", "scipy", "tensorrt", "tensorrt_rtx", "tensorrt-rtx", "torch_tensorrt",
          "torch-tensorrt", "torch-tensorrt-rtx", "torch2trt", "cuda", "cuda-python", "pycuda", "dask", "distributed",
          "fsspec")  # fmt: skip
BARE = f"""
import importlib.metadata, sys
from importlib.machinery import PathFinder
ABSENT = {ABSENT!r}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Blocked())
found, spec = importlib.metadata.version, PathFinder.find_spec
def version(name):
    if name.lower() in ABSENT or name.lower().startswith("tensorrt"):
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else spec(name, path, target)
importlib.metadata.version, PathFinder.find_spec = version, find_spec
from trtpipe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def of_target(path: Path) -> list[str]:
    """The options by which docs/examples.md judges a job for its own target: the release that the file names."""
    text = path.read_text()
    named = re.search(r"--for ([\d.]+)", text)
    if named is None and "target: onnxruntime" not in text:
        assert "tensorrt_rtx" in text, f"{path.name} must name a release, with --for, in its comment"
        return ["--job-only", "--for", "1.7.1"]
    return ["--job-only", *(() if named is None else ("--for", named[1]))]


def validated(trtpipe: list[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRTPIPE", "PYTEST", "PYTHON"))}
    if trtpipe[0] == sys.executable:
        environment["PYTHONPATH"] = str(pages.ROOT)
    command = [*trtpipe, "validate", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


def every_example_passes(trtpipe: list[str], folder: Path) -> None:
    shutil.copytree(CONFIGS, folder / "configs")
    for path in EXAMPLES:
        name = str(path.relative_to(pages.ROOT))
        done = validated(trtpipe, folder, *of_target(path), name)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{name}: ok\n", "")


def test_every_example_passes_with_all_else_hidden(tmp_path: Path) -> None:
    every_example_passes([sys.executable, "-c", BARE], tmp_path)


def test_what_is_missing_is_said_and_how_to_judge_the_job_alone(tmp_path: Path) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    done = validated([sys.executable, "-c", BARE], tmp_path, "configs/quickstart.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    problems = [re.sub(r"^configs/quickstart.yaml:\d+: ", "", line) for line in done.stderr.splitlines()]
    data = f"It is {tmp_path.resolve()}/data/digits"
    beside = "from the folder of the job file."
    assert problems == [
        "model: torch, onnx, onnxscript, onnxruntime, numba, networkx and jinja2 are not installed. Run: pip install 'trtpipe[build]'",
        "model.weights: must be a file that exists (got '../data/digits/resnet.safetensors': nothing there). "
        f"{data}/resnet.safetensors, {beside}",
        "precision.int8_mode: torchao is not installed. Run: pip install 'trtpipe[build]'",
        "calibration.images: must be a folder that exists (got '../data/digits/calib': nothing there). "
        f"{data}/calib, {beside}",
        "build.target: tensorrt_rtx is not installed. Run: pip install 'trtpipe[rtx]'",
        f"check.images: must be a folder that exists (got '../data/digits/val': nothing there). {data}/val, {beside}",
        "check.images: torchvision is not installed. Run: pip install 'trtpipe[build]'",
        "configs/quickstart.yaml: the job is right but for data, modules, packages or a GPU that are not here "
        "(--job-only leaves those out).",
    ]


def test_a_factory_of_a_package_that_an_extra_brings(tmp_path: Path) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    for name, package, extra in (
        ("bit-m-r101x1-fp16", "timm", "examples"),
        ("resnet50-int8-rtx", "torchvision", "build"),
    ):
        done = validated([sys.executable, "-c", BARE], tmp_path, f"configs/{name}.yaml")
        assert done.returncode == 3  # nothing is wrong with the job
        step = f"model.factory: {package} is not installed. Run: pip install 'trtpipe[{extra}]'\n"
        assert step in done.stderr


def test_a_job_that_its_target_cannot_honour_fails_there_too(tmp_path: Path) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    dla = ("--job-only", "--for", "11.0.0", "configs/jetson-orin-torch2trt-int8-dla.yaml")
    done = validated([sys.executable, "-c", BARE], tmp_path, *dla)
    assert done.returncode == 2
    assert "build.default_device_type: TensorRT 11.0.0 does not support DLA" in done.stderr
    assert "--job-only" not in done.stderr


@pytest.mark.acceptance
def test_every_example_passes_in_an_environment_with_nothing_but_the_package(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: object) -> str:
        done = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = tmp_path / "venv" / "bin" / "pip"
    run(pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "wheel", pages.ROOT)
    run(pip, "install", "--quiet", *(tmp_path / "wheel").glob("trtpipe-*.whl"))
    installed = {package["name"].lower() for package in json.loads(run(pip, "list", "--format=json"))}
    assert "trtpipe" in installed
    assert not installed & set(ABSENT)
    (tmp_path / "empty").mkdir()
    every_example_passes([str(tmp_path / "venv" / "bin" / "trtpipe")], tmp_path / "empty")

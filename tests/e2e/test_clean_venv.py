"""Devices as they are: fresh environments with the light core and one runtime, nothing else; needs a package index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtpipe.bundle.format import read_bundle

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.acceptance

#: What no device should need.
ABSENT = ("torch", "torchvision", "torchao", "onnx", "onnxscript", "numba", "matplotlib", "scikit-learn")


def called(*command: object, cwd: Path = ROOT) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRTPIPE_PUBLIC_KEY")}
    ran = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, cwd=cwd, env=environment, timeout=900, check=False
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This trtpipe's, built from a copy, so that the build leaves nothing here."""
    folder = tmp_path_factory.mktemp("wheel")
    called(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (made,) = folder.iterdir()
    return made


def environment(path: Path, wheel: Path, *packages: str, python: str = sys.executable) -> Path:
    """A fresh virtual environment with this trtpipe's light core and `packages`; returns its `trtpipe`."""
    called(python, "-m", "venv", path)
    called(path / "bin/pip", "install", "--quiet", wheel, *packages)
    installed = {p["name"].lower() for p in json.loads(called(path / "bin/pip", "list", "--format=json"))}
    assert not installed & set(ABSENT)
    return path / "bin" / "trtpipe"


@pytest.fixture(scope="module")
def data(digits: Path) -> None:
    """The quickstart's images and weights, where its job looks for them."""
    if not (ROOT / "data/digits/resnet.safetensors").exists():
        shutil.copytree(digits, ROOT / "data/digits", dirs_exist_ok=True)


def line(command: str, out: Path, *settings: str) -> Path:
    """`trtpipe build` or `prepare` of the quickstart, in this environment."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    called(sys.executable, "-m", "trtpipe", command, "configs/quickstart.yaml", "-q", "-o", out, *overrides)
    return out / "quickstart"


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory, data: None) -> Path:
    """The quickstart's bundle for onnxruntime."""
    out = tmp_path_factory.mktemp("portable")
    return line("build", out, "build.target=onnxruntime", "build.compute_capability=[]")


def interpreters() -> dict[str, str]:
    """The supported Pythons that are here, by version: this one is."""
    found = {f"3.{minor}": shutil.which(f"python3.{minor}") for minor in range(10, 14)}
    found[f"3.{sys.version_info.minor}"] = sys.executable

    def runs(program: str) -> bool:
        return not subprocess.run([program, "-c", ""], check=False, capture_output=True).returncode

    return {version: program for version, program in found.items() if program is not None and runs(program)}


@pytest.mark.parametrize("python", interpreters())
def test_verify_and_run_with_onnxruntime_alone(tmp_path: Path, wheel: Path, portable: Path, python: str) -> None:
    interpreter = interpreters()[python]
    bundle = portable
    trtpipe = environment(tmp_path / "venv", wheel, "onnxruntime", python=interpreter)
    verified = json.loads(called(trtpipe, "verify", bundle, "--json", cwd=tmp_path))
    assert verified["exit_code"] == 0
    assert verified["check"]["passed"] is True
    rows = [json.loads(r) for r in called(trtpipe, "run", bundle, ROOT / "data/digits/val", cwd=tmp_path).splitlines()]
    assert len(rows) == 360
    accuracy = sum(r["label"] == r["truth"] for r in rows) / len(rows)
    check = read_bundle(bundle).manifest.check
    assert check is not None
    stated = next(m.value for m in check.metrics if m.name == "accuracy_engine")
    print(f"Python {python}: accuracy here {accuracy:.6f}, in the manifest {stated:.6f}")
    if verified["notes"]:
        # The newest ONNX Runtime for this Python is another one than checked the bundle, and verify says so.
        assert verified["notes"][0].startswith("ONNX Runtime is ")
        assert abs(accuracy - stated) <= 0.01
    else:
        assert abs(accuracy - stated) <= 0.002


@pytest.fixture(scope="module")
def with_rtx_alone(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The `trtpipe` of a device that has TensorRT-RTX and nothing else."""
    return environment(tmp_path_factory.mktemp("rtx") / "venv", wheel, "tensorrt-rtx>=1.7.1,<1.8")


@pytest.mark.parametrize("batch", ["dynamic", "static"])
def test_a_kit_is_built_with_rtx_alone(tmp_path: Path, data: None, with_rtx_alone: Path, batch: str) -> None:
    settings = []
    if batch == "static":
        settings = ["inputs.image={dtype: float32, shape: [8, 1, 32, 32]}"]
        settings += ["calibration.batch_size=8", "calibration.samples=352"]
    kit = line("prepare", tmp_path / "kits", *settings)
    direct = read_bundle(line("build", tmp_path / "direct", *settings)).read("model.engine")
    called(with_rtx_alone, "build", kit, "-q", "-o", tmp_path / "out", cwd=tmp_path)
    engine = read_bundle(tmp_path / "out" / "quickstart").read("model.engine")
    different = sum(a != b for a, b in zip(engine, direct, strict=True))
    print(f"{batch}: {different} of {len(engine)} bytes differ")
    assert different == 0


def test_the_light_core_is_light(tmp_path: Path, wheel: Path) -> None:
    """Under 80 MB of packages to fetch, and imported in less processor time than NumPy."""
    trtpipe = environment(tmp_path / "venv", wheel)
    python, wheels = trtpipe.parent / "python", tmp_path / "wheels"
    called(python, "-m", "pip", "download", "--quiet", "-d", wheels, wheel)
    fetched_mb = sum(p.stat().st_size for p in wheels.iterdir()) / 1e6
    figures: Any = json.loads(called(python, ROOT / "benchmarks/install_size.py", "--json", cwd=tmp_path))
    print(f"{fetched_mb:.1f} MB in {len(list(wheels.iterdir()))} packages to fetch; installed: {figures}")
    assert fetched_mb < 80
    assert figures["import_cpu_s"] < figures["import_numpy_cpu_s"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_dependency_has_a_wheel(tmp_path: Path, python: str, machine: str) -> None:
    """On every supported Python and platform: a device has no compiler. Asks the index, installs nothing."""
    import tomllib

    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    platforms = [f"--platform=manylinux{tag}_{machine}" for tag in ("2014", "_2_17", "_2_28", "_2_34")]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    command += [f"--target={tmp_path}", *requirements]
    found = json.loads(called(*command))["install"]
    names = {item["metadata"]["name"].lower() for item in found}
    assert {n.replace("_", "-") for n in names} >= {"numpy", "pydantic-core", "pillow", "cryptography", "safetensors"}
    for item in found:
        wheel = item["download_info"]["url"].rsplit("/", 1)[-1]
        print(f"{python} {machine}: {wheel}")
        assert wheel.endswith(".whl")
        assert wheel.endswith("-any.whl") or machine in wheel

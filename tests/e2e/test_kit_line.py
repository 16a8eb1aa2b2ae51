"""A job to a kit, the kit to a bundle in an interpreter without torch, and the same bundle built directly."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtpipe.bundle import signing
from trtpipe.bundle.format import Bundle, read_bundle
from trtpipe.bundle.kit import NOT_EXECUTED
from trtpipe.cli.main import main
from trtpipe.runtime import executor
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt import driver
from trtpipe.trt.driver import Driver, Gpu
from trtpipe.trt.flavour import installed

FACTORY = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, 1, 1), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4),
    )
"""

JOB = """
name: tiny
model: {factory: "tiny_kit_net:net"}
inputs:
  image: {dtype: float32, shape: [BATCH, 3, 16, 16]RANGE}
outputs:
  logits: {dtype: float32}
precision: {int8_mode: true}
calibration: {images: images, batch_size: 4}
build: {target: TARGET, compute_capability: CAPABILITY}
check: {images: images, batch_size: 4, limits: {relative_l2_max: 0.1}}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from PIL import Image

    (tmp_path / "tiny_kit_net.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.clip(random.normal(random.integers(0, 256, 3), 30, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path


def job(project: Path, target: str, *, dynamic: bool) -> Path:
    text = JOB.replace("BATCH", "N" if dynamic else "4").replace(
        "RANGE", ", N: {min: 1, opt: 4, max: 8}" if dynamic else ""
    )
    text = text.replace("TARGET", target).replace("CAPABILITY", '["8.6"]' if target == "tensorrt_rtx" else "[]")
    (project / "job.yaml").write_text(text)
    return project / "job.yaml"


def without_torch(*arguments: str) -> None:
    """A command in an interpreter where nothing of [build] can be imported, but what the target needs."""
    code = f"""
import sys
for name in ("torch", "torchvision", "torchao", "onnx", "onnxscript", "onnxruntime", "numba", "matplotlib"):
    sys.modules[name] = None
from trtpipe.cli.main import main
sys.exit(main({list(arguments)!r}))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr


def differences(one: Bundle, other: Bundle) -> set[str]:
    """Keys of the manifest that are not equal, its own digest aside."""
    a, b = (json.loads(x.manifest_bytes) for x in (one, other))
    return {key for key in a | b if a.get(key) != b.get(key)} - {"digest"}


def built(project: Path, made: Path) -> tuple[Bundle, Bundle, Bundle]:
    """(kit, the bundle of the kit, the bundle of the job)."""
    assert main(["build", str(made), "-o", str(project / "direct"), "-q"]) == 0
    assert main(["prepare", str(made), "-o", str(project / "kits"), "-q"]) == 0
    without_torch("build", str(project / "kits" / "tiny"), "-o", str(project / "out"), "-q")
    kit, finished, direct = (read_bundle(project / folder / "tiny") for folder in ("kits", "out", "direct"))
    return kit, finished, direct


@pytest.mark.parametrize("dynamic", [False, True])
def test_rtx_kit_is_byte_for_byte_the_direct_build(project: Path, dynamic: bool) -> None:
    kit, finished, direct = built(project, job(project, "tensorrt_rtx", dynamic=dynamic))
    for name in ("model.engine", "model.onnx", "golden.safetensors", "calibration.json"):
        assert finished.read(name) == direct.read(name), name
    # The kit's engine has not been executed, and says so; all else is the same, the fingerprint too.
    # A device without onnx does not look for the INT8 weights in its engine.
    assert differences(finished, direct) <= {"check", "notes", "files", "engine"}
    engines = (finished.manifest.engine, direct.manifest.engine)
    assert engines[0] == engines[1].model_copy(update={"int8_weights": None})
    assert main(["build", str(project / "kits" / "tiny"), "-o", str(project / "with-onnx"), "-q"]) == 0
    with_onnx = read_bundle(project / "with-onnx" / "tiny")
    assert with_onnx.manifest.engine == direct.manifest.engine
    assert direct.manifest.engine.int8_weights is not None
    own = [n for n in with_onnx.manifest.notes if n not in (NOT_EXECUTED, *direct.manifest.notes)]
    assert own == ["the kit was taken as it is: unsigned, and this device has no key that demands a signature (--key)"]
    shared = [n for n in with_onnx.manifest.notes if n in direct.manifest.notes]
    assert shared == [n for n in direct.manifest.notes if n in shared]
    files = (finished.manifest.files, direct.manifest.files)
    assert {n for n in (*files[0], *files[1]) if files[0].get(n) != files[1].get(n)} <= {"report.html"}
    assert kit.golden().samples == 12
    assert finished.manifest.fingerprint != kit.manifest.fingerprint


def test_a_kit_for_a_tensorrt_that_is_not_here(project: Path, capsys: Any) -> None:
    """Prepared on any machine; the TensorRT of the device alone compiles it."""
    if "tensorrt" in installed():
        pytest.skip("TensorRT is installed here")
    made = job(project, "tensorrt", dynamic=False)
    assert main(["prepare", str(made), "-o", str(project / "kits"), "-q"]) == 0
    capsys.readouterr()
    kit = project / "kits" / "tiny"
    assert main(["verify", str(kit)]) == 3
    assert "mismatch: runtime: TensorRT is not installed, and this kit is built with it" in capsys.readouterr().out
    assert main(["build", str(kit), "-o", str(project / "out")]) == 3
    assert "runtime: TensorRT is not installed, and this kit is built with it" in capsys.readouterr().err


def test_onnxruntime_kit(project: Path, capsys: Any) -> None:
    made = job(project, "onnxruntime", dynamic=True)
    public = signing.generate_key(project / "key")
    assert main(["prepare", str(made), "-o", str(project / "kits"), "-q", "--sign", str(project / "key")]) == 0
    kit = str(project / "kits" / "tiny")
    assert main(["verify", kit, "--key", str(public)]) == 0
    other = signing.generate_key(project / "other")
    assert main(["build", kit, "-o", str(project / "out"), "--key", str(other)]) == 2
    assert "its signature does not fit" in capsys.readouterr().err
    assert not (project / "out").exists()
    assert (
        main(["build", kit, "-o", str(project / "out"), "--key", str(public), "--sign", str(project / "key"), "-q"])
        == 0
    )
    assert main(["verify", str(project / "out" / "tiny"), "--key", str(public)]) == 0
    check = read_bundle(project / "out" / "tiny").manifest.check
    assert (check.executed, check.runner) == ("graph", f"onnxruntime {metadata.version('onnxruntime')}")
    assert main(["build", kit, "-o", str(project / "kits")]) == 2
    assert "the bundle would replace its own kit" in capsys.readouterr().err
    assert main(["build", kit, "--set", "build.target=tensorrt"]) == 2
    assert "--set must not be given with a kit" in capsys.readouterr().err
    assert main(["build", str(project / "out" / "tiny"), "-o", str(project / "again")]) == 2
    assert "is a finished bundle, not a kit" in capsys.readouterr().err


def test_a_kit_is_checked_by_what_executes_it_where_it_is_finished(
    project: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ONNX Runtime that gives other numbers than that of the kit's machine."""
    made = job(project, "onnxruntime", dynamic=True)
    assert main(["prepare", str(made), "-o", str(project / "kits"), "-q"]) == 0
    kit, rightly = str(project / "kits" / "tiny"), OrtRunner.run
    monkeypatch.setattr(OrtRunner, "run", lambda self, x: {n: -y for n, y in rightly(self, x).items()})
    assert main(["build", kit, "-o", str(project / "out"), "-q"]) == 1
    assert "tiny: FAILED" in capsys.readouterr().out
    assert read_bundle(project / "out" / "tiny").manifest.failed


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (Driver(problem="libcuda.so.1, the NVIDIA driver's library, is not on this machine", installed=False), None),
        (Driver(problem="the NVIDIA driver does not start: 999"), "no GPU can be used: the NVIDIA driver does not"),
        (Driver("13.0", (Gpu(0, "T4", "7.5", 8 << 30), Gpu(1, "RTX", "8.6", 8 << 30))),
         "Or use RTX, which is here too: set CUDA_VISIBLE_DEVICES=1."),
        (Driver("12.4", (Gpu(0, "RTX", "8.6", 8 << 30),)), "must have a driver of CUDA 13 (got CUDA 12.4)"),
    ],
)  # fmt: skip
def test_a_finished_kit_says_why_no_gpu_executed_its_engine(
    gpus: Driver, said: str | None, project: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(project, "tensorrt_rtx", dynamic=False)
    assert main(["prepare", str(made), "-o", str(project / "kits"), "-q"]) == 0
    monkeypatch.setattr(driver, "probe", lambda: gpus)
    monkeypatch.setattr(executor, "invalid_here", lambda plan: "")
    assert main(["build", str(project / "kits" / "tiny"), "-o", str(project / "out")]) == 0
    notes = read_bundle(project / "out" / "tiny").manifest.check.notes
    assert NOT_EXECUTED in notes
    assert any(said in n for n in notes) if said else notes[-1] == NOT_EXECUTED
    assert said is None or said in capsys.readouterr().out

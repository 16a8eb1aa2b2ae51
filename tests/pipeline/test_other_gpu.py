"""A build host with a GPU that the job is not for: the engine is built, its graph is checked, and that is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtpipe.bundle.format import read_bundle
from trtpipe.cli.main import main
from trtpipe.runtime import device
from trtpipe.trt import driver

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

NETWORK = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3))
"""
JOB = """
name: foreign
model: {factory: small_network_for_another_gpu:make}
inputs: {x: {shape: [N, 1, 8, 8], N: {min: 1, opt: 2, max: 8}}}
outputs: {y: {}}
build: {target: tensorrt_rtx, compute_capability: [8.6, 8.9]}
check: {arrays: x.npy, batch_size: 4}
"""
WHY = (
    "compute capability: the engine must run on 8.6, 8.9 (got 9.0, NVIDIA H100). Build the bundle for "
    "target tensorrt on this device."
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small_network_for_another_gpu.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(10, 1, 8, 8)).astype(np.float32))
    (tmp_path / "job.yaml").write_text(JOB)
    h100 = driver.Driver("13.0", (driver.Gpu(0, "NVIDIA H100", "9.0", 80 << 30),))
    monkeypatch.setattr(driver, "probe", lambda: h100)
    assert device.this_device().compute_capability == "9.0"
    return tmp_path / "job.yaml"


def test_a_host_with_another_gpu_builds_checks_the_graph_and_says_so(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(job), "-o", str(job.parent / "out")]) == 0, capsys.readouterr().err
    manifest = read_bundle(job.parent / "out" / "foreign").manifest
    assert manifest.check is not None
    assert (manifest.check.executed, manifest.check.passed) == ("graph", True)
    note = f"the graph was executed, as the engine does not run on this machine: {WHY}"
    assert note in manifest.check.notes
    assert note in manifest.notes
    assert manifest.engine is not None
    assert manifest.engine.compute_capabilities == ("8.6", "8.9")
    assert note in capsys.readouterr().out

    assert main(["bench", str(job.parent / "out" / "foreign"), "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert f"- engine: {WHY}" in said
    assert main(["verify", str(job.parent / "out" / "foreign")]) == 3
    assert f"mismatch: {WHY}" in capsys.readouterr().out


def test_a_kit_is_finished_there_with_its_graphs_check(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(job), "-o", str(job.parent / "kits")]) == 0
    assert main(["build", str(job.parent / "kits" / "foreign"), "-o", str(job.parent / "out")]) == 0
    manifest = read_bundle(job.parent / "out" / "foreign").manifest
    assert manifest.check is not None
    assert (manifest.check.executed, manifest.check.passed) == ("graph", True)
    assert any(note.startswith("No GPU could execute the engine where the kit was finished") for note in manifest.notes)
    capsys.readouterr()
    assert main(["build", str(job), "-o", str(job.parent / "strict"), "--set", "check.require=engine"]) == 3
    assert "check.require: cannot be engine on this machine, whose GPU does not run the" in capsys.readouterr().err

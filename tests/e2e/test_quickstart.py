"""The quickstart, end to end: real scans, a trained network, a real TensorRT-RTX engine, a check that can fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_data import link_digits

from trtpipe.bundle.format import Bundle, read_bundle
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import Built, build
from trtpipe.progress import Silent
from trtpipe.trt.isolated import build_isolated
from trtpipe.trt.plan import read_header
from trtpipe.values import OnnxModel

JOB = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """A folder with configs/quickstart.yaml and data/digits as the Makefile makes them."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "configs").mkdir()
    shutil.copy(JOB, folder / "configs")
    link_digits(digits, folder / "data" / "digits")
    return folder


@pytest.fixture(scope="session")
def built(place: Path) -> Built:
    return build(read_job(place / "configs" / "quickstart.yaml"), place / "out", Silent())


@pytest.fixture(scope="session")
def bundle(built: Built) -> Bundle:
    return read_bundle(built.bundle.path)


def metric(built: Built, name: str) -> float:
    return next(m.value for m in built.report.metrics if m.name == name)


def test_the_folders_are_disjoint(place: Path) -> None:
    seen: dict[str, str] = {}
    for split in ("train", "calib", "val"):
        for path in (place / "data" / "digits" / split).rglob("*.png"):
            assert seen.setdefault(path.name, split) == split
    assert len(seen) == 1797


def test_the_check_passes_on_every_val_image(built: Built) -> None:
    assert built.report.passed
    assert built.report.executed == "graph"
    assert built.report.samples == 360
    assert metric(built, "accuracy_baseline") >= 0.97
    assert abs(metric(built, "accuracy_drop")) <= 0.01
    assert metric(built, "cosine") >= 0.99


def test_the_control_failed(built: Built) -> None:
    assert built.report.control.failed
    assert built.report.control.how == "scale x 127"


def test_the_bundle_holds_an_int8_engine(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.engine is not None
    assert manifest.engine.target == "tensorrt_rtx"
    header = read_header(bundle.read(manifest.engine.file))
    assert header.compute_capabilities == ("8.6", "8.9", "12.0")
    convolutions = [layer for layer in manifest.layers if layer.op == "conv2d"]
    assert len(convolutions) == 9
    assert {layer.precision for layer in convolutions} == {"int8"}
    assert manifest.calibration_digest
    assert manifest.class_names == tuple("0123456789")


def test_golden_answers_are_the_baselines(bundle: Bundle, place: Path) -> None:
    import torch

    from trtpipe.model.load import load_model

    golden = bundle.golden()
    loaded = load_model(read_job(place / "configs" / "quickstart.yaml"))
    with torch.inference_mode():
        expected = loaded.module(torch.from_numpy(golden.inputs["image"].copy()))[0].numpy()
    assert np.allclose(golden.outputs["logits"], expected, atol=1e-4)


def test_inspect_says_it_in_json(built: Built) -> None:
    command = [sys.executable, "-m", "trtpipe", "inspect", str(built.bundle.path), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["engine"]["target"] == "tensorrt_rtx"
    assert found["check"]["executed"] == "graph"
    assert found["calibration_digest"] == built.bundle.manifest.calibration_digest


def test_the_same_job_gives_the_same_bytes(built: Built, place: Path) -> None:
    again = build(read_job(place / "configs" / "quickstart.yaml"), place / "again", Silent())
    assert again.bundle.manifest.fingerprint == built.bundle.manifest.fingerprint
    one, other = built.bundle.path, again.bundle.path
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in other.iterdir())
    assert [n for n in names if (one / n).read_bytes() != (other / n).read_bytes()] == []


def test_what_else_python_has_loaded_moves_no_byte_of_the_engine(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Module paths of other lengths leave other blocks on the heap: one build in five once differed by that."""
    manifest, random = bundle.manifest, np.random.default_rng(0)
    graph = OnnxModel(bundle.read("model.onnx"), manifest.opset or 0, manifest.inputs, manifest.outputs)
    before = list(sys.path)
    for _ in range(12):
        more = ["/nowhere/" + "x" * length for length in random.integers(1, 200, random.integers(0, 40))]
        monkeypatch.setattr(sys, "path", [*before, *more])
        engine = build_isolated(graph, manifest.build, progress=Silent(), precision=manifest.precision)
        assert engine.data == bundle.read(manifest.engine_file), f"after {more}"


def changed(place: Path, name: str, **sections: Any) -> Any:
    """The quickstart with some keys of its sections replaced."""
    sets = [f"{section}.{key}={json.dumps(value)}" for section, keys in sections.items() for key, value in keys.items()]
    return read_job(place / "configs" / "quickstart.yaml", [f"name={name}", *sets])


def test_a_failed_check_still_leaves_its_bundle_and_exits_1(place: Path) -> None:
    command = [sys.executable, "-m", "trtpipe", "build", "configs/quickstart.yaml", "-o", "strict"]
    command += ["--set", "check.limits.max_abs_max=1e-9", "--set", "check.samples=20"]
    run = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert read_bundle(place / "strict" / "quickstart").manifest.check.passed is False  # type: ignore[union-attr]


def test_samples_in_both_sets_are_warned_of(place: Path) -> None:
    job = changed(place, "both", calibration={"images": "../data/digits/val"}, check={"samples": 20})
    (warning,) = [w for w in build(job, place / "out", Silent()).report.warnings if "calibrated" in w]
    assert warning.startswith("20 of 20 check samples were calibrated on too (first: ")


@pytest.mark.parametrize("algorithm", ["entropy_2", "minmax", "percentile", "mse"])
def test_accuracy_holds_with(place: Path, algorithm: str) -> None:
    job = changed(
        place,
        f"by-{algorithm}",
        calibration={"algorithm": algorithm},
        build={"target": "onnxruntime", "compute_capability": []},
    )
    report = build(job, place / "out", Silent()).report
    assert report.passed, report


def test_the_check_catches_what_entropy_does_to_these_scans(place: Path) -> None:
    """`entropy` counts zeros, as NVIDIA's slides do; on scans that are mostly background it clips too much."""
    job = changed(
        place,
        "by-entropy",
        calibration={"algorithm": "entropy", "corrections": False},
        build={"target": "onnxruntime", "compute_capability": []},
    )
    report = build(job, place / "out", Silent()).report
    assert not report.passed
    assert "cosine" in {m.name for m in report.metrics if m.passed is False}

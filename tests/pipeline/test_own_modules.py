"""A job's own modules: found while its code runs, wherever the command runs, and loaded as they are on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trtpipe.job.job import Job
from trtpipe.job.load import read_job
from trtpipe.pipeline.bench import bench_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.calibrate import make_table
from trtpipe.pipeline.deep import deep_problems
from trtpipe.pipeline.kit import write_kit
from trtpipe.pipeline.own_modules import sources
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.pipeline.tune import tune
from trtpipe.progress import Silent

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        import {late}
        return torch.relu(self.conv(x)).mean((2, 3)) * {late}.FACTOR


def net():
    return Net().eval()
"""
JOB = """
name: {late}
model: {{factory: "net_of_{late}:net"}}
inputs: {{x: {{shape: [N, 3, 8, 8], N: {{min: 1, opt: 4, max: 4}}}}}}
outputs: {{y: {{}}}}
precision: {{int8_mode: true}}
calibration: {{arrays: x.npy, batch_size: 4, corrections: false}}
build: {{target: onnxruntime}}
check: {{arrays: x.npy, limits: {{cosine_min: 0.5}}}}
"""
WAYS: dict[str, Callable[[Job, Path], object]] = {
    "deep": lambda job, _: deep_problems(job) == () or pytest.fail("it has problems"),
    "build": lambda job, out: build(job, out, Silent(), diagnose_seconds=0),
    "calibrate": lambda job, _: make_table(job, Silent()),
    "tune": lambda job, out: tune(job, out, Silent(), evaluations=1),
    "bench": lambda job, _: bench_job(job, Silent(), rounds=1, seconds=0.01, samples=4),
    "kit": lambda job, out: write_kit(
        job.model_copy(update={"build": job.build.model_copy(update={"target": "tensorrt"})}),
        out,
        Silent(),
        diagnose_seconds=0,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_imports_as_it_is_called(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a folder of the same name where the command runs is not taken for the module."""
    late = f"late_for_{way}"
    (tmp_path / "jobs").mkdir()
    (tmp_path / "elsewhere" / late).mkdir(parents=True)
    (tmp_path / "jobs" / f"{late}.py").write_text("FACTOR = 1.5\n")
    (tmp_path / "jobs" / f"net_of_{late}.py").write_text(NET.format(late=late))
    (tmp_path / "jobs" / "job.yaml").write_text(JOB.format(late=late))
    np.save(tmp_path / "jobs" / "x.npy", np.random.default_rng(0).random((8, 3, 8, 8), np.float32))
    monkeypatch.chdir(tmp_path / "elsewhere")
    WAYS[way](read_job(tmp_path / "jobs" / "job.yaml"), tmp_path / "out")


def test_a_module_that_is_nowhere(tmp_path: Path) -> None:
    (tmp_path / "net_of_nowhere_at_all.py").write_text(NET.format(late="nowhere_at_all"))
    (tmp_path / "job.yaml").write_text(JOB.format(late="nowhere_at_all"))
    np.save(tmp_path / "x.npy", np.zeros((8, 3, 8, 8), np.float32))
    (problem,) = deep_problems(read_job(tmp_path / "job.yaml"))
    assert "No module named 'nowhere_at_all'" in str(problem)
    assert str(problem).endswith("Install what it imports, or put that beside the job file.")


def outputs(folder: Path, out: Path) -> float:
    built = build(read_job(folder / "job.yaml"), out, Silent(), diagnose_seconds=0)
    return float(built.bundle.golden().outputs["y"][0, 0])


def test_modules_of_one_name_and_edited_ones_are_loaded_anew(tmp_path: Path) -> None:
    """Of two jobs in one process, and of one that is built again after an edit; what nobody changed stays loaded."""
    text = NET.format(late="factor_of_each").replace("        import factor_of_each\n", "")
    for name, factor in (("a", 1.5), ("b", 15.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "factor_of_each.py").write_text(f"FACTOR = {factor}\n")
        (folder / "net_of_factor_of_each.py").write_text(f"import factor_of_each\n{text}")
        (folder / "job.yaml").write_text(JOB.format(late="factor_of_each").replace("int8_mode: true", ""))
        np.save(folder / "x.npy", np.random.default_rng(0).random((8, 3, 8, 8), np.float32))
    first = outputs(tmp_path / "a", tmp_path / "out")
    loaded = sys.modules["net_of_factor_of_each"]
    assert outputs(tmp_path / "a", tmp_path / "out") == first
    assert sys.modules["net_of_factor_of_each"] is loaded
    assert outputs(tmp_path / "b", tmp_path / "out") == pytest.approx(10 * first, rel=1e-5)
    assert outputs(tmp_path / "a", tmp_path / "out") == first
    (tmp_path / "a" / "factor_of_each.py").write_text("FACTOR = 4.5\n")  # as long as before, within a second
    assert outputs(tmp_path / "a", tmp_path / "out") == pytest.approx(3 * first, rel=1e-5)


def test_the_sources_of_a_callable_are_those_of_its_own_imports_too(tmp_path: Path) -> None:
    """Trials of a search are taken up for the same ones only."""
    (tmp_path / "net_of_judged.py").write_text(NET.format(late="weight_of_judged"))
    (tmp_path / "judge_of_it.py").write_text("import numpy\nfrom weight_of_judged import W\n")
    (tmp_path / "weight_of_judged.py").write_text("W = 1\n")
    (tmp_path / "job.yaml").write_text(JOB.format(late="judged"))
    np.save(tmp_path / "x.npy", np.zeros((8, 3, 8, 8), np.float32))
    job = read_job(tmp_path / "job.yaml")
    assert sources(job, []) == sources(job, ["numpy:mean"])
    before = sources(job, ["judge_of_it:q"])
    assert before not in (sources(job, []), sources(job, ["weight_of_judged:q"]))
    (tmp_path / "weight_of_judged.py").write_text("W = 7\n")
    assert sources(job, ["judge_of_it:q"]) != before


@pytest.mark.parametrize(("weights", "warned"), [("int4", True), (None, False)])
def test_weights_of_4_bits_fitted_to_the_samples_of_the_check(
    weights: str | None, warned: bool, tmp_path: Path
) -> None:
    """There is no table then whose samples would say so."""
    net = "import torch\n\n\ndef net():\n    torch.manual_seed(0)\n    return torch.nn.Linear(128, 32)\n"
    (tmp_path / f"net_of_fitted_{warned}.py").write_text(net)
    text = JOB.format(late=f"fitted_{warned}").replace("[N, 3, 8, 8]", "[N, 128]")
    text = text.replace("{int8_mode: true}", f"{{weights: {weights}}}" if weights else "{}")
    (tmp_path / "job.yaml").write_text(text.replace("corrections: false", "samples: 8"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((8, 128), np.float32))
    built = build(read_job(tmp_path / "job.yaml"), tmp_path / "out", Silent(), diagnose_seconds=0)
    warnings = [w for w in built.report.warnings if w.startswith("8 of 8 check samples were calibrated on too")]
    assert len(warnings) == warned


@pytest.mark.parametrize("size", [7, 48, 64, 100])
def test_the_first_samples_are_those_of_the_first_batches(size: int, tmp_path: Path) -> None:
    """What is warned of is what the weights were fitted to, for sizes that do not divide how many that are, too."""
    (tmp_path / f"net_of_first_{size}.py").write_text(
        "import torch\n\n\ndef net():\n    torch.manual_seed(0)\n    return torch.nn.Linear(3, 2)\n"
    )
    text = JOB.format(late=f"first_{size}").replace("[N, 3, 8, 8]", "[N, 3]").replace("opt: 4, max: 4", "max: 128")
    text = text.replace("N: {min: 1, ", "N: {min: 1, opt: 1, ").replace("batch_size: 4", f"batch_size: {size}")
    (tmp_path / "job.yaml").write_text(text)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((130, 3), np.float32))
    prepared = PreparedJob(read_job(tmp_path / "job.yaml"), Stages(Silent()))
    used = np.concatenate([inputs[0].numpy() for inputs in prepared.first_batches()])
    (drawn,) = prepared.calibration_samples.batches(130)
    np.testing.assert_array_equal(used, drawn.arrays["x"][: len(used)])
    assert prepared.first_digests == prepared.calibration_samples.sample_digests[: len(used)]
    assert len(used) == max(size, 64 // size * size)

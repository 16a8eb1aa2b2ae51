"""Outputs of every layout go down the whole line: build, golden data, recheck, kit, bench and a user's own batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtpipe.bundle.format import read_bundle
from trtpipe.cli.main import main
from trtpipe.errors import BuildError, InputError
from trtpipe.job.load import read_job
from trtpipe.pipeline.bench import bench_bundle
from trtpipe.pipeline.build import Built, build
from trtpipe.pipeline.kit import finish_kit, write_kit
from trtpipe.progress import Silent
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.runtime.recheck import recheck
from trtpipe.runtime.session import load

NET = """
import torch
from torch import nn

HEADS = {
    "rows": lambda y: y,
    "one number a sample": lambda y: y.sum(1),
    "batch last": lambda y: y.t(),
    "batch in the middle": lambda y: y.reshape(-1, 2, 3).transpose(0, 1),
    "scalar": lambda y: y.mean(),
    "statistic": lambda y: y.mean(0),
    "pairs": lambda y: y @ y.t(),
    "two lists": lambda y: torch.cat([y, -y]),
    "flat": lambda y: y.reshape(-1),
    "detections": lambda y: y.reshape(-1, 2)[:3],
    "rows of others": lambda y: y.flip(0),
    "less their mean": lambda y: y - y.mean(0),
    "normed by the batch": nn.BatchNorm1d(6, track_running_stats=False),
}


class Net(nn.Module):
    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(4, 16), nn.Linear(16, 6), HEADS[head]

    def forward(self, x):
        return self.head(self.b(torch.relu(self.a(x))))


def make(head):
    return Net(head)
"""
#: layout -> (batch axis with a dynamic batch, with a batch of 1)
LAYOUTS: dict[str, tuple[int | None, int | None]] = {
    "rows": (0, 0),
    "one number a sample": (0, 0),
    "batch last": (1, 1),
    "batch in the middle": (1, 1),
    "scalar": (None, None),
    "statistic": (None, None),
    "pairs": (None, None),
    "two lists": (None, None),
    "flat": (None, None),
    "detections": (None, None),
}
SAMPLES = 11


def job(folder: Path, head: str, batch: Any = "N", module: str = "net_of_shapes", net: str = NET) -> Path:
    (folder / f"{module}.py").write_text(net)
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32))
    sizes = batch if isinstance(batch, dict) else {"min": 2, "opt": 3, "max": 4}
    x: dict[str, Any] = {"shape": [batch, 4]} if isinstance(batch, int) else {"shape": ["N", 4], "N": sizes}
    text = {
        "name": "shapes",
        "model": {"factory": f"{module}:make", "args": {"head": head}},
        "inputs": {"x": x},
        "outputs": {"y": {}},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npy", "limits": {"relative_l2_max": 1e-3}},
    }
    (folder / "job.yaml").write_text(json.dumps(text))
    return folder / "job.yaml"


def network(head: str, x: Any) -> Any:
    """What PyTorch itself computes."""
    import torch

    scope: dict[str, Any] = {"__name__": "net"}
    exec(NET, scope)
    with torch.inference_mode():
        return scope["make"](head)(torch.from_numpy(x)).numpy()


# The first rows of `detections` are another sample's when the batch is 2.
@pytest.mark.parametrize(
    ("head", "batch"), [(h, b) for h in sorted(LAYOUTS) for b in ("N", 1, 3) if (h, b) != ("detections", "N")]
)
def test_every_layout_goes_down_the_line(
    tmp_path: Path, head: str, batch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Built = build(read_job(job(tmp_path, head, batch)), tmp_path / "out", Silent())
    assert made.report.passed, made.report.problems
    assert made.report.samples == SAMPLES
    spec = made.bundle.manifest.outputs[0]
    assert spec.batch_axis == LAYOUTS[head][batch != "N"]
    x = np.load(tmp_path / "x.npy")
    size = 4 if batch == "N" else batch
    golden = made.bundle.golden()
    assert golden.batch == (None if spec.batch_axis is not None else size)
    with load(tmp_path / "out" / "shapes") as model:
        checked = recheck(model)
        assert checked.passed, checked.problems
        found = model({"x": x[: 2 * size]})["y"]
        wanted = [network(head, x[k : k + size]) for k in (0, size)]
        if spec.batch_axis is None:
            assert np.allclose(found, np.stack(wanted), atol=1e-5)
        else:
            assert np.allclose(found, np.concatenate([np.moveaxis(w, spec.batch_axis, 0) for w in wanted]), atol=1e-5)
        if spec.batch_axis is None and size > 1:
            with pytest.raises(InputError, match=r"output y has no batch axis: samples must fill whole batches"):
                model({"x": x[: size + 1]})
            np.save(tmp_path / "odd.npy", x[: size + 1])
            out = str(tmp_path / "out" / "shapes")
            assert main(["run", out, str(tmp_path / "odd.npy"), "--raw", "--batch-size", str(size)]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            of = f", 2 to {size} at once or a multiple of {size}" if batch == "N" else f" of {size}"
            assert (
                f"output y has no batch axis: samples must fill whole batches{of} (got {size + 1}). Give as many, or a "
                "--batch-size that divides them."
            ) in captured.err
            np.save(tmp_path / "even.npy", x[: 2 * size])
            assert main(["run", out, str(tmp_path / "even.npy"), "--raw", "--batch-size", str(size)]) == 0
            assert len(capsys.readouterr().out.splitlines()) == 2 * size
    rows = bench_bundle(made.bundle, Silent(), rounds=1, seconds=0).rows
    assert [(r.skipped, r.sqnr_db is not None and r.sqnr_db > 60) for r in rows if not r.skipped] == [("", True)]


@pytest.mark.parametrize("head", ["rows of others", "less their mean", "normed by the batch"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_samples_that_depend_on_their_batch_are_run_in_the_checks_batches(
    tmp_path: Path, head: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever size that is: the golden inputs in others give other outputs, and the optimizer was blamed for it."""
    path = job(tmp_path, head, {"min": 2, "opt": 3, "max": 16}, module=f"net_of_{size}_others")
    made = build(read_job(path, (f"check.batch_size={size}",)), tmp_path / "out", Silent())
    assert made.report.passed, made.report.problems
    assert any("depends on the others in its batch" in note for note in made.report.notes)
    golden = made.bundle.golden()
    assert golden.batch == size
    assert golden.samples == min(SAMPLES, -(-8 // size) * size)
    note = (
        "output y of a sample depends on the others in its batch: run together what belongs together, 16 samples at "
        "most (trtpipe run: --batch-size). More are split, and fewer are filled up with copies of the last one to 2, "
        "which gives other values"
    )
    with load(tmp_path / "out" / "shapes") as model:
        assert model.notes == (note,)
        assert recheck(model).passed
    assert main(["run", str(made.bundle.path), str(tmp_path / "x.npy"), "--raw"]) == 0
    assert f"note: {note}" in capsys.readouterr().err
    rows = bench_bundle(made.bundle, Silent(), rounds=1, seconds=0).rows
    assert [(r.skipped, r.sqnr_db is not None and r.sqnr_db > 60) for r in rows if not r.skipped] == [("", True)]
    assert main(["export", str(tmp_path / "out" / "shapes"), str(tmp_path / "models"), "--to", "triton"]) == 0
    assert "optimizations" not in capsys.readouterr().err
    assert "dynamic_batching" not in (tmp_path / "models" / "shapes" / "config.pbtxt").read_text()
    kit = write_kit(read_job(path, (f"check.batch_size={size}",)), tmp_path / "kits", Silent())
    finished = finish_kit(kit.bundle.path, tmp_path / "finished", Silent())
    assert finished.report.passed
    assert finished.bundle.manifest.mixed == made.bundle.manifest.mixed == ("y",)


@pytest.mark.parametrize("head", ["rows", "batch last", "scalar", "two lists"])
def test_a_kit_is_finished_on_all_its_samples(tmp_path: Path, head: str) -> None:
    kit = write_kit(read_job(job(tmp_path, head)), tmp_path / "kits", Silent())
    assert kit.report.passed, kit.report.problems
    assert kit.bundle.golden().samples == SAMPLES
    made = finish_kit(tmp_path / "kits" / "shapes", tmp_path / "out", Silent())
    assert made.report.passed
    with load(tmp_path / "out" / "shapes") as model:
        assert recheck(model).passed


@pytest.mark.parametrize("head", sorted(set(LAYOUTS) - {"detections"}))
def test_a_bundle_that_changed_by_one_element_fails_its_check(tmp_path: Path, head: str) -> None:
    made = build(read_job(job(tmp_path, head)), tmp_path / "out", Silent())
    with load(tmp_path / "out" / "shapes") as model:
        runner = model.runner

        class Wrong:
            name = "wrong"

            def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]:
                value = np.array(runner.run(inputs)["y"])
                value.reshape(-1)[0 if value.ndim else ...] = np.nan
                return {"y": value}

        model._runner = Wrong()  # type: ignore[assignment]
        report = recheck(model)
    assert not report.passed
    assert report.problems[0] == "output y holds NaN or infinity in what was executed"
    assert read_bundle(made.bundle.path).manifest == made.bundle.manifest


def test_an_old_manifest_is_read(tmp_path: Path) -> None:
    """One of before outputs knew their batch axis: it is the first."""
    made = build(read_job(job(tmp_path, "rows")), tmp_path / "out", Silent())
    path = made.bundle.path / "manifest.json"
    raw = json.loads(path.read_text())
    for spec in (*raw["inputs"], *raw["outputs"]):
        del spec["batch_axis"]
    del raw["check"]["warnings"], raw["check"]["control"]["executed"], raw["check"]["control"]["runner"]
    del raw["limits"]["confident"], raw["digest"]
    path.write_text(json.dumps(raw, sort_keys=True, indent=2, ensure_ascii=False) + "\n")
    manifest = read_bundle(made.bundle.path).manifest
    assert [s.batch_axis for s in manifest.outputs] == [0]
    assert dataclasses.replace(manifest.outputs[0]) == made.bundle.manifest.outputs[0]


def test_a_shape_that_depends_on_the_data_is_refused(tmp_path: Path) -> None:
    net = NET.replace("self.b(torch.relu(self.a(x)))", "self.b(torch.relu(self.a(x[x[:, 0] > 0])))")
    file = job(tmp_path, "rows", module="net_of_data", net=net)
    with pytest.raises(InputError, match=r"outputs\.y: must have one shape for all samples"):
        build(read_job(file), tmp_path / "out", Silent())


def test_an_output_without_elements_is_refused_by_its_name(tmp_path: Path) -> None:
    net = NET.replace("self.b(torch.relu(self.a(x)))", "self.b(torch.relu(self.a(x)))[:, :0]")
    file = job(tmp_path, "rows", module="net_of_nothing", net=net)
    with pytest.raises(BuildError, match=r"^outputs\.y: must have elements \(got \[N, 0\]\)\. Leave it out of what is"):
        build(read_job(file), tmp_path / "out", Silent())


def test_a_report_says_that_the_last_batch_was_filled_up(tmp_path: Path) -> None:
    made = build(read_job(job(tmp_path, "statistic")), tmp_path / "out", Silent())
    assert (
        "check: y has no batch axis; the last batch, of 3 samples, was filled up to 4 with copies of "
        "its last sample, for the baseline and for what was executed alike"
    ) in made.bundle.manifest.notes


def test_the_layers_of_a_bundle_are_read_back_from_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what was planned."""
    seen = []

    def compiled(layers: Any, graph: Any) -> Any:
        seen.append(graph.data)
        return tuple(dataclasses.replace(layer, precision="fp16", reason="as compiled") for layer in layers)

    monkeypatch.setattr("trtpipe.pipeline.assemble.read_back", compiled)
    made: Built = build(read_job(job(tmp_path, "rows")), tmp_path / "out", Silent())
    assert {(x.precision, x.reason) for x in made.bundle.manifest.layers} == {("fp16", "as compiled")}
    assert seen == [made.bundle.read("model.onnx")]


@pytest.mark.parametrize(("target", "exact"), [("onnxruntime", False), ("tensorrt_rtx", True)])
def test_a_graph_for_onnxruntime_is_checked_as_its_users_open_it(
    target: str, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session with default settings, the control too; a graph in the place of an engine as it stands."""
    opened = []

    class Watched(OrtRunner):
        def __init__(self, model: bytes, *, as_written: bool = False, optimization: Any = "all", **more: Any) -> None:
            opened.append((as_written, optimization))
            super().__init__(model, as_written=as_written, optimization=optimization, **more)

    monkeypatch.setattr("trtpipe.runtime.executor.OrtRunner", Watched)
    made: Built = build(read_job(job(tmp_path, "rows"), [f"build.target={target}"]), tmp_path / "out", Silent())
    assert made.report.passed
    assert opened == [(exact, "all")] * 2

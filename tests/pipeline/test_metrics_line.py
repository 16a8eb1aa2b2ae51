"""Metrics of a job down the line: build, tune, a bundle checked again; the segmentation example tuned to an mIoU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import trtpipe
from trtpipe.bundle.manifest import from_json
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.prepared import PreparedJob, Stages
from trtpipe.progress import Silent
from trtpipe.runtime.recheck import golden_limits

NET = """
import numpy as np
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Conv2d(1, 3, 3, padding=1)

class Samples:
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return np.random.default_rng(i).normal(size=(1, 8, 8)).astype(np.float32)

def half_right(outputs, labels, ids, part=2):
    assert labels.shape == (len(ids), 8, 8)
    return (outputs["y"].argmax(1) == labels)[:, ::part].mean((1, 2))

def broken(outputs, labels, ids):
    return "much"

def nothing(outputs, labels, ids):
    return float("nan")
"""


def write(folder: Path, metrics: dict[str, Any], limits: dict[str, Any], **check: Any) -> Path:
    """A job of a dense output with labels in a .npy."""
    (folder / "dense_net.py").write_text(NET)
    code: dict[str, Any] = {}
    exec(NET, code)  # the labels are what the network says, but for one row of pixels
    samples = np.stack([code["Samples"]()[i] for i in range(6)])
    labels = code["net"]()(torch.from_numpy(samples)).detach().numpy().argmax(1)
    labels[:, 1] = 0
    np.save(folder / "labels.npy", labels)
    job = {
        "name": "dense",
        "model": {"factory": "dense_net:net"},
        "inputs": {"x": {"shape": ["N", 1, 8, 8], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {"y": {}},
        "build": {"target": "onnxruntime"},
        "check": {"factory": "dense_net:Samples", "labels": "labels.npy", "metrics": metrics, "limits": limits} | check,
    }
    (folder / "job.yaml").write_text(json.dumps({k: v for k, v in job.items() if v is not None}))
    return folder / "job.yaml"


METRICS = {"right": {"function": "dense_net:half_right", "args": {"part": 1}}, "overlap": "miou"}


def test_figures_are_measured_judged_and_in_the_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, METRICS, {"metrics": {"right": {"drop_max": 0.01}, "overlap": {"min": 0.7}}})
    assert main(["build", str(path), "-o", str(tmp_path / "out"), "-q"]) == 0
    said = capsys.readouterr().out
    assert "right_drop" in said
    assert "limit 0.01" in said
    manifest = from_json((tmp_path / "out" / "dense" / "manifest.json").read_bytes(), "m")
    assert manifest.check is not None
    found = {m.name: m for m in manifest.check.metrics}
    assert found["right_baseline"].value == pytest.approx(found["right_engine"].value, abs=0.01)
    assert found["right_drop"].interval is not None
    assert (found["right_drop"].passed, found["overlap_engine"].passed) == (True, True)
    limits, notes = golden_limits(manifest, 6)
    assert set(notes[:2]) == {
        "metrics.right.drop_max is of the job's own metric, and was not judged here",
        "metrics.overlap.min is of the job's own metric, and was not judged here",
    }
    assert set(limits.given) == {"cosine_worst_min"}  # the build's own worst cosine, as nothing else is left
    capsys.readouterr()
    assert main(["check", str(tmp_path / "out" / "dense")]) == 0
    assert "metrics.right.drop_max is of the job's own metric" in capsys.readouterr().out
    report = (tmp_path / "out" / "dense" / "report.html").read_text()
    assert "right lost" in report


BOXES_NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 4, 8)

    def forward(self, x):
        scores = self.conv(x).flatten(1).sigmoid()
        boxes = torch.tensor([0.0, 0.0, 4.0, 4.0]) + 0 * scores[:, :, None]
        return boxes, scores, (0 * scores).long()
"""


def boxes_job(folder: Path, size: tuple[int, int] = (8, 8)) -> Path:
    """A job of boxes, with the annotations of COCO of two pictures of 8 x 8 that they say to be of `size`."""
    (folder / "boxes_net.py").write_text(BOXES_NET)
    (folder / "images").mkdir()
    for k in range(2):
        pixels = np.random.default_rng(k).integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{k}.png")
    images = [{"id": k, "file_name": f"{k}.png", "width": size[0], "height": size[1]} for k in range(2)]
    boxes = [{"id": k, "image_id": k, "bbox": [0, 0, 4, 4], "category_id": 0} for k in range(2)]
    (folder / "coco.json").write_text(json.dumps({"images": images, "annotations": boxes}))
    job = {
        "name": "boxes",
        "model": {"factory": "boxes_net:Net"},
        "inputs": {"x": {"shape": ["N", 3, 8, 8], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {"boxes": {}, "scores": {}, "labels": {"dtype": "int64"}},
        "build": {"target": "onnxruntime"},
        "check": {"images": "images", "labels": "coco.json", "metrics": {"map": "coco_map"}},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def test_scores_of_boxes_are_no_classes_to_classify_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["build", str(boxes_job(tmp_path)), "-o", str(tmp_path / "out"), "-q"])
    bundle = tmp_path / "out" / "boxes"
    manifest = from_json((bundle / "manifest.json").read_bytes(), "m")
    assert {s.name: s.classes for s in manifest.outputs} == {"boxes": True, "scores": False, "labels": False}
    with trtpipe.load(bundle, graph=True) as model, pytest.raises(InputError, match=r"has no output \[N, C\]"):
        model.classify([tmp_path / "images" / "0.png"])
    capsys.readouterr()
    assert main(["run", str(bundle), str(tmp_path / "images"), "--graph", "-q"]) == 2
    assert "has no output [N, C] to classify by. Add --raw." in capsys.readouterr().err
    prepared = PreparedJob(read_job(tmp_path / "job.yaml"), Stages(Silent()))  # bench compares these
    assert [s.classes for s in prepared.outputs] == [True, False, False]


def test_a_limit_that_is_missed_fails_the_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, METRICS, {"metrics": {"overlap": {"min": 0.999}}})
    assert main(["build", str(path), "-o", str(tmp_path / "out"), "-q"]) == 1
    assert "overlap_engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metrics", "limits", "check", "message"),
    [
        ({"m": "dense_net:broken"}, {"cosine_min": 0.5}, {},
         "check.metrics.m: must return a number, one number for each"),
        ({"m": "dense_net:nothing"}, {"cosine_min": 0.5}, {},
         "check.metrics: must be numbers on the baseline (got NaN for m). Correct the function, or give labels that it "
         "can judge by."),
        ({"m": "miou"}, {"metrics": {"m": {"drop_max": 0.1}}}, {"labels": None},
         "check.limits.metrics.m.drop_max cannot be judged: m is against the baseline, and a drop needs check.labels. "
         "Give that, or take the limit out of the job."),
        ({"m": {"function": "miou", "args": {"classes": 2}}}, {"cosine_min": 0.5}, {},
         "check.metrics.m: needs labels from 0 to 1 (got 0 to 2)."),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_said_before_anything_is_built(
    tmp_path: Path, metrics: dict[str, Any], limits: dict[str, Any], check: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, metrics, limits, **check)
    job = json.loads(path.read_text())
    job["check"] = {k: v for k, v in job["check"].items() if v is not None}
    path.write_text(json.dumps(job))
    with pytest.raises(InputError) as caught:
        build(read_job(path), tmp_path / "out", Silent())
    assert str(caught.value).startswith(message)


@pytest.mark.acceptance
def test_the_segmentation_example_is_tuned_to_a_budget_of_miou(tmp_path: Path) -> None:
    """Thresholds at the 92nd percentile cost mIoU; tune finds an algorithm or modules with which the budget holds."""
    from trtpipe.examples.shapes import make

    configs = Path(__file__).parents[2] / "configs"
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "segmentation.yaml"
    path.write_text((configs / "segmentation.yaml").read_text())
    make(tmp_path / "data" / "shapes")
    coarse = ["calibration.algorithm=percentile", "calibration.percentile=92", "calibration.corrections=false",
              "check.limits={metrics: {miou: {drop_max: 0.005}}}", "build.target=onnxruntime",
              "build.compute_capability=[]"]  # fmt: skip
    options = [o for text in coarse for o in ("--set", text)]
    out = tmp_path / "out"
    assert main(["build", str(path), "-o", str(out), "-q", "--diagnose", "0", *options]) == 1
    assert main(["tune", str(path), "-o", str(out), "-q", "--evaluations", "6", *options]) == 0
    trials = json.loads((out / "segmentation.trials.json").read_text())["trials"]
    drops = [next(m["value"] for m in t["metrics"] if m["name"] == "miou_drop") for t in trials]
    assert drops[0] > 0.005 >= min(drops)
    assert main(["build", str(path.with_name("segmentation.tuned.yaml")), "-o", str(out), "-q"]) == 0

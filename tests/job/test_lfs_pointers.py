"""A clone without `git lfs pull` has pointers in the place of large files, wherever a job names one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from calib.files import is_lfs_pointer
from trtpipe.cli.main import main

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
JOB = """
name: n
model: {{{model}}}
inputs: {{x: {{shape: [N, 3, 4, 4], N: {{min: 1, opt: 2, max: 2}}}}}}
outputs: {{y: {{}}}}
build: {{target: onnxruntime}}
check: {{{check}}}
"""
FACTORY, ARRAYS = "factory: 'torch.nn:Identity'", "arrays: x.npy"
#: What a job says, where `large` is what is not there, and what a message begins with.
JOBS = {
    "weights": (f"{FACTORY}, weights: large.safetensors", ARRAYS, "job.yaml:3: model.weights"),
    "pickle": (f"{FACTORY}, weights: large.pt", ARRAYS, "job.yaml:3: model.weights"),
    "onnx": ("onnx: large.onnx", ARRAYS, "job.yaml:3: model.onnx"),
    "program": ("program: large.pt2", ARRAYS, "job.yaml:3: model.program"),
    "torchscript": (f"{FACTORY}, torchscript: large.ts", ARRAYS, "job.yaml:3: model.torchscript"),
    "arrays": (FACTORY, "arrays: large.npz", "job.yaml:7: check.arrays"),
    "labels": (FACTORY, "images: images, labels: large.csv", "job.yaml:7: check.labels"),
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_file_that_a_job_names(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, check, where = JOBS[kind]
    name = next(word.strip("'} ") for word in f"{model}, {check}".replace(":", ",").split(",") if "large" in word)
    (tmp_path / name).write_text(POINTER)
    (tmp_path / "images").mkdir()
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 4, 4), np.float32))
    (tmp_path / "job.yaml").write_text(JOB.format(model=model, check=check))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 2
    said = f"must be the file itself (got '{name}': the pointer of Git LFS to it). Fetch it: git lfs pull."
    assert f"{tmp_path}/{where}: {said}" in capsys.readouterr().err.splitlines()


def test_images_and_the_data_of_an_onnx_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_text(POINTER)
    limits = "limits: {cosine_min: 0.9}"
    (tmp_path / "job.yaml").write_text(JOB.format(model=FACTORY, check=f"images: images, {limits}"))
    assert main(["build", str(tmp_path / "job.yaml"), "-o", str(tmp_path / "out")]) == 2
    assert (
        f"{tmp_path}/images/a.png: must be a readable image (got the pointer of Git LFS to it). Fetch it: git lfs "
        "pull, or set on_bad_sample: skip.\n"
    ) in capsys.readouterr().err
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N", 3, 4, 4]) for n in "xy")
    w = numpy_helper.from_array(np.ones((3, 4, 4), np.float32), "w")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [w])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "m.data").write_text(POINTER)
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 4, 4), np.float32))
    (tmp_path / "job.yaml").write_text(JOB.format(model="onnx: m.onnx", check=f"{ARRAYS}, {limits}"))
    assert main(["build", str(tmp_path / "job.yaml"), "-o", str(tmp_path / "out")]) == 2
    assert (
        "model.onnx: its external data must be the file itself (got the pointer of Git LFS to it). Fetch it: git lfs "
        "pull.\n"
    ) in capsys.readouterr().err


def test_no_other_file_is_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("version https://")
    assert not is_lfs_pointer(tmp_path / "short")
    assert not is_lfs_pointer(tmp_path)
    assert not is_lfs_pointer(tmp_path / "none")

"""A calibration table of version 1, from before FP8 and 4 bits, with the INT8 graph that was built from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from calib.table import CalibrationTable
from trtpipe.api import build
from trtpipe.job.load import read_job
from trtpipe.progress import Silent
from trtpipe.quantization.formats import maxima
from trtpipe.trt.isolated import build_isolated
from trtpipe.values import OnnxModel

FOLDER = Path(__file__).parent / "table_v1"
JOB = """
name: plain
model: {factory: "plain_net:net"}
inputs: {image: {shape: [N, 3, 8, 8], N: {min: 1, opt: 2, max: 8}}}
outputs: {logits: {}}
precision: {int8_mode: true}
calibration: {table: calibration.json, algorithm: entropy_2}
build: {target: tensorrt_rtx, compute_capability: ["8.9"]}
check: {arrays: check.npy, batch_size: 4}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    for path in FOLDER.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    np.save(folder / "check.npy", np.random.default_rng(0).random((4, 3, 8, 8), np.float32))
    (folder / "job.yaml").write_text(JOB)
    return read_job(folder / "job.yaml"), build(folder / "job.yaml", folder / "out").bundle


def constants(model):
    """Every stored number of a graph: weights in INT8, scales, biases."""
    graph = onnx.load_from_string(model).graph
    tensors = [*graph.initializer, *(n.attribute[0].t for n in graph.node if n.op_type == "Constant")]
    return sorted((t.data_type, tuple(t.dims), onnx.numpy_helper.to_array(t).tobytes()) for t in tensors)


def test_it_is_read_and_kept_as_it_is(built):
    written = (FOLDER / "calibration.json").read_bytes()
    assert b'"version": 1' in written
    assert built[1].read("calibration.json") == written
    assert CalibrationTable.load(FOLDER / "calibration.json").corrections is None


def test_it_gives_the_same_int8_graph_and_engine_byte_for_byte(built):
    """An exporter of another PyTorch may spell the graph otherwise; the numbers in it are the same."""
    job, bundle = built
    before, now = (FOLDER / "model.onnx").read_bytes(), bundle.read("model.onnx")
    assert constants(now) == constants(before)
    versions = [onnx.load_from_string(m).producer_version for m in (before, now)]
    if versions[0] == versions[1]:
        assert now == before
        graph = OnnxModel(before, 20, bundle.manifest.inputs, bundle.manifest.outputs)
        engine = build_isolated(graph, job.build, progress=Silent(), precision=job.precision)
        assert bundle.read("model.engine") == engine.data


def test_it_has_what_fp8_takes():
    table = CalibrationTable.load(FOLDER / "calibration.json")
    assert table.amax["body:input"] == pytest.approx(1.50006413)  # INT8 clips
    assert maxima(table)["body:input"] == pytest.approx(1.79394531)  # FP8 does not

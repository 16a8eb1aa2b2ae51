"""build.quantization: implicit through the line: no Q/DQ in the graph, the samples handed to TensorRT's calibrator."""

from __future__ import annotations

from types import SimpleNamespace

import nets
import numpy as np
import onnx
import pytest

from trtpipe.job.job import Job
from trtpipe.job.sections import Build, Calibration, Check, Input, ModelSource, Output, Precision
from trtpipe.pipeline import stages as pipeline
from trtpipe.progress import Silent
from trtpipe.routes import onnx as route


@pytest.fixture
def job(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((6, 3, 8, 8), np.float32))
    return Job(
        name="implicit",
        model=ModelSource(factory="nets:Residual"),
        inputs={"x": Input(shape=("N", 3, 8, 8), dims={"N": {"min": 1, "opt": 4, "max": 8}})},
        outputs={"logits": Output()},
        precision=Precision(int8_mode=True),
        calibration=Calibration(arrays=str(tmp_path / "x.npy"), batch_size=3, algorithm="minmax"),
        build=Build(target="tensorrt", quantization="implicit"),
        check=Check(arrays=str(tmp_path / "x.npy")),
    )


def test_tensorrt_gets_the_samples_and_a_graph_without_qdq(job, monkeypatch):
    asked = {}

    def build_engine(model, build, **others):
        asked.update(others, model=model, build=build)

    monkeypatch.setattr(route, "build_engine", build_engine)
    prepared = SimpleNamespace(captured=nets.captured("residual"), needed_ranges=lambda precision: {})
    prepared.corrected = lambda table: prepared
    assert pipeline.calibrate(job, prepared, pipeline.Stages(Silent())) is None
    quantized = pipeline.quantize(job, prepared, None, pipeline.Stages(Silent()))
    route.compile_engine(job, None, quantized, Silent())
    operators = {n.op_type for n in onnx.load_from_string(asked["model"].data).graph.node}
    assert "Conv" in operators
    assert "QuantizeLinear" not in operators
    calibration = asked["calibration"]
    assert calibration.source.sample_count == 6
    assert (calibration.batch_size, calibration.algorithm) == (3, "minmax")
    assert {n: len(d) for n, d in calibration.made_from.items()} == {"graph": 64}
    assert asked["precision"] == job.precision


def test_explicit_hands_over_no_samples(job, monkeypatch):
    given = {}
    monkeypatch.setattr(route, "build_engine", lambda model, build, **more: given.update(more))
    explicit = job.model_copy(update={"build": Build(target="tensorrt")})
    route.compile_graph(explicit, None, Silent())
    assert given["calibration"] is None

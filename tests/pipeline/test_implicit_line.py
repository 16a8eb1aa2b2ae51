"""build.quantization: implicit through the line: no Q/DQ in the graph, the samples handed to TensorRT's calibrator."""

from __future__ import annotations

from types import SimpleNamespace

import nets
import numpy as np
import onnx
import pytest

from trtpipe.job.job import Job
from trtpipe.job.limits import Limits
from trtpipe.job.sections import Build, Calibration, Check, Input, ModelSource, Output, Precision
from trtpipe.model.data import open_calibration
from trtpipe.pipeline import measure
from trtpipe.pipeline import prepared as line
from trtpipe.pipeline import stages as pipeline
from trtpipe.progress import Silent
from trtpipe.routes import onnx as route
from trtpipe.routes.native import native_calibration
from trtpipe.trt.options import refusals


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
    route.compile_engine(job, None, quantized, Silent(), native_calibration(job, open_calibration(job)))
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


def test_the_samples_are_opened_once_for_the_ranges_the_engine_and_its_control(job, monkeypatch):
    """A factory may take minutes, or give other samples the second time."""
    opened, used = [], []
    monkeypatch.setattr(line, "open_calibration", lambda asked: opened.append(open_calibration(asked)) or opened[-1])
    monkeypatch.setattr(route, "build_engine", lambda *_, calibration, **__: used.append(calibration.source))
    both = job.model_copy(update={"precision": Precision(int8_mode=True, fp16_mode=True)})
    stages = pipeline.Stages(Silent())
    prepared = pipeline.prepare(both, stages)
    quantized = pipeline.quantize(both, prepared, None, stages)
    pipeline.compile_engine(both, prepared, quantized, stages)
    pipeline.compile_engine(both, prepared, quantized, stages)
    assert used == opened * 2
    assert len(opened) == 1


def test_the_fp16_engine_that_int8_is_timed_against_is_not_quantized(job, monkeypatch):
    class Seen(Exception):
        pass

    def compiled(plain, prepared, quantized, stages):
        assert route_refusals(plain) == []
        assert pipeline.native_of(plain, prepared) is None
        raise Seen

    def route_refusals(asked):
        return [path for path, _ in refusals(asked.build, asked.precision, "tensorrt", "10.3.0")]

    limits = Limits(speedup_over_fp16_min=1.1)
    timed = job.model_copy(update={"check": job.check.model_copy(update={"limits": limits, "require": "engine"})})
    monkeypatch.setattr(measure, "compile_engine", compiled)
    stages = pipeline.Stages(Silent())
    with pytest.raises(Seen):
        measure.judged_speed(timed, pipeline.prepare(timed, stages), None, SimpleNamespace(executed="engine"), stages)

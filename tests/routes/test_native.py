"""What TensorRT's own calibrators are given, on the onnx route and on torch2trt's."""

from __future__ import annotations

import numpy as np
import pytest
from models import job, line, tiny

from trtpipe.errors import InputError
from trtpipe.model.data import open_calibration
from trtpipe.progress import Silent
from trtpipe.routes import onnx
from trtpipe.routes.native import native_calibration


@pytest.fixture
def samples(tmp_path):
    np.save(tmp_path / "calibration.npy", np.random.default_rng(0).random((20, 3, 16, 16), dtype=np.float32))
    return str(tmp_path / "calibration.npy")


def implicit(**calibration):
    return job(
        "onnx",
        "tensorrt",
        build={"quantization": "implicit"},
        precision={"int8_mode": True, "fp16_mode": True},
        calibration=calibration,
    )


def test_the_jobs_samples_algorithm_and_batch_size(samples):
    wanted = implicit(arrays=samples, batch_size=64, algorithm="percentile", percentile=99.0)
    found = native_calibration(wanted, open_calibration(wanted))
    assert (found.file, found.made_from) == (None, {})
    assert (found.source.sample_count, found.algorithm, found.percentile) == (20, "percentile", 99.0)
    assert found.batch_size == 32  # within the range of the inputs' batch


def test_tensorrt_calibrates_with_samples(samples):
    with pytest.raises(InputError) as caught:
        native_calibration(job("onnx", "tensorrt"), open_calibration(implicit(arrays=samples)))
    assert str(caught.value) == "calibration: the job has no calibration data. Add calibration.images."


def test_with_implicit_quantization_the_line_places_no_qdq(samples):
    explicit = job("onnx", "tensorrt", precision={"int8_mode": True}, calibration={"arrays": samples})
    assert explicit.places_int8
    assert not implicit(arrays=samples).places_int8


def test_the_onnx_route_hands_them_to_the_builder(samples, monkeypatch):
    given = {}
    monkeypatch.setattr(onnx, "build_engine", lambda model, build, **more: given.update(more) or "engine")
    model = line(tiny(), 16, 5)
    wanted = implicit(arrays=samples, batch_size=8)
    source = open_calibration(wanted)
    calibration = native_calibration(wanted, source)
    assert onnx.compile_engine(wanted, model.loaded, model.quantized(), Silent(), calibration) == "engine"
    assert given["precision"] is wanted.precision
    assert given["calibration"].source is source
    assert given["calibration"].batch_size == 8
    assert list(given["calibration"].made_from) == ["graph"]
    given.clear()
    onnx.compile_engine(job("onnx", "tensorrt"), model.loaded, model.quantized(), Silent())
    assert given["calibration"] is None

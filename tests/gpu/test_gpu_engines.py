"""Engines built and run on this machine's GPU, held against ONNX Runtime on the same graph."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_graphs import batch, conv_model, quantized_model

from trtpipe import errors
from trtpipe.job.sections import Build
from trtpipe.progress import Silent
from trtpipe.runtime import doctor
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt.builder import build_engine
from trtpipe.trt.platforms import rtx_support
from trtpipe.trt.refit import refitted
from trtpipe.trt.runtime import EngineRunner
from trtpipe.trt.timing_cache import GIVEN
from trtpipe.values import DimRange


def relative_l2(got, wanted):
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def built(model, target, gpu, **options):
    """An engine for this GPU. TensorRT-RTX is asked for the GPU's own compute capability where it has that, else a
    portable engine."""
    from trtpipe.trt.platforms import RTX_COMPUTE_CAPABILITIES

    if target == "tensorrt_rtx" and gpu.compute_capability in RTX_COMPUTE_CAPABILITIES:
        options["compute_capability"] = (gpu.compute_capability,)
    return build_engine(model, Build(target=target, **options), progress=Silent())


@pytest.fixture
def runs(target, gpu):
    """Skips where this TensorRT cannot run its engines on this GPU; `test_doctor_says_what_happens` says which."""
    if target == "tensorrt_rtx":
        try:
            with EngineRunner(built(conv_model(), target, gpu).data):
                pass
        except errors.TrtpipeError as error:
            pytest.skip(f"{gpu.name}: {error}")


def test_doctor_says_what_happens(target, gpu, capsys, results):
    """The first question: does a TensorRT-RTX engine load and run here? Whatever the answer, doctor has to give it.

    Of a GPU that nobody has tried, platforms and doctor say that it is not known; the skip then says what to write.
    """
    engine = built(conv_model(), target, gpu)
    try:
        with EngineRunner(engine.data) as runner:
            runner.run(batch(2))
        happened = "it runs"
    except errors.TrtpipeError as error:
        happened = str(error)
    with capsys.disabled():
        print(f"\n{target} on {gpu.name} ({gpu.compute_capability}): {happened}")
    results(f"{target}-runs", {"gpu": gpu.name, "compute_capability": gpu.compute_capability, "happened": happened})
    support = rtx_support(gpu.compute_capability)
    if target == "tensorrt_rtx" and support.runs is None:
        entry = (happened == "it runs", "" if happened == "it runs" else happened)
        pytest.skip(f"platforms.RTX_SEEN should hold {gpu.compute_capability!r}: {entry}")
    (said,) = (a.possible for a in doctor.examine().abilities if f"target {target})" in a.what and "run" in a.what)
    assert said == (happened == "it runs"), "doctor and platforms must say what happened above"


@pytest.mark.parametrize("size", [1, 3, 8])
def test_fp32_is_the_graph(runs, target, gpu, provider, size):
    model = conv_model()
    engine = built(model, target, gpu, tf32=False)
    with EngineRunner(engine.data, memory=provider) as runner, OrtRunner(model.data) as graph:
        assert [s.name for s in runner.inputs] == ["image"]
        assert runner.inputs[0].dims["image_0"] == DimRange(1, 4, 8)
        got, wanted = runner.run(batch(size)), graph.run(batch(size))
    assert got["map"].shape == wanted["map"].shape
    assert relative_l2(got["map"], wanted["map"]) < 1e-5


def test_int8_is_the_graph(runs, target, gpu, provider):
    model = quantized_model()
    engine = built(model, target, gpu)
    with EngineRunner(engine.data, memory=provider) as runner, OrtRunner(model.data, as_written=True) as graph:
        difference = relative_l2(runner.run(batch(8))["map"], graph.run(batch(8))["map"])
    assert difference < 0.02  # a rounding of the quantized input may fall the other way


def test_several_profiles(runs, target, gpu, provider):
    profiles = ({"N": DimRange(1, 1, 1)}, {"N": DimRange(2, 4, 8)})
    model = conv_model()
    engine = built(model, target, gpu, profiles=profiles, tf32=False)
    with EngineRunner(engine.data, memory=provider) as runner, OrtRunner(model.data) as graph:
        for size in (1, 8, 1, 2):
            inputs = batch(size, seed=size)
            assert relative_l2(runner.run(inputs)["map"], graph.run(inputs)["map"]) < 1e-5
        with pytest.raises(errors.InputError, match="shapes must be within a profile"):
            runner.run(batch(9))


def test_cuda_graphs(runs, target, gpu, provider):
    engine = built(conv_model(), target, gpu, tf32=False)
    with EngineRunner(engine.data, memory=provider) as plain:
        wanted = [plain.run(batch(size, seed))["map"] for size, seed in ((4, 1), (4, 2), (8, 3), (4, 1))]
    with EngineRunner(engine.data, memory=provider, cuda_graph=True) as captured:
        got = [captured.run(batch(size, seed))["map"] for size, seed in ((4, 1), (4, 2), (8, 3), (4, 1))]
    for one, other in zip(got, wanted, strict=True):
        assert np.array_equal(one, other)


def test_outputs_are_copies(runs, target, gpu, provider):
    engine = built(conv_model(), target, gpu)
    with EngineRunner(engine.data, memory=provider) as runner:
        first = runner.run(batch(4, 1))["map"]
        kept = first.copy()
        runner.run(batch(4, 2))
    assert np.array_equal(first, kept)


def test_the_inspector_speaks_the_users_language(runs, target, gpu):
    engine = built(conv_model(), target, gpu)
    with EngineRunner(engine.data) as runner:
        assert any("layer3.1.conv2" in name for name in runner.layers())
        assert runner.device_memory_bytes >= 0


def test_an_engine_of_another_gpu_is_refused(gpu):
    pytest.importorskip("tensorrt_rtx")
    other = next(c for c in ("8.6", "8.9") if c != gpu.compute_capability)
    engine = build_engine(conv_model(), Build(compute_capability=(other,)), progress=Silent())
    with pytest.raises(errors.InputError, match=rf"the GPU must be of compute capability {other}"):
        EngineRunner(engine.data).__enter__()


def test_a_timing_cache_is_read_again(target, gpu, tmp_path):
    if target != "tensorrt":
        pytest.skip("TensorRT-RTX times nothing while building")
    built(conv_model(), target, gpu, timing_cache=str(tmp_path))
    (file,) = tmp_path.iterdir()
    first = file.read_bytes()
    assert built(conv_model(), target, gpu, timing_cache=str(tmp_path)).notes == ()
    assert len(file.read_bytes()) >= len(first) > 0


def test_kernels_for_the_shapes_of_a_call(runs, target, gpu, provider, monkeypatch, tmp_path):
    if target != "tensorrt_rtx":
        pytest.skip("TensorRT-RTX alone compiles kernels when it runs")
    engine = built(conv_model(), target, gpu, tf32=False)
    with EngineRunner(engine.data, memory=provider) as plain:
        wanted = plain.run(batch(4))["map"]
    for specialization in ("lazy", "eager", "none"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / specialization))  # no kernels of an earlier run
        with EngineRunner(engine.data, memory=provider, specialization=specialization) as runner:
            assert relative_l2(runner.run(batch(4))["map"], wanted) < 1e-5


def test_an_engine_takes_other_weights(runs, target, gpu, provider):
    onnx = pytest.importorskip("onnx")
    model = conv_model()
    engine = built(model, target, gpu, tf32=False, refit="all")
    graph = onnx.load_from_string(model.data)
    (weight,) = graph.graph.initializer
    weight.CopyFrom(onnx.numpy_helper.from_array(-2 * onnx.numpy_helper.to_array(weight), weight.name))
    other = graph.SerializeToString()
    with EngineRunner(refitted(engine.data, other), memory=provider) as runner, OrtRunner(other) as wanted:
        assert relative_l2(runner.run(batch(4))["map"], wanted.run(batch(4))["map"]) < 1e-5


def test_the_same_engine_comes_out_with_its_timing_cache(target, gpu, tmp_path):
    if target != "tensorrt":
        pytest.skip("TensorRT-RTX times nothing")
    first = built(conv_model(), target, gpu, timing_cache=str(tmp_path / "own"))
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / GIVEN).write_bytes(first.timing_cache)
    again = built(conv_model(), target, gpu, timing_cache=str(tmp_path / "given"))
    assert again.data == first.data

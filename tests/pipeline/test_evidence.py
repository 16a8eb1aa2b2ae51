"""What a build measures beside its check, in the bundle's report, in a build and in a night alike."""

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import nights
import numpy as np
import pytest

import trtpipe
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.evaluation.bench import WARM_UP, Bench, Row
from trtpipe.pipeline import bench as bench_line
from trtpipe.pipeline import measure as evidence
from trtpipe.pipeline.stages import Stages
from trtpipe.progress import Silent
from trtpipe.runtime.device import this_device
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt.runtime import EngineRunner
from trtpipe.values import CheckReport, Control, DimRange, Engine, Fallback, Metric, TensorSpec

RTX = "precision: {int8_mode: true}\nbuild: {target: tensorrt_rtx, compute_capability: ['8.6']}\n"
INT8 = "precision: {int8_mode: true}\nbuild: {target: onnxruntime}\n"
EXECUTED = CheckReport(
    "engine", "RTX on a card", 1, (Metric("cosine", "y", 1.0, 0.9, True),), Control("t", "scale x 127", True, 1), True
)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nights.make_world(tmp_path / "jobs")
    return tmp_path


def with_check(path, more):
    path.write_text(path.read_text().replace("check: {", f"check: {{{more}, "))
    return path


def page_of(bundle):
    return (bundle / "report.html").read_text()


def test_sensitivity_is_in_the_report_of_a_job_that_asks_for_it(world):
    job = nights.write_job(world / "jobs", "m", INT8)
    assert "Alone quantized" not in page_of(trtpipe.build(job, "out").bundle.path)
    built = trtpipe.build(with_check(job, "sensitivity: true"), "out")
    assert built.report.passed
    assert "Alone quantized" in page_of(built.bundle.path)


@pytest.mark.parametrize("command", [("build",), ("nightly", "--cache", "cache", "--workers", "0")])
def test_a_failed_check_names_modules_whichever_command_finds_it(world, capsys, command):
    job = nights.write_job(world / "jobs", "m", INT8)
    job.write_text(job.read_text().replace("cosine_min: 0.9,", "max_abs_max: 0.0,"))
    assert main([command[0], str(job), *command[1:], "-o", "out", "--json"]) == 1
    assert "worst quantized modules: " in capsys.readouterr().out
    assert "Alone quantized" in page_of(world / "out" / "m")


def test_the_table_of_modes_is_in_the_report_of_a_job_that_asks_for_it(world, monkeypatch):
    asked = []

    def bench_prepared(job, prepared, table, plans, stages):
        asked.append(plans["engine"]().data)
        return Bench("m", 4, 24, 10, 5, "eager FP32", 1, (Row("a mode", "cpu", "", 1.25), Row("b", "cuda", "no GPU")))

    monkeypatch.setattr("trtpipe.pipeline.build.bench_prepared", bench_prepared)
    job = nights.write_job(world / "jobs", "m", INT8)
    assert 'id="speed"' not in page_of(trtpipe.build(job, "out").bundle.path)
    built = trtpipe.build(with_check(job, "bench: true"), "out")
    page = page_of(built.bundle.path)
    assert "a mode" in page
    assert "not measured: no GPU" in page
    assert asked == [built.bundle.read(built.bundle.manifest.engine_file)]


def test_a_kit_says_that_it_has_no_report_to_measure_for(world):
    from trtpipe.pipeline import kit as kit_line

    job = with_check(nights.write_job(world / "jobs", "m", INT8), "sensitivity: true, bench: true")
    kit = kit_line.write_kit(trtpipe.load_job(job), world / "kits", Silent())
    assert "diagnose" not in kit.seconds
    note = "a kit has no report: check.sensitivity and check.bench measured nothing"
    assert note in kit.report.notes
    assert note in kit.bundle.manifest.notes


def test_a_kit_says_that_it_takes_no_timing_cache_along(world):
    from trtpipe.pipeline import kit as kit_line
    from trtpipe.pipeline.validate import plan_one

    job = nights.write_job(world / "jobs", "m", "build: {target: tensorrt, timing_cache: caches}\n")
    kit = kit_line.write_kit(plan_one(job, purpose="prepare"), world / "kits", Silent())
    note = "a kit takes no timing cache to its device: build.timing_cache has no effect there"
    assert note in kit.report.notes
    assert note in kit.bundle.manifest.notes


@pytest.mark.parametrize("release", [None, "10.3.0"])
def test_a_kit_for_onnxruntime_says_that_it_is_for_no_release(world, release):
    from trtpipe.pipeline import kit as kit_line

    job = nights.write_job(world / "jobs", "m", "build: {target: onnxruntime}\n")
    kit = kit_line.write_kit(trtpipe.load_job(job), world / "kits", Silent(), release=release)
    note = "a kit for onnxruntime is for no TensorRT: its release 10.3.0 has no effect"
    assert (note in kit.bundle.manifest.notes) is (release is not None)


class Executing(EngineRunner):
    """An engine's runner that executes the graph, and knows what TensorRT says of its memory."""

    device_memory_bytes = 5 << 20

    def __init__(self, graph):
        self._runner = OrtRunner(graph.data)
        self.name = "a double"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self, inputs):
        return self._runner.run(inputs)


@pytest.mark.parametrize("way", ["build", "kit"])
def test_the_memory_of_an_executed_engine_is_kept(world, monkeypatch, way):
    from trtpipe.evaluation.control import damaged_copy
    from trtpipe.pipeline import build as line
    from trtpipe.pipeline import kit as kit_line
    from trtpipe.pipeline import stages
    from trtpipe.pipeline.controls import graph_control

    def opened(engine):
        return Executing(engine.graph), "engine"

    def damaged(job, engine, *_):
        return graph_control(*damaged_copy(engine.graph), "tensorrt_rtx")

    for module in (stages, kit_line):
        monkeypatch.setattr(module, "open_engine", opened)
    monkeypatch.setattr(stages, "control", damaged)
    monkeypatch.setattr(kit_line, "not_executed_here", lambda engine: False)
    monkeypatch.setattr(
        kit_line, "_control", lambda graph, make, progress: graph_control(*damaged_copy(graph), "tensorrt_rtx")
    )
    monkeypatch.setattr(line, "timed", lambda prepared, engine, report, stages: (report, ()))
    gpu = dataclasses.replace(this_device(), compute_capability="8.6")
    monkeypatch.setattr(stages, "this_device", lambda: gpu)
    job = trtpipe.load_job(nights.write_job(world / "jobs", "m", RTX))
    if way == "build":
        bundle = line.build(job, world / "out", Silent()).bundle
    else:
        kit = kit_line.write_kit(job, world / "kits", Silent())
        bundle = kit_line.finish_kit(kit.bundle.path, world / "out", Silent()).bundle
    assert bundle.manifest.check.executed == "engine"
    assert bundle.manifest.engine.device_memory_bytes == 5 << 20


class Timed:
    """`trt.timing.TimedEngine` with known times: 0.5 ms more at each execution."""

    def __init__(self):
        self.log = []

    def __enter__(self):
        self.log.append("open")
        return self

    def __exit__(self, *_):
        self.log.append("close")

    def run(self, inputs):
        self.log.append("run")

    def milliseconds(self, inputs, *, transfers):
        assert not transfers
        self.log.append("timed")
        return 0.5 * self.log.count("timed")


def test_an_executed_engine_is_timed(monkeypatch):
    runner, opened = Timed(), []

    def timed(engine, *, version_compatible=False, without_lean_runtime=False, refit=None, plugins=None):
        opened.append((engine, version_compatible, refit))
        return runner

    monkeypatch.setattr(evidence, "TimedEngine", timed)
    monkeypatch.setattr(evidence, "first_batch", lambda prepared: {"x": np.zeros(1)})
    spec = TensorSpec("y", "float32", (1,), {})
    prepared = SimpleNamespace(outputs=(spec,))
    engine = Engine(b"plan", "tensorrt_rtx", "1.7", (), (spec,), (spec,), None, {"version_compatible": True}, ())
    report, found = evidence.timed(prepared, engine, EXECUTED, Stages(Silent()))
    assert opened == [(b"plan", True, None)]
    assert runner.log == ["open"] + ["run"] * WARM_UP + ["timed"] * 200 + ["close"]
    assert found == tuple(0.5 * k for k in range(1, 201))
    assert report.metrics[-1] == Metric("latency_ms", "y", 50.25)
    assert report.passed


@pytest.mark.parametrize(
    ("held", "opt", "count", "reads"), [(8, 4, 20, 0), (8, 8, 20, 0), (8, 12, 20, 1), (8, 12, 8, 0)]
)
def test_the_timed_batch_is_read_only_where_the_first_check_batch_is_smaller(held, opt, count, reads):
    spec = TensorSpec("x", "float32", ("N", 2), {"N": DimRange(1, opt, 16)})
    output = TensorSpec("y", "float32", ("N",), {"N": DimRange(1, opt, 16)})
    samples, read = np.arange(2 * count, dtype=np.float32).reshape(count, 2), []

    def batches(size):
        read.append(size)
        yield SimpleNamespace(arrays={"x": samples[:size]})

    source = SimpleNamespace(sample_count=count, batches=batches)
    baseline = SimpleNamespace(labels=None)
    prepared = SimpleNamespace(
        first_check_batch={"x": samples[:held]},
        check_source=source,
        baseline=baseline,
        inputs=(spec,),
        outputs=(output,),
    )
    np.testing.assert_array_equal(evidence.first_batch(prepared)["x"], samples[: min(opt, count)])
    assert len(read) == reads


def test_what_was_not_executed_has_no_latency():
    from dataclasses import replace

    graph = replace(EXECUTED, executed="graph")
    assert evidence.timed(None, None, graph, Stages(Silent())) == (graph, ())


def test_a_hybrid_engine_is_not_timed_and_that_is_said():
    kept = (Fallback("odd", "aten.erfc.default", "no converter"),)
    spec = TensorSpec("y", "float32", (1,), {})
    engine = Engine(b"hybrid", "tensorrt_rtx", "1.7", (), (spec,), (spec,), None, {}, (), kept)
    report, found = evidence.timed(None, engine, EXECUTED, Stages(Silent()))
    assert found == ()
    assert report.metrics == EXECUTED.metrics
    assert report.notes[-1] == (
        "latency_ms: not measured: PyTorch runs between the engines of a hybrid module, which cannot be timed as one"
    )


def test_the_modes_of_a_hybrid_engine_say_why_they_are_not_measured(monkeypatch):
    from trtpipe.trt import driver

    monkeypatch.setattr(driver, "probe", lambda: SimpleNamespace(devices=("a card",), problem=""))
    modes = bench_line._engine_modes(lambda: bench_line.TimedPlan(b"", {}, hybrid=True), "tensorrt_rtx", {})
    assert [m.name for m in modes] == ["engine", "engine, CUDA graph", "engine, with transfers"]
    for mode in modes:
        assert not mode.cannot
        with pytest.raises(InputError, match="PyTorch runs between the engines of a hybrid module"):
            mode.prepare()


def test_an_engine_is_timed_with_its_own_settings(monkeypatch):
    from trtpipe.trt import driver

    made, opened, log = [], [], []

    def plan():
        made.append(1)
        return bench_line.TimedPlan(b"plan", {"version_compatible": True, "refit": b"graph"})

    @contextmanager
    def timed(engine, *, cuda_graph, version_compatible=False, without_lean_runtime=False, refit=None, plugins=None):
        opened.append((engine, cuda_graph, version_compatible, refit))
        yield SimpleNamespace(name="RTX", notes=(), run=None)
        log.append("closed")

    monkeypatch.setattr(driver, "probe", lambda: SimpleNamespace(devices=("a card",), problem=""))
    monkeypatch.setattr(bench_line, "TimedEngine", timed)
    for number, mode in enumerate(bench_line._engine_modes(plan, "tensorrt_rtx", {})):
        ready = mode.prepare()
        assert ready.size_bytes == len(b"plan")
        assert log == ["closed"] * number
        ready.close()
    assert opened == [(b"plan", graph, True, b"graph") for graph in (False, True, False)]
    assert made == [1]

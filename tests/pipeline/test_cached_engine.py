"""An engine that comes from the cache is checked, timed, judged and benched as one that was just compiled."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import compiled_double
import nights
import pytest
from job_values import CALLABLES, PRECISIONS

from trtpipe.job.job import Job
from trtpipe.job.load import read_job
from trtpipe.pipeline import bench
from trtpipe.pipeline import build as build_module
from trtpipe.pipeline.build import Built, build
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import this_machine
from trtpipe.pipeline.cache.keys import Survey, stage_keys
from trtpipe.pipeline.cache.recorder import Recorder
from trtpipe.pipeline.cache.store import Cache
from trtpipe.pipeline.cached import CachedResults, Memory
from trtpipe.pipeline.calibrate import make_table
from trtpipe.progress import Silent
from trtpipe.trt.builder import build_engine
from trtpipe.trt.timing import TimedEngine

MISSED = "the engine takes 0.500 ms and its FP16 twin 0.500 ms, 1 times as fast (limit 1.5); "


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = nights.make_world(tmp_path_factory.mktemp("engines"))
    (folder / "net.py").write_text(nights.NET + CALLABLES)
    make_table(read_job(write(folder, "int8", {})), Silent()).save(folder / "table.json")
    return folder


@pytest.fixture(autouse=True)
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """And a bench of one round, of ONNX Runtime and the engine."""
    short = functools.partial(
        bench.bench_prepared, rounds=1, samples=4, left_out=lambda name: "" if "engine" in name else "not here"
    )
    monkeypatch.setattr(build_module, "bench_prepared", short)
    with compiled_double.as_tensorrt(monkeypatch):
        yield


def write(folder: Path, precision: str, check: dict[str, Any]) -> Path:
    """A job of this kind whose engine must be executed, and of which everything is measured."""
    kind = PRECISIONS[precision]
    limits = {"cosine_min": 0.9, "top1_agreement_min": 0.9, **check}
    quantized = kind.get("precision", {}).keys() - {"fp16_mode", "bf16_mode"}
    explicit = bool(quantized) and "quantization" not in kind.get("build", {})
    content = {
        "name": "m",
        "model": kind.get("model", {"factory": "net:net", "weights": "w0.safetensors"}),
        "inputs": {"image": {"shape": ["N", 1, 16, 16], "N": {"min": 1, "opt": 4, "max": 8}}},
        "outputs": {"logits": {}},
        "precision": kind.get("precision", {}),
        "calibration": {"arrays": "calib.npz", "algorithm": "minmax"} | kind.get("calibration", {}),
        "build": kind.get("build", {}) | {"target": "tensorrt"},
        "check": {"arrays": "val.npz", "require": "engine", "sensitivity": explicit, "bench": True, "limits": limits},
    }
    if "table" in content["calibration"]:
        del content["calibration"]["arrays"]
    path = folder / "m.yaml"
    path.write_text(json.dumps(content))
    return path


def results(job: Job, root: Path) -> CachedResults:
    with Digests() as digests:
        found = Survey(digests, this_machine(digests)).ingredients(job)
    keys = stage_keys(job, found)
    return CachedResults(Cache(root), keys, Memory(), Silent(), Recorder(), lambda: keys)


def outcome(built: Built) -> Any:
    """What a build came to, less times of the processor."""
    manifest = json.loads((built.bundle.path / "manifest.json").read_bytes())
    page = built.bundle.read("report.html").decode()
    said = [t for t in ("Alone quantized", "engine, with transfers", "0.500") if t in page]
    report = built.report
    return report.metrics, report.problems, report.passed, report.control, manifest["notes"], manifest["layers"], said


def test_the_doubles_are_called_as_what_they_stand_for() -> None:
    def names(of: Any) -> list[str]:
        return list(inspect.signature(of).parameters)

    assert inspect.signature(compiled_double.compiled) == inspect.signature(build_engine)
    for method in ("run", "milliseconds", "layer_ms"):
        assert names(getattr(compiled_double.Executed, method)) == names(getattr(TimedEngine, method)), method


@pytest.mark.parametrize(("precision", "limit"), [*((p, 1.5) for p in PRECISIONS), ("int8", 0.5)])
def test_what_is_measured_of_an_engine_is_the_same(world: Path, tmp_path: Path, precision: str, limit: float) -> None:
    """The speedup is judged, the latency measured and the engine benched."""
    job = read_job(write(world, precision, {"speedup_over_fp16_min": limit}))
    first = outcome(build(job, tmp_path / "first", Silent(), results=results(job, tmp_path / "cache")))
    found = results(job, tmp_path / "cache")
    again = build(job, tmp_path / "again", Silent(), results=found)
    assert "engine" in found.reused
    assert outcome(again) == first
    assert again.report.executed == again.report.control.executed == "engine"
    values = {m.name: m.value for m in again.report.metrics}
    assert (values["speedup_over_fp16"], values["latency_ms"]) == (1.0, 0.5)
    assert again.report.passed is (limit == 0.5), again.report.problems
    assert any(p.startswith(MISSED) for p in again.report.problems) is (limit == 1.5)
    assert "engine, with transfers" in first[-1]


def test_a_new_limit_is_held_against_an_engine_that_is_kept(world: Path, tmp_path: Path) -> None:
    told = []
    for limit in (0.5, 1.5, 0.75):
        job = read_job(write(world, "int8", {"speedup_over_fp16_min": limit}))
        found = results(job, tmp_path / "cache")
        report = build(job, tmp_path / "out", Silent(), results=found).report
        told.append(("engine" in found.reused, report.passed, any(p.startswith(MISSED) for p in report.problems)))
    assert told == [(False, True, False), (True, False, True), (True, True, False)]

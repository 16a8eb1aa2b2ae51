"""What a build measures is the same whichever results of its stages come from the cache."""

import itertools
import json
import shutil

import nights
import numpy as np
import pytest

from trtpipe.errors import InputError
from trtpipe.evaluation.bench import Bench, Row
from trtpipe.job.load import read_job
from trtpipe.pipeline import build as build_module
from trtpipe.pipeline.build import build
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import this_machine
from trtpipe.pipeline.cache.keys import Survey, stage_keys
from trtpipe.pipeline.cache.recorder import Recorder
from trtpipe.pipeline.cache.store import Cache
from trtpipe.pipeline.cached import CachedResults, Memory
from trtpipe.progress import Silent

KINDS = ("outputs", "baseline", "calibration", "graph")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A job that fails over numbers and wants everything measured; its bundle built without and with a cache."""
    folder = tmp_path_factory.mktemp("cached")
    nights.make_world(folder / "jobs")
    extra = "precision: {int8_mode: true, fp16_mode: true}\nbuild: {target: onnxruntime}\n"
    path = nights.write_job(folder / "jobs", "m", extra)
    text = path.read_text().replace(
        "limits: {cosine_min: 0.9,", "sensitivity: true, bench: true, limits: {max_abs_max: 0,"
    )
    path.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The modes are not timed; what timing needs is asked for."""

    def bench_prepared(job, prepared, table, plans, stages):
        sizes = {name: len(plan().data) for name, plan in plans.items()}
        kinds = (
            prepared.torchscript,
            prepared.loaded.module,
            prepared.captured.graph,
            table,
            prepared.baseline.outputs,
        )
        assert None not in kinds
        rows = (Row(f"engine of {sizes['engine']} bytes", "cpu", "", 1.25),)
        return Bench("m", 4, 24, 10, 5, "eager FP32", 1, rows)

    monkeypatch.setattr(build_module, "bench_prepared", bench_prepared)


def results(world, job, root):
    with Digests() as digests:
        found = Survey(digests, this_machine(digests)).ingredients(job)
    keys = stage_keys(job, found)
    return CachedResults(Cache(root), keys, Memory(), Silent(), Recorder(), lambda: keys)


def outcome(built):
    """All that a build came to, less times."""
    manifest = json.loads((built.bundle.path / "manifest.json").read_bytes())
    files = {n: f["sha256"] for n, f in manifest["files"].items() if n != "report.html"}
    page = built.bundle.read("report.html").decode()
    report = built.report
    said = [t for t in ("Alone quantized", "engine of ") if t in page]
    return files, report.metrics, report.problems, report.passed, manifest["notes"], manifest["layers"], said


@pytest.fixture(scope="module")
def expected(world):
    job = read_job(world / "jobs" / "m.yaml")
    return lambda: outcome(build(job, world / "plain", Silent()))


@pytest.mark.parametrize("kept", [s for n in range(5) for s in itertools.combinations(KINDS, n)], ids="+".join)
def test_any_part_of_the_cache_gives_what_no_cache_gives(world, kept, once):
    job = read_job(world / "jobs" / "m.yaml")
    root = world / "cache"
    if not root.exists():
        build(job, world / "first", Silent(), results=results(world, job, root))
    some = world / "some"
    shutil.rmtree(some, ignore_errors=True)
    shutil.copytree(root, some)
    for kind in KINDS:
        if kind not in kept:
            shutil.rmtree(some / kind)
    found = results(world, job, some)
    again = build(job, world / "again", Silent(), results=found)
    assert outcome(again) == once
    assert len(once[2]) == 1
    assert once[2][0].startswith("worst quantized modules: ")
    assert len(once[6]) == 2
    assert set(found.reused) >= set(kept) - {"outputs", "calibration"}


@pytest.fixture(scope="module")
def _held():
    return {}


@pytest.fixture
def once(_held, expected):
    """Of a build without a cache, made once."""
    if not _held:
        _held["outcome"] = expected()
    return _held["outcome"]


def test_an_engine_from_the_cache_is_blamed_and_timed_as_a_new_one(world):
    """Of TensorRT-RTX; the graph is executed in its place where no GPU is."""
    pytest.importorskip("tensorrt_rtx")
    job = read_job(world / "jobs" / "m.yaml", ["build={target: tensorrt_rtx, compute_capability: ['8.6']}"])
    root = world / "rtx"
    first = outcome(build(job, world / "first", Silent(), results=results(world, job, root)))
    for kind in KINDS:
        shutil.rmtree(root / kind)
    found = results(world, job, root)
    assert outcome(build(job, world / "again", Silent(), results=found)) == first
    assert "engine" in found.reused


@pytest.mark.parametrize(
    ("given", "changed", "message"),
    [
        (
            ["check.arrays=plain.npz", "check.limits={cosine_min: 0.5}"],
            "check.limits.accuracy_drop_max=0.1",
            "check.limits.accuracy_drop_max cannot be judged: it needs labels",
        ),
        (
            ["build={target: tensorrt_rtx, compute_capability: ['8.6']}", "precision={}"],
            "build.compute_capability=['8.6', '7.5']",
            "build.compute_capability: TensorRT-RTX compiles no matrix product of FP32 tensors for 7.5",
        ),
    ],
    ids=["limit", "GPU"],
)
def test_what_a_new_job_is_refused_for_a_changed_one_is_too(world, tmp_path, given, changed, message):
    """Whatever is kept of the stage that would have refused it: before anything is compiled."""
    pytest.importorskip("tensorrt_rtx")
    arrays = dict(np.load(world / "jobs" / "val.npz"))
    np.savez(world / "jobs" / "plain.npz", image=arrays["image"])
    path, root = world / "jobs" / "m.yaml", tmp_path / "cache"
    given = ["check.sensitivity=false", "check.bench=false", *given]
    job = read_job(path, given)
    build(job, tmp_path / "first", Silent(), results=results(world, job, root))
    job = read_job(path, [*given, changed])
    for kept in (results(world, job, root), results(world, job, tmp_path / "empty")):
        with pytest.raises(InputError) as caught:
            build(job, tmp_path / "again", Silent(), results=kept)
        assert str(caught.value).startswith(message)

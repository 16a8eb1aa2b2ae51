import json
import sys
import types

import pytest

from calib.errors import CalibCancelled
from trtpipe.errors import Cancelled, InputError
from trtpipe.job.load import read_job
from trtpipe.nightly import execute
from trtpipe.nightly.execute import _fresh_modules
from trtpipe.nightly.options import Options
from trtpipe.nightly.outcome import Drift, JobOutcome
from trtpipe.nightly.run import nightly
from trtpipe.nightly.task import (
    BuildTask,
    FinishTask,
    KitTask,
    RepeatTask,
    from_plain,
    plain,
    task_from_plain,
    task_to_plain,
)
from trtpipe.pipeline.cache.reads import Reads
from trtpipe.pipeline.cache.store import Cache
from trtpipe.pipeline.cached import Memory
from trtpipe.values import Metric


def module(monkeypatch, name, folder):
    loaded = types.ModuleType(name)
    loaded.__file__ = str(folder / f"{name}.py")
    (folder / f"{name}.py").touch()
    monkeypatch.setitem(sys.modules, name, loaded)


def job_of(folder, name):
    return types.SimpleNamespace(folder=folder, callables={"model.factory": f"{name}:net"})


def test_modules_of_the_job_before_and_those_the_job_names_are_forgotten(tmp_path, monkeypatch):
    for name in ("before", "named", "elsewhere"):
        module(monkeypatch, f"tt_{name}", tmp_path)
    memory = Memory()
    memory.modules = frozenset({"tt_before", "json"})
    with _fresh_modules(job_of(tmp_path, "tt_named"), "key", memory):
        assert {n for n in sys.modules if n.startswith("tt_")} == {"tt_elsewhere"}
        module(monkeypatch, "tt_now", tmp_path)
    assert "json" in sys.modules
    assert "tt_now" in memory.modules


def test_modules_of_a_model_that_is_shared_stay(tmp_path, monkeypatch):
    for name in ("model", "data"):
        module(monkeypatch, f"tt_{name}", tmp_path)
    memory = Memory()
    memory.put("key", "model", object(), Reads())
    memory.modules, memory.model_modules = frozenset({"tt_model", "tt_data"}), frozenset({"tt_model"})
    with _fresh_modules(job_of(tmp_path, "tt_model"), "key", memory):
        assert {n for n in sys.modules if n.startswith("tt_")} == {"tt_model"}
    with _fresh_modules(job_of(tmp_path, "tt_model"), "other", memory):
        assert not {n for n in sys.modules if n.startswith("tt_")}


TEXT = """
name: a
model: {factory: "net:net"}
inputs: {x: {shape: [N, 4], N: {min: 1, opt: 2, max: 4}}}
outputs: {y: {}}
check: {arrays: x.npz}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    (tmp_path / "x.npz").touch()
    return read_job(path)


def test_tasks_survive_being_plain_data(job):
    first = ("a", "a.yaml", "k", "out", "cache", True, ("weights changed",), ("died",))
    tasks = [
        BuildTask(*first, job=job, parts={"weights": "x"}, store="s", force=True, diagnose_seconds=3.0),
        RepeatTask(*first, job=job, times=3),
        KitTask(*first, job=job),
        FinishTask(*first, kits="kits", store="s", force=True),
    ]
    for task in tasks:
        again = task_from_plain(json.loads(json.dumps(task_to_plain(task))))
        assert type(again) is type(task)
        assert again == task
    assert task_from_plain(task_to_plain(tasks[0])).job.folder == job.folder


def test_what_a_job_sets_without_using_it_is_said_of_it_elsewhere_too(job):
    """Given at its default it is given all the same."""
    job = read_job(
        job.folder / "a.yaml",
        ["calibration={arrays: x.npz, algorithm: auto, corrections: true}", "precision.fp16_mode=true"],
    )
    task = BuildTask("a", "a.yaml", "k", "out", "cache", True, job=job)
    assert "calibration.algorithm" in " ".join(job.unused())
    assert task_from_plain(json.loads(json.dumps(task_to_plain(task)))).job.unused() == job.unused()


def test_an_outcome_survives_being_plain_data():
    outcome = JobOutcome(
        "a", "a.yaml", "built", 1, "", ("weights changed",), "k", "f", "out/a", "e", 5, "onnxruntime", "graph",
        "ort", 3, (Metric("sqnr_db", "y", float("inf"), 3.0, True, (1.0, 2.0)), Metric("cosine", "y", 0.5)), ("bad",),
        {"compile": 1.5}, ("graph",), "cpu0", ("died",), ("note",), drift=Drift(("x", "y"), 0.5, ("n",)),
    )  # fmt: skip
    assert from_plain(plain(outcome)) == outcome


def test_a_job_whose_inputs_changed_since_planning_is_not_built(tmp_path, monkeypatch):
    now = types.SimpleNamespace(moved_since=lambda before, written: ["weights changed"], key="now")
    monkeypatch.setattr(execute, "this_machine", lambda digests: None)
    monkeypatch.setattr(execute, "with_reads", lambda *_: (now, Reads()))
    monkeypatch.setattr(execute, "code_key", lambda ingredients: "code")
    task = types.SimpleNamespace(name="a", cache=str(tmp_path), job=None, parts={}, store="", force=False, wait=False)
    with pytest.raises(InputError, match=r"^a: inputs changed since planning \(weights changed\)\. Run again\.$"):
        execute._build(task, None, Memory(), Cache(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("raised", "code", "error"),
    [
        (
            ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript"),
            3,
            "onnxscript is not installed. Run: pip install 'trtpipe[build]'",
        ),
        (
            MemoryError(),
            3,
            "out of memory. Use a machine with more memory; in a job, a smaller batch_size or fewer workers.",
        ),
        (ZeroDivisionError("division"), 70, "this is a bug in trtpipe, please report it:"),
        (SystemExit(0), 70, "this is a bug in trtpipe, please report it:"),  # of a library, say
    ],
    ids=repr,
)
def test_what_costs_one_job_of_the_night(raised, code, error, monkeypatch):
    def failing(*_):
        raise raised

    monkeypatch.setattr(execute, "_execute", failing)
    made = execute.execute(FinishTask("a", "a.yaml", "k", "out", "cache"), None, Memory())
    assert (made["outcome"], made["exit_code"], made["error"].splitlines()[0]) == ("error", code, error)


@pytest.mark.parametrize(
    "stop", [Cancelled("interrupted"), CalibCancelled("calibration: was asked to stop.")], ids=repr
)
def test_a_job_that_was_asked_to_stop_has_no_outcome(stop, monkeypatch):
    def stopped(*_):
        raise stop

    monkeypatch.setattr(execute, "_execute", stopped)
    with pytest.raises(Cancelled, match=str(stop)):
        execute.execute(types.SimpleNamespace(name="a"), None, Memory())


def test_only_a_damaged_bundle_leaves_the_cache(tmp_path):
    """A place that cannot be written says nothing of what the cache holds."""
    cache, place = Cache(tmp_path / "cache"), tmp_path / "out" / "a"
    cache.put("bundle", "key", {}, {"manifest.json": b"{}"})
    place.parent.mkdir()
    for make, remove in ((place.touch, place.unlink), (lambda: place.symlink_to("b"), place.unlink)):
        make()
        with pytest.raises((InputError, OSError)):
            execute.put_back(cache, "key", place)
        assert cache.get("bundle", "key") is not None
        remove()
    assert not execute.put_back(cache, "key", place)  # whose manifest is none
    assert cache.get("bundle", "key") is None
    assert not execute.put_back(cache, "key", place)


def test_a_night_without_a_job_is_refused(tmp_path):
    options = Options((), tmp_path / "out", tmp_path / "cache", tmp_path / "history.sqlite")
    watcher = types.SimpleNamespace(note=lambda message: None, cancelled=lambda: False)
    with pytest.raises(InputError, match=r"^JOB: no job was given\. Name a job file, or a folder of them\.$"):
        nightly(options, watcher)

import errno
import io
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from calib.errors import CalibError
from trtpipe.cli.watching import Jobs
from trtpipe.job.job import Job
from trtpipe.nightly.local import PROCESS_BYTES, Local, _Queue, expected_bytes
from trtpipe.nightly.pool import Pool, Slot
from trtpipe.nightly.task import BuildTask
from trtpipe.trt.driver import Driver, Gpu

JOB = Job.model_validate(
    {
        "name": "a",
        "model": {"factory": "a:b"},
        "inputs": {"x": {"shape": ["N", 4], "N": {"min": 1, "opt": 2, "max": 4}}},
        "outputs": {"y": {}},
        "check": {"arrays": "x.npz"},
    }
)
NOWHERE = Path(os.devnull)
CPU, CPU1, GPU = Slot("cpu0", 1, None, NOWHERE), Slot("cpu1", 1, None, NOWHERE), Slot("gpu0", 1, 0, NOWHERE)


def task(name, target="onnxruntime", weights="w"):
    job = JOB.model_copy(
        update={
            "model": JOB.model.model_copy(update={"weights": weights}),
            "build": JOB.build.model_copy(update={"target": target}),
        }
    )
    return BuildTask(name, f"{name}.yaml", "key", "out", "cache", job=job)


def test_a_gpu_has_a_queue_of_its_own(tmp_path):
    gpus = Driver("12.6", (Gpu(0, "RTX", "8.9", 1), Gpu(1, "RTX", "8.9", 1)))
    local = Local(2, None, gpus, tmp_path)
    assert [(s.name, s.gpu) for s in local.slots] == [("gpu0", 0), ("gpu1", 1), ("cpu0", None), ("cpu1", None)]
    queue = _Queue([task("a", "tensorrt"), task("b"), task("c", "tensorrt_rtx")], None, gpus=True)
    assert queue.take(CPU).name == "b"
    assert queue.take(CPU) is None
    assert [queue.take(GPU).name, queue.take(GPU).name] == ["a", "c"]


@pytest.mark.parametrize(("workers", "threads"), [(None, 1), (1, 8), (2, 4), (3, 2), (16, 1)])
def test_a_workers_threads_do_not_depend_on_what_memory_is_free(workers, threads, tmp_path, monkeypatch):
    """Sums of floats depend on them, and so does what is built."""
    monkeypatch.setattr("trtpipe.nightly.local.usable_cores", lambda: 8)
    for memory in (PROCESS_BYTES, 3 * PROCESS_BYTES, 100 * PROCESS_BYTES):
        local = Local(workers, memory, Driver("", ()), tmp_path)
        assert {slot.threads for slot in local.slots} == {threads}


def test_gpus_of_another_kind_stay_idle_and_that_is_said(tmp_path):
    driver = Driver("12.6", (Gpu(0, "A100", "8.0", 1), Gpu(1, "T4", "7.5", 1), Gpu(2, "A100", "8.0", 1)))
    local = Local(1, None, driver, tmp_path)
    assert [s.gpu for s in local.slots] == [0, 2, None]
    assert local.unused == ("GPU 1 (T4)",)
    notes = []
    local.run([], SimpleNamespace(note=notes.append), lambda task, result: None)
    assert notes == ["not used, as not of the first GPU's kind: GPU 1 (T4)"]


def test_without_a_gpu_any_worker_takes_any_job():
    queue = _Queue([task("a", "tensorrt_rtx")], None, gpus=False)
    assert queue.take(CPU).name == "a"


def test_memory_is_respected_and_one_job_always_runs(tmp_path):
    weights = tmp_path / "w"
    weights.write_bytes(bytes(1000))
    assert expected_bytes(task("a", weights=str(weights))) == PROCESS_BYTES + 8000
    first, second = task("a"), task("b")
    queue = _Queue([first, second], PROCESS_BYTES, gpus=False)
    assert queue.take(CPU).name == "a"
    assert queue.take(CPU1) is None
    queue.ended(first)
    assert queue.take(CPU1).name == "b"


def test_jobs_of_one_model_follow_each_other_in_one_worker():
    names = [("a1", "A"), ("a2", "A"), ("b1", "B"), ("b2", "B"), ("c1", "C")]
    queue = _Queue([task(n, weights=w) for n, w in names], None, gpus=False)
    taken = [queue.take(slot).name for slot in (CPU, CPU1, CPU, CPU1, CPU)]
    assert taken == ["a1", "b1", "a2", "b2", "c1"]


def test_what_another_process_builds_is_left_to_the_last_and_waited_for():
    first, second = task("a"), task("b", weights="v")
    queue = _Queue([first, second], None, gpus=False)
    queue.later(queue.take(CPU))
    assert [(t.name, t.wait) for t in queue.waiting] == [("b", False), ("a", True)]
    assert [queue.take(CPU).name, queue.take(CPU).name] == ["b", "a"]


def test_a_log_has_a_line_for_each_job_that_ends(capsys):
    with Jobs().watching() as jobs:
        jobs.planned(["a", "b", "c"])
        jobs.state("a", "reused")
        jobs.state("b", "running", "cpu0")
        jobs.state("b", "running", "cpu0: capture")
        jobs.note("something")
        jobs.state("b", "built", "weights changed")
        jobs.state("c", "error", "no such file")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "note: something"
    assert lines[1].startswith("[2/3] b: built in 0.0")
    assert lines[1].endswith(" s: weights changed")
    assert lines[2] == "[3/3] c: error: no such file"


def test_a_terminal_has_a_table(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Jobs().watching() as jobs:
        jobs.planned([f"job{k}" for k in range(30)])
        jobs.state("job0", "running", "cpu0: [capture]")
        jobs.state("job1", "failed check", "cosine")
    shown = screen.getvalue()
    for text in ("job0", "running", "cpu0: [capture]", "failed", "1 of 30 done, 10 not shown"):
        assert text in shown


def test_quiet_shows_nothing(capsys):
    with Jobs(quiet=True).watching() as jobs:
        jobs.planned(["a"])
        jobs.state("a", "built")
        jobs.note("x")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("Event", errno.ENOSPC, "workers: 2 worker processes cannot be started (no space left in /dev/shm). Free some "
         "there, enlarge it (docker run --shm-size=1g), or use fewer workers: 0 starts none."),
        ("Pipe", errno.EMFILE, "workers: 1 worker process cannot be started (too many open files). Raise the limit "
         "(`ulimit -n 4096`), or use fewer workers: 0 starts none."),
    ],
)  # fmt: skip
def test_what_its_workers_lack_is_said(what, code, said, monkeypatch):
    def refused(*_):
        raise OSError(code, "no")

    monkeypatch.setattr(type(multiprocessing.get_context("spawn")), what, refused)
    with pytest.raises(CalibError) as raised, Pool([CPU, CPU1]) as pool:
        pool.start(CPU, task("a"))
    assert str(raised.value) == said

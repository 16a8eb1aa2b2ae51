"""A night is complete only when every planned job has an outcome; else it is interrupted, and can be resumed."""

import itertools
import json
import os
import signal
import time

import nights
import pytest
from nights import outcomes

from trtpipe.nightly import local
from trtpipe.nightly import run as running
from trtpipe.nightly.history import History
from trtpipe.nightly.options import Options, Unwatched
from trtpipe.nightly.outcome import JobOutcome, lines
from trtpipe.nightly.pool import Event, Pool, Slot
from trtpipe.nightly.task import plain
from trtpipe.trt.driver import Driver

JOBS = ("a", "b", "c")


class Stopping(Unwatched):
    """Is asked to stop once `asked` is set."""

    asked = False

    def cancelled(self):
        return self.asked


@pytest.fixture
def jobs(tmp_path):
    folder = nights.make_world(tmp_path / "jobs")
    return tuple(nights.write_job(folder, name) for name in JOBS)


@pytest.fixture
def options(jobs, tmp_path):
    return Options(jobs, tmp_path / "out", tmp_path / "cache", tmp_path / "out" / "history.sqlite")


def built(task):
    return plain(JobOutcome(task.name, task.file, "built", key=task.key))


def require_one_rule(report, options, done):
    """The report, its exit code and the history agree on whether all jobs are done."""
    complete = done == set(JOBS)
    assert {o.name: o.outcome for o in report.outcomes} == {n: "built" if n in done else "cancelled" for n in JOBS}
    assert (report.interrupted, report.exit_code) == ((False, 0) if complete else (True, 130))
    left = len(JOBS) - len(done)
    said = "all 3 jobs are green" if complete else f"INTERRUPTED with {left} of 3 jobs to do: go on with --resume"
    assert next(lines(report)) == said
    with History(options.history) as history:
        assert (history.unfinished() is None) == complete


@pytest.mark.parametrize("done", [c for n in range(4) for c in itertools.combinations(JOBS, n)], ids="".join)
def test_whatever_an_executor_did_not_finish_was_cancelled(done, options, monkeypatch):
    class Executor:
        workers = ("one",)

        def run(self, tasks, watcher, finished):
            for task in tasks:
                if task.name in done:
                    finished(task, built(task))

    monkeypatch.setattr(running, "_local", lambda options: Executor())
    require_one_rule(running.nightly(options, Unwatched()), options, set(done))


class StandIn:
    """A pool whose jobs end one after the other, all in one way once the user has stopped the night."""

    def __init__(self, slots, watcher, moment, ending):
        self.slots, self.watcher, self.moment, self.ending = list(slots), watcher, moment, ending
        self.running, self.ended = [], []
        watcher.asked = moment == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def idle(self):
        taken = {slot for slot, _ in self.running}
        return tuple(s for s in self.slots if s not in taken)

    def start(self, slot, task):
        assert not self.watcher.cancelled()
        self.running.append((slot, task))

    def events(self, timeout_s):
        slot, task = self.running.pop(0)
        self.watcher.asked = len(self.ended) >= self.moment - 1
        kind = self.ending if self.watcher.asked else "done"
        outcome = {"outcome": "busy"} if kind == "busy" else built(task) if kind == "done" else {}
        if kind == "done":
            self.ended.append(task.name)
        yield Event("done" if kind == "busy" else kind, task, slot.name, "signal 15 (SIGTERM)", outcome)

    def cancel(self):
        assert self.watcher.cancelled()


@pytest.mark.parametrize("ending", ["done", "cancelled", "died", "busy"])
@pytest.mark.parametrize("moment", [0, 1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_stopped_at_any_moment(workers, moment, ending, options, monkeypatch, tmp_path):
    """`moment`: before the first job ends (1), the second, ...; 0: before any is given to a worker."""
    watcher, pools = Stopping(), []

    def pool(slots):
        pools.append(StandIn(slots, watcher, moment, ending))
        return pools[0]

    monkeypatch.setattr(local, "Pool", pool)
    executor = local.Local(workers, 1 << 40, Driver("", ()), tmp_path / "logs")
    monkeypatch.setattr(running, "_local", lambda options: executor)
    report = running.nightly(options, watcher)
    require_one_rule(report, options, set(pools[0].ended))
    assert ending == "done" or report.interrupted


#: The job's code says that it was reached, and goes on when the test has let it.
WAIT = """
import os, time
def reached(place):
    if place == {place!r} and not os.path.exists({begun!r}):
        open({begun!r}, "w").close()
        while not os.path.exists({go!r}):
            time.sleep(0.05)
"""
NET = """
reached("import")
from torch import nn as layers
class Net(layers.Sequential):
    def forward(self, x):
        reached("forward")
        return super().forward(x)
"""


@pytest.mark.parametrize(
    ("workers", "place", "number"),
    [
        (("--workers", "0"), "import", signal.SIGINT),
        (("--workers", "1"), "forward", signal.SIGTERM),
        (("--workers", "2"), "import", signal.SIGTERM),
        ((), "forward", signal.SIGINT),
    ],
)
def test_the_only_job_of_a_night_is_stopped(workers, place, number, tmp_path):
    folder = nights.make_world(tmp_path / "jobs")
    begun, go = tmp_path / "begun", tmp_path / "go"
    wait = WAIT.format(place=place, begun=str(begun), go=str(go))
    (folder / "net.py").write_text(wait + NET + nights.NET.replace("nn.Sequential(", "Net("))
    nights.write_job(folder, "only")
    where = ("-o", "out", "--cache", "cache")
    process = nights.start("nightly", "jobs", *where, *workers, cwd=tmp_path)
    while not begun.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    assert process.stderr.readline().startswith("note: stopping; running jobs end at their next step.")
    go.touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.splitlines()[0] == "INTERRUPTED with 1 of 1 jobs to do: go on with --resume"
    with History(tmp_path / "out" / "history.sqlite") as history:
        assert history.unfinished() is not None
    if not workers:
        resumed = json.loads(nights.run("nightly", *where, "--resume", "--json", cwd=tmp_path))
        assert (resumed["resumed"], outcomes(resumed)) == (True, {"only": "built"})


@pytest.mark.parametrize("model", [False, True])
def test_a_worker_that_begins_is_not_interrupted_with_its_night(tmp_path, capfd, model):
    """Ctrl-C reaches the whole process group; what a worker imports takes seconds, and it printed a traceback."""
    with Pool([Slot("w", 1, None, tmp_path / "log")]) as pool:
        (worker,) = pool._workers
        worker.begin(model=model)
        began = time.monotonic()
        os.kill(worker._process.pid, signal.SIGINT)
        while not (tmp_path / "log").exists():  # it is written once interrupts are ignored
            assert worker._process.is_alive()
            assert time.monotonic() < began + 60
            os.kill(worker._process.pid, signal.SIGINT)
            time.sleep(0.02)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert worker._process.exitcode == 0
    assert capfd.readouterr() == ("", "")

"""Worker processes on this machine: each runs the jobs of one model and its data, one at a time.

For other code a slot gets another process (`pipeline.apart`). A worker that dies (a crash in native code, no memory
left) costs the job that it was running one attempt, and is replaced. When the process that made the pool dies, its
workers end themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from calib.loading import starting
from calib.types import JsonMapping
from trtpipe.errors import Cancelled
from trtpipe.machine import how_ended
from trtpipe.nightly.execute import execute
from trtpipe.nightly.task import JobTask, Task, task_from_plain, task_to_plain
from trtpipe.pipeline.apart import GRACE_S, begin, code_of, end, entered
from trtpipe.pipeline.cached import Memory
from trtpipe.trt import driver

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event as CancelFlag

    from trtpipe.pipeline.apart import Process

EventKind = Literal["stage", "note", "done", "cancelled", "died"]
#: Times that a job whose worker died is tried again.
RETRIES = 1


def after_death(task: Task, death: str) -> tuple[Task, str]:
    """A task that a worker died of, with that among its attempts; and why it is not tried again, empty where it is."""
    task = dataclasses.replace(task, attempts=(*task.attempts, death))
    times = len(task.attempts)
    return task, f"{task.name}: {death}, {times} times." if times > RETRIES else ""


@dataclass(frozen=True)
class Slot:
    """Room for one job at a time. `gpu` is the CUDA index it alone uses, `threads` are torch's, `log` its output."""

    name: str
    threads: int
    gpu: int | None
    log: Path


@dataclass(frozen=True)
class Event:
    """What a running job reported: `text` is of `stage` and `note`, and of `died` how; `outcome` is of `done`."""

    kind: EventKind
    task: Task
    where: str
    text: str = ""
    outcome: JsonMapping = field(default_factory=dict)


class Reports:
    """A Reporter that sends its stages and notes down a pipe."""

    def __init__(self, send: Callable[[tuple[EventKind, str]], None], cancelled: Callable[[], bool]) -> None:
        self._send, self._cancelled = send, cancelled

    def step(self, done: int, total: int | None, unit: str) -> None:
        """Stop here when the user has asked to."""
        self._check()

    def note(self, message: str) -> None:
        """Pass it on."""
        self._send(("note", message))

    def cancelled(self) -> bool:
        """Whether the user has asked to stop."""
        return bool(self._cancelled())

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Pass the stage's name on."""
        self._check()
        self._send(("stage", name))
        return contextlib.nullcontext()

    def _check(self) -> None:
        if self.cancelled():
            raise Cancelled


def _code(task: Task) -> str:
    """What names the code that a task runs; empty for one that runs none, on a device that finishes a kit."""
    return code_of(task.job) if isinstance(task, JobTask) else ""


class Pool:
    """Worker processes, one for each slot; each is started when it gets its first job."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        with starting(len(slots)):
            self._cancel = multiprocessing.get_context("spawn").Event()
        self._workers = [_Worker(slot, self._cancel) for slot in slots]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def idle(self) -> tuple[Slot, ...]:
        """Slots without a job."""
        return tuple(w.slot for w in self._workers if w.task is None)

    def start(self, slot: Slot, task: Task) -> None:
        """Give a job to an idle slot."""
        next(w for w in self._workers if w.slot == slot).start(task)

    def events(self, timeout_s: float) -> Iterator[Event]:
        """The events of running jobs; waits at most `timeout_s` for the first."""
        busy = [w for w in self._workers if w.task is not None]
        ready = connection.wait([w.pipe for w in busy if w.pipe is not None], timeout_s)
        for worker in busy:
            if worker.pipe in ready:
                yield from worker.receive()

    def cancel(self) -> None:
        """Ask every job to stop at the next chance it has."""
        self._cancel.set()

    def kill(self) -> None:
        """End every worker now."""
        for worker in self._workers:
            worker.end(0.0)

    def close(self) -> None:
        """End every worker; one that is running a job is given a moment."""
        self._cancel.set()
        deadline = time.monotonic() + GRACE_S
        for worker in self._workers:
            worker.end(deadline)


class _Worker:
    """One slot and its process."""

    def __init__(self, slot: Slot, cancel: CancelFlag) -> None:
        self.slot, self._cancel = slot, cancel
        self.task: Task | None = None
        self.pipe: connection.Connection | None = None
        self._process: Process | None = None
        self._code = ""  # of the jobs that the process runs

    def start(self, task: Task) -> None:
        code = _code(task)
        if code != self._code and self._process is not None:
            self.end(time.monotonic() + GRACE_S)
            self.pipe = self._process = None
        pipe, self._code = self.pipe, code
        if pipe is None or self._process is None or not self._process.is_alive():
            pipe = self.begin(model=isinstance(task, JobTask))
        self.task = task
        with contextlib.suppress(OSError):  # it died just now: `receive` says so
            pipe.send(task_to_plain(task))

    def begin(self, *, model: bool) -> connection.Connection:
        with starting(1):
            self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
            arguments = (theirs, self._cancel, self.slot.threads, self.slot.gpu, self.slot.log, dict(os.environ))
            self._process = begin(f"trtpipe-{self.slot.name}", _serve, *arguments, model=model)
        theirs.close()
        return self.pipe

    def receive(self) -> Iterator[Event]:
        task, pipe, process = self.task, self.pipe, self._process
        assert task is not None
        assert pipe is not None
        assert process is not None
        try:
            while pipe.poll():
                kind, value = pipe.recv()
                if kind in ("done", "cancelled"):
                    self.task = None
                said = {"outcome": value} if kind == "done" else {"text": value}
                yield Event(kind, task, self.slot.name, **said)
                if self.task is None:
                    return
        except (EOFError, OSError):
            end(process, GRACE_S)
            how = how_ended(process.exitcode or 0)
            pipe.close()
            self.task = self.pipe = self._process = None
            yield Event("died", task, self.slot.name, how)

    def end(self, deadline: float) -> None:
        if self._process is None or self.pipe is None:
            return
        if self.task is None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
        end(self._process, deadline - time.monotonic())


def _serve(
    pipe: connection.Connection,
    cancel: CancelFlag,
    threads: int,
    gpu: int | None,
    log: Path,
    environment: dict[str, str],
) -> None:
    """The worker's loop: take a job from the pipe, run it, send its outcome back.

    `environment` is that of the process that made the pool, as it is now.
    """
    os.environ.clear()
    os.environ.update(environment)
    entered(signal.SIG_IGN)  # the one who made the pool decides
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    if gpu is not None:
        os.environ[driver.VISIBLE] = driver.visible(gpu, "workers")
    _write_to(log)
    memory = Memory()
    while (raw := pipe.recv()) is not None:
        task = task_from_plain(raw)
        os.write(1, f"== {task.name}\n".encode())
        try:
            _set_threads(threads)
            done = execute(task, Reports(pipe.send, cancel.is_set), memory)
        except Cancelled:
            pipe.send(("cancelled", ""))
            continue
        pipe.send(("done", done))


def _set_threads(count: int) -> None:
    """As many as the slot has: results of float sums depend on it, so it must not depend on the load."""
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(count)


def _write_to(log: Path) -> None:
    """What the worker and the libraries in it print goes to its log, native code's output too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)

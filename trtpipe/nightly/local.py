"""Tasks on this machine: worker processes, one for each GPU and some for the CPU, within memory; or in this process."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calib.types import JsonObject
from trtpipe.errors import BuildError, Cancelled
from trtpipe.machine import available_bytes, usable_cores
from trtpipe.model.onnx.external import data_files
from trtpipe.nightly.execute import BUSY, execute
from trtpipe.nightly.options import LOGS
from trtpipe.nightly.pool import Event, EventKind, Pool, Reports, Slot, after_death
from trtpipe.nightly.task import JobTask, Task, failure
from trtpipe.pipeline.apart import code_of
from trtpipe.pipeline.cached import Memory

if TYPE_CHECKING:
    from trtpipe.nightly.options import Watcher
    from trtpipe.trt.driver import Driver

#: What a process with torch and TensorRT takes before it has a model, bytes; and a model by each byte of its weights.
PROCESS_BYTES, PER_WEIGHT_BYTE = 1_500_000_000, 8
_WAIT_S = 0.2

Finished = Callable[[Task, JsonObject], None]


class Local:
    """Runs tasks here.

    Args:
        workers: processes for jobs without a GPU; None: one for each core, as far as memory goes; 0: this process.
        memory_bytes: what all jobs together may take; None: what is available now.
        driver: which GPUs there are; each has a queue of its own.
        logs: folder for what workers print.
    """

    def __init__(self, workers: int | None, memory_bytes: int | None, driver: Driver, logs: Path) -> None:
        self.in_process = workers == 0
        self.memory_bytes = memory_bytes if memory_bytes is not None else available_bytes()
        cores = usable_cores()
        count = workers or max(1, min(cores, (self.memory_bytes or 0) // PROCESS_BYTES or cores))
        first = driver.devices[:1]
        gpus = [
            d.index
            for d in driver.devices
            if (d.name, d.compute_capability) == (first[0].name, first[0].compute_capability)
        ]
        #: Engines are for one kind of GPU: the first one's. Others stay idle, and a note names them.
        self.unused = tuple(f"GPU {d.index} ({d.name})" for d in driver.devices if d.index not in gpus)
        threads = max(1, cores // (workers or cores))  # sums depend on it, and must not on what memory is free
        self.slots = tuple(
            [Slot(f"gpu{i}", threads, i, logs / f"worker-gpu{i}.log") for i in gpus]
            + [Slot(f"cpu{i}", threads, None, logs / f"worker-cpu{i}.log") for i in range(count)]
        )

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the slots."""
        return ("this process",) if self.in_process else tuple(s.name for s in self.slots)

    def run(self, tasks: Sequence[Task], watcher: Watcher, finished: Finished) -> None:
        """Run every task, until the user stops it; one that another process builds comes last, and is waited for."""
        if self.in_process:
            self._run_here(tasks, watcher, finished)
            return
        if self.unused:
            watcher.note(f"not used, as not of the first GPU's kind: {', '.join(self.unused)}")
        slots = self.slots[: max(len(tasks), 1)] if not any(s.gpu is not None for s in self.slots) else self.slots
        with Pool(slots) as pool:
            queue = _Queue(tasks, self.memory_bytes, any(s.gpu is not None for s in slots))
            try:
                self._serve(pool, queue, watcher, finished)
            except KeyboardInterrupt:
                pool.kill()

    def _serve(self, pool: Pool, queue: _Queue, watcher: Watcher, finished: Finished) -> None:
        while queue.waiting or queue.running:
            if watcher.cancelled():
                pool.cancel()
                if not queue.running:
                    return
            for slot in () if watcher.cancelled() else pool.idle:
                task = queue.take(slot)
                if task is not None:
                    pool.start(slot, task)
                    watcher.state(task.name, "running", slot.name)
            for event in pool.events(_WAIT_S):
                self._handle(event, queue, watcher, finished)

    def _handle(self, event: Event, queue: _Queue, watcher: Watcher, finished: Finished) -> None:
        task = event.task
        if event.kind in ("stage", "note"):
            _show(event, watcher)
        elif event.kind == "done" and event.outcome["outcome"] == BUSY:
            queue.later(task)
            watcher.state(task.name, "waiting", "another process is building it")
        elif event.kind == "cancelled" or (event.kind == "died" and watcher.cancelled()):
            queue.ended(task)
        elif event.kind == "done":
            queue.ended(task)
            finished(task, dict(event.outcome) | {"where": event.where})
        elif event.kind == "died":
            death = f"worker {event.where} died with {event.text}"
            tried, why = after_death(task, death)
            if why:
                queue.ended(task)
                message = f"{why} Its log is in {LOGS}/ of the output folder."
                finished(task, failure(tried, message, BuildError.exit_code))
            else:
                watcher.note(f"{task.name}: {death}; it is tried again")
                queue.again(task, tried)

    def _run_here(self, tasks: Sequence[Task], watcher: Watcher, finished: Finished) -> None:
        if len({code_of(task.job) for task in tasks if isinstance(task, JobTask)}) > 1:
            watcher.note("--workers 0: what the code of one model changes in other packages stays for those after it")
        memory = Memory()
        for task in tasks:
            if watcher.cancelled():
                return
            where = self.workers[0]
            watcher.state(task.name, "running", where)

            def say(said: tuple[EventKind, str], task: Task = task, where: str = where) -> None:
                _show(Event(said[0], task, where, said[1]), watcher)

            try:
                reports = Reports(say, watcher.cancelled)
                finished(task, execute(dataclasses.replace(task, wait=True), reports, memory))
            except (Cancelled, KeyboardInterrupt):
                return


def _show(event: Event, watcher: Watcher) -> None:
    """A stage or a note of a running task."""
    if event.kind == "stage":
        watcher.state(event.task.name, "running", f"{event.where}: {event.text}")
    else:
        watcher.note(f"{event.task.name}: {event.text}")


class _Queue:
    """Tasks that wait, and what the running ones are expected to take."""

    def __init__(self, tasks: Sequence[Task], memory_bytes: int | None, gpus: bool) -> None:
        self.waiting = list(tasks)
        self.running: dict[str, int] = {}
        self._memory_bytes, self._gpus = memory_bytes, gpus
        #: By the name of a task: looked at once, not each time that a worker is free.
        self._model_of = {task.name: _model(task) for task in tasks}
        self._bytes_of = {task.name: expected_bytes(task) for task in tasks}
        self._models: dict[str, str] = {}

    def take(self, slot: Slot) -> Task | None:
        """The next task for this slot that memory is left for; one always runs.

        A worker keeps its latest model and graph, so jobs of one model follow each other in one worker where they can.
        """
        fit = [task for task in self.waiting if self._fits(task, slot)]
        if not fit:
            return None
        elsewhere = {model for name, model in self._models.items() if name != slot.name}
        own, model_of = self._models.get(slot.name), self._model_of
        task = min(fit, key=lambda t: (t.wait, model_of[t.name] != own, model_of[t.name] in elsewhere))
        self._models[slot.name] = model_of[task.name]
        self.waiting = [t for t in self.waiting if t is not task]
        self.running[task.name] = self._bytes_of[task.name]
        return task

    def _fits(self, task: Task, slot: Slot) -> bool:
        if self._gpus and uses_gpu(task) != (slot.gpu is not None):
            return False
        used = sum(self.running.values())
        return not (self.running and self._memory_bytes and used + self._bytes_of[task.name] > self._memory_bytes)

    def ended(self, task: Task) -> None:
        """It runs no longer."""
        self.running.pop(task.name, None)

    def later(self, task: Task) -> None:
        """Another process builds it: behind all others, and then to be waited for."""
        self.ended(task)
        self.waiting.append(dataclasses.replace(task, wait=True))

    def again(self, task: Task, changed: Task) -> None:
        """It is to be tried once more, first of all."""
        self.ended(task)
        self.waiting.insert(0, changed)


def _model(task: Task) -> str:
    """Jobs with the same text here share model and graph."""
    if not isinstance(task, JobTask):
        return ""
    return json.dumps([task.job.model.model_dump(mode="json"), str(task.job.folder)], sort_keys=True)


def uses_gpu(task: Task) -> bool:
    """Whether a GPU, where there is one, builds or checks it."""
    return isinstance(task, JobTask) and task.job.build.target != "onnxruntime"


def expected_bytes(task: Task) -> int:
    """A rough guess of what it takes at its peak."""
    if not isinstance(task, JobTask):
        return PROCESS_BYTES
    model = task.job.model
    data = data_files(Path(model.onnx)) if model.onnx is not None else ()
    named = (model.weights, model.program, model.onnx, model.torchscript, *data)
    files = [p for p in named if p is not None and os.path.exists(p)]
    return PROCESS_BYTES + PER_WEIGHT_BYTE * sum(os.path.getsize(p) for p in files)

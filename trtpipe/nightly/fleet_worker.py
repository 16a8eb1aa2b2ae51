"""A worker of a fleet: a Dask worker that announces what it is and runs one job at a time in a process of its own.

The job's process is not the one that talks to the scheduler: a crash in native code costs an attempt and not the
worker, and a long native call does not make the worker look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calib.types import JsonObject
from trtpipe.bundle.format import place, read_bundle
from trtpipe.errors import BuildError, Cancelled, InputError, MissingError
from trtpipe.machine import usable_cores
from trtpipe.nightly.outcome import THERE
from trtpipe.nightly.pool import Pool, Slot, after_death
from trtpipe.nightly.task import FinishTask, Task, failure, task_from_plain
from trtpipe.nightly.transport import CONNECT_S, Transport, is_refusal, transport, unreachable
from trtpipe.packages import not_installed, versions
from trtpipe.pipeline.cache.digests import DIGESTS, Digests
from trtpipe.pipeline.cache.environment import Machine, this_machine
from trtpipe.pipeline.cache.store import Cache
from trtpipe.runtime.device import Device, this_device
from trtpipe.trt import driver
from trtpipe.version_numbers import sm

if TYPE_CHECKING:
    from distributed import Worker

#: Receives the kind of an event (`start`, `stage`, `note`) and its text.
Say = Callable[[str, str], None]

#: Seconds that a worker has for closing once it is to end.
CLOSE_S = 10
#: The Dask topic on which workers report the progress of their jobs.
TOPIC = "trtpipe"


def announced(device: Device, tags: Sequence[str], torch: bool) -> tuple[str, ...]:
    """What a worker says it is: GPU, TensorRT by every prefix of its version, processor, tags."""
    resources = ["cpu", device.machine, *tags]
    if torch:
        resources.append("torch")
    if device.compute_capability is not None:
        resources += ["gpu", f"sm{sm(device.compute_capability)}"]
    if device.jetson:
        resources.append("jetson")
    for name, version in device.versions.items():
        parts = version.split(".")
        resources += [name, *(f"{name}={'.'.join(parts[: i + 1])}" for i in range(len(parts)))]
    return tuple(dict.fromkeys(resources))


class JobsOfWorker:
    """What a worker is and has, beside Dask's own: set as `trtpipe_jobs` on its Worker."""

    def __init__(self, name: str, announces: Sequence[str], cache: Path, threads: int) -> None:
        self.name, self.announces, self.cache = name, tuple(announces), cache
        with Digests(cache / DIGESTS) as digests:
            self.machine: Machine = this_machine(digests)
        self._slot = Slot("job", threads, None, cache / f"{name}.log")
        self._pool = Pool([self._slot])
        self._stopped: set[str] = set()
        self._running = ""

    def run(self, task: Task, kit: Mapping[str, bytes], say: Say) -> JsonObject:
        """One job, or the kit of one to finish; `say(kind, value)` receives its progress.

        Returns:
            Its outcome, this worker's name, and the files of the bundle.
        """
        with tempfile.TemporaryDirectory(prefix="trtpipe-", dir=self.cache / "scratch") as scratch:
            local: Task = dataclasses.replace(task, out=str(Path(scratch, "out")), cache=str(self.cache))
            if isinstance(local, FinishTask):
                place(Path(scratch, "kits", task.name), kit, where=Path(f"kit of {task.name}"))
                local = dataclasses.replace(local, kits=str(Path(scratch, "kits")))
            self._running = task.key
            try:
                outcome = self._watched(local, say)
            finally:  # a stop that came too late is none of the job's next run
                self._running = ""
                self._stopped.discard(task.key)
            files: dict[str, bytes] = {}
            if outcome["outcome"] in THERE:
                files = read_bundle(Path(scratch, "out", task.name)).contents()
            return {"outcome": outcome, "worker": self.name, "files": files}

    def _watched(self, task: Task, say: Say) -> JsonObject:
        self._pool.start(self._slot, task)
        while True:
            for event in self._pool.events(0.2):
                if event.kind == "done":
                    return dict(event.outcome)
                if event.kind == "cancelled":
                    return failure(task, f"{task.name}: was stopped by the user", Cancelled.exit_code)
                if event.kind == "died":
                    task, why = after_death(task, f"the process of worker {self.name} died with {event.text}")
                    if why:
                        return failure(task, why, BuildError.exit_code)
                    self._pool.start(self._slot, task)
                else:
                    say(event.kind, event.text)
            if task.key in self._stopped:
                self._pool.kill()
                self._pool = Pool([self._slot])
                return failure(task, f"{task.name}: was stopped by the user", Cancelled.exit_code)

    def stop(self, keys: Sequence[str]) -> None:
        """End the running job if it is one of these."""
        if self._running in keys:
            self._stopped.add(self._running)

    def close(self) -> None:
        """End the job's process."""
        self._pool.kill()


def serve(
    scheduler: str,
    *,
    ready: Callable[[], None] = lambda: None,
    tags: Sequence[str] = (),
    name: str = "",
    cache: Path,
    threads: int | None = None,
    gpu: int | None = None,
    credentials: Path | None = None,
    insecure: bool = False,
) -> None:
    """Be a worker of `scheduler` until it closes or the process is stopped.

    Args:
        scheduler: its address, as Dask has it: `tls://HOST:PORT` or `tcp://HOST:PORT`.
        ready: called when nothing of this machine stands in the way, before the scheduler is asked.
        tags: words without commas that a job's device can ask for.
        name: what the fleet calls this worker; by default the host's name and the process's number.
        cache: folder of the job cache; made where it is missing.
        threads: how many threads a build may use, 1 or more; by default the cores that this process may use.
        gpu: index of the one GPU to use, from 0; by default all that CUDA shows.
        credentials: folder that `trtpipe keygen --fleet` made, for TLS.
        insecure: whether an address off the loopback may go without TLS.

    Raises:
        MissingError: distributed is not installed, the scheduler does not answer, or GPU `gpu` cannot be used.
        InputError: the cache cannot be written, a tag is not one word without commas, or the address needs credentials
            (see `transport`).
    """
    try:
        from distributed import Worker
    except ImportError:
        raise MissingError(f"worker: {not_installed('distributed')}") from None
    way = transport(scheduler, credentials, insecure=insecure, where="ADDRESS")
    if gpu is not None:  # before anything asks the driver
        os.environ[driver.VISIBLE] = driver.visible(gpu, "--gpu")
        if problem := driver.probe().problem:
            raise MissingError(
                f"--gpu: must be a GPU of this machine (got {gpu}; {problem}). Leave it out for a worker without one."
            )
    Cache(cache)  # makes its folders, or says why it cannot
    (cache / "scratch").mkdir(exist_ok=True)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    words = announced(this_device(), tags, versions(("torch",)) != {})
    for word in tags:
        if not word or any(c.isspace() or c == "," for c in word):
            raise InputError(f"--tag: must be one word without commas (got {word!r}).")
    jobs = JobsOfWorker(name, words, cache, threads or usable_cores())

    ready()

    async def live() -> None:
        with contextlib.suppress(_NotThereYet):  # a Worker waits for its scheduler, for ever and without a reason
            await _greet(way)
        worker = Worker(
            way.address,
            host=way.host,
            security=way.security,
            dashboard_address="127.0.0.1:0",  # it is plain HTTP
            nthreads=1,
            name=name,
            resources=dict.fromkeys(words, 1),
            local_directory=str(cache / "scratch"),
            heartbeat_interval="1s",
        )
        worker.trtpipe_jobs = jobs
        await worker
        try:
            await worker.finished()
        finally:  # interrupted while it closes for its scheduler's end, Dask waits for what nobody does any more
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(worker.close(), CLOSE_S)

    try:
        asyncio.run(live())
    except (OSError, TimeoutError) as error:
        raise unreachable(way.address, error, "ADDRESS") from error
    finally:
        jobs.close()


class _NotThereYet(Exception):
    """Nobody listens at the scheduler's address, or nobody answers."""


async def _greet(way: Transport) -> None:
    """Connect to the scheduler once, and say in its name what a Worker would retry for ever.

    Raises:
        OSError: one side refuses the other.
        _NotThereYet: nobody is there.
    """
    from distributed.core import connect

    arguments = {} if way.security is None else way.security.get_connection_args("worker")
    try:
        # Dask's own timeout ends with the connection, and not with the first words.
        comm = await asyncio.wait_for(connect(way.address, timeout=CONNECT_S, **arguments), 2 * CONNECT_S)
    except (OSError, asyncio.TimeoutError) as error:
        if is_refusal(way.address, error):
            raise
        raise _NotThereYet from error
    comm.abort()


def introduce(dask_worker: Worker) -> JsonObject | None:
    """Run on every worker of a scheduler: what it is; None of a worker that is not trtpipe's."""
    jobs = getattr(dask_worker, "trtpipe_jobs", None)
    if jobs is None:
        return None
    return {"name": jobs.name, "announces": list(jobs.announces), "machine": dataclasses.asdict(jobs.machine)}


def stop(keys: Sequence[str], dask_worker: Worker) -> None:
    """Run on every worker: end the job that is running if it is one of these."""
    jobs = getattr(dask_worker, "trtpipe_jobs", None)
    if jobs is not None:
        jobs.stop(keys)


def run_task(raw: JsonObject, kit: Mapping[str, bytes]) -> JsonObject:
    """Run on the worker that Dask chose: one job; with the files of a kit, that kit is finished."""
    from distributed import get_worker

    worker = get_worker()
    task = task_from_plain(raw)

    def say(kind: str, value: str) -> None:
        event = {"kind": kind, "name": task.name, "key": task.key, "member": worker.trtpipe_jobs.name, "value": value}
        worker.log_event(TOPIC, event)

    say("start", "")
    outcome: JsonObject = worker.trtpipe_jobs.run(task, kit, say)
    return outcome

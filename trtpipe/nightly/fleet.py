"""A fleet of machines, by Dask distributed: who can build a job, and the jobs sent there.

Each worker (`trtpipe worker`) announces what it is as resources: `sm87`, `gpu`, `tensorrt=10.3`, a tag of its own.
A job goes to a worker that has all it needs. Where those have no torch (a Jetson), all but the engine is made here, and
the kit is sent. The bundle comes back whole, is checked against its digests and put into place as any bundle is. A
worker that dies costs its job an attempt; the job goes to another worker that matches.
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from calib.types import JsonObject
from trtpipe.bundle.format import place, read_bundle
from trtpipe.errors import BuildError, MissingError, TrtpipeError, user_error
from trtpipe.nightly.execute import keep, record_reads
from trtpipe.nightly.fleet_worker import TOPIC, introduce, run_task, stop
from trtpipe.nightly.local import Local
from trtpipe.nightly.options import LOGS
from trtpipe.nightly.outcome import THERE
from trtpipe.nightly.task import BuildTask, FinishTask, JobTask, KitTask, Task, failure, from_plain, task_to_plain
from trtpipe.nightly.transport import CONNECT_S, transport, unreachable
from trtpipe.packages import distributions, not_installed
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import BUILDERS, Machine, this_machine
from trtpipe.routes.options import needs_gpu
from trtpipe.trt import driver

if TYPE_CHECKING:
    from distributed import Future

    from trtpipe.job.job import Job
    from trtpipe.nightly.options import Watcher
    from trtpipe.pipeline.cache.store import Cache

#: Times a job is begun before its workers' deaths are taken to be its own doing.
MOST_STARTS = 4
#: A job that no worker matches any more waits so long for one to come back.
LOST_S = 30.0
_LOOK_S = 1.0


@dataclass(frozen=True)
class Member:
    """One worker: its address, the name it goes by, what it announces, and what it is."""

    address: str
    name: str
    announces: frozenset[str]
    machine: Machine


@dataclass
class _Sent:
    """A job that is with the fleet. `starts` are the workers that began it. Mutable: workers come and go."""

    task: Task
    future: Future
    needs: frozenset[str]
    starts: list[str] = field(default_factory=list)
    lost_at: float | None = None


def needs(job: Job) -> frozenset[str]:
    """What a worker must announce to build a job."""
    wanted = {"torch", job.build.target, *job.worker}
    if job.check.require == "engine" or needs_gpu(job.build):
        wanted.add("gpu")
    return frozenset(wanted)


def _both(here: Machine, there: Machine) -> Machine:
    """Where a graph is made here and compiled there."""
    compilers = {n for names in BUILDERS.values() for n in names}
    versions = {n: v for n, v in here.versions.items() if n not in compilers}
    versions |= {n: v for n, v in there.versions.items() if n in compilers}
    source = here.source if here.source == there.source else f"{here.source} {there.source}"
    return Machine(versions, here.python, f"{here.system} for {there.system}", source, there.cuda, there.gpu)


def distinct_resources(announces: frozenset[str]) -> tuple[str, ...]:
    """The announced resources without those that follow from others: of a package only its whole version."""
    return tuple(w for w in sorted(announces) if not any(o.startswith((f"{w}=", f"{w}.")) for o in announces))


def _shown(name: str, announces: frozenset[str]) -> str:
    return f"{name}: {', '.join(distinct_resources(announces))}"


class Fleet:
    """The workers of one scheduler.

    Args:
        address: like tls://host:8786.
        cache: of this machine; bundles that come back are kept in it.
        credentials, insecure: as of `transport`.

    Raises:
        InputError: the address needs credentials.
        MissingError: distributed is not installed, the scheduler does not answer, or it has no worker of trtpipe.
    """

    def __init__(self, address: str, cache: Cache, credentials: Path | None = None, *, insecure: bool = False) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise MissingError(f"--scheduler: {not_installed('distributed')}") from None
        way = transport(address, credentials, insecure=insecure, where="--scheduler")
        self.address, self._cache = way.address, cache
        #: For the report.
        self.notes: tuple[str, ...] = (way.note,) if way.note else ()
        try:
            self._client = Client(way.address, timeout=CONNECT_S, name="trtpipe-nightly", security=way.security)
        except (OSError, ValueError, TypeError) as error:
            raise unreachable(way.address, error, "--scheduler") from error
        self.members = self._members()
        self._by_kit: dict[str, str] = {}  # job -> release of the TensorRT that it is for
        if not self.members:
            self._client.close()
            raise MissingError(
                f"--scheduler: {address} has no worker of trtpipe. Run on each machine: trtpipe worker {address}"
            )
        self._events: queue.SimpleQueue[JsonObject] = queue.SimpleQueue()
        self._client.subscribe_topic(TOPIC, lambda event: self._events.put(event[1]))

    @property
    def workers(self) -> tuple[str, ...]:
        """Each worker's name and what it announces."""
        return tuple(_shown(m.name, m.announces) for m in self.members)

    def machine_for(self, job: Job) -> Machine:
        """The kind of machine that builds a job: of those that match, the kind that most workers are.

        Raises:
            MissingError: no worker matches.
        """
        wanted = needs(job)
        kinds = [m.machine for m in self.members if wanted <= m.announces]
        if kinds:
            return max(kinds, key=kinds.count)
        kinds = [m.machine for m in self.members if wanted - {"torch"} <= m.announces]
        if not kinds or job.build.route != "onnx":
            raise MissingError(self._unmatched(job.name, wanted, self.workers))
        there = max(kinds, key=kinds.count)
        releases = (there.versions.get(name) for name in distributions("tensorrt"))
        self._by_kit[job.name] = next(filter(None, releases), "") if job.build.target == "tensorrt" else ""
        return _both(self._here, there)

    @cached_property
    def _here(self) -> Machine:
        with Digests(self._cache.digests_path) as digests:
            return this_machine(digests)

    def run(self, tasks: Sequence[Task], watcher: Watcher, finished: Callable[[Task, JsonObject], None]) -> None:
        """Send every task to a worker that matches, and take back what comes of it, until the user stops it."""
        builds = [task for task in tasks if isinstance(task, BuildTask)]
        whole = [task for task in builds if task.name not in self._by_kit]
        sent = {task.name: self._send(task, needs(task.job)) for task in whole}
        self._make_kits([task for task in builds if task.name in self._by_kit], sent, watcher, finished)
        looked = time.monotonic()
        try:
            while sent:
                if watcher.cancelled():
                    raise KeyboardInterrupt
                self._listen(sent, watcher)
                for name in [n for n, s in sent.items() if s.future.done()]:
                    self._take(sent.pop(name), finished)
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    self._look(sent, finished)
                time.sleep(0.05)
        except KeyboardInterrupt:
            self._stop(sent)

    def close(self) -> None:
        """Leave the scheduler; workers go on."""
        self._client.close()

    def _members(self) -> tuple[Member, ...]:
        described = self._client.run(introduce, on_error="ignore")
        members = []
        for address, raw in described.items():
            if raw is not None:
                members.append(Member(address, raw["name"], frozenset(raw["announces"]), Machine(**raw["machine"])))
        return tuple(sorted(members, key=lambda m: m.name))

    def _make_kits(
        self, tasks: Sequence[BuildTask], sent: dict[str, _Sent], watcher: Watcher, finished: Callable[..., None]
    ) -> None:
        """All but the engine of jobs whose workers have no torch, made here and sent on as each is ready."""
        if not tasks:
            return
        by_name = {task.name: task for task in tasks}

        def send(made: Task, raw: JsonObject) -> None:
            task = by_name[made.name]
            if raw["outcome"] != "built":
                finished(task, raw)
                return
            files = read_bundle(Path(raw["bundle"])).contents()
            finishing = FinishTask(
                task.name,
                task.file,
                task.key,
                task.out,
                task.cache,
                reasons=task.reasons,
                store=task.store,
                force=task.force,
            )
            sent[task.name] = self._send(finishing, needs(task.job) - {"torch"}, files)

        with tempfile.TemporaryDirectory(prefix="trtpipe-kits-") as scratch:
            making = [
                KitTask(
                    t.name,
                    t.file,
                    t.key,
                    scratch,
                    t.cache,
                    job=t.job,
                    diagnose_seconds=t.diagnose_seconds,
                    release=self._by_kit[t.name],
                )
                for t in tasks
            ]
            logs = Path(tasks[0].out) / LOGS
            Local(None, None, driver.probe(), logs).run(making, watcher, send)

    def _send(self, task: Task, wanted: frozenset[str], kit: Mapping[str, bytes] | None = None) -> _Sent:
        raw = task_to_plain(dataclasses.replace(task, wait=True))
        future = self._client.submit(
            run_task,
            raw,
            dict(kit or {}),
            key=f"trtpipe-{task.name}-{secrets.token_hex(4)}",
            resources=dict.fromkeys(sorted(wanted), 1),
            pure=False,
            retries=0,
        )
        return _Sent(task, future, wanted)

    def _listen(self, sent: Mapping[str, _Sent], watcher: Watcher) -> None:
        """Handle the events that workers have logged since the last call."""
        while not self._events.empty():
            event = self._events.get()
            known = sent.get(str(event.get("name")))
            if known is None or event.get("key") != known.task.key:
                continue
            where = str(event["member"])
            if event["kind"] == "start":
                if known.starts:
                    watcher.note(f"{known.task.name}: worker {known.starts[-1]} was lost; {where} tries again")
                known.starts.append(where)
                watcher.state(known.task.name, "running", where)
            elif event["kind"] == "stage":
                watcher.state(known.task.name, "running", f"{where}: {event['value']}")
            else:
                watcher.note(f"{known.task.name}: {event['value']}")

    def _take(self, done: _Sent, finished: Callable[[Task, JsonObject], None]) -> None:
        """One job's end."""
        tried = tuple(f"worker {name} was lost while it built this" for name in done.starts[:-1])
        task = dataclasses.replace(done.task, attempts=tried)
        if done.future.status != "finished":
            from distributed import KilledWorker

            error = done.future.exception() if done.future.status == "error" else None
            what = f"{type(error).__name__}: {error}" if error is not None else "it was cancelled"
            if isinstance(error, KilledWorker):
                lost = ", ".join(done.starts) or "its workers"
                what = f"every worker that started this job died ({lost})"
                task = dataclasses.replace(task, attempts=tuple(f"worker {n} died" for n in done.starts))
            finished(task, failure(task, f"{task.name}: {what}.", BuildError.exit_code))
            return
        received = done.future.result()
        done.future.release()
        raw = dict(received["outcome"])
        raw |= {"where": received["worker"], "attempts": [*tried, *raw.get("attempts", ())]}
        if raw["outcome"] in THERE:
            try:
                raw["bundle"] = str(self._place(task, received["files"]))
            except (TrtpipeError, OSError) as error:
                if (refused := user_error(error)) is None:
                    raise
                finished(task, failure(task, str(refused), refused.exit_code) | {"attempts": raw["attempts"]})
                return
            if isinstance(task, JobTask):
                record_reads(self._cache, raw, task.job.folder or Path.cwd())
            keep(self._cache, raw["key"] or task.key, from_plain(raw), received["files"])
        finished(task, raw)

    def _place(self, task: Task, files: Mapping[str, bytes]) -> Path:
        """The bundle put where it belongs; every file is checked against the manifest's digests first."""
        return place(Path(task.out, task.name), files, where=Path(f"bundle of {task.name} from its worker")).path

    def _look(self, sent: dict[str, _Sent], finished: Callable[[Task, JsonObject], None]) -> None:
        """Give up jobs that no worker matches any more, and those that take their workers down with them."""
        alive = {w["name"]: frozenset(w.get("resources", {})) for w in self._alive().values()}
        shown = [_shown(name, announced) for name, announced in sorted(alive.items())]
        for name, job in list(sent.items()):
            if any(job.needs <= announced for announced in alive.values()):
                job.lost_at = None
            else:
                job.lost_at = job.lost_at or time.monotonic()
            message, code, lost = "", MissingError.exit_code, job.starts
            if job.lost_at is not None and time.monotonic() - job.lost_at > LOST_S:
                message = self._unmatched(name, job.needs, shown)
            elif len(job.starts) > MOST_STARTS:
                lost = job.starts[:-1]  # the last has but begun
                message = f"{name}: it took its workers down ({len(lost)} lost: {', '.join(lost)})."
                code = BuildError.exit_code
            if message:
                self._client.cancel([job.future], force=True)
                del sent[name]
                tried = tuple(f"worker {n} was lost while it built this" for n in lost)
                task = dataclasses.replace(job.task, attempts=tried)
                finished(task, failure(task, message, code))

    def _alive(self) -> JsonObject:
        """The scheduler's own list of workers."""
        try:
            info = self._client.scheduler_info(n_workers=-1)
        except TypeError:  # before 2025.4 it lists all of them
            info = self._client.scheduler_info()
        workers: JsonObject = info["workers"]
        return workers

    def _unmatched(self, name: str, wanted: frozenset[str], have: Sequence[str]) -> str:
        return (
            f"{name}: a worker must announce {', '.join(sorted(wanted))} (got {'; '.join(have) or 'no worker'}). "
            f"Start one: trtpipe worker {self.address}"
        )

    def _stop(self, sent: Mapping[str, _Sent]) -> None:
        """Take back what has not begun, and ask what runs to stop."""
        self._client.cancel([s.future for s in sent.values()], force=True)
        self._client.run(stop, [s.task.key for s in sent.values()], on_error="ignore")

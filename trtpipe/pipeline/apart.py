"""Processes for the jobs of one model: what their code changes within other packages (`torch.nn.ReLU.forward = ...`)
ends with the process, and is no other job's.

Each is forked from one that has imported torch and has run no job (multiprocessing's forkserver).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trtpipe.jsontext import json_digest

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess, SpawnProcess
    from types import FrameType

    from trtpipe.job.job import Job

    Process = SpawnProcess | ForkServerProcess


#: A process that is asked to end and does not is killed after this many seconds.
GRACE_S = 10.0


def code_of(job: Job) -> str:
    """Digest of what names the code that a job runs: jobs with the same one may share a process."""
    return json_digest({
        "folder": str(job.folder), "callables": dict(job.callables), "model": job.model.model_dump(mode="json"),
        "plugins": list(job.build.plugins),
    })  # fmt: skip


def begin(name: str, target: Callable[..., None], *arguments: object, model: bool = True) -> Process:
    """A process that has begun, and runs `target` of the arguments (which multiprocessing can send). It is not
    interrupted before `entered`: importing what it runs takes seconds.

    Args:
        name: the process's, for logs.
        target: a function of a module; it calls `entered` first.
        arguments: its own.
        model: whether jobs with a model are run; else nothing heavy is imported for it.
    """
    with _interrupts_held():
        if model:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["trtpipe.pipeline.preloaded"])
            forked = context.Process(target=target, args=arguments, name=name)
            try:
                forked.start()
            except (OSError, EOFError):  # a package that is damaged has ended the process to fork from
                pass
            else:
                return forked
        spawned = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name)
        spawned.start()
        return spawned


def end(process: Process, seconds: float) -> None:
    """Wait for a process that is ending, and kill it when it takes longer: bundles and entries are whole or absent. So
    are those killed that code of a job has begun and left (a pool that is still open)."""
    process.join(max(0.0, seconds))
    if process.is_alive():
        process.kill()
        process.join()
    with contextlib.suppress(OSError):  # there is none
        os.killpg(process.pid or 0, signal.SIGKILL)


def entered(on_interrupt: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """In the process that has begun: SIGINT does what is given from here on, data is loaded as in any other program,
    and the process, with all that it has begun, ends when the one that began it does."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, on_interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # A spawned process would spawn its own too, and those cannot import the modules beside a job.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # the system's own
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Loading ahead of the model in worker processes, by torch's DataLoader."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Protocol, TypeVar

from calib.errors import EXHAUSTED, CalibError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_NO_PLACE = ("/dev/shm is not there or not writable", "Mount it, writable for all")
#: By errno, what lacks where worker processes are started, and what gives more of it. multiprocessing makes its
#: semaphores in /dev/shm, and no other file.
_LACKING: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("no space left in /dev/shm", "Free some there, enlarge it (docker run --shm-size=1g)"),
    **dict.fromkeys((errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOSYS), _NO_PLACE),
    **EXHAUSTED,
    errno.ENOMEM: ("out of memory", "End other programs"),
}


class Items(Protocol[T_co]):
    """Items by position; pickled to worker processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int) -> T_co: ...


def in_workers(work: Items[T], workers: int) -> Iterator[T]:
    """`work[0]`, `work[1]`, ... in order, each computed by one of `workers` processes, two ahead of need for each.

    Raises:
        CalibError: a process ended, or could not be started.
    """
    from torch.utils.data import DataLoader

    try:
        with starting(workers), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more of them than cores
            loader: DataLoader[T] = DataLoader(
                work,  # type: ignore[arg-type]  # a map-style dataset needs no base class
                batch_size=None,
                shuffle=False,
                num_workers=workers,
                collate_fn=_as_it_is,
                worker_init_fn=partial(_begin, os.getpid()),
            )
            batches = iter(loader)
        yield from batches
    except RuntimeError as error:  # the loader's own; what the work raises is a value by then
        raise CalibError(
            f"workers: a worker process ended before all samples were loaded ({error}). "
            "Set workers to 0 to see what ends it."
        ) from error


def _begin(parent: int, worker: int) -> None:
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """End this process, by SIGKILL, when its parent is killed, whose number is `parent`; nothing where it is no Linux.

    A process that waits for one that is gone would wait for ever.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def starting(workers: int) -> Iterator[None]:
    """Around the start of so many worker processes.

    Raises:
        CalibError: the operating system refuses what they need: files, processes, space in /dev/shm.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        with _without_unraisable():  # a loader that has half begun fails to end, as soon as nothing holds it
            traceback.clear_frames(error.__traceback__)
        code = error.errno if isinstance(error, OSError) else None
        if str(error) == "can't start new thread":
            code = errno.EAGAIN
        if code not in _LACKING or getattr(error, "filename", None) is not None:
            raise
        reason, step = _LACKING[code]
        processes = f"{workers} worker process{'es' * (workers != 1)}"
        raise CalibError(
            f"workers: {processes} cannot be started ({reason}). {step}, or use fewer workers: 0 starts none."
        ) from error


@contextlib.contextmanager
def _without_unraisable() -> Iterator[None]:
    """Errors of destructors within, which nobody can catch, are not printed."""
    shown, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = shown


def _as_it_is(item: T) -> T:
    return item

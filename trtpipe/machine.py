"""What this machine has for processes: the cores that this one may use, and memory; and how one ended."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Bytes by which a process may grow before it returns what it does not use.
MUCH = 64 << 20


def usable_cores() -> int:
    """The cores that this process may run on; all that there are where the system cannot say. At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def how_ended(code: int) -> str:
    """What ended a process, by its exit code, which is negative for a signal: `SIGKILL`, `signal 40` of those that have
    no name, or `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def available_bytes() -> int | None:
    """Memory in bytes that can be used without swapping; None where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return int(fields[1]) * 1024 if fields else None


def private_bytes() -> int | None:
    """Memory in bytes that this process has for itself: what is resident, without files and shared memory; None where
    the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


#: Parameters of glibc's mallopt (malloc.h), in bytes: the most that is kept at the heap's end, and from which size on a
#: block is a mapping of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: What they are while freed memory is used again, and what glibc comes to by itself once a block of the latter's size
#: was freed.
_REUSED, _BY_ITSELF = (256 << 20, 128 << 20), (64 << 20, 32 << 20)


@contextmanager
def freed_memory_reused() -> Iterator[None]:
    """Use memory that was freed again within the block; nothing where there is no glibc.

    By itself glibc returns each block of over 32 MiB, as activations of a batch are, and the next one costs a fault for
    each of its pages: a third of the time of calibrating and correcting MobileNetV2 with 128 photographs, and 4 to 9 %
    of a build of ResNet-50, EfficientNet-B4 or ViT-B without corrections. Behind the block it is as glibc has it in any
    process that frees blocks of 32 MiB.
    """
    _set(*_REUSED)
    try:
        yield
    finally:
        _set(*_BY_ITSELF)


def _set(trim: int, mapped: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, mapped):  # older releases take 32 MiB at most
        mallopt(_M_TRIM_THRESHOLD, trim)


class Heap:
    """The memory that this process has for itself, and what it returns of it to the system once it has grown by much.

    glibc keeps what is freed: blocks of up to 32 MiB, as most tensors are, lie in its heap once a larger one was freed
    (mallopt(3), M_MMAP_THRESHOLD), and of that only the end shrinks by itself. To return all of it after each use takes
    longer than to compute some operations.
    """

    def __init__(self) -> None:
        self._settled = private_bytes()
        self._most = 0

    def settle(self, *, garbage: bool = False, rising: bool = False) -> None:
        """Return what is not used, if the process has grown by `MUCH` since that was last done.

        Args:
            garbage: search for it, which takes a second: graphs are cycles, and hold their weights until then.
            rising: only where the process is larger than at any such call before. What the next operation will use
                again is not returned then, and the peak is no higher.
        """
        now = private_bytes()
        if now is None or self._settled is None or now <= self._settled + MUCH or (rising and now <= self._most):
            return
        self._most = max(self._most, now)
        if garbage:
            gc.collect()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's alone
            trim(0)
        self._settled = private_bytes()

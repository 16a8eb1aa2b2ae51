"""The counting loop, compiled by numba. Import it lazily: it needs numba, and compiles once (then it is cached)."""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import numpy.typing as npt

#: Pairs of values looked at together: 16 KiB, so the second look finds them in the first-level cache.
_BLOCK = 2048
#: Pairs a thread takes at a time: about 0.1 ms of work.
_CHUNK = 1 << 17


@numba.njit(cache=True, nogil=True)
def _count_part(pairs, even, odd, bounds):  # type: ignore[no-untyped-def]
    """Count some pairs. Slices keep every index provably non-negative, which lets LLVM vectorise."""
    mask = np.uint64(0xFFFF)
    flip = np.int32(0x7FFFFFFF)
    low, high = bounds[0], bounds[1]
    for start in range(0, pairs.size, _BLOCK):
        block = pairs[start : start + _BLOCK]
        patterns = block.view(np.int32)
        for i in range(patterns.size):
            # As integers, float patterns sort as the floats do once the negative ones are flipped.
            ordered = patterns[i] ^ ((patterns[i] >> np.int32(31)) & flip)
            low = min(low, ordered)
            high = max(high, ordered)
        for i in range(block.size):
            # Two tables, so that a run of equal values (a ReLU's zeros) does not wait for its own last store.
            pair = block[i]
            even[(pair >> np.uint64(15)) & mask] += 1
            odd[(pair >> np.uint64(47)) & mask] += 1
    bounds[0], bounds[1] = low, high


def count(pairs: npt.NDArray[np.uint64], tables: npt.NDArray[np.int64], bounds: npt.NDArray[np.int32]) -> None:
    """Add float32 values, two to a uint64, to per-thread tables.

    The caller's thread and helpers take chunks until none is left. Helpers sleep between calls, where OpenMP's would
    spin for milliseconds on the very cores that the model's next layer needs.

    Args:
        pairs: uint64 [N], the float32 values in memory order.
        tables: int64 [threads, 2, 65536], added to.
        bounds: int32 [threads, 2], least and greatest pattern in sortable form (`ordered` above), updated.
    """
    chunks = -(-pairs.size // _CHUNK)
    take = itertools.count().__next__  # one number to one thread: the interpreter lock sees to it

    def work(thread: int) -> None:
        while (at := take()) < chunks:
            part = pairs[at * _CHUNK : (at + 1) * _CHUNK]
            _count_part(part, tables[thread, 0], tables[thread, 1], bounds[thread])

    helpers = min(tables.shape[0], chunks) - 1
    if helpers < 1:
        work(0)
        return
    tasks = [_helpers(tables.shape[0] - 1).submit(work, thread) for thread in range(1, helpers + 1)]
    work(0)
    for task in tasks:
        if not task.cancel():  # one that never got to run has nothing left to do
            task.result()


@functools.cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """Threads that wait for work; made once, since starting them costs as much as counting a layer."""
    return ThreadPoolExecutor(threads, thread_name_prefix="calib")

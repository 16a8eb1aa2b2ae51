"""The counting loop, compiled by numba. Import it lazily: it needs numba, and compiles once (then it is kept)."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from calib.histogram import ALL_BINS, SHIFT, SLOTS

#: Pairs of values looked at together: 16 KiB, so the second look finds them in the first-level cache.
_BLOCK = 2048
#: Pairs that are not worth a second thread, and that a thread of the pool takes at a time: some 10 microseconds.
_CHUNK = 1 << 14


def _kept(compiler: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """A decorator: numba's `compiler`, its result kept for the next process where there is a place for it: beside this
    file, in the folder that NUMBA_CACHE_DIR names, or in the user's cache. Without a home, numba would make a folder
    that is called `~`.
    """

    def compiled(function: Callable[..., None]) -> Any:
        if os.path.isabs(os.path.expanduser("~")) or os.environ.get("NUMBA_CACHE_DIR"):
            with suppress(RuntimeError):  # "no locator available"
                return compiler(*signature, cache=True, **options)(function)
        return compiler(*signature, **options)(function)

    return compiled


@_kept(numba.njit, nogil=True)
def _count_part(pairs, even, odd, bounds):  # type: ignore[no-untyped-def]
    """Count some pairs. Slices keep every index provably non-negative, which lets LLVM vectorise."""
    mask, lower, upper = np.uint64(ALL_BINS - 1), np.uint64(SHIFT), np.uint64(32 + SHIFT)
    flip, sign = np.int32(0x7FFFFFFF), np.int32(-(2**31))
    low, high, least = bounds[0], bounds[1], bounds[2]
    for start in range(0, pairs.size, _BLOCK):
        block = pairs[start : start + _BLOCK]
        patterns = block.view(np.int32)
        for i in range(patterns.size):
            # As integers, float patterns sort as the floats do once the negative ones are flipped.
            ordered = patterns[i] ^ ((patterns[i] >> np.int32(31)) & flip)
            low = min(low, ordered)
            high = max(high, ordered)
            # Negated and less one, so that zero wraps around to the greatest of all.
            least = min(least, np.int32((patterns[i] | sign) - np.int32(1)))
        for i in range(block.size):
            # Two tables, and zeros in one of two slots in turn, so that a run of equal values (a ReLU's zeros) does not
            # wait for its own last store.
            pair = block[i]
            at, beside = (pair >> lower) & mask, (pair >> upper) & mask
            zero = np.uint64(ALL_BINS + (i & 1))
            even[zero if at == 0 else at] += 1
            odd[zero if beside == 0 else beside] += 1
    bounds[0], bounds[1], bounds[2] = low, high, least


def count(pairs: npt.NDArray[np.uint64], tables: npt.NDArray[np.int64], bounds: npt.NDArray[np.int32]) -> None:
    """Add float32 values, two to a uint64, to per-thread tables.

    Args:
        pairs: uint64 [N], C-contiguous, the float32 values in memory order.
        tables: int64 [threads, 2, SLOTS], C-contiguous, added to: the buckets of `Histogram`, and behind them two slots
            that zeros are counted in.
        bounds: int32 [threads, 3], C-contiguous, updated: least and greatest pattern in sortable form (`ordered`
            above), and the least magnitude that is not zero, less one and with the sign bit set.
    """
    if pairs.size <= _CHUNK or tables.shape[0] == 1:
        _count_part(pairs, tables[0, 0], tables[0, 1], bounds[0])
    elif (team := _openmp_team()) is not None:
        team(pairs, tables, bounds)
    else:
        _count_in_pool(pairs, tables, bounds)


Team = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int32]], None]


@functools.cache
def _openmp_team() -> Team | None:
    """Counting in the process's OpenMP team, the threads that torch's layers run in; None where there is none.

    By ctypes, since threadpoolctl only limits such a team, and nothing else runs a function in it.

    These threads spin for a while after a layer. Threads of our own would find the cores taken by them, which
    doubles the time to count a layer of ResNet-50.
    """
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel  # of the GNU runtime's ABI, which LLVM's and Intel's offer too
    except (AttributeError, OSError, TypeError):
        return None
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    region = _region()

    def run(pairs: npt.NDArray[np.uint64], tables: npt.NDArray[np.int64], bounds: npt.NDArray[np.int32]) -> None:
        work = np.array([pairs.ctypes.data, pairs.size, tables.ctypes.data, bounds.ctypes.data], np.int64)
        parallel(region, work.ctypes.data, tables.shape[0], 0)

    return run


#: Not inside `_region`: numba finds no function in its cache that refers to variables around it.
_thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
_team_size = types.ExternalFunction("omp_get_num_threads", types.int32())


def _region() -> int:
    """Address of the C function that every thread of the team calls."""

    @_kept(numba.cfunc, types.void(types.CPointer(types.int64)))
    def region(address):  # type: ignore[no-untyped-def]
        thread, threads = _thread_number(), _team_size()  # the runtime may give fewer threads than were asked for
        work = numba.carray(address, (4,))
        size = work[1]
        pairs = numba.carray(_pointer(work[0], np.uint64), (size,))
        even_odd = numba.carray(_pointer(work[2], np.int64), (threads, 2, SLOTS))
        bounds = numba.carray(_pointer(work[3], np.int32), (threads, 3))
        part = pairs[size * thread // threads : size * (thread + 1) // threads]
        _count_part(part, even_odd[thread, 0], even_odd[thread, 1], bounds[thread])

    return int(region.address)


@numba.extending.intrinsic
def _pointer(context, address, dtype):  # type: ignore[no-untyped-def]
    """An integer as a pointer to `dtype`."""
    pointer = types.CPointer(dtype.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, dtype), generate


def _count_in_pool(pairs: npt.NDArray[np.uint64], tables: npt.NDArray[np.int64], bounds: npt.NDArray[np.int32]) -> None:
    """The same without OpenMP: the caller's thread and helpers take chunks until none is left."""
    chunks = -(-pairs.size // _CHUNK)
    take = itertools.count().__next__  # one number to one thread: the interpreter lock sees to it

    def work(thread: int) -> None:
        while (at := take()) < chunks:
            part = pairs[at * _CHUNK : (at + 1) * _CHUNK]
            _count_part(part, tables[thread, 0], tables[thread, 1], bounds[thread])

    helpers = min(tables.shape[0], chunks) - 1
    tasks = [_helpers(tables.shape[0] - 1).submit(work, thread) for thread in range(1, helpers + 1)]
    work(0)
    for task in tasks:
        if not task.cancel():  # one that never got to run has nothing left to do
            task.result()


@functools.cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """Threads that wait for work; made once, since starting them costs as much as counting a layer."""
    return ThreadPoolExecutor(threads, thread_name_prefix="calib")

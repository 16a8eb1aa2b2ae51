"""The counting loop, compiled by numba. Import it lazily: it needs numba, and compiles once (then it is cached)."""

from __future__ import annotations

import numba
import numpy as np

#: Pairs of values looked at together: 16 KiB, so the second look finds them in the first-level cache.
_BLOCK = 2048


@numba.njit(cache=True, nogil=True)
def _count_part(pairs, even, odd, bounds):  # type: ignore[no-untyped-def]
    """Count one thread's pairs. Slices keep every index provably non-negative, which lets LLVM vectorise."""
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


@numba.njit(cache=True, parallel=True)
def count(pairs, tables, bounds):  # type: ignore[no-untyped-def]
    """Add float32 values, two to a uint64, to per-thread tables.

    Args:
        pairs: uint64 [N], the float32 values in memory order.
        tables: int64 [threads, 2, 65536], added to.
        bounds: int32 [threads, 2], least and greatest pattern in sortable form (`ordered` above), updated.
    """
    threads = tables.shape[0]
    step = (pairs.size + threads - 1) // threads
    for t in numba.prange(threads):
        part = pairs[min(pairs.size, t * step) : min(pairs.size, (t + 1) * step)]
        _count_part(part, tables[t, 0], tables[t, 1], bounds[t])

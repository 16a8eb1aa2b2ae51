"""Observers: the histogram of a tensor's values, in one pass and constant memory, on the CPU and on CUDA.

The shape contract, for every observer: `observe(x)` takes one tensor of any shape, any memory layout and any floating
dtype (taken as float32), on any device, any number of times; it keeps no reference to it and returns nothing. On CUDA
it never waits for the device. The histogram is read from a property, which changes nothing.
"""

from __future__ import annotations

import functools
import logging
import math
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from calib.errors import CalibError
from calib.histogram import ALL_BINS, BINS, SHIFT, SLOTS, Histogram

if TYPE_CHECKING:
    import torch

_INFINITY = 0x7F800000
_FLIP = 0x7FFFFFFF
#: No value yet: sortable least and greatest pattern, and least magnitude as calib.kernel keeps it.
_UNSEEN = (2**31 - 1, -(2**31), 2**31 - 1)
#: Counters of zeros on a device: a power of two. They are most of what a ReLU gives, and one counter is a queue.
_SPREAD = 1024


class HistogramObserver:
    """Counts every value of a tensor into the buckets of `Histogram`, in two halves that the caller alternates.

    `half` (0 or 1) says which half the next values belong to; `histogram` is their sum and does not depend on it.
    """

    def __init__(self) -> None:
        self.half = 0
        self._counters: dict[tuple[str, int], _Counter] = {}

    def observe(self, x: torch.Tensor) -> None:
        """Count the values of `x`: any shape, floating dtype, read once, not kept.

        Raises:
            CalibError: `x` is not a floating tensor.
        """
        if not x.dtype.is_floating_point:
            raise CalibError(
                f"observer: a calibrated tensor must be floating (got {x.dtype}). Leave it out of quantization."
            )
        where = (str(x.device), self.half)
        if where not in self._counters:
            self._counters[where] = _CpuCounter() if x.device.type == "cpu" else _DeviceCounter(x.device)
        self._counters[where].add(x.detach())

    @property
    def histogram(self) -> Histogram:
        """Everything seen so far. On CUDA this waits for the device."""
        first, second = self.halves
        return first + second

    @property
    def halves(self) -> tuple[Histogram, Histogram]:
        """What was seen while `half` was 0, and while it was 1."""
        first, second = (
            Histogram.total(c.read() for (_, half), c in self._counters.items() if half == h) for h in (0, 1)
        )
        return first, second


def dense(x: torch.Tensor) -> torch.Tensor:
    """`x`'s values as one contiguous dimension [N], in memory order: a view where `x` is dense, else a copy."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda d: d[1]):
        if size != 1:
            if stride != expected:
                return x.reshape(-1).contiguous()
            expected *= size
    return x.as_strided((x.numel(),), (1,))


class _Counter:
    """Counts on one device."""

    def add(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def read(self) -> Histogram:
        raise NotImplementedError


class _CpuCounter(_Counter):
    """The compiled loop: one pair of tables for each thread, whose pages exist only where something was counted."""

    def __init__(self) -> None:
        import torch

        self._count: Callable[..., None] = _kernel()
        threads = torch.get_num_threads()
        shape = (threads, 2, SLOTS)
        # Anonymous memory by name: NumPy asks for huge pages, which would make all of a large table resident.
        self._tables = np.frombuffer(mmap.mmap(-1, 8 * math.prod(shape)), np.int64).reshape(shape)
        self._bounds = np.tile(np.array(_UNSEEN, np.int32), (threads, 1))

    def add(self, x: torch.Tensor) -> None:
        import torch

        flat = dense(x.to(torch.float32)).numpy()
        if not flat.size:
            return
        start = (flat.ctypes.data // 4) % 2
        stop = start + (flat.size - start) // 2 * 2
        for loose in (flat[:start], flat[stop:]):
            self._add_loose(loose)
        before = self._bounds.copy()
        pairs = flat[start:stop].view(np.uint64)
        if pairs.size:
            self._count(pairs, self._tables, self._bounds)
        if self._bounds[:, 1].max() >= _INFINITY or self._bounds[:, 0].min() < -_INFINITY:
            self._bounds[:, :2] = before[:, :2]
            self._note_finite_bounds(flat)

    def read(self) -> Histogram:
        low, high = int(self._bounds[:, 0].min()), int(self._bounds[:, 1].max())
        least = (int(self._bounds[:, 2].min()) & _FLIP) + 1
        most = max((v if v >= 0 else ~v) for v in (low, high)) if low <= high else 0
        # Between zero and the least magnitude, and over the greatest, no table has a page; looking there makes one.
        seen = (slice(0, 1), slice(max(1, least >> SHIFT), (most >> SHIFT) + 1), slice(BINS, None))
        counts = np.zeros(ALL_BINS, np.int64)
        for table in self._tables.reshape(-1, SLOTS):
            counts[0] += table[ALL_BINS:].sum()
            for part in seen:
                counts[part] += table[:ALL_BINS][part]
        return _histogram(counts, low, high)

    def _add_loose(self, values: npt.NDArray[np.float32]) -> None:
        """Count the at most one value before and after the pairs."""
        for bits in values.view(np.int32).tolist():
            self._tables[0, 0, (bits & _FLIP) >> SHIFT] += 1
            if bits & _FLIP:
                self._bounds[0, 2] = min(int(self._bounds[0, 2]), (bits & _FLIP) - 1 - 2**31)
            self._widen_bounds(bits, bits)

    def _note_finite_bounds(self, flat: npt.NDArray[np.float32]) -> None:
        """The rare case: NaN or infinity among the values, so the bounds are taken from the finite ones alone."""
        finite = flat[np.isfinite(flat)]
        if finite.size:
            low, high = np.array([finite.min(), finite.max()], np.float32).view(np.int32).tolist()
            self._widen_bounds(low, high)

    def _widen_bounds(self, low_bits: int, high_bits: int) -> None:
        low, high = _sortable(low_bits), _sortable(high_bits)
        if low >= -_INFINITY and high < _INFINITY:
            self._bounds[0, 0] = min(self._bounds[0, 0], low)
            self._bounds[0, 1] = max(self._bounds[0, 1], high)


@functools.cache
def _warn_slower(why: str) -> None:
    """Log the reason, once for all tensors."""
    logging.getLogger("calib").warning("slower counting, as Triton cannot compile here: %s", why)


class _DeviceCounter(_Counter):
    """The same counts on a device, left there until they are read: by Triton's kernel on CUDA, else by torch's own."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._counts = torch.zeros(ALL_BINS + _SPREAD, dtype=torch.int64, device=device)
        self._low = torch.full((1,), _UNSEEN[0], dtype=torch.int32, device=device)
        self._high = torch.full((1,), _UNSEEN[1], dtype=torch.int32, device=device)
        self._triton = True

    def add(self, x: torch.Tensor) -> None:
        flat = dense(x)
        if not flat.numel():
            return
        if not (flat.is_cuda and self._add_in_one_launch(flat)):
            self._add_by_torch(flat)

    def _add_in_one_launch(self, flat: torch.Tensor) -> bool:
        """Whether Triton counted them; where it cannot compile, a dozen slower launches count the same."""
        import torch

        count = _device_kernel()
        if not self._triton or count is None or flat.dtype == torch.float64:
            return False
        try:
            with torch.cuda.device(flat.device):
                count(
                    flat, self._counts, self._low, self._high, all_bins=ALL_BINS, bins=BINS, shift=SHIFT, spread=_SPREAD
                )
        except Exception as error:  # noqa: BLE001  # Triton needs a C compiler, and says so in many ways
            self._triton = False  # nothing was launched
            _warn_slower(str(error))
            return False
        return True

    def _add_by_torch(self, flat: torch.Tensor) -> None:
        import torch

        bits = flat.to(torch.float32).view(torch.int32)
        index = (bits & _FLIP) >> SHIFT
        finite = index < BINS
        ordered = bits ^ ((bits >> 31) & _FLIP)
        # In place: a CUDA graph that recorded this reads and writes the same memory each time.
        self._low.copy_(torch.minimum(self._low, torch.where(finite, ordered, _UNSEEN[0]).amin()))
        self._high.copy_(torch.maximum(self._high, torch.where(finite, ordered, _UNSEEN[1]).amax()))
        lane = torch.arange(bits.numel(), device=bits.device) & (_SPREAD - 1)
        slot = torch.where(index == 0, ALL_BINS + lane, index.to(torch.int64))
        one = torch.ones((), dtype=torch.int64, device=bits.device).expand(bits.numel())
        self._counts.scatter_add_(0, slot, one)

    def read(self) -> Histogram:
        counts = self._counts.cpu().numpy()
        buckets = counts[:ALL_BINS].copy()
        buckets[0] += counts[ALL_BINS:].sum()
        return _histogram(buckets, int(self._low), int(self._high))


@functools.cache
def _device_kernel() -> Callable[..., None] | None:
    try:
        from calib.gpu_kernel import count
    except ImportError:
        return None
    kernel: Callable[..., None] = count
    return kernel


def _kernel() -> Callable[..., None]:
    try:
        from calib.kernel import count
    except ImportError as error:
        raise CalibError("observer: numba, which counts on the CPU, cannot be imported. Install it.") from error
    kernel: Callable[..., None] = count
    return kernel


def _sortable(bits: int) -> int:
    """An int32 float pattern as an integer that sorts as the float does."""
    return bits if bits >= 0 else bits ^ _FLIP


def _histogram(counts: npt.NDArray[np.int64], low: int, high: int) -> Histogram:
    finite = counts[:BINS].copy()
    non_finite = int(counts[BINS:].sum())
    if not finite.any():
        return Histogram(finite, non_finite=non_finite)
    bits = np.array([_sortable(low), _sortable(high)], np.int32)
    floor, ceiling = bits.view(np.float32).tolist()
    return Histogram(finite, floor + 0.0, ceiling + 0.0, non_finite)

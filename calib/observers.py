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
#: Counters of zeros where torch counts, a power of two: they are most of what a ReLU gives, and one is a queue.
_SPREAD = 1024


class HistogramObserver:
    """Counts every value of a tensor into the buckets of `Histogram`, in two halves that the caller alternates.

    `half` says which half the next values belong to; `histogram` is their sum and does not depend on it. It is 0, 1 or
    an int32 tensor [1] that holds one of them, on the device of the values: that is read where they are counted, so
    that a CUDA graph that recorded `observe` obeys it.
    """

    def __init__(self) -> None:
        self.half: int | torch.Tensor = 0
        self._counters: dict[str, _Counter] = {}

    def observe(self, x: torch.Tensor) -> None:
        """Count the values of `x`: any shape, floating dtype, read once, not kept.

        Raises:
            CalibError: `x` is not a floating tensor.
        """
        if not x.dtype.is_floating_point:
            raise CalibError(
                f"observer: a calibrated tensor must be floating (got {x.dtype}). Leave it out of quantization."
            )
        where = str(x.device)
        if where not in self._counters:
            self._counters[where] = _CpuCounter() if x.device.type == "cpu" else _DeviceCounter(x.device)
        self._counters[where].add(x.detach(), self.half)

    @property
    def histogram(self) -> Histogram:
        """Everything seen so far. On CUDA this waits for the device."""
        first, second = self.halves
        return first + second

    @property
    def halves(self) -> tuple[Histogram, Histogram]:
        """What was seen while `half` was 0, and while it was 1."""
        first, second = (Histogram.total(c.read(half) for c in self._counters.values()).compact() for half in (0, 1))
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
    """Counts on one device, of both halves."""

    def add(self, x: torch.Tensor, half: int | torch.Tensor) -> None:
        raise NotImplementedError

    def read(self, half: int) -> Histogram:
        raise NotImplementedError


class _CpuCounter(_Counter):
    """The compiled loop for each half."""

    def __init__(self) -> None:
        self._halves = (_Loop(), _Loop())

    def add(self, x: torch.Tensor, half: int | torch.Tensor) -> None:
        self._halves[int(half)].add(x)

    def read(self, half: int) -> Histogram:
        return self._halves[half].read()


class _Loop:
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
    logging.getLogger("calib").warning("slower counting, as its kernel cannot be compiled here: %s", why)


class _DeviceCounter(_Counter):
    """The same counts on a device, left there until they are read: by our kernel on CUDA, else by torch."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._counts = torch.zeros((2, ALL_BINS + _SPREAD), dtype=torch.int64, device=device)
        self._low = torch.full((2,), _UNSEEN[0], dtype=torch.int32, device=device)
        self._high = torch.full((2,), _UNSEEN[1], dtype=torch.int32, device=device)
        self._numbers = torch.arange(2, dtype=torch.int32, device=device)
        self._in_one_launch = True

    def add(self, x: torch.Tensor, half: int | torch.Tensor) -> None:
        import torch

        flat = dense(x).to(torch.float32)
        if not flat.numel():
            return
        which = self._numbers[half : half + 1] if isinstance(half, int) else half
        if not (flat.is_cuda and self._add_in_one_launch(flat, which)):
            self._add_by_torch(flat, which)

    def _add_in_one_launch(self, flat: torch.Tensor, half: torch.Tensor) -> bool:
        """Whether our kernel counted them; where it cannot be compiled, a dozen slower launches count the same."""
        import torch

        if not self._in_one_launch:
            return False
        try:
            from calib.gpu_kernel import count

            with torch.cuda.device(flat.device):
                count(flat, half, self._counts, self._low, self._high)
        except Exception as error:  # noqa: BLE001  # cuda-bindings and NVRTC say in many ways what they lack
            self._in_one_launch = False  # nothing was launched
            _warn_slower(str(error))
            return False
        return True

    def _add_by_torch(self, flat: torch.Tensor, half: torch.Tensor) -> None:
        import torch

        bits, half = flat.view(torch.int32), half.to(torch.int64)
        index = (bits & _FLIP) >> SHIFT
        finite = index < BINS
        ordered = bits ^ ((bits >> 31) & _FLIP)
        # In place: a CUDA graph that recorded this reads and writes the same memory each time.
        low, high = (torch.where(finite, ordered, unseen) for unseen in _UNSEEN[:2])
        self._low.scatter_reduce_(0, half, low.amin(dim=0, keepdim=True), "amin")
        self._high.scatter_reduce_(0, half, high.amax(dim=0, keepdim=True), "amax")
        lane = torch.arange(bits.numel(), device=bits.device) & (_SPREAD - 1)
        slot = torch.where(index == 0, ALL_BINS + lane, index.to(torch.int64)) + half * self._counts.shape[1]
        one = torch.ones((), dtype=torch.int64, device=bits.device).expand(bits.numel())
        self._counts.view(-1).scatter_add_(0, slot, one)

    def read(self, half: int) -> Histogram:
        counts = self._counts[half].cpu().numpy()
        buckets = counts[:ALL_BINS].copy()
        buckets[0] += counts[ALL_BINS:].sum()
        return _histogram(buckets, int(self._low[half]), int(self._high[half]))


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

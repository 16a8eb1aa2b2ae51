"""The counting loop for CUDA, compiled by Triton, which PyTorch's CUDA builds bring. Import it lazily.

One launch reads a tensor once; the same by torch's own operations takes a dozen launches and reads it as often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

#: Values that one program of the grid looks at.
_BLOCK = 4096


# Constants in capitals, as Triton's own code has them: they are compiled in.
@triton.jit  # type: ignore[untyped-decorator]
def _count(x, counts, low, high, size, ALL: tl.constexpr, FINITE: tl.constexpr, SHIFT: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    bits = tl.load(x + at, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    index = (bits & 0x7FFFFFFF) >> SHIFT
    # A ReLU's zeros would all wait for one counter; they have many, whose sum is read.
    slot = tl.where(index == 0, ALL + (at & (SPREAD - 1)).to(tl.int32), index)
    tl.atomic_add(counts + slot, tl.full((BLOCK,), 1, tl.int64), mask=inside, sem="relaxed")
    # As integers, float patterns sort as the floats do once the negative ones are flipped.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    finite = inside & (index < FINITE)
    tl.atomic_min(low, tl.min(tl.where(finite, ordered, 0x7FFFFFFF), axis=0), sem="relaxed")
    tl.atomic_max(high, tl.max(tl.where(finite, ordered, -0x7FFFFFFF - 1), axis=0), sem="relaxed")


def count(
    x: torch.Tensor,
    counts: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    *,
    all_bins: int,
    bins: int,
    shift: int,
    spread: int,
) -> None:
    """Add the values of a tensor to counters on its device; nothing waits.

    Args:
        x: [N], contiguous, floating, taken as float32.
        counts: int64 [all_bins + spread]; zeros are counted in the last `spread`, a power of two.
        low, high: int32 [1], updated: least and greatest finite pattern in sortable form (`ordered` above).
        all_bins, bins, shift: those of `calib.histogram`.
        spread: see `counts`.
    """
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    _count[grid](x, counts, low, high, x.numel(), all_bins, bins, shift, spread, _BLOCK)

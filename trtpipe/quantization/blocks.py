"""A linear's weight in 4 bits: a scale for each block of inputs, and levels that make up for each other within it.

With the second moments of what a block reads, both serve the linear's output: the block's threshold is the share of its
amax that leaves the least error there (as J. Lin et al., "AWQ" (2023), clip), and a column's rounding error is made up
for by the block's other columns (`rounding`, Frantar et al., "GPTQ" (2022), whose moments go beyond blocks). Without
them a block's amax is its threshold: what is cut off the largest weights adds up wherever inputs have one sign, and the
error of the weights alone does not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from trtpipe.quantization.formats import (
    FP8,
    INT4,
    NVFP4,
    block_scales,
    fp4_codes,
    global_scale,
    scales_of,
    to_fp4,
    to_fp8,
)
from trtpipe.quantization.rounding import second_order

#: A block's threshold is searched among these shares of its amax.
SHARES = tuple(1.0 - 0.025 * k for k in range(17))


def quantize_int4(
    w: torch.Tensor, block: int, half: torch.dtype | None, moments: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear's weight in INT4: codes int8 [N, K] in -8..7 and float32 scales [N, K / block].

    Args:
        w: float [N, K]; K is a multiple of `block`.
        block: numbers that share a scale, along K.
        half: what the scales are rounded up to.
        moments: float32 [K / m, m, m], E[x x^T] of the inputs by blocks of m, a multiple of `block`; None: not known.
    """
    blocks = _blocks(w, block)
    amax = blocks.abs().amax(-1)

    def at(share: float) -> tuple[torch.Tensor, torch.Tensor]:
        scales = scales_of(amax * share, INT4, half)
        return scales, scales

    scales, steps, known = _best(blocks, at, int4_levels, moments)
    levels = _levels(blocks, steps, known, int4_levels)
    return levels.reshape(w.shape).to(torch.int8), scales


def quantize_nvfp4(
    w: torch.Tensor, moments: torch.Tensor | None, half: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A linear's weight in NVFP4: codes uint8 [N, K], block scales float8_e4m3fn [N, K / 16], and their scale.

    Args as for `quantize_int4`; the scale of the scales is amax / (6 * 448). A block's scale times that is a number of
    `half` in an engine that computes in it: no block whose own scale E4M3 has, beside the largest, gets one that is 0.
    """
    (block,) = NVFP4.blocks
    blocks = _blocks(w, block)
    amax = blocks.abs().amax(-1)
    least = 0.0 if half is None else float(torch.nextafter(torch.zeros((), dtype=half), torch.ones((), dtype=half)))
    scale = max(global_scale(float(amax.max())), least / FP8.largest)
    floor = to_fp8(torch.tensor(least / scale)).to(torch.float32)

    def at(share: float) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = block_scales(torch.where(amax > 0, (amax * share).clamp_min(NVFP4.largest * scale * floor), 0), scale)
        narrow = narrow.to(torch.float32)
        wide = (narrow * scale).to(half or torch.float32).to(torch.float32)
        return narrow, torch.where(wide == 0, 1.0, wide)

    narrow, steps, known = _best(blocks, at, to_fp4, moments)
    levels = _levels(blocks, steps, known, to_fp4)
    return fp4_codes(levels.reshape(w.shape)), narrow.to(torch.float8_e4m3fn), scale


def int4_levels(x: torch.Tensor) -> torch.Tensor:
    """The nearest of INT4's levels to each number: float32 integers in [-8, 7]."""
    return torch.round(x).clamp_(-8, 7)


#: The stored scales of each block, and its steps, at a share of its amax.
_At: TypeAlias = Callable[[float], tuple[torch.Tensor, torch.Tensor]]
_LevelsOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def _blocks(w: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [N, B, block]."""
    return w.to(torch.float32).reshape(w.shape[0], -1, block)


def _best(
    blocks: torch.Tensor, at: _At, levels_of: _LevelsOf, moments: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Each block's scales and steps, [N, B], at the share with the least error at the output, and the moments, float32
    [B, block, block]; those at its amax where no moments are known."""
    scales, steps = at(SHARES[0])
    if moments is None or not bool(torch.isfinite(moments).all()):
        return scales, steps, None
    known = _within(moments, blocks.shape[-1])

    def error(steps: torch.Tensor) -> torch.Tensor:
        lost = (levels_of(blocks / steps[..., None]) * steps[..., None] - blocks).transpose(0, 1)  # [B, N, block]
        return ((lost @ known) * lost).sum(-1).T

    least = error(steps)
    for share in SHARES[1:]:
        other_scales, other_steps = at(share)
        better = (lost := error(other_steps)) < least
        least = torch.where(better, lost, least)
        scales, steps = torch.where(better, other_scales, scales), torch.where(better, other_steps, steps)
    return scales, steps, known


def _levels(
    blocks: torch.Tensor, steps: torch.Tensor, known: torch.Tensor | None, levels_of: _LevelsOf
) -> torch.Tensor:
    """The levels of [N, B, block] on steps [N, B]: float32 of the same shape."""
    if known is None:
        return levels_of(blocks / steps[..., None])
    (levels,) = second_order([blocks.transpose(0, 1)], [steps.T], known, levels_of)
    return levels.transpose(0, 1)


def _within(moments: torch.Tensor, block: int) -> torch.Tensor:
    """The moments of smaller blocks: float32 [K / block, block, block]."""
    count, size, _ = moments.shape
    parts = moments.reshape(count, size // block, block, size // block, block)
    return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, block, block).contiguous()

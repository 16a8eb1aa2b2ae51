"""Second-order rounding of a weight: each column's rounding error is made up for by the columns after it.

Source: Frantar et al., "GPTQ" (2022), after Hassibi and Stork, "Optimal Brain Surgeon" (1992), by the factor of the
moments themselves, which gives the same levels as that of their inverse (Chee et al., "QuIP", 2023). The target is
what the operation gives in float on float inputs; the inputs it has are the quantized ones, so that a weight also makes
up for what quantizing them lost, as far as that is linear (Li et al., "GPTAQ", 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from calib.algorithms import WEIGHT_RANGE
from trtpipe.quantization.formats import INT8, scales_of
from trtpipe.values import Int8Weight

#: Added to the diagonal of the inputs' second moments, relative to its mean.
DAMPING = 0.01
#: The least that is divided by, or that a logarithm is taken of: below the magnitudes of any network, and not zero.
LEAST_MAGNITUDE = 1e-30
#: Columns whose errors are passed on together: to all others, and to those of their own block.
BLOCK, STRIP = 128, 16
#: Bands of rows in which second moments are added up.
BANDS = 8


def weight_scales(w: torch.Tensor) -> torch.Tensor:
    """For `w` [..., K], amax / 127 rounded up to a number of BF16: float32 [...].

    Engines of every half precision hold the very same scales then. A smaller amax, by least squared error, is no
    better: with 127 levels the largest weight costs more when it is cut than all the others gain.
    """
    return scales_of(w.abs().amax(-1), INT8, torch.bfloat16)


def scaled(w: torch.Tensor, s: torch.Tensor, axis: int) -> torch.Tensor:
    """`w` times `s` [C] along `axis`."""
    return w * s.reshape([-1 if d == axis else 1 for d in range(w.dim())])


def on_grid(own: Int8Weight) -> torch.Tensor | None:
    """The weight that an operation reads in INT8, float32 in its own shape; None where that is its own one.

    Levels are multiplied anew each time: the weights of all operations would take four times their levels' memory.
    """
    if own.stored is None or own.scales is None or own.stored.is_floating_point():
        return own.stored
    return scaled(own.stored.to(torch.float32), own.scales, own.axis)


def int8_levels(x: torch.Tensor) -> torch.Tensor:
    """The nearest of INT8's levels to each number: float32 integers in [-127, 127]."""
    return torch.round(x).clamp_(*WEIGHT_RANGE)


def nearest(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Levels of `w` [..., K] on `scales` [...], each alone: float32 integers in [-127, 127]."""
    return int8_levels(w / scales[..., None])


def add_moments(moments: torch.Tensor, x: torch.Tensor) -> None:
    """Add x x^T, of `x` float32 [G, K, N], to the upper triangle of `moments` [G, K, K], in place.

    Of what is below only blocks along the diagonal are computed, which takes little more than half of the time.
    """
    inputs = x.shape[1]
    block = max(BLOCK, -(-inputs // BANDS))
    for start in range(0, inputs, block):
        stop = start + block
        moments[:, start:stop, start:].baddbmm_(x[:, start:stop], x[:, start:].mT)


def second_order(
    targets: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    moments: torch.Tensor,
    levels_of: Callable[[torch.Tensor], torch.Tensor] = int8_levels,
) -> list[torch.Tensor]:
    """Levels of weights that read the same inputs, of known second moments: the factors of these are most of the work.

    Args:
        targets: float32 [G, C_out / G, K] each: groups, their output channels, their inputs.
        scales: float32 [G, C_out / G] of each target.
        moments: float32 [G, K, K], E[x x^T] of the inputs of each group.
        levels_of: the nearest levels of a number format, float32 to float32.

    Returns:
        float32 levels of each target's shape; the nearest ones where the moments are singular.
    """
    diagonal = moments.diagonal(dim1=1, dim2=2)
    damping = DAMPING * diagonal.mean(1, keepdim=True)
    damping = damping + (diagonal <= 0).float() * diagonal.amax(1, keepdim=True).clamp_min(LEAST_MAGNITUDE)
    order = torch.argsort(diagonal, dim=1, descending=True)
    backwards = order.flip(1)
    h = moments.gather(1, backwards[:, :, None].expand_as(moments))
    h = h.gather(2, backwards[:, None, :].expand_as(h))
    h.diagonal(dim1=1, dim2=2).add_(damping.gather(1, backwards))
    lower, bad = torch.linalg.cholesky_ex(h)
    del h  # as large as all the rest of a wide layer
    if bool(bad.any()):
        return [levels_of(w / steps[..., None]) for w, steps in zip(targets, scales, strict=True)]
    feedback = lower.flip(1, 2)  # the upper factor of the moments, in `order`
    del lower
    feedback /= feedback.diagonal(dim1=1, dim2=2)[:, None, :].clone()
    columns = order[:, None, :].expand_as(targets[0])
    # The targets' channels beside each other: each is rounded by itself, all by the same factor.
    wanted, steps = torch.cat([t.gather(2, columns) for t in targets], 1), torch.cat(list(scales), 1)
    levels, w = torch.empty_like(wanted), wanted.clone()
    for start in range(0, w.shape[-1], BLOCK):
        stop = min(start + BLOCK, w.shape[-1])
        part, own = _columns_first(w[..., start:stop]), feedback[:, start:stop, start:stop]
        rounded, errors = torch.empty_like(part), _columns_first(wanted[..., start:stop])
        for first in range(0, len(part), STRIP):
            last = min(first + STRIP, len(part))
            for i in range(first, last):
                rounded[i] = levels_of(part[i] / steps)
                errors[i] -= rounded[i] * steps
                part[i + 1 : last] += errors[i] * own[:, i, i + 1 : last].T[:, :, None]
            part[last:].movedim(1, 0).baddbmm_(own[:, first:last, last:].mT, errors[first:last].movedim(1, 0))
        levels[..., start:stop] = rounded.movedim(0, -1)
        w[..., stop:].baddbmm_(errors.movedim(0, -1), feedback[:, start:stop, stop:])
    return [torch.empty_like(one).scatter(2, columns, one) for one in torch.split(levels, targets[0].shape[1], 1)]


def _columns_first(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [K, ...], so that a column lies in one piece."""
    return x.movedim(-1, 0).contiguous()


def regressed(w: torch.Tensor, moments: torch.Tensor, lost: torch.Tensor, damping: float) -> torch.Tensor:
    """The float weight that on quantized inputs comes closest to `w` on float ones.

    Args:
        w: float32 [G, C_out / G, K].
        moments: float32 [G, K, K], E[q q^T] of the quantized inputs q.
        lost: float32 [G, C_out / G, K], E[w (x - q) q^T] for float inputs x.
        damping: how strongly the result is held to `w`, relative to the mean of the moments' diagonal.
    """
    diagonal = moments.diagonal(dim1=1, dim2=2)
    h = moments.clone()
    h.diagonal(dim1=1, dim2=2).add_(damping * diagonal.mean(1, keepdim=True).clamp_min(LEAST_MAGNITUDE))
    factor, bad = torch.linalg.cholesky_ex(h)
    del h
    if bool(bad.any()):
        return w
    return w + torch.cholesky_solve(lost.mT, factor).mT

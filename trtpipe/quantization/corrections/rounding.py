"""Second-order rounding of a weight to INT8: each column's rounding error is made up for by the columns after it.

Source: Frantar et al., "GPTQ" (2022), after Hassibi and Stork, "Optimal Brain Surgeon" (1992). The target is what the
operation gives in float on float inputs; the inputs it has are the quantized ones, so that a weight also makes up for
what quantizing them lost, as far as that is linear (Li et al., "GPTAQ", 2025).
"""

from __future__ import annotations

import torch

from trtpipe.quantization.formats import SMALLEST_SCALE, rounded_up
from trtpipe.quantization.observers import WEIGHT_RANGE

#: Added to the diagonal of the inputs' second moments, relative to its mean.
DAMPING = 0.01
#: Columns whose errors are passed on together.
BLOCK = 128


def weight_scales(w: torch.Tensor) -> torch.Tensor:
    """For `w` [..., K], amax / 127 rounded up to a number of BF16: float32 [...].

    Engines of every half precision hold the very same scales then. A smaller amax, by least squared error, is no
    better: with 127 levels the largest weight costs more when it is cut than all the others gain.
    """
    return rounded_up((w.abs().amax(-1) / WEIGHT_RANGE[1]).clamp_min(SMALLEST_SCALE), torch.bfloat16)


def nearest(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Levels of `w` [..., K] on `scales` [...], each alone: float32 integers in [-127, 127]."""
    return torch.round(w / scales[..., None]).clamp_(*WEIGHT_RANGE)


def second_order(w: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Levels of a weight for inputs of known second moments.

    Args:
        w: float32 [G, C_out / G, K]: groups, their output channels, their inputs.
        scales: float32 [G, C_out / G].
        moments: float32 [G, K, K], E[x x^T] of the inputs of each group.

    Returns:
        float32 integers of w's shape, in [-127, 127]; the nearest ones where the moments are singular.
    """
    diagonal = moments.diagonal(dim1=1, dim2=2)
    h = moments + torch.diag_embed(DAMPING * diagonal.mean(1, keepdim=True).expand_as(diagonal))
    h = h + torch.diag_embed((diagonal <= 0).float() * diagonal.amax(1, keepdim=True).clamp_min(1e-30))
    order = torch.argsort(diagonal, dim=1, descending=True)
    h = h.gather(1, order[:, :, None].expand_as(h)).gather(2, order[:, None, :].expand_as(h))
    columns = order[:, None, :].expand_as(w)
    w = w.gather(2, columns)
    factor, bad = torch.linalg.cholesky_ex(h)
    upper, worse = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    levels = torch.empty_like(w)
    if bool(bad.any()) or bool(worse.any()):
        return nearest(levels.scatter(2, columns, w), scales)
    for start in range(0, w.shape[2], BLOCK):
        stop = min(start + BLOCK, w.shape[2])
        part, own = w[..., start:stop], upper[:, start:stop, start:stop]
        errors = torch.empty_like(part)
        for i in range(stop - start):
            column = part[..., i]
            levels[..., start + i] = torch.round(column / scales).clamp_(*WEIGHT_RANGE)
            errors[..., i] = (column - levels[..., start + i] * scales) / own[:, i, i, None]
            part[..., i:] -= errors[..., i : i + 1] * own[:, i : i + 1, i:]
        w[..., stop:] -= errors @ upper[:, start:stop, stop:]
    return torch.empty_like(levels).scatter(2, columns, levels)


def regressed(w: torch.Tensor, moments: torch.Tensor, lost: torch.Tensor, damping: float) -> torch.Tensor:
    """The float weight that on quantized inputs comes closest to `w` on float ones.

    Args:
        w: float32 [G, C_out / G, K].
        moments: float32 [G, K, K], E[q q^T] of the quantized inputs q.
        lost: float32 [G, K, K], E[(x - q) q^T] for float inputs x.
        damping: how strongly the result is held to `w`, relative to the mean of the moments' diagonal.
    """
    diagonal = moments.diagonal(dim1=1, dim2=2)
    h = moments + torch.diag_embed(damping * diagonal.mean(1, keepdim=True).clamp_min(1e-30).expand_as(diagonal))
    factor, bad = torch.linalg.cholesky_ex(h)
    if bool(bad.any()):
        return w
    return w + torch.cholesky_solve((w @ lost).mT, factor).mT

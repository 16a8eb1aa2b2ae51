"""Second-order rounding of a weight to INT8: each column's rounding error is made up for by the columns after it.

Source: Frantar et al., "GPTQ" (2022), after Hassibi and Stork, "Optimal Brain Surgeon" (1992). The target is what the
operation gives in float on float inputs; the inputs it has are the quantized ones, so that a weight also makes up for
what quantizing them lost, as far as that is linear (Li et al., "GPTAQ", 2025).
"""

from __future__ import annotations

import torch

from trtpipe.quantization.quantize import SMALLEST_SCALE, WEIGHT_RANGE, rounded_up

#: Added to the diagonal of the inputs' second moments, relative to its mean.
DAMPING = 0.01
#: Columns whose errors are passed on together.
BLOCK = 128


def weight_scales(w: torch.Tensor, search: bool = True) -> torch.Tensor:
    """float32 [C_out]: for `w` [C_out, K] the scale of least squared error among amax / 127 times 1, 0.95, ..., 0.6.

    All are numbers of BF16, so that engines of every half precision hold the very same ones.
    """
    top = w.abs().amax(1)
    best, least = None, None
    for share in (1.0, *(1 - i / 20 for i in range(1, 9))) if search else (1.0,):
        scales = rounded_up((top * share / WEIGHT_RANGE[1]).clamp_min(SMALLEST_SCALE), torch.bfloat16)
        error = (w - nearest(w, scales) * scales[:, None]).square().sum(1)
        if best is None or least is None:
            best, least = scales, error
        else:
            better = error < least
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
    assert best is not None
    return best


def nearest(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Levels of `w` [C_out, K], each alone: float32 integers in [-127, 127]."""
    return torch.round(w / scales[:, None]).clamp_(*WEIGHT_RANGE)


def second_order(w: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Levels of `w` [C_out, K] on `scales` [C_out] for inputs with second moments `moments` [K, K], E[x x^T]."""
    diagonal = moments.diagonal()
    dead = diagonal <= 0
    h = moments.clone()
    h.diagonal().add_(DAMPING * float(diagonal.mean().clamp_min(1e-30)))
    h.diagonal()[dead] = float(diagonal.max().clamp_min(1e-30))
    order = torch.argsort(diagonal, descending=True)
    h, w = h[order][:, order], w[:, order].clone()
    factor, bad = torch.linalg.cholesky_ex(h)
    if int(bad):
        return nearest(w, scales)[:, torch.argsort(order)]
    upper = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    levels = torch.empty_like(w)
    for start in range(0, w.shape[1], BLOCK):
        stop = min(start + BLOCK, w.shape[1])
        part, own = w[:, start:stop], upper[start:stop, start:stop]
        errors = torch.empty_like(part)
        for i in range(stop - start):
            column = part[:, i]
            levels[:, start + i] = torch.round(column / scales).clamp_(*WEIGHT_RANGE)
            errors[:, i] = (column - levels[:, start + i] * scales) / own[i, i]
            part[:, i:] -= errors[:, i : i + 1] * own[i : i + 1, i:]
        w[:, stop:] -= errors @ upper[start:stop, stop:]
    return levels[:, torch.argsort(order)]


def regressed(w: torch.Tensor, moments: torch.Tensor, lost: torch.Tensor, damping: float) -> torch.Tensor:
    """The float weight that on quantized inputs comes closest to `w` on float ones.

    Args:
        w: float32 [C_out, K].
        moments: float32 [K, K], E[q q^T] of the quantized inputs q.
        lost: float32 [K, K], E[(x - q) q^T] for float inputs x.
        damping: how strongly the result is held to `w`, relative to the mean of the moments' diagonal.
    """
    h = moments.clone()
    h.diagonal().add_(damping * float(moments.diagonal().mean().clamp_min(1e-30)))
    factor, bad = torch.linalg.cholesky_ex(h)
    if int(bad):
        return w
    return w + torch.cholesky_solve((w @ lost).T, factor).T

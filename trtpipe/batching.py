"""Batches that the bindings allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trtpipe.values import TensorSpec

Array = np.ndarray[Any, Any]


def fitted(batch: Mapping[str, Array], inputs: Sequence[TensorSpec]) -> Iterable[tuple[dict[str, Array], int]]:
    """`batch` cut to what the bindings allow, the rest padded with its own last sample; each with its true count."""
    low, high = inputs[0].at("min")[0], inputs[0].at("max")[0]
    size = len(next(iter(batch.values())))
    for start in range(0, size, high):
        piece = {n: a[start : start + high] for n, a in batch.items()}
        count = min(high, size - start)
        if count < low:
            piece = {n: np.concatenate([a, np.repeat(a[-1:], low - count, axis=0)]) for n, a in piece.items()}
        yield piece, count

"""Samples cut into the batches that the bindings allow, and outputs of those batches put together again.

Outputs are kept one row a sample, [S, ...], whichever axis of the output is its batch axis. An output without a batch
axis (`TensorSpec.batch_axis` None) depends on all samples of its batch: it is kept one row a batch, [B, ...], and every
batch is then of one size, the last one filled up with copies of its last sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from calib.types import Array
from trtpipe.errors import InputError
from trtpipe.values import TensorSpec

#: Samples of the check that a bundle keeps as golden data, the first ones; a kit keeps all it is to be checked on.
KEPT_SAMPLES = 8


def unranked(output: TensorSpec) -> bool:
    """Whether an output has no score a class for each sample, whatever its shape."""
    return output.batch_axis is None or not output.classes


@dataclass(frozen=True)
class Batching:
    """How samples are run: `size` at a time, within the range of the inputs' batch dimension."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    size: int

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of the outputs that have no batch axis."""
        return tuple(s.name for s in self.outputs if s.batch_axis is None)

    @property
    def unranked(self) -> tuple[str, ...]:
        """Names of the outputs that are no class scores of samples, whatever their shape."""
        return tuple(s.name for s in self.outputs if unranked(s))

    @property
    def _range(self) -> tuple[int, int]:
        """Samples in the smallest and in the largest batch that is run."""
        low, high = (self.inputs[0].at(which)[0] for which in ("min", "max"))
        if not self.whole:
            return low, high
        size = max(low, min(self.size, high))
        return size, size

    def pieces(self, batch: Mapping[str, Array]) -> Iterator[tuple[dict[str, Array], int]]:
        """`batch`, each input [N, ...], cut to batches that can be run, each with its number of samples; a rest that is
        too small is filled up with copies of its last sample."""
        low, high = self._range
        total = len(next(iter(batch.values())))
        for start in range(0, total, high):
            piece = {n: a[start : start + high] for n, a in batch.items()}
            count = min(high, total - start)
            if count < low:
                piece = {n: np.concatenate([a, np.repeat(a[-1:], low - count, axis=0)]) for n, a in piece.items()}
            yield piece, count

    def rows(self, outputs: Mapping[str, Array], count: int) -> dict[str, Array]:
        """One row for each of the first `count` samples of a batch, [count, ...]; or one row in all, [1, ...], where no
        axis is the batch's. The dtypes are those of `outputs`.

        An output that has no binding, or another rank, is flat: it is there to be named as what differs.
        """
        axes = {s.name: s for s in self.outputs}
        result = {}
        for name, value in outputs.items():
            array, spec = np.asarray(value), axes.get(name)
            if spec is None or array.ndim != len(spec.shape):
                result[name] = array.reshape(-1)
            elif spec.batch_axis is None:
                result[name] = array[np.newaxis]
            else:
                result[name] = np.moveaxis(array, spec.batch_axis, 0)[:count]
        return result

    def row_count(self, spec: TensorSpec, samples: int) -> int:
        """Rows that output `spec` has for `samples` samples."""
        return samples if spec.batch_axis is not None else -(-samples // self._range[1])

    def first(self, outputs: Mapping[str, Array], samples: int) -> dict[str, Array]:
        """The rows of the first `samples` samples; `outputs` have one row a sample, [S, ...], as from `rows`."""
        return {s.name: outputs[s.name][: self.row_count(s, samples)] for s in self.outputs if s.name in outputs}


def joined(parts: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """The rows of all batches, [S, ...] of each output, in order.

    Raises:
        InputError: an output's rows differ in shape from one batch to the next.
    """
    lists: dict[str, list[Array]] = {}
    for part in parts:
        for name, rows in part.items():
            lists.setdefault(name, []).append(rows)
    for name, rows_of in lists.items():
        shapes = list(dict.fromkeys(a.shape[1:] for a in rows_of))
        if len(shapes) > 1:
            raise InputError(
                f"outputs.{name}: must have one shape for all samples (got {list(shapes[0])} and {list(shapes[1])}). "
                "A shape that depends on the data cannot be compiled: return a fixed number of rows and a mask."
            )
    return {name: np.concatenate(rows_of) for name, rows_of in lists.items()}


def require_names(given: Collection[str], wanted: Collection[str]) -> None:
    """InputError unless a batch has exactly the inputs `wanted`."""
    if set(given) != set(wanted):
        raise InputError(f"inputs: must be {', '.join(wanted)} (got {', '.join(given)}). Name each one.")

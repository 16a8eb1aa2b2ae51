"""Samples cut into the batches that the bindings allow, and outputs of those batches put together again.

Outputs are kept one row a sample, [S, ...], whichever axis of the output is its batch axis. An output without a batch
axis (`TensorSpec.batch_axis` None) depends on all samples of its batch: it is kept one row a batch, [B, ...], and every
batch is then of one size, the last one filled up with copies of its last sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TypeAlias

import numpy as np

from calib.types import Array
from trtpipe.errors import InputError
from trtpipe.values import DimRange, TensorSpec

#: `build.profiles`: the range of each dimension that a profile narrows; none is one profile, of the inputs' own ranges.
Profiles: TypeAlias = Sequence[Mapping[str, DimRange]]
#: Samples of the check that a bundle keeps as golden data, the first ones; a kit keeps all it is to be checked on.
KEPT_SAMPLES = 8


def unranked(output: TensorSpec) -> bool:
    """Whether an output has no score a class for each sample, whatever its shape."""
    return output.batch_axis is None or not output.classes


def has_shape(sizes: Sequence[int], wanted: Sequence[int | str], dims: Mapping[str, DimRange]) -> bool:
    """Whether an array of these sizes has the `wanted` shape, in which a str is a dynamic dimension with its range in
    `dims`."""
    return len(sizes) == len(wanted) and all(
        got == want if isinstance(want, int) else dims[want].min <= got <= dims[want].max
        for got, want in zip(sizes, wanted, strict=True)
    )


def of_batches(mixed: Sequence[str], inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """A note on outputs, `mixed`, of which a sample's row is another one in another batch."""
    if not mixed:
        return ()
    low, high = (inputs[0].at(which)[0] for which in ("min", "max"))
    filled = f", and fewer are filled up with copies of the last one to {low}" if low > 1 else ""
    return (
        f"output {', '.join(mixed)} of a sample depends on the others in its batch: run together what belongs "
        f"together, {high} samples at most (trtpipe run: --batch-size). More are split{filled}, which gives other "
        "values",
    )


def by_profile(inputs: Sequence[TensorSpec], profiles: Profiles) -> tuple[tuple[TensorSpec, ...], ...]:
    """The inputs with the ranges that they have in each profile."""
    return tuple(
        tuple(replace(s, dims={d: profile.get(d, own) for d, own in s.dims.items()}) for s in inputs)
        for profile in profiles or ({},)
    )


@dataclass(frozen=True)
class Batching:
    """How samples are run: `size` at a time, within the range of the inputs' batch dimension, each batch of shapes that
    one of the profiles takes."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    size: int
    profiles: Profiles = ()

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

    def require_whole(self, samples: int, where: str | PathLike[str], advice: str = "Give as many.") -> None:
        """Hold `samples` to fill whole batches of `size` where an output has no batch axis.

        Args:
            samples: how many there are.
            where: begins the message.
            advice: ends it.

        Raises:
            InputError: they do not: what stands in for the missing ones would change that output.
        """
        low = self.inputs[0].at("min")[0]
        size = max(low, self.size)
        if self.whole and (samples < low or (samples > size and samples % size)):
            of = f", {low} to {size} at once or a multiple of {size}" if low < size else f" of {size}"
            raise InputError(
                f"{where}: output {self.whole[0]} has no batch axis: samples must fill whole batches{of} (got "
                f"{samples}). {advice}"
            )

    def pieces(self, batch: Mapping[str, Array]) -> Iterator[tuple[dict[str, Array], int]]:
        """`batch`, each input [N, ...], cut to batches that can be run, as large as can be, each with its number of
        samples; a rest that is too small is filled up with copies of its last sample.

        Raises:
            InputError: no profile takes samples of these shapes.
        """
        spans = self._spans(batch)
        start, total = 0, len(next(iter(batch.values())))
        while start < total:
            left = total - start
            size = max((min(high, left) for low, high in spans if low <= left), default=min(low for low, _ in spans))
            count = min(size, left)
            piece = {n: a[start : start + count] for n, a in batch.items()}
            if count < size:
                piece = {n: np.concatenate([a, np.repeat(a[-1:], size - count, axis=0)]) for n, a in piece.items()}
            yield piece, count
            start += count

    def _spans(self, batch: Mapping[str, Array]) -> list[tuple[int, int]]:
        """The smallest and the largest batch of such samples in each profile that takes them."""
        low, high = self._range
        if not self.profiles:
            return [(low, high)]
        spans = []
        for specs in by_profile(self.inputs, self.profiles):
            least, most = max(low, specs[0].at("min")[0]), min(high, specs[0].at("max")[0])
            fits = all(
                a <= n <= b
                for s in specs
                for a, n, b in zip(s.at("min")[1:], batch[s.name].shape[1:], s.at("max")[1:], strict=True)
            )
            if fits and least <= most:
                spans.append((least, most))
        if not spans:
            got = ", ".join(f"{s.name} {list(batch[s.name].shape[1:])}" for s in self.inputs)
            of = f"{low} to {high}" if low < high else f"{low}"
            raise InputError(
                f"inputs: must be of sizes that a profile of build.profiles takes in batches of {of} (got samples "
                f"{got}). Change the sizes, or add a profile."
            )
        return spans

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


def require_one_size(first: Mapping[str, Array], later: Mapping[str, Array], where: str) -> None:
    """Refuse check samples of another size than the first: golden data, timing and the report hold all in one array.

    Args:
        first: the first batch, each input [N, ...].
        later: another one.
        where: names its samples.

    Raises:
        InputError: an input's samples have another shape there.
    """
    for name, array in later.items():
        if array.shape[1:] != first[name].shape[1:]:
            raise InputError(
                f"check: samples must be of one size (got {list(first[name].shape[1:])} for input {name!r} at first "
                f"and {list(array.shape[1:])} at {where}). Resize or crop them; other sizes that inputs declare are "
                "checked beside."
            )


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
                "Give samples of one size; a shape that depends on the data cannot be compiled: return a fixed number "
                "of rows and a mask."
            )
    return {name: np.concatenate(rows_of) for name, rows_of in lists.items()}


def require_names(given: Collection[str], wanted: Collection[str]) -> None:
    """InputError unless a batch has exactly the inputs `wanted`."""
    if set(given) != set(wanted):
        raise InputError(f"inputs: must be {', '.join(wanted)} (got {', '.join(given)}). Name each one.")


def last_label(labels: Array | None) -> int:
    """The largest of labels int64 [S]; -1 without any. They are about an output of more classes than that."""
    return -1 if labels is None else int(labels.max(initial=-1))


def ranked_output(columns: Mapping[str, int], last: int) -> str:
    """Of outputs [S, C] with so many `columns` C, by name, the one whose classes count: the first that has one for each
    label up to `last`, else the first; "" of none. The labels of the check are about it."""
    return next((name for name, many in columns.items() if many > last >= 0), next(iter(columns), ""))

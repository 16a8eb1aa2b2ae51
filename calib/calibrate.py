"""One pass of the data through the observed model, and the calibration table from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from calib.algorithms import PERCENTILE, threshold
from calib.data import Source
from calib.errors import CalibCancelled, CalibError
from calib.histogram import Histogram
from calib.observers import HistogramObserver
from calib.table import NOTHING_TO_OBSERVE, CalibrationTable, make_table

if TYPE_CHECKING:
    import torch


class SampleProgress(Protocol):
    """Receives the progress of `calibrate`."""

    def step(self, done: int, total: int | None, unit: str) -> None:
        """`done` of `total` samples are through."""

    def cancelled(self) -> bool:
        """Whether to stop."""


def calibrate(
    run: Callable[[tuple[torch.Tensor, ...]], object],
    observers: Mapping[str, HistogramObserver],
    source: Source,
    *,
    batch_size: int,
    algorithm: str = "auto",
    percentile: float = PERCENTILE,
    digests: Mapping[str, str] | None = None,
    progress: SampleProgress | None = None,
    device: str = "cpu",
) -> CalibrationTable:
    """Run all of `source` through `run` once and turn what the observers saw into a table.

    Args:
        run: executes the observed model on one batch, the inputs [N, ...] in the source's order and dtypes on `device`,
            in inference mode.
        observers: by table key, "<module path>:<role>"; `run` feeds them. They must be new: what they saw before
            counts.
        source: the samples.
        batch_size: how many at a time; thresholds do not depend on it beyond the model's own rounding.
        algorithm, percentile: see `calib.algorithms.threshold`.
        digests: what the table will belong to, by name; "data" is added.
        progress: receives the samples done, and may cancel.
        device: where inputs are put.

    Raises:
        CalibError: bad data or options; a tensor that was never seen, or held NaN or infinity.
        CalibCancelled: progress asked to stop.
    """
    import torch

    threshold(Histogram.empty(), algorithm, percentile)  # options are refused before the work, not after it
    if not observers:
        raise CalibError(NOTHING_TO_OBSERVE)
    done = batches = 0
    labels: Counter[int] = Counter()
    half = torch.zeros(1, dtype=torch.int32, device=device)
    for observer in observers.values():
        observer.half = half
    for batch in source.batches(batch_size):
        if progress is not None and progress.cancelled():
            raise CalibCancelled(f"calibration: was asked to stop (got {done} of {source.sample_count} samples).")
        half.fill_(batches % 2)
        inputs = tuple(torch.from_numpy(batch.arrays[n]).to(device, non_blocking=True) for n in source.names)
        with torch.inference_mode():
            run(inputs)
        batches += 1
        done += len(batch.ids)
        if batch.labels is not None:
            labels.update(batch.labels.tolist())
        if progress is not None:
            progress.step(done, source.sample_count, "samples")
    return make_table(
        {key: observer.halves for key, observer in observers.items()},
        algorithm,
        percentile,
        digests or {},
        dict(zip(source.ids, source.sample_digests, strict=True)),
        source.recipe,
        batches,
        batch_size,
        _coverage(source, labels),
        source.skipped,
    )


def _coverage(source: Source, seen: Counter[int]) -> dict[str, int] | None:
    if source.labels is None:
        return None
    names = source.classes
    if names is None:
        return {str(label): seen[label] for label in sorted(np.unique(source.labels).tolist())}
    return {name: seen[i] for i, name in enumerate(names)}

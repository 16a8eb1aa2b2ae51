"""One pass of the calibration samples through the observed graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from calib.calibrate import calibrate as run_calibration
from calib.observers import HistogramObserver
from trtpipe.model.computing import CPU, placed
from trtpipe.model.recorded import replayed
from trtpipe.quantization.quantize import prepare

if TYPE_CHECKING:
    from calib.algorithms import Algorithm
    from calib.data import Source
    from calib.table import CalibrationTable
    from trtpipe.progress import Progress
    from trtpipe.values import Captured


def calibrate(
    captured: Captured,
    source: Source,
    *,
    batch_size: int,
    algorithm: Algorithm,
    percentile: float,
    digests: Mapping[str, str],
    progress: Progress,
    device: str = CPU,
) -> CalibrationTable:
    """amax of every quantizable activation, including those that precision.keep excludes.

    Args:
        captured: the hub graph.
        source: the calibration samples.
        batch_size: samples per forward pass.
        algorithm: one of calib.algorithms.
        percentile: for that algorithm, in (0, 100].
        digests: what the table is valid for, by name.
        progress: receives the number of samples done.
        device: where PyTorch computes, and the observers count: one MiB for each tensor.

    Raises:
        calib.CalibError: the data is bad.
    """
    prepared = prepare(captured)
    for observer in prepared.observers.values():
        observer.histogram = HistogramObserver()
    histograms = {key: o.histogram for key, o in prepared.observers.items() if o.histogram is not None}

    least = captured.inputs[0].at("min")[0]

    def run(inputs: tuple[torch.Tensor, ...]) -> object:
        count = len(inputs[0])
        for observer in prepared.observers.values():
            observer.filled = (count, least) if count < least else None
        return prepared.graph(*(_filled_up(x, least) for x in inputs))

    with (
        placed(prepared.graph, device),
        replayed(run, device) as run_batch,
    ):
        return run_calibration(
            run_batch,
            histograms,
            source,
            batch_size=batch_size,
            algorithm=algorithm,
            percentile=percentile,
            digests=digests,
            progress=progress,
            device=device,
        )


def _filled_up(x: torch.Tensor, least: int) -> torch.Tensor:
    """`x` [B, ...] repeated up to the smallest batch that the bindings take: the last batch may be smaller."""
    return x if len(x) >= least else x[torch.arange(least) % len(x)]

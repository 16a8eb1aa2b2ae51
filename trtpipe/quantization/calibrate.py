"""One pass of the calibration samples through the observed graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from calib.calibrate import calibrate as run_calibration
from calib.observers import HistogramObserver
from trtpipe.model.computing import CPU, placed
from trtpipe.model.recorded import replayed
from trtpipe.quantization.quantize import Prepared, prepare

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
    prepared, histograms = counting(captured)

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


def counting(captured: Captured) -> tuple[Prepared, dict[str, HistogramObserver]]:
    """A copy of the captured graph that counts what operations read in INT8; its histograms by the keys of the table.

    Of tensors that share a scale through a concat or a max-pool (rule Q5), what comes out of it is counted and not
    what goes in: that is in it, or reaches nothing. A pool's padding, of -10,000 say, is no value that must be held.
    """
    prepared = prepare(captured)
    histograms: dict[str, HistogramObserver] = {}
    for key, observer in prepared.observers.items():
        observer.histogram = histograms[key] = HistogramObserver()
    nodes = {n.name: n for n in prepared.graph.graph.nodes}
    read = {s.producer for s in prepared.sites if s.axis is None}
    for consumer in {s.consumer.name for s in prepared.sites if s.rule == "Q5" and s.consumer in read}:
        for seen in [n for n in nodes[consumer].all_input_nodes if n.op == "call_module"]:
            nodes[consumer].replace_input_with(seen, seen.all_input_nodes[0])
            if not seen.users:
                prepared.graph.graph.erase_node(seen)
    prepared.graph.recompile()
    return prepared, histograms


def _filled_up(x: torch.Tensor, least: int) -> torch.Tensor:
    """`x` [B, ...] repeated up to the smallest batch that the bindings take: the last batch may be smaller."""
    return x if len(x) >= least else x[torch.arange(least) % len(x)]

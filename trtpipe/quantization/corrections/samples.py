"""The samples that corrections are fitted on, and those that they are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trtpipe.batching import Batching
from trtpipe.quantization.partial import BatchTensors, Partial

if TYPE_CHECKING:
    from calib.data import Source
    from trtpipe.values import Captured

#: Samples used, in batches of at most `_BATCH`: of eight, five are fitted on, one decides about single operations,
#: and two about whole steps. Fewer where the values alive at once would not fit in `_MOST_BYTES`. More of them pay:
#: MobileNetV2, corrected by 64 and by 96 of its calibration photographs, has 16.3 and 18.1 dB on the other 32.
MOST_SAMPLES, _BATCH, _MOST_BYTES = 128, 8, 4 << 30
#: With fewer samples nothing can be fitted and judged apart.
LEAST_SAMPLES = 16


@dataclass(frozen=True)
class Samples:
    """Batches to fit on, to decide about single operations, and to judge steps by.

    `complete`: they are the source's samples, each of them once.
    """

    fit: tuple[BatchTensors, ...]
    local: tuple[BatchTensors, ...]
    judge: tuple[BatchTensors, ...]
    complete: bool

    @property
    def halves(self) -> tuple[tuple[BatchTensors, ...], tuple[BatchTensors, ...]]:
        """All of them in two halves, from all along the source, those that judge last in the second one."""
        first = [b for i, b in enumerate(self.fit) if i % 5 != 3]
        return tuple(first), (*self.fit[3::5], *self.local, *self.judge)


def drawn(captured: Captured, source: Source) -> Samples | None:
    """The first samples of the source that differ, every eighth batch apart; None when there are too few.

    A copy of what a step was fitted on would judge it as if it were unseen.
    """
    every, source = source.sample_count, source.distinct()
    specs = captured.inputs
    size = max(1, min(_BATCH, source.sample_count // 8))
    how, batches = Batching(specs, captured.outputs, size), list[BatchTensors]()
    count, most = 0, MOST_SAMPLES
    for batch in source.batches(size, apart=True):  # a job that calibrates one at a time may have several sizes
        for piece, used in how.pieces(batch.arrays):
            batches.append([torch.from_numpy(piece[s.name]) for s in specs])
            count += used
        if len(batches) == 1:
            most = min(MOST_SAMPLES, max(LEAST_SAMPLES, _MOST_BYTES // max(1, _alive_bytes(captured, batches[0]))))
        if count >= most and len(batches) >= 8:
            break
    if count < LEAST_SAMPLES:
        return None
    local = [b for i, b in enumerate(batches) if i % 8 == 1]
    judge = [b for i, b in enumerate(batches) if i % 4 == 3]
    fit = [b for i, b in enumerate(batches) if i % 8 != 1 and i % 4 != 3]
    complete = every == count == sum(len(b[0]) for b in batches)
    return Samples(tuple(fit), tuple(local), tuple(judge), complete)


def _alive_bytes(captured: Captured, batch: BatchTensors) -> int:
    """Most bytes alive at once for one sample, in float and in INT8."""
    machine = Partial(captured.graph)
    alive, most = machine.inputs(batch), 0
    with torch.inference_mode():
        for node in machine.nodes:
            if node.op == "output":
                break
            machine.step(node, alive, {})
            most = max(most, sum(x.nbytes for x in alive.values() if isinstance(x, torch.Tensor)))
    return 2 * most // max(1, len(batch[0]))

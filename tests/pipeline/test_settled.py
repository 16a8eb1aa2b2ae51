"""A stage returns the memory that it no longer uses."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from trtpipe.machine import MUCH
from trtpipe.pipeline.prepared import Stages
from trtpipe.progress import Silent


class Graph:
    """A cycle with weights."""

    def __init__(self, size: int) -> None:
        self.itself, self.weights = self, np.ones(size, np.uint8)


def test_what_a_stage_leaves_is_returned_before_the_next_where_it_is_much() -> None:
    stages, kept = Stages(Silent()), []
    with stages("model"):
        pass
    gc.disable()
    try:
        for size, held in ((MUCH // 4, True), (3 * MUCH, False)):
            with stages("quantize"):
                kept.append(weakref.ref(Graph(size)))
            assert (kept[-1]() is not None) is held
    finally:
        gc.enable()

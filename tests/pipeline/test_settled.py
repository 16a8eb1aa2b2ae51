"""A stage returns the memory that it no longer uses."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest

from trtpipe.errors import InputError
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


def test_a_stages_seconds_are_its_own_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is done again after a search, and searching has stages within it."""
    now = [0.0]
    monkeypatch.setattr("trtpipe.pipeline.prepared.time.perf_counter", lambda: now[0])
    stages = Stages(Silent())

    def passed(seconds: float) -> None:
        now[0] += seconds

    with stages("check"):
        passed(2)
    with stages("tune"):
        passed(1)
        with stages("quantize"):
            passed(3)
        with suppress(InputError), stages("check"):
            passed(8)
            raise InputError("x")
        with stages("quantize"):
            passed(4)
    with stages("check"):
        passed(5)
    assert stages.seconds == {"check": 7.0, "quantize": 7.0, "tune": 9.0}

"""PT2E's graphs are held by those alone who use them."""

from __future__ import annotations

import gc
import weakref

import nets
import pytest

from trtpipe.quantization.quantize import place_qdq, prepare


@pytest.mark.parametrize("convert", [False, True])
def test_a_graph_with_observers_ends_with_its_last_user(convert: bool) -> None:
    prepared = prepare(nets.captured("residual"))
    graph = weakref.ref(prepared.graph)
    if convert:
        place_qdq(prepared, dict.fromkeys(prepared.observers, 1.0))
    del prepared
    gc.collect()
    assert graph() is None

"""The garbage collector is as it was after a build, however that ends."""

import gc

import pytest

from trtpipe.pipeline.collector import SELDOM, seldom_collected


def test_garbage_is_collected_less_often_inside_alone() -> None:
    before = gc.get_threshold()
    with seldom_collected():
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == before


@seldom_collected()
def failing() -> None:
    raise KeyboardInterrupt


def test_also_after_an_interrupt_and_each_time() -> None:
    before = gc.get_threshold()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            failing()
        assert gc.get_threshold() == before

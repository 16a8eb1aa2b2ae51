"""The garbage collector, and glibc's heap, are as they were after a build, however that ends."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from trtpipe import machine
from trtpipe.pipeline.collector import SELDOM, seldom_collected, set_apart
from trtpipe.pipeline.prepared import Stages
from trtpipe.progress import Silent


@pytest.fixture(autouse=True)
def as_python_starts() -> Iterator[None]:
    """Thresholds, and nothing set apart: the tests' process has its own."""
    before = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.freeze()


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


def test_what_is_set_apart_is_searched_again_after_the_block() -> None:
    set_apart()
    assert gc.get_freeze_count() == 0  # outside of a block
    with seldom_collected():
        set_apart()
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("thresholds", [(2 * SELDOM[0], 10, 10), (700, 10, 10)])
def test_a_caller_who_has_set_objects_apart_or_collects_as_seldom_is_left_alone(
    thresholds: tuple[int, int, int],
) -> None:
    gc.set_threshold(*thresholds)
    if thresholds[0] < SELDOM[0]:
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        with seldom_collected():
            assert gc.get_threshold() == thresholds
            set_apart()
        assert gc.get_freeze_count() <= before
        assert bool(gc.get_freeze_count()) == bool(before)
    finally:
        gc.unfreeze()


def test_no_command_or_build_counts_the_callers_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc.get_freeze_count` goes through all of them: of this process's millions a command would take half a second."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted"))
    gc.set_threshold(2 * SELDOM[0], 10, 10)
    with seldom_collected(), seldom_collected():
        set_apart()


def test_a_build_sets_its_libraries_apart() -> None:
    with seldom_collected():
        stages = Stages(Silent())
        with stages("baseline"):
            pass
        assert gc.get_freeze_count() == 0
        with stages("capture"):
            pass
        assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("name", ["baseline", "check", "compile"])
@pytest.mark.parametrize("fails", [False, True])
def test_freed_memory_is_used_again_within_every_stage_alone(
    name: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = []
    monkeypatch.setattr(machine, "_set", lambda trim, size: mapped.append(size))
    with suppress(ZeroDivisionError), Stages(Silent())(name):
        assert mapped == [machine._REUSED[1]]
        _ = 1 / (not fails)
    assert mapped == [machine._REUSED[1], machine._BY_ITSELF[1]]


class Ring:
    """Garbage once nobody knows it."""

    def __init__(self) -> None:
        self.itself = self


def test_of_the_job_before_nothing_stays() -> None:
    """Of many jobs in one process, each would keep the graphs of all before it."""
    with seldom_collected():
        for _ in range(2):  # jobs
            with seldom_collected():
                ring = Ring()
                seen = weakref.ref(ring)
                set_apart()  # it lasts as long as the job
                del ring
            gc.collect()
            assert seen() is not None
            set_apart()
            assert seen() is None

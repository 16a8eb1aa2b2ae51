"""Python's garbage collector while a command runs, and a job is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Thresholds of `gc.set_threshold`: new objects before a collection of the youngest generation, and collections of a
#: generation before one of the next.
SELDOM = (50_000, 20, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage less often within the block, and what `set_apart` has set apart not at all.

    Importing torch and exporting a graph make a million objects that stay. By default the youngest are searched after
    each 700 new ones, and soon all of them again, which takes a sixth of the time that a build spends in Python. The
    collector of a caller who collects as seldom, or has set objects apart, stays as it is.
    """
    before = gc.get_threshold()
    if before[0] >= SELDOM[0] or gc.get_freeze_count():  # the latter counts one by one
        yield
        return
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def set_apart() -> None:
    """Search no object that lives now for garbage before this is called again, or the block of `seldom_collected` ends;
    nothing outside of one.

    Of libraries nothing is garbage before that, and to search a million objects takes a third of a second each time.
    What was set apart before is searched first: the graphs of the job before are garbage by now.
    """
    if gc.get_threshold() == SELDOM:
        if gc.get_freeze_count():
            gc.unfreeze()
            gc.collect()
        gc.freeze()

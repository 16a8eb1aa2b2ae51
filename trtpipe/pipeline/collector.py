"""Python's garbage collector while a job is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects after which the youngest are looked at, and how many such looks before older ones are, and all.
SELDOM = (50_000, 20, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage less often, as before when the block ends.

    Importing torch and exporting a graph make a million objects that stay. By default the collector looks at the
    youngest after each 700 new ones, and soon at all of them again: a sixth of what a build computes in Python.
    """
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)

"""What is CUDA's and has to be given back, exactly once, however its user ends."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any


class Owned:
    """Something of CUDA's that is given back exactly once: by `free`, or when it is dropped.

    Args:
        value: a handle or an address; or an object that gives its memory back itself when it is dropped.
        release: gives it back. What it raises is logged, since whoever frees can do nothing about it.
    """

    def __init__(self, value: Any, release: Callable[[Any], object] = lambda value: None) -> None:
        self._value, self._release = value, release

    @property
    def value(self) -> Any:
        """What is owned; None once it was given back."""
        return self._value

    def free(self) -> None:
        """Give it back, unless that was done."""
        value, self._value = self._value, None
        if value is not None:
            try:
                self._release(value)
            except Exception as error:  # noqa: BLE001 - the others have to be given back too
                logging.getLogger("trtpipe").warning("%s", str(error))

    __del__ = free


class Owner:
    """Remembers what a provider gave out, so that `free_all` can give back what is left."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._live: weakref.WeakValueDictionary[int, Owned] = weakref.WeakValueDictionary()

    def own(self, value: Any, release: Callable[[Any], object] = lambda value: None) -> Owned:
        """`value`, to be given back by `release`."""
        owned = Owned(value, release)
        self._live[next(self._numbers)] = owned
        return owned

    def free_all(self) -> None:
        """Give back everything that was not yet, the newest first."""
        for _, owned in sorted(self._live.items(), reverse=True):
            owned.free()

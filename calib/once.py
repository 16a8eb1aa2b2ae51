"""What is read of the machine, read once where many jobs ask the same: folders of images, metadata of packages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
#: Within `read_once`, what was read, by the function and what it was given.
_KNOWN: ContextVar[dict[tuple[object, ...], Any] | None] = ContextVar("_KNOWN", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """Read each thing once within the outermost such block, during which none of them changes.

    Of 300 jobs, each asks the same of thirty distributions and lists the same two folders, which takes a fiftieth of a
    second.
    """
    held = _KNOWN.get()
    token = _KNOWN.set({} if held is None else held)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def kept(function: Callable[..., T], *given: Hashable) -> T:
    """What a function gives, which changes none of it: within `read_once` what it gave the first time. An error is
    raised each time."""
    known = _KNOWN.get()
    if known is None:
        return function(*given)
    if (key := (function, *given)) not in known:
        known[key] = function(*given)
    value: T = known[key]
    return value

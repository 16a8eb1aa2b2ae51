"""Environment variables that a job's own code reads while it runs, whichever file or text that code is from."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from trtpipe.pipeline.cache.paths import is_own
from trtpipe.pipeline.cache.sources import SOME

#: Modules that read a variable for whoever calls them; what others of Python read, they read for themselves.
_FOR_OTHERS = frozenset({"os", "collections.abc", "_collections_abc", "posixpath", "pathlib", __name__})


@contextlib.contextmanager
def variables_watched(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with the name of each variable that code of the job's own reads inside.

    `os.getenv`, `os.environ.get`, `in` and `os.path.expandvars` all end in `os.environ[name]`; a loop over the
    environment, or a copy of it, reads `SOME`.

    Args:
        tell: raises nothing.
    """
    environment: Any = type(os.environ)
    item, every = environment.__getitem__, environment.__iter__

    def of(self: object, key: object) -> object:
        if _is_asked_by_own(sys._getframe(1)):
            tell(key if isinstance(key, str) else os.fsdecode(key) if isinstance(key, bytes) else SOME)
        return item(self, key)

    def names(self: object) -> object:
        if _is_asked_by_own(sys._getframe(1)):
            tell(SOME)
        return every(self)

    environment.__getitem__, environment.__iter__ = of, names
    try:
        yield
    finally:
        environment.__getitem__, environment.__iter__ = item, every


def _is_asked_by_own(frame: FrameType | None) -> bool:
    """Whether the caller is code of the job's own; code from a string belongs to whoever runs it."""
    while frame is not None:
        source = frame.f_code.co_filename
        if frame.f_globals.get("__name__") not in _FOR_OTHERS and (source.startswith("<frozen") or source[:1] != "<"):
            return is_own(source)
        frame = frame.f_back
    return False

"""Files that an import looked for: they would have been loaded in the place of the module, had they been there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from types import FrameType

#: What a folder of `sys.path` may hold of a module, in the order in which Python looks.
_FORMS = (f"{os.sep}__init__.py", *EXTENSION_SUFFIXES, ".py")
#: Python's own import, by the names of its two modules.
_IMPORT = ("importlib._bootstrap", "importlib._bootstrap_external", "_frozen_importlib", "_frozen_importlib_external")


def looked_for(file: str, frame: FrameType | None) -> Iterator[str]:
    """Absolute paths at which Python looked for the module that it is loading from `file`, before it found that.

    Args:
        file: the source file.
        frame: of whoever opens it; nothing is given where that is no import.
    """
    while frame is not None and frame.f_globals.get("__name__") in _IMPORT:
        if frame.f_code.co_name == "get_code":
            break
        frame = frame.f_back
    else:
        return
    assert frame is not None
    parent, _, name = str(frame.f_locals.get("fullname", "")).rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else sys.path
    for folder in folders:
        for form in _FORMS:
            path = os.path.join(os.path.abspath(folder), name + form)
            if path == file or (os.path.exists(path) and os.path.samefile(path, file)):
                return
            yield path


class _Lookups:
    """A finder of modules that finds none, and tells where Python looks."""

    def __init__(self, asks: Callable[[FrameType], bool], tell: Callable[[str], None], folder: str) -> None:
        self._asks, self._tell = asks, tell
        self._folder, self._before = os.path.join(folder, ""), frozenset(sys.path)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Tell of each path at which Python looks for the module `name` and finds nothing."""
        if not self._asks(sys._getframe(1)):
            return
        last = name.rpartition(".")[2]
        for folder in map(str, sys.path if path is None else path):
            # Folders that were searched before the job's code began are of the environment, but for the job's own.
            if path is None and folder in self._before and not os.path.join(folder, "").startswith(self._folder):
                continue
            place = os.path.join(os.path.abspath(folder), last)
            for form in _FORMS:
                if os.path.isfile(place + form):
                    return
                self._tell(place + form)
            self._tell(place)  # a folder alone is a part of a namespace package


@contextlib.contextmanager
def lookups_told(asks: Callable[[FrameType], bool], tell: Callable[[str], None], folder: str) -> Iterator[None]:
    """Tell of the paths at which Python looks for modules inside, whether it finds one or not.

    Args:
        asks: whether a lookup that was begun in this frame counts.
        tell: is given absolute paths, and raises nothing.
        folder: of the job, which is searched for its own code.
    """
    finder = _Lookups(asks, tell, os.path.abspath(folder))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the code has changed the list
            sys.meta_path.remove(finder)

"""Where an import looks: files that would have been loaded in the place of the module, had they been there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from types import FrameType

#: What a folder of `sys.path` may hold of a module, in the order in which Python looks.
_FORMS = (f"{os.sep}__init__.py", *EXTENSION_SUFFIXES, ".py")


@dataclass(frozen=True)
class Lookup:
    """Where Python looks for one module, by absolute paths.

    `frame` is of whoever asks; `absent` are the paths at which nothing is, `own` those of them that are not in a folder
    of the environment, searched before the job's code began; `found` is the first at which the module is, or None.
    """

    frame: FrameType
    absent: tuple[str, ...]
    own: tuple[str, ...]
    found: str | None


class _Finder:
    """A finder of modules that finds none, and tells where Python looks."""

    def __init__(self, tell: Callable[[Lookup], None], folder: str) -> None:
        self._tell, self._folder, self._before = tell, os.path.join(folder, ""), frozenset(sys.path)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Tell where Python looks for the module `name`, down to the first path at which it is."""
        last = name.rpartition(".")[2]
        absent: list[str] = []
        own: list[str] = []
        found = None
        for folder in map(str, sys.path if path is None else path):
            place = os.path.join(os.path.abspath(folder), last)
            missing = []
            for form in _FORMS:
                if os.path.isfile(place + form):
                    found = place + form
                    break
                missing.append(place + form)
            else:
                missing.append(place)  # a folder alone is a part of a namespace package
            absent += missing
            if path is not None or folder not in self._before or os.path.join(folder, "").startswith(self._folder):
                own += missing
            if found is not None:
                break
        self._tell(Lookup(sys._getframe(1), tuple(absent), tuple(own), found))


@contextlib.contextmanager
def lookups_told(tell: Callable[[Lookup], None], folder: str) -> Iterator[None]:
    """Tell where Python looks for modules inside, whether it finds one or not.

    Args:
        tell: raises nothing.
        folder: of the job, which is searched for its own code.
    """
    finder = _Finder(tell, os.path.abspath(folder))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the code has changed the list
            sys.meta_path.remove(finder)

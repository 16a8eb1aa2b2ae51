"""Files that would have been loaded in the place of an imported module, had they been there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
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

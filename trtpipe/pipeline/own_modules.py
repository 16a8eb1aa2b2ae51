"""A job's own modules: found beside its file for as long as its code runs, and loaded as they are on disk now."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from calib.user_code import OURS
from trtpipe.job.importable import find_module, is_installed, on_path
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.keys import modules
from trtpipe.pipeline.cache.sources import imported

if TYPE_CHECKING:
    from trtpipe.job.job import Job

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")

#: When what a module was loaded from was last known to be as it was loaded, in ns, by the names of modules that jobs
#: loaded; of any other it is the start.
_SINCE: dict[str, int] = {}
_START = time.time_ns()
_NEVER = (*OURS, "__main__", "__mp_main__")


def with_own_modules(
    work: Callable[Concatenate[Job, _Options], _Result],
) -> Callable[Concatenate[Job, _Options], _Result]:
    """`work` of a job, with its own modules: not only factories import, but what they made as it is called; and a
    process may have loaded modules of the same names for another job, or before somebody edited them."""

    @functools.wraps(work)
    def found(job: Job, *args: _Options.args, **options: _Options.kwargs) -> _Result:
        forget_stale(job)
        began, before = time.time_ns(), set(sys.modules)
        try:
            with on_path(job.folder):
                return work(job, *args, **options)
        finally:
            _SINCE.update(dict.fromkeys(set(sys.modules) - before, began))

    return cast("Callable[Concatenate[Job, _Options], _Result]", found)


def forget_stale(job: Job) -> None:
    """Let Python load anew what the job would get otherwise than from disk: modules that were loaded from another
    folder's file, or from a file that has changed since, and those that import them."""
    folder = job.folder or Path.cwd()
    named = {n for target in job.callables.values() for n in modules(target.partition(":")[0], folder)}
    loaded = {name: file for name in (named | set(_SINCE)) if (file := own_file(name)) is not None}
    stale = {name for name, file in loaded.items() if _is_stale(name, file, folder)}
    if not stale:
        return
    for name in _with_importers(stale, loaded):
        with suppress(OSError, NotImplementedError, ValueError):  # Python believes a file's seconds and size
            os.unlink(importlib.util.cache_from_source(loaded[name]))
        sys.modules.pop(name, None)
        _SINCE.pop(name, None)
    importlib.invalidate_caches()
    linecache.checkcache()


def sources(job: Job, callables: Iterable[str]) -> str:
    """SHA-256, in hex, of the user's own files behind `package.module:callable`s, with what they import."""
    found: dict[str, str] = {}
    for target in callables:
        found |= modules(target.partition(":")[0], job.folder or Path.cwd())
    with Digests() as digests:
        own = [f"{name} {digests.file(Path(file))}" for name, file in sorted(found.items()) if not is_installed(file)]
    return hashlib.sha256(" ".join(own).encode()).hexdigest()


def own_file(name: str) -> str | None:
    """The file of the loaded module `name`, if it is the user's own: not of this package, a program, or installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    own = isinstance(file, str) and name.partition(".")[0] not in _NEVER and not is_installed(file)
    return file if own else None


def _is_stale(name: str, file: str, folder: Path) -> bool:
    with suppress(ImportError, OSError, ValueError):
        spec = find_module(name, (folder, Path.cwd()))
        same = spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)
        return not same or os.stat(file).st_ctime_ns > _SINCE.get(name, _START)
    return True


def _with_importers(stale: Collection[str], loaded: dict[str, str]) -> set[str]:
    """`stale`, and the modules whose sources import one of them, directly or not."""
    found = set(stale)
    imports: dict[str, set[str]] = {}
    for name, file in loaded.items():
        with suppress(OSError):
            is_package = os.path.basename(file).startswith("__init__.")
            imports[name] = set(imported(Path(file).read_bytes(), name, is_package))
    while more := {name for name, names in imports.items() if name not in found and names & found}:
        found |= more
    return found

"""Globs over module paths, in `precision` and in `build.device_types`: what one matches, and what is near to one that
matches nothing."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable


def matching(globs: Iterable[str], path: str) -> str | None:
    """The first glob that matches the path, or a container that it is in."""
    parts = path.split(".")
    ancestors = [".".join(parts[: k + 1]) for k in range(len(parts))]
    return next((g for g in globs if any(fnmatch.fnmatchcase(a, g) for a in ancestors)), None)


def nearest_paths(glob: str, paths: Iterable[str]) -> str:
    """The end of a message on a glob that matches none of the `paths`: those nearest to it."""
    if not (named := sorted(set(paths) - {""})):
        return "No operation here is in a module, so that none has a path."
    near = difflib.get_close_matches(glob.replace("*", ""), named, n=3, cutoff=0.0)
    return f"Nearest paths: {', '.join(near)}."

"""Whether a `package.module:callable` can be imported, found out without importing it (which may load torch)."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from calib.files import suffix_of, text_at_most
from calib.user_code import OURS, hidden_step, in_packages
from trtpipe.errors import did_you_mean
from trtpipe.job.yamlfile import MAX_BYTES

#: Of the names of job files, beside which a job's own code lies.
_JOB_SUFFIXES = (".yaml", ".yml")
_ROOT = Path(__file__).resolve().parents[2]


def is_job_file(path: Path) -> bool:
    """Whether a path in a folder of jobs is one: hidden files are none, as macOS and editors leave them there; a link
    to nothing, or to where nobody may look, and a pipe are, and fail when they are read."""
    if suffix_of(path) not in _JOB_SUFFIXES or path.name.startswith("."):
        return False
    return not os.path.isdir(path)


def is_written_as_job(path: Path) -> bool:
    """Whether a file has sections that every job has, at its top; one that cannot be read as a job's file has none."""
    try:
        text = text_at_most(path, MAX_BYTES)
    except (OSError, ValueError):
        return False
    return all(re.search(rf"^{section}\s*:", text, re.MULTILINE) for section in ("model", "inputs", "outputs"))


def is_reference(text: str) -> bool:
    """Whether a text has the form package.module:callable."""
    module, colon, name = text.partition(":")
    return colon == ":" and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


@contextmanager
def on_path(base: Path | None) -> Iterator[None]:
    """Look up modules in `base` first and in the current folder last, while the block runs: where `missing` looks.

    Python's own come before any: a job's `colorsys.py` is not what libraries mean by that name. Commands that run the
    code of a job are decorated with `on_path(None)`; those that may be given a bundle instead enter it where they have
    a job, as nobody's files beside a bundle are imported.
    """
    first, last = ([] if base is None else [str(base)]), [str(Path.cwd())]
    own = _PythonsOwn()
    sys.meta_path.insert(0, own)
    sys.path[:0] = first
    sys.path += last
    try:
        yield
    finally:  # what was added, and not where the path may have had it before; the code may have taken it out itself
        with suppress(ValueError):
            sys.meta_path.remove(own)
        for folder in first:
            if folder in sys.path:
                sys.path.remove(folder)
        for folder in last:
            if folder in sys.path:
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]


class _PythonsOwn(MetaPathFinder):
    """Finds the modules that are files of Python's own, where they are."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname not in sys.stdlib_module_names:
            return None
        return PathFinder.find_spec(fullname, _folders_of_python())


@functools.cache
def _folders_of_python() -> list[str]:
    paths = sysconfig.get_paths()
    own = dict.fromkeys((paths["stdlib"], paths["platstdlib"]))
    return [*own, *(os.path.join(folder, "lib-dynload") for folder in own)]


def is_installed(origin: str) -> bool:
    """Whether a module's file belongs to an installed package or to Python itself."""
    return origin.startswith(_installed_folders()) or in_packages(origin)


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Those of this Python; to find them out takes a millisecond, and every module that is loaded is asked for."""
    paths = sysconfig.get_paths()
    return tuple(paths[name] + os.sep for name in ("purelib", "platlib", "stdlib"))


def find_module(name: str, folders: Iterable[Path] = (), path: Iterable[str] | None = None) -> ModuleSpec | None:
    """The spec of a module, searched in `folders` and then where Python would, or in `path`; nothing is imported or
    executed. Its name is the last part of the module's."""
    where: list[str] | None = [*map(str, folders), *(p or "." for p in (sys.path if path is None else path))]
    spec: ModuleSpec | None = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, where)  # by its full name, a namespace package asks for its imported parent
        if spec is None:
            return None
        where = list(spec.submodule_search_locations or ())
    return spec


def missing(target: str, folders: Iterable[Path] = ()) -> tuple[str, str, str] | None:
    """What keeps `module:callable` from being imported, as (what must hold, what was got, next step); None if nothing.

    One of trtpipe or calib is looked for in these alone: they are loaded, whatever else is called so.
    """
    module = target.partition(":")[0]
    if (top := module.partition(".")[0]) not in OURS:
        found = find_module(top, folders) if top in sys.stdlib_module_names else None
        if found is None or found.origin is None or is_installed(found.origin):
            return _missing(target, folders)
        return "name a module that is not called as one of Python's own", found.origin, "Rename it."
    absent = _missing(target, (_ROOT,))
    return None if absent is None else (*absent[:2], absent[2] or hidden_step(module))


def _missing(target: str, folders: Iterable[Path]) -> tuple[str, str, str] | None:
    """`missing`, by the first module of that name.

    The callable is looked for in the module's source. A module without Python source, or one that may fill itself as it
    is executed (`from x import *`, `__getattr__`, `globals()`), is believed: importing it says what it has.
    """
    module, _, name = target.partition(":")
    spec = find_module(module, folders)
    if spec is None:
        top = module.partition(".")[0]
        hint = "Install it, or put it beside the job file." if find_module(top, folders) is None else ""
        return "name a module that can be found", repr(module), hint
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = _names(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        return "name a module that can be parsed", f"{spec.origin}:{error.lineno}: {error.msg}", ""
    except OSError:
        return None
    first = name.partition(".")[0]
    if names is None or first in names or (spec.submodule_search_locations and find_module(f"{module}.{first}")):
        return None
    public = sorted(n for n in names if not n.startswith("_"))
    return f"name something that {module} defines", repr(name), did_you_mean(name, public)


#: Names by which code makes names that its text does not show.
_FILLING = {"__getattr__", "eval", "exec", "globals", "locals", "setattr", "sys.modules", "vars"}


@functools.lru_cache(maxsize=64)
def _names(source: bytes) -> frozenset[str] | None:
    """The names a module binds at its top level, inside `if` and `try` and by `global` too; None when its text does not
    show them all."""
    names: set[str] = set()
    whole = ast.parse(source)
    for node in ast.walk(whole):
        used = node.id if isinstance(node, ast.Name) else ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if used in _FILLING or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__"):
            return None
        if isinstance(node, ast.Global):
            names.update(node.names)
    todo: list[ast.AST] = [whole]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                if any(alias.name == "*" for alias in node.names):
                    return None
                names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif not isinstance(node, ast.Lambda):
                todo.append(node)
    return frozenset(names)

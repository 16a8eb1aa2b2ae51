"""What raises no audit event because it opens files in native code, or starts a process of its own: wrapped.

Operators that libraries give to PyTorch (`torch.ops`) are called by one method each of two classes,
which is wrapped while something is recorded: whatever a library's functions are called, they end there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing.process
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

Opened = Callable[[object], None]


class _Paths(NamedTuple):
    """Where paths are among a function's arguments (those with names may all be some), and what it adds to them."""

    at: tuple[int, ...] = (0,)
    endings: tuple[str, ...] = ("",)

    def of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[object]:
        """The paths that a call is given."""
        for given in (*(args[k] for k in self.at if k < len(args)), *kwargs.values()):
            if isinstance(given, (str, bytes, os.PathLike)):
                yield from (os.fsdecode(given) + ending for ending in self.endings)


#: Functions that open files in native code, by module.
_NATIVE: Mapping[str, Mapping[str, _Paths]] = {
    "safetensors": {"safe_open": _Paths()},
    "torch": {"from_file": _Paths(), "UntypedStorage.from_file": _Paths()},
    "torch._C": {"PyTorchFileReader": _Paths(), "import_ir_module": _Paths((1,))},
    "torchvision.io.video": {"read_video": _Paths()},
    "cv2": {"imread": _Paths()},
    "PIL._imagingft": {"getfont": _Paths()},
    "PIL._imagingcms": {"profile_open": _Paths()},
    "ssl": {"SSLContext.load_verify_locations": _Paths((1, 2)), "SSLContext.load_cert_chain": _Paths((1, 2))},
    "_gdbm": {"open": _Paths()},
    "_dbm": {"open": _Paths(endings=("", ".db", ".dir", ".pag"))},
}

#: Namespaces of PyTorch's own operators, whose text names no file.
TORCHS = frozenset(
    {"aten", "prim", "prims", "debugprims", "debug_mode_ops", "export", "mkldnn", "mkldnn_prepacked", "onednn"}
    | {"onnx_symbolic", "profiler", "streams", "symm_mem", "c10d", "c10d_functional"}
    | {"_c10d_functional", "_c10d_functional_autograd"}
)


@contextlib.contextmanager
def operators_watched(around: Callable[[str, str], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around` for each text that an operator of a library is given inside, while that operator runs.

    Args:
        around: is given the operator's name, like "image::read_file", and the text.
    """
    ops = sys.modules.get("torch._ops")
    if ops is None:
        yield
        return

    def watching(call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def called(operator: Any, /, *args: object, **kwargs: object) -> object:
            given = (*args, *kwargs.values())
            listed = (text for value in given if isinstance(value, (list, tuple)) for text in value)
            texts = [text for text in (*given, *listed) if isinstance(text, str)]
            if not texts:
                return call(operator, *args, **kwargs)
            name = str(getattr(operator, "_qualified_op_name", operator))
            with contextlib.ExitStack() as stack:
                for text in texts if name.partition("::")[0] not in TORCHS else ():
                    stack.enter_context(around(name, text))
                return call(operator, *args, **kwargs)

        return called

    kinds = (ops.OpOverloadPacket, ops.OpOverload)
    before = [kind.__call__ for kind in kinds]
    for kind, call in zip(kinds, before, strict=True):
        kind.__call__ = watching(call)
    try:
        yield
    finally:
        for kind, call in zip(kinds, before, strict=True):
            kind.__call__ = call


def _not_loaded(module: str) -> bool:
    """Whether a module is not imported, or is just being imported."""
    return module not in sys.modules or getattr(sys.modules[module].__spec__, "_initializing", False)


def wrap(opened: Opened, started: Callable[[str], None]) -> None:
    """Wrap functions that open files in native code, in the modules that are loaded by now, and wherever else a module
    holds the same function; and the start of processes that are not forked from this one, which are not heard.

    Args:
        opened: is given the path of each such file before it is opened.
        started: is given the start method of each such process.
    """
    start = multiprocessing.process.BaseProcess.start
    if not getattr(start, "_trtpipe_records", False):
        multiprocessing.process.BaseProcess.start = _noted_start(start, started)  # type: ignore[method-assign]
    for module, functions in _NATIVE.items():
        if _not_loaded(module) or (module.startswith("torch.") and _not_loaded("torch")):  # it documents itself
            continue
        for dotted, paths in functions.items():
            holder: object = sys.modules[module]
            *outer, name = dotted.split(".")
            for part in outer:
                holder = getattr(holder, part, None)
            found = getattr(holder, name, None)
            if found is None or getattr(found, "_trtpipe_records", False):
                continue
            record = _recorded_type if isinstance(found, type) else _recorded
            wrapped = record(found, paths, opened)
            if outer:
                setattr(holder, name, wrapped if inspect.ismethoddescriptor(found) else staticmethod(wrapped))
                continue
            replace_everywhere(name, found, wrapped)


def replace_everywhere(name: str, found: object, wrapped: object) -> None:
    """Replace what modules hold by a name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is found:
            setattr(module, name, wrapped)


def _noted_start(start: Callable[..., None], started: Callable[[str], None]) -> Callable[..., None]:
    @functools.wraps(start)
    def noted(process: multiprocessing.process.BaseProcess) -> None:
        start(process)
        method = getattr(getattr(process, "_popen", None), "method", "fork")
        if method != "fork":
            started(method)

    noted._trtpipe_records = True  # type: ignore[attr-defined]
    return noted


def _recorded(function: Callable[..., object], paths: _Paths, opened: Opened) -> Callable[..., object]:
    @functools.wraps(function, updated=())
    def wrapped(*args: object, **kwargs: object) -> object:
        for path in paths.of(args, kwargs):
            opened(path)
        return function(*args, **kwargs)

    wrapped._trtpipe_records = True  # type: ignore[attr-defined]
    return wrapped


def _recorded_type(wrapped: type, paths: _Paths, opened: Opened) -> type:
    """A type that makes instances of `wrapped`, of which they are instances too, and says so."""

    class OpenedType(type):
        _trtpipe_records = True

        def __call__(cls, *args: object, **kwargs: object) -> object:
            for path in paths.of(args, kwargs):
                opened(path)
            return wrapped(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, wrapped)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, wrapped)

        def __getattr__(cls, name: str) -> object:
            return getattr(wrapped, name)

    return OpenedType(wrapped.__name__, (), {"__module__": wrapped.__module__, "__doc__": wrapped.__doc__})

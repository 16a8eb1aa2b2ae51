"""What the job's code changes of the whole process, put back for later stages and other jobs."""

from __future__ import annotations

import importlib
import operator
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _ProcessSetting:
    """One process-wide setting that the job's code may change, and how it is restored.

    Attributes:
        changed: the note after "the job's code"; `{now}` is the value that the code set, `{before}` the restored one.
        read: gives the current value.
        write: sets a value.
        differ: whether the current value (first) has to be restored to the earlier one (second).
        of_a_call: whether it is put back after every call of the job's code.
    """

    changed: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    differ: Callable[[Any, Any], bool] = operator.ne
    of_a_call: bool = True


@contextmanager
def put_back(note: Callable[[str], None], *, of_a_call: bool = False) -> Iterator[None]:
    """Put back what the job's code changes of the whole process within the block, with a note of each.

    Two blocks that overlap in two threads put back each other's changes: a call of the job's code has its own.

    `_STATES` are the current folder, from which relative outputs are written, the standard streams (one that is closed
    is opened again), the folders of `sys.path` (those that the job's code adds stay), signals that interrupt, the
    permissions of new files, NumPy's error handling, and torch's default dtype, default device and autocast.

    Args:
        note: is told of each.
        of_a_call: only what takes microseconds to read, and what every thread may: no signals, no permissions.
    """
    states = [s for s in _STATES if s.of_a_call or not of_a_call]
    before = [state.read() for state in states]
    try:
        yield
    finally:
        for state, value in zip(states, before, strict=True):
            if state.differ(now := state.read(), value):
                state.write(value)
                note(f"the job's code {state.changed.format(now=now, before=value)}")


def _folder() -> str:
    """The current folder; empty where it is gone."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def _go_to(folder: str) -> None:
    if folder:
        os.chdir(folder)


def _set_streams(streams: tuple[Any, ...]) -> None:
    sys.stdout, sys.stderr = streams


def _closed() -> tuple[bool, ...]:
    """Whether the standard streams are closed; None is none that anybody writes to."""
    return tuple(bool(getattr(stream, "closed", False)) for stream in (sys.stdout, sys.stderr))


def _open_streams(closed: tuple[bool, ...]) -> None:
    """Open again what is closed now and was not: on the process's own descriptor, which Python's streams leave open."""
    for name, descriptor, before in zip(("stdout", "stderr"), (1, 2), closed, strict=True):
        if getattr(sys, name).closed and not before:
            try:
                os.fstat(descriptor)
                target: int | str = descriptor
            except OSError:
                target = os.devnull
            stream = open(target, "w", buffering=1, errors="backslashreplace", closefd=target != descriptor)  # noqa: SIM115
            setattr(sys, name, stream)


def _set_path(folders: tuple[str, ...]) -> None:
    sys.path[:] = [*folders, *(added for added in sys.path if added not in folders)]


def _handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def _set_handlers(handlers: dict[signal.Signals, Any]) -> None:
    with suppress(ValueError, TypeError):  # not in the main thread, which owns the signals; a handler set from C
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _umask() -> int:
    """Linux has no other way to read it than to set it."""
    value = os.umask(0o077)
    os.umask(value)
    return value


def _set_umask(value: int) -> None:
    os.umask(value)


def imported(name: str) -> Any:
    """A module, or None while nothing has imported it. One that another thread imports is waited for: until then it
    lacks what it will have."""
    if name in sys.modules:
        with suppress(Exception):  # of a package that cannot be imported; whoever needs it says so
            return importlib.import_module(name)
    return None


def _torch() -> Any:
    """torch, or None while it is not imported: its states are then those that it begins with."""
    return imported("torch")


def _errors() -> tuple[tuple[str, str], ...]:
    """NumPy's handling of floating-point errors, or its defaults while it is not imported."""
    numpy = imported("numpy")
    return _NUMPY_DEFAULTS if numpy is None else tuple(sorted(numpy.geterr().items()))


def _set_errors(kinds: tuple[tuple[str, str], ...]) -> None:
    sys.modules["numpy"].seterr(**dict(kinds))


def _dtype() -> str:
    return "float32" if (torch := _torch()) is None else str(torch.get_default_dtype()).removeprefix("torch.")


def _set_dtype(name: str) -> None:
    if (torch := _torch()) is not None:
        torch.set_default_dtype(getattr(torch, name))


def _device() -> str:
    return "cpu" if (torch := _torch()) is None else str(torch.get_default_device())


def _autocast() -> tuple[str, ...]:
    """The devices on which torch's autocast is on."""
    torch = _torch()
    return () if torch is None else tuple(d for d in _AUTOCAST if torch.is_autocast_enabled(d))


def _set_autocast(devices: tuple[str, ...]) -> None:
    if (torch := _torch()) is not None:
        for device in _AUTOCAST:
            torch.set_autocast_enabled(device, device in devices)


@contextmanager
def as_it_begins() -> Iterator[None]:
    """Within the block what the caller has set counts for nothing: NumPy's error handling, torch's autocast and its
    default dtype are as a process begins with them, and standard streams that are None (a service, pythonw) go nowhere.
    """
    errors, devices, dtype, streams = _errors(), _autocast(), _dtype(), (sys.stdout, sys.stderr)
    numpy = imported("numpy")
    if numpy is not None:
        _set_errors(_NUMPY_DEFAULTS)
    _set_autocast(())
    _set_dtype("float32")
    try:
        with open(os.devnull, "w") as nowhere:
            _set_streams(tuple(stream or nowhere for stream in streams))
            yield
    finally:
        _set_streams(streams)
        if numpy is not None:
            _set_errors(errors)
        _set_autocast(devices)
        _set_dtype(dtype)


_AUTOCAST = ("cpu", "cuda")
_NUMPY_DEFAULTS = (("divide", "warn"), ("invalid", "warn"), ("over", "warn"), ("under", "ignore"))
_STATES = (
    _ProcessSetting("went to the folder {now}; back to {before}", _folder, _go_to),
    _ProcessSetting("replaced sys.stdout or sys.stderr; put back", lambda: (sys.stdout, sys.stderr), _set_streams),
    _ProcessSetting(
        "closed sys.stdout or sys.stderr; opened again",
        _closed,
        _open_streams,
        lambda now, before: any(n and not b for n, b in zip(now, before, strict=True)),
    ),
    _ProcessSetting(
        "took folders out of sys.path; put back",
        lambda: tuple(sys.path),
        _set_path,
        lambda now, before: not set(before).issubset(now),
    ),
    _ProcessSetting("set handlers of SIGINT or SIGTERM; put back", _handlers, _set_handlers, of_a_call=False),
    _ProcessSetting("set the umask to {now:#o}; back to {before:#o}", _umask, _set_umask, of_a_call=False),
    _ProcessSetting("changed numpy.seterr; put back", _errors, _set_errors),
    _ProcessSetting(
        "set torch's default dtype to {now}; back to {before}",
        _dtype,
        _set_dtype,
    ),
    _ProcessSetting(
        "set torch's default device to {now}; back to {before}",
        _device,
        # None takes the mode off that torch would otherwise keep around every call.
        lambda name: _torch().set_default_device(None if name == "cpu" else name),
    ),
    _ProcessSetting("turned torch's autocast on or off; put back", _autocast, _set_autocast),
)

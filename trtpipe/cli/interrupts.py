"""What Ctrl-C, SIGTERM and the end of a terminal do to a command: an exception, wherever that is safe."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import FrameType

from trtpipe.errors import ExitCode

#: What ends a command that can still undo what it has begun: SIGHUP comes from a terminal that is closed, and from ssh.
STOPPING = tuple(s for n in ("SIGINT", "SIGTERM", "SIGHUP") if (s := getattr(signal, n, None)) is not None)
#: Signals closer than this count once: one that is sent to both processes of a command (see `supervised`) reaches it
#: twice, and timeout(1) sends each to the process and to its group. Nothing else tells such a pair from two.
_ONCE_S = 0.25
_AGAIN_S = 0.02


@contextmanager
def interrupted_by(interrupt: Callable[[int, FrameType | None], None], *, last: bool = False) -> Iterator[None]:
    """Call `interrupt` on the signals of `STOPPING` until the end of the block; one that is ignored stays so. After the
    `last` block of a process they do nothing until `end_with`: what was to be stopped is over, and its exit code is on
    its way.

    Not while a native module is imported: an exception that is raised in the Python which such a module calls to
    initialize itself makes several of them crash (onnx's, with SIGSEGV). The signal comes again, until that is over.
    """
    hook, latest, own = sys.unraisablehook, -math.inf, os.getpid()

    def once(number: int, frame: FrameType | None) -> None:
        nonlocal latest
        if os.getpid() != own:  # a process that was forked within the block (of a pool, which is ended by SIGTERM)
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        if _imports_native(frame):
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        earlier, latest = latest, time.monotonic()
        if latest - earlier > _ONCE_S:
            interrupt(number, frame)

    def unraisable(event: sys.UnraisableHookArgs) -> None:
        # An interrupt inside a destructor cannot be raised: Python would print it. The flag ends the stage.
        if not isinstance(event.exc_value, KeyboardInterrupt):
            hook(event)

    sys.unraisablehook = unraisable
    before: dict[signal.Signals, signal._HANDLER] = {}
    try:
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup, or a shell's `&`, wants it
                before[number] = signal.signal(number, once)
    except ValueError:  # not in the main thread, which owns the signals
        before.clear()
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, _over if last else handler)


def end_with(code: ExitCode) -> None:
    """Have the signals of `STOPPING` end the process at once, with the exit code that its command has reached: what
    Python still calls at the end would print where it was. Twins of what has stopped the command do not; one that is
    ignored stays so."""
    since = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - since > _ONCE_S:
            os._exit(code)

    for number in STOPPING:
        if signal.getsignal(number) is _over:
            signal.signal(number, end)


def _over(number: int, frame: FrameType | None) -> None:
    """Nothing."""


def _imports_native(frame: FrameType | None) -> bool:
    """Whether the code of `frame` runs for a native module that is being imported."""
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False

"""A command in a process of its own, so that an exit code is the command's and nobody else's.

Code of the job and native libraries run in the process of the command. Whatever of it ends that process (`os._exit`,
`exit()` in C, `exec`, a handler of `atexit`) ends a child here, and the exit code that the command did not reach is no
success.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from calib.loading import end_with_parent
from trtpipe.cli import console
from trtpipe.cli.interrupts import STOPPING, end_with
from trtpipe.errors import Cancelled, ExitCode, InputError
from trtpipe.machine import how_ended

#: Whoever ends the command by one of these knows it.
_ASKED_FOR = frozenset({*STOPPING, signal.SIGQUIT, signal.SIGPIPE})
#: How long a command may take to end that was asked to twice, in seconds: native code answers no signal.
PATIENCE_S = 10.0
_FROM_THE_KERNEL = 0x80  # SI_KERNEL of <signal.h>


def supervised(command: Callable[[], ExitCode]) -> ExitCode:
    """The exit code of `command`, run in a child process; in the child, what `command` returns.

    What stops it is passed on to the child, but for what a terminal sends to both. A child that has not ended
    `PATIENCE_S` after the second time, or the last one after that, is killed.

    No standard stream may be closed (`results.fill_closed_streams`): its descriptor would be the way back.

    Args:
        command: returns its exit code, 0 to 255, and raises nothing.
    """
    if not hasattr(signal, "sigwaitinfo"):  # no Linux
        return _alone(command)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPPING, signal.SIGCHLD})
    reading, writing = os.pipe()
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:  # no more processes are allowed here: without the safeguard
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _alone(command)
    if child == 0:
        os.close(reading)
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = command()
        os.write(writing, bytes([code]))
        os.close(writing)
        end_with(code)
        gc.freeze()  # the process ends: what it holds need not be searched for garbage once more, which takes seconds
        return code
    os.close(writing)
    os.set_blocking(reading, False)
    ended, stopped = _wait(child)
    try:
        reached = os.read(reading, 1)
    except BlockingIOError:  # a process that the command left behind holds the pipe
        reached = b""
    return _judged(ended, reached, stopped=stopped)


def _alone(command: Callable[[], ExitCode]) -> ExitCode:
    """The command in this process, which an interrupt ends with its code from then on."""
    code = command()
    end_with(code)
    return code


def _wait(child: int) -> tuple[int, bool]:
    """The exit code of the child, negative when a signal ended it, and whether it had been asked to stop."""
    asked, expected = 0, {*STOPPING, signal.SIGCHLD}
    while True:
        received = signal.sigwaitinfo(expected) if asked < 2 else signal.sigtimedwait(expected, PATIENCE_S)
        if received is None:
            os.kill(child, signal.SIGKILL)
        elif received.si_signo in STOPPING:
            asked += 1
            if received.si_code != _FROM_THE_KERNEL:
                os.kill(child, received.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), asked > 0


def _judged(ended: int, reached: bytes, *, stopped: bool) -> ExitCode:
    """The exit code of a command whose process ended with `ended`; `reached` is its own, if it came to one.

    `stopped`: it had been asked to stop. A library that crashes then, crashes because an exception struck it.
    """
    if ended < 0:
        number = -ended
        if reached and number in _ASKED_FOR:  # once more, while the interpreter was closing
            return ExitCode(reached[0])
        if number in STOPPING:  # before the command could answer it, or once more after it had
            return Cancelled.exit_code
        if stopped and number not in _ASKED_FOR:
            _say(f"interrupted: the process was ended by {how_ended(ended)} while it stopped.", Cancelled.exit_code)
            return Cancelled.exit_code
        message, code = early_end(ended)
        if number not in _ASKED_FOR:
            _say(f"trtpipe: {message}", code)
        return code
    if not reached:
        message, code = early_end(ended)
        _say(f"trtpipe: {message}", code)
        return code
    return ExitCode(reached[0] or ended)


def early_end(ended: int) -> tuple[str, ExitCode]:
    """Why a process that runs code of jobs has ended before its work did, and the command's exit code for that.

    Args:
        ended: its exit code, negative when a signal ended it.
    """
    if ended < 0:
        return f"the process was ended by {how_ended(ended)}. {_CAUSES.get(-ended, _CRASHED)}", ExitCode(128 - ended)
    return (
        f"the process ended before the command did (exit code {ended}): code of the job, or a library, called "
        "os._exit, exec or exit(). Take that call out.",
        InputError.exit_code,
    )


_CRASHED = "A library has crashed: run it again with PYTHONFAULTHANDLER=1 to see where."
_CAUSES: dict[int, str] = {
    signal.SIGKILL: "The system does so when memory runs out: reduce the batch sizes, or how much runs at once."
}


def _say(message: str, code: ExitCode) -> None:
    console.err(message)
    if "--json" in sys.argv[1:]:
        with suppress(OSError):
            console.out_json({"error": message, "exit_code": code})

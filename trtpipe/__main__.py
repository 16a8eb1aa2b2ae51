"""The program `trtpipe`, and `python -m trtpipe`."""

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType

_MISSING, _BUG, _INTERRUPTED = 3, 70, 130  # of `trtpipe.errors`, which is not imported yet


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End the process as an interrupted command does: nothing has begun that would have to be undone."""
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


# Before what takes a moment to import: an interrupt ends that without a traceback. Not in a process begun by
# multiprocessing, which imports the program's module too, and never calls main().
_BEGUN_BY_IT = "multiprocessing.spawn" in sys.modules
_STOPPING = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))  # of `trtpipe.cli.interrupts`
_HANDLERS = {n: signal.getsignal(n) for n in (() if _BEGUN_BY_IT else _STOPPING)}
for _number, _handler in _HANDLERS.items():
    if _handler is not signal.SIG_IGN:  # as of `nohup`
        signal.signal(_number, _interrupted)

from trtpipe.import_errors import package_fault  # noqa: E402

_failed: BaseException | None = None
try:
    from trtpipe.cli.main import main as _command
except BaseException as error:  # noqa: BLE001  # main() says what it is
    _failed = error


def main() -> int:
    """The exit code of the command of this process."""
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    return _command() if _failed is None else _refused(_failed)


def _refused(error: BaseException) -> int:
    """The exit code where the commands cannot be imported, after the reason, as `cli.main` gives it: nothing of that is
    there."""
    message, code, above = package_fault(error), _MISSING, ""
    if message is None:
        message, code = "this is a bug in trtpipe; please report it with the lines above", _BUG
        above = "".join(traceback.format_exception(error))
    said = json.dumps({"error": message, "exit_code": code}, indent=2, ensure_ascii=False)
    for descriptor, text in ((2, f"{above}{message}"), *([(1, said)] if "--json" in sys.argv[1:] else [])):
        with suppress(OSError):
            os.write(descriptor, f"{text}\n".encode(errors="backslashreplace"))
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The program `trtpipe`, and `python -m trtpipe`."""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # `Cancelled.exit_code`, which is not imported yet


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End the process as an interrupted command does: nothing has begun that would have to be undone."""
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


# Before what takes a moment to import: an interrupt ends that without a traceback. Not in a process begun by
# multiprocessing, which imports the program's module too, and never calls main().
_BEGUN_BY_IT = "multiprocessing.spawn" in sys.modules
_HANDLERS = {n: signal.getsignal(n) for n in (() if _BEGUN_BY_IT else (signal.SIGINT, signal.SIGTERM))}
for _number, _handler in _HANDLERS.items():
    if _handler is not signal.SIG_IGN:  # as of `nohup`
        signal.signal(_number, _interrupted)

from trtpipe.cli.main import main as _command  # noqa: E402


def main() -> int:
    """The exit code of the command of this process."""
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    return _command()


if __name__ == "__main__":
    sys.exit(main())

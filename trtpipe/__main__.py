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


def main() -> int:
    """The exit code of the command of this process; an interrupt while it is imported ends it without a traceback."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # as of `nohup`
            signal.signal(number, _interrupted)
    from trtpipe.cli.main import main as command

    for number, handler in handlers.items():
        signal.signal(number, handler)
    return command()


if __name__ == "__main__":
    sys.exit(main())

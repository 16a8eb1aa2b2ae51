"""The log messages of Torch-TensorRT, while it is imported and while it works, kept off the terminal."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from trtpipe.errors import first_line
from trtpipe.trt import monitor
from trtpipe.trt.monitor import LOG_LEVELS, Watch

#: Torch-TensorRT's loggers; the second one, which TensorRT itself writes to, is no child of the first.
LOGGERS = ("torch_tensorrt", "torch_tensorrt [TensorRT Conversion Context]")
#: TensorRT's, and what comes with every model or is about machines and packages that this route does not use.
ROUTE_NOISE = re.compile(
    monitor.NOISE.pattern + "|modelopt|is deprecated|Remaining GPU memory|Using default stream in enqueue"
    "|PyTorch 0/1 specialization"
)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """No logging of warnings and below."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def logged(watch: Watch, level: str) -> Iterator[None]:
    """What Torch-TensorRT and, through it, TensorRT log goes to `watch` and nowhere else."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            level = {"critical": "internal_error", "debug": "verbose"}.get(n := record.levelname.lower(), n)
            # Its errors repeat, with a traceback and the whole graph, what is then raised.
            if record.exc_info is None and level in LOG_LEVELS:
                watch.message(level, first_line(record.getMessage()))

    handler = Handler()
    before = []
    for name in LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel({"info": logging.INFO, "verbose": logging.DEBUG}.get(level, logging.WARNING))
    try:
        yield
    finally:
        for logger, old, propagate in before:
            logger.removeHandler(handler)
            logger.propagate = propagate
            logger.setLevel(old)

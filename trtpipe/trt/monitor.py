"""TensorRT's two callbacks, its logger and its progress monitor, made of the module that will call them.

An exception must not leave a callback: TensorRT prints it to standard error and goes on, so an interrupt inside `log`
would be lost. Both callbacks keep what was raised, and `Watch.check` raises it once TensorRT has returned.
"""

from __future__ import annotations

import itertools
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from trtpipe.errors import Cancelled, MissingError
from trtpipe.progress import Progress
from trtpipe.trt.flavour import Flavour

if TYPE_CHECKING:
    from trtpipe.trt.types import ILogger, IProgressMonitor

#: From the gravest: a job's `log_level` shows its own level and those before it.
LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose")
PERCENT = "%"
_KEPT = frozenset(LOG_LEVELS[:3])
#: Warnings that say nothing about the engine.
NOISE = re.compile(
    r"onnx2trt_utils|Multi stream is disabled|CUDA lazy loading|is unsupported in TensorRT-RTX"
    r"|Weight quantization .* has not been calibrated"
)
#: The latest are kept: an engine may warn at each of a server's millions of executions.
_MOST_MESSAGES = 10_000


class _Message(NamedTuple):
    """A message of TensorRT: its number, the thread that it came in, its level and its text."""

    number: int
    thread: int
    level: str
    text: str


class Watch:
    """Receives TensorRT's callbacks: keeps its messages, passes its progress on, and holds a request to stop."""

    def __init__(self, progress: Progress, level: str) -> None:
        self._progress = progress
        self._shown = frozenset(LOG_LEVELS[: LOG_LEVELS.index(level) + 1])
        self._messages: deque[_Message] = deque(maxlen=_MOST_MESSAGES)
        self._numbers = itertools.count()
        self._raised: BaseException | None = None
        self._stop = False
        self._phases: dict[str, tuple[str | None, int, int]] = {}
        self._best = -1

    def mark(self) -> int:
        """Where an operation begins, to be asked for its errors: earlier ones are of other operations."""
        return next(self._numbers)

    def errors(self, since: int) -> tuple[str, ...]:
        """TensorRT's error messages since `mark`."""
        return tuple(m.text for m in self._errors(since))

    def reason(self, since: int) -> str:
        """TensorRT's last error message since `mark`, of this thread where it has one, as others use the engine too."""
        errors = self._errors(since)
        mine = [m for m in errors if m.thread == threading.get_ident()]
        return (mine or errors)[-1].text if errors else "no error message"

    def reasons(self, since: int) -> str:
        """All of its error messages since `mark`, each once, in their order: one that follows may be of no option."""
        return "; ".join(dict.fromkeys(m.text for m in self._errors(since)))

    def _errors(self, since: int) -> list[_Message]:
        return [m for m in tuple(self._messages) if m.number > since and m.level != "warning"]

    @property
    def warnings(self) -> tuple[str, ...]:
        """TensorRT's warnings so far, each once."""
        return tuple(dict.fromkeys(m.text for m in self._messages if m.level == "warning"))

    @property
    def notes(self) -> tuple[str, ...]:
        """The warnings that say something of the engine, as its notes have them."""
        return tuple(f"TensorRT: {text}" for text in self.warnings if not NOISE.search(text))

    def message(self, level: str, text: str) -> None:
        """A message of TensorRT. Errors and warnings are kept; the job's log_level decides what is shown."""
        try:
            if level in _KEPT:
                self._messages.append(_Message(next(self._numbers), threading.get_ident(), level, text))
            if level in self._shown:
                self._progress.note(f"TensorRT {level}: {text}")
        except BaseException as error:  # noqa: BLE001 - handed on by check()
            self._keep(error)

    def phase(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of `steps` steps begins inside a step of `parent`."""
        self._phases[name] = (parent, 0, steps)

    def finish(self, name: str) -> None:
        """A phase is over; a phase that TensorRT cut short has stopped too."""
        self._phases.pop(name, None)

    def step(self, name: str, index: int) -> bool:
        """Step `index` of a phase is done. False asks TensorRT to stop."""
        try:
            parent, _, steps = self._phases.get(name, (None, 0, 0))
            self._phases[name] = (parent, index + 1, steps)
            percent = int(100 * self._fraction())
            if percent > self._best:
                self._best = percent
                self._progress.step(percent, 100, PERCENT)
            if self._progress.cancelled():
                self._stop = True
        except BaseException as error:  # noqa: BLE001 - handed on by check()
            self._keep(error)
        return not self._stop

    def stop(self) -> None:
        """Ask TensorRT to stop at its next step."""
        self._stop = True

    def check(self) -> None:
        """Raise what a callback raised, or Cancelled when a stop was asked for."""
        raised, self._raised = self._raised, None
        if raised is not None and not isinstance(raised, KeyboardInterrupt):
            raise raised
        if self._stop or raised is not None or self._progress.cancelled():
            raise Cancelled("build: cancelled while TensorRT was building; nothing was written.")

    def _keep(self, error: BaseException) -> None:
        self._raised = self._raised or error
        self._stop = True

    def _fraction(self) -> float:
        """How far the outermost phase is, the phases inside its current step counted as parts of that step."""
        done = 0.0
        for _, at, steps in reversed(self._phases.values()):
            done = min(1.0, (at + done) / steps) if steps else 0.0
        return done


@contextmanager
def interruptible(watch: Watch) -> Iterator[None]:
    """Ctrl-C asks TensorRT to stop at its next step instead of raising inside a callback, where it would be lost.

    Only where Python's own handler is in place: a program that handles SIGINT itself reports it through `cancelled`.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        watch.stop()

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def create(flavour: Flavour, name: str, watch: Watch, *arguments: object) -> Any:
    """A Builder, Runtime or Refitter of the flavour's module.

    Args:
        flavour: the TensorRT.
        name: of the class.
        watch: of the logger that is among the arguments.
        arguments: of the class.

    Raises:
        MissingError: TensorRT gives none, as where CUDA does not start; pybind11 makes a TypeError of that.
        Cancelled: the user stopped it.
    """
    since = watch.mark()
    try:
        return getattr(flavour.module, name)(*arguments)
    except TypeError as error:
        if "nullptr" not in str(error):
            raise
    watch.check()
    where = "build" if name == "Builder" else "engine"
    said = watch.reasons(since) or "; ".join(watch.warnings)  # TensorRT 8.6 warns of a CUDA that does not start
    raise MissingError(
        f"{where}: {flavour.title} gives no {name} ({said or 'no message'}). See whether this "
        "process may use the GPU, and whether the driver is new enough for this TensorRT: trtpipe doctor."
    )


def make_logger(flavour: Flavour, watch: Watch) -> ILogger:
    """A logger of the flavour's module that gives everything to `watch` and prints nothing."""
    trt = flavour.module

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # pybind11 wants the base called by name

        def log(self, severity: object, message: str) -> None:
            watch.message(str(severity).rsplit(".", 1)[-1].lower(), message)

    return Logger()


def make_monitor(flavour: Flavour, watch: Watch) -> IProgressMonitor:
    """A progress monitor of the flavour's module that gives everything to `watch`."""
    trt = flavour.module

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            watch.phase(phase_name, parent_phase, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            watch.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return watch.step(phase_name, step)

    return Monitor()

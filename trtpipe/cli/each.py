"""Several jobs of one command, in turn: those of other code in a process of their own (`pipeline.apart`)."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

from calib.types import JsonMapping
from trtpipe.cli import console
from trtpipe.cli.supervised import early_end
from trtpipe.errors import BUG, SUCCESS, Cancelled, ExitCode, user_error
from trtpipe.pipeline.apart import GRACE_S, begin, code_of, end, entered

if TYPE_CHECKING:
    from trtpipe.job.job import Job
    from trtpipe.pipeline.apart import Process
    from trtpipe.progress import Reporter


@dataclass(frozen=True)
class Result:
    """What a command says of one job: its exit code, its object for `--json`, and the text for everybody else."""

    code: ExitCode
    json: JsonMapping
    text: str = ""


@dataclass(frozen=True)
class Work:
    """What a command does for the job, or the kit, at `path`; `do` of several jobs can be sent to another process."""

    path: Path
    do: Callable[[Reporter], Result]
    job: Job | None = None

    @property
    def code(self) -> str:
        """What names the code that it runs; empty for a kit, whose job is settled."""
        return "" if self.job is None else code_of(self.job)


def each(works: Sequence[Work], *, as_json: bool, verbose: int, quiet: bool) -> ExitCode:
    """Do one after the other, print what each gives, and return the worst exit code.

    With several, one that fails is said and the others still run.

    Raises:
        TrtpipeError: the only one failed; or, as Cancelled, the user stopped them.
    """
    results: list[Result] = []
    watching = partial(console.Console, quiet=quiet or as_json, verbose=verbose > 0)
    done = _here(works, watching) if len({work.code for work in works}) == 1 else _apart(works, watching)
    for result in done:
        results.append(result)
        if result.text and not as_json:
            console.out(result.text)
    if as_json:
        console.out_json([result.json for result in results])
    return max((result.code for result in results), default=SUCCESS)


def _here(works: Sequence[Work], watching: Callable[[], console.Console]) -> Iterator[Result]:
    with watching().watching() as reporter:
        for work in works:
            yield work.do(reporter) if len(works) == 1 else _attempted(work, reporter)


def _attempted(work: Work, reporter: Reporter) -> Result:
    try:
        return work.do(reporter)
    except (Cancelled, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a bug costs one of several jobs; its place is printed
        shown = user_error(error)
        if isinstance(shown, Cancelled):
            raise shown from None
        if shown is None:
            traceback.print_exception(error)
            return _failed(work.path, console.A_BUG, BUG)
        return _failed(work.path, str(shown), shown.exit_code)


def _failed(path: Path, message: str, code: ExitCode) -> Result:
    console.err(f"{path}: {message}")
    return Result(code, {"job": str(path), "error": message, "exit_code": code})


def _apart(works: Sequence[Work], watching: Callable[[], console.Console]) -> Iterator[Result]:
    for _, group in itertools.groupby(works, key=lambda work: work.code):
        left = list(group)
        while left:
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            process = begin("trtpipe-jobs", _serve, theirs, tuple(left), watching, dict(os.environ))
            theirs.close()
            with suppress(EOFError, OSError):
                while left:
                    result = _received(ours, process)
                    left.pop(0)
                    yield result
                    ours.send(True)  # it prints no more before it has this
            process.join(GRACE_S)
            code = process.exitcode or 0
            end(process, 0)
            if left:
                yield _failed(left.pop(0).path, *early_end(code))


def _received(pipe: connection.Connection, process: Process) -> Result:
    """The next result.

    Raises:
        Cancelled: the user stopped it; the process has then ended.
    """
    try:
        result = pipe.recv()
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGINT)
        try:
            process.join()
        finally:  # once more interrupted, too
            end(process, 0)
        raise
    if result is None:
        end(process, GRACE_S)
        raise Cancelled
    assert isinstance(result, Result)
    return result


def _serve(
    pipe: connection.Connection,
    works: Sequence[Work],
    watching: Callable[[], console.Console],
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        entered(signal.default_int_handler)
        for stream in (sys.stdout, sys.stderr):  # as `results_apart` has them
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace", line_buffering=True)
        with watching().watching() as reporter:
            for work in works:
                pipe.send(_attempted(work, reporter))
                pipe.recv()
    except (Cancelled, KeyboardInterrupt):
        with suppress(OSError):
            pipe.send(None)
    except (EOFError, OSError):  # nobody listens any more
        return
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends anyway

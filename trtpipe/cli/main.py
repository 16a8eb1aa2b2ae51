"""The command line: the module of each command, and the exit code of each way to end.

0 ok, 1 a check failed, 2 the job or the input is bad, 3 a dependency or device is missing, 4 no engine can be made of
the model, 70 a bug in trtpipe (with its traceback), 130 interrupted, 141 nobody reads its output any more
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from trtpipe import __version__
from trtpipe.cli import console
from trtpipe.cli.commands.options import Settings
from trtpipe.cli.interrupts import interrupted_by
from trtpipe.cli.results import fill_closed_streams, results_apart
from trtpipe.cli.supervised import supervised
from trtpipe.errors import (
    BUG,
    SUCCESS,
    UNREAD,
    Cancelled,
    ExitCode,
    InputError,
    did_you_mean,
    either,
    user_error,
)
from trtpipe.pipeline.collector import seldom_collected

if TYPE_CHECKING:
    from trtpipe.job.problems import Problem

#: Every command and where it is; a command's module is imported when it is called (or listed).
COMMANDS: Mapping[str, str] = {
    "build": "trtpipe.cli.commands.build:command",
    "validate": "trtpipe.cli.commands.validate:command",
    "calibrate": "trtpipe.cli.commands.calibrate:command",
    "prepare": "trtpipe.cli.commands.prepare:command",
    "refit": "trtpipe.cli.commands.refit:command",
    "check": "trtpipe.cli.commands.check:command",
    "tune": "trtpipe.cli.commands.tune:command",
    "bench": "trtpipe.cli.commands.bench:command",
    "verify": "trtpipe.cli.commands.verify:command",
    "run": "trtpipe.cli.commands.run:command",
    "pack": "trtpipe.cli.commands.pack:command",
    "unpack": "trtpipe.cli.commands.unpack:command",
    "export": "trtpipe.cli.commands.export:command",
    "keygen": "trtpipe.cli.commands.keygen:command",
    "inspect": "trtpipe.cli.commands.inspect:command",
    "init": "trtpipe.cli.commands.init:command",
    "nightly": "trtpipe.cli.commands.nightly:command",
    "history": "trtpipe.cli.commands.history:command",
    "worker": "trtpipe.cli.commands.worker:command",
    "doctor": "trtpipe.cli.commands.doctor:command",
    "schema": "trtpipe.cli.commands.schema:command",
}


class _Commands(click.Group):
    """A group whose commands are imported when they are asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; no argument may be empty, which as a path would be the current folder."""
        if "" in args:
            ctx.fail("an argument is empty. Give it a value: is a variable of the shell not set?")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order they are usually needed."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported; None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        if (work := command.callback) is not None:
            command = copy.copy(command)  # the module's own stays as it is: it may be asked for again

            @functools.wraps(work)
            def apart(*args: Any, **options: Any) -> Any:
                with results_apart():
                    return work(*args, **options)

            command.callback = apart
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest command in the message; none runs where the current folder is gone."""
        _require_folder()
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], tuple(COMMANDS))
            ctx.fail(" ".join(filter(None, (f"COMMAND must be {either(tuple(COMMANDS))} (got {args[0]!r}).", hint))))
        return super().resolve_command(ctx, args)


def _require_folder() -> None:
    """Raises InputError where the current folder is gone, from where paths are looked up, and Python's modules."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder: it is no longer there. Change to another.") from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="trtpipe", message="%(prog)s %(version)s")
def group() -> None:
    """A PyTorch model, images and a target in; a TensorRT engine with its proof out.

    Completion in bash: eval "$(_TRTPIPE_COMPLETE=bash_source trtpipe)"; zsh_source and fish_source are for those.
    """


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Run one command.

    Args:
        argv: the arguments after the program's name. When None, those of this process, and the command runs in a child
            of it (see `supervised`).

    Returns:
        The exit code.
    """
    if argv is not None:
        return _run(argv)
    fill_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is spelt out, as `results_apart` has it
        sys.stdout.reconfigure(errors="backslashreplace")
    return supervised(lambda: _run(None))


@seldom_collected()
def _run(argv: Sequence[str] | None) -> ExitCode:
    settings = Settings(json="--json" in (sys.argv if argv is None else argv))  # its option may not be read any more
    try:
        with interrupted_by(_interrupt, last=argv is None):
            result = group.main(
                args=None if argv is None else list(argv), prog_name="trtpipe", obj=settings, standalone_mode=False
            )
        return ExitCode(result) if isinstance(result, int) else SUCCESS
    except click.exceptions.Exit as end:
        return ExitCode(end.exit_code)
    except click.ClickException as error:
        with suppress(OSError):  # the code says it too, where standard error itself cannot be written
            error.show(file=sys.stderr)
        return _said(settings, error.format_message(), InputError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _failed(settings, "interrupted", Cancelled.exit_code)
    except SystemExit as end:
        if _raised_in(end) != "click":
            return _unexpected(settings, end)
        return UNREAD if end.code else SUCCESS  # a completion ends so, and with 1 what click prints to a closed pipe
    except BrokenPipeError:  # the same, seen outside of click
        return UNREAD
    except BaseException as error:  # noqa: BLE001  # the one place where a bug becomes output
        return _unexpected(settings, error)


def _raised_in(error: BaseException) -> str:
    """The top-level package of the code that raised an error."""
    (*_, (frame, _)) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _unexpected(settings: Settings, error: BaseException) -> ExitCode:
    """The exit code of an error: the user's or machine's has a message (`errors.user_error`), any other is a bug."""
    if (shown := user_error(error)) is not None:
        if isinstance(shown, Cancelled):  # whichever stage noticed it
            said = str(shown) if str(shown).startswith("interrupted") else f"interrupted: {shown}"
            return _failed(settings, said, shown.exit_code)
        return _failed(settings, str(shown), shown.exit_code, getattr(shown, "problems", ()))
    with suppress(OSError):
        traceback.print_exception(error)
    return _failed(settings, console.A_BUG, BUG)


def _failed(settings: Settings, message: str, code: ExitCode, problems: Sequence[Problem] = ()) -> ExitCode:
    with suppress(OSError):
        console.err(message)
    return _said(settings, message, code, problems)


def _said(settings: Settings, message: str, code: ExitCode, problems: Sequence[Problem] = ()) -> ExitCode:
    """`code`, after the error on standard output where JSON was asked for."""
    if settings.json:
        listed = {"problems": [p.as_dict() for p in problems]} if problems else {}
        with suppress(OSError):  # standard output itself may be what could not be written
            console.out_json({"error": message, "exit_code": code, **listed})
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

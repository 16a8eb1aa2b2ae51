"""Options that several commands share, and the search for job files."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from calib.files import suffix_of
from trtpipe.cli import console
from trtpipe.errors import InputError, MissingError
from trtpipe.job.importable import is_job_file, is_written_as_job
from trtpipe.model.computing import VARIABLE as DEVICE_VARIABLE
from trtpipe.model.computing import cpu_asked
from trtpipe.outputs import cache_folder, has_name, require_writable_file, require_writable_folder
from trtpipe.quantization.diagnose import DIAGNOSE_SECONDS
from trtpipe.streams import descriptor_of, is_stream, open_stream, require_no_stream, take
from trtpipe.trt import driver
from trtpipe.values import MANIFEST

F = TypeVar("F", bound=Callable[..., object])


class InputPath(click.Path):
    """What is to be read: a file or a folder; of pipes and devices (`streams`) those that `piped` lets be taken."""

    def __init__(self, *, piped: bool = False, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay, dir_okay=dir_okay)
        self.piped = piped

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path; InputError when it is a pipe or a device that cannot be read as a file."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if ctx is None or not ctx.resilient_parsing:
            (take if self.piped else require_no_stream)(path)
        return path


class OutputFile(click.Path):
    """A file to be written; it is tested for that before any work begins. With `piped`, also a pipe or a device: it is
    open from then on until the command ends, so that its reader stays."""

    def __init__(self, *, piped: bool = False) -> None:
        super().__init__(path_type=Path)
        self.name = "file"
        self.piped = piped

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path; OSError when it cannot be written, InputError where nothing reads a pipe."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if ctx is not None and ctx.resilient_parsing:
            return path
        if not (self.piped and is_stream(path)):
            self.probe(path)
        elif ctx is not None:
            descriptor = open_stream(path)
            ctx.call_on_close(partial(os.close, descriptor))
            if descriptor_of(path) is not None:  # which `results_apart` may turn elsewhere
                return Path(f"/dev/fd/{descriptor}")
        return path

    def probe(self, path: Path) -> None:
        """OSError when no file can be written at `path`."""
        require_writable_file(path)


class NewPath(OutputFile):
    """A file or folder to be made; the command itself refuses one that exists."""

    def probe(self, path: Path) -> None:
        """OSError when nothing can be made at `path`."""
        if not path.is_dir() or not has_name(path):
            super().probe(path)


class OutputFolder(click.Path):
    """A folder to be written into, created if missing; it is tested for that before any work begins."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)
        self.name = "directory"

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path; OSError when nothing can be written there."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if ctx is None or not ctx.resilient_parsing:
            require_writable_folder(path)
        return path


class OutputTables(click.Path):
    """A folder for tables, or the file of one, which ends in .json; probed as `OutputFolder` and `OutputFile` are."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)
        self.name = "path"

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path; OSError when nothing can be written there."""
        is_file = suffix_of(os.fsdecode(value)) == ".json"
        return (OutputFile() if is_file else OutputFolder()).convert(value, param, ctx)


@dataclass
class Settings:
    """What `cli.main` needs to know of the command that it ran. Mutable: its options fill it in."""

    json: bool = False


def _store_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    settings = ctx.ensure_object(Settings)
    settings.json = value
    return value


def json_option(function: F) -> F:
    """`--json`: the result on stdout as one JSON value, an error as `{"error", "exit_code"}`."""
    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=_store_json, help="Print the result as JSON."
    )(function)


def set_option(function: F) -> F:
    """`--set SECTION.KEY=VALUE`, any number of times."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: --set build.target=tensorrt."
    )(function)


def out_option(default: str, what: str) -> Callable[[F], F]:
    """`-o`, `--out`: the folder that results go to; `what` is its help."""
    return click.option(
        "-o",
        "--out",
        default=Path(default),
        show_default=True,
        type=OutputFolder(),
        help=what,
    )


def device_option(function: F) -> F:
    """`--device`: where PyTorch computes, and which GPU this process and those that it starts see."""
    return click.option(
        "--device",
        expose_value=False,
        callback=_choose_device,
        metavar="DEVICE",
        help="Where PyTorch computes: cpu, cuda, or cuda:N, which is then the only GPU, also for TensorRT. "
        "[default: the first GPU that CUDA_VISIBLE_DEVICES leaves, where there is one]",
    )(function)


def _choose_device(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Say it in the environment, before CUDA is first asked: only so every library has the same GPU."""
    if value is None or ctx.resilient_parsing:
        return
    named = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", value)
    if named is None:
        raise click.UsageError(f"--device must be cpu, cuda or cuda:N (got {value}).")
    changes = {DEVICE_VARIABLE: value.partition(":")[0]}
    if named.group(1) is not None:
        changes[driver.VISIBLE] = driver.visible(int(named.group(1)), "--device")
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    if named.group(0) != "cpu" and (problem := driver.probe().problem):
        _restore(before)
        if before.get(driver.VISIBLE, "") is None and driver.VISIBLE in problem:  # which only this option has set
            raise MissingError(
                f"--device: must be one of this machine's GPUs (got {value}, and the driver has none of that number). "
                "`trtpipe doctor` lists them."
            )
        raise MissingError(
            f"--device: must be left out where no NVIDIA GPU can be used (got {value}; {problem}). Check the driver, "
            "or leave it out."
        )
    ctx.call_on_close(lambda: _restore(before))


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


cache_option = click.option("--cache", type=OutputFolder(), help="Folder of the build cache.")


def cache_or_users(given: Path | None) -> Path:
    """The folder that `--cache` names, else the user's, which was not named: what cannot be written says what it is.

    Raises:
        InputError: no `--cache`, and the user's folder cannot be written.
    """
    if given is not None:
        return given
    folder = cache_folder()
    try:
        require_writable_folder(folder)
    except OSError as error:
        raise InputError(
            f"--cache: must be given where the user's cache cannot be written (got {folder}: "
            f"{error.strerror or error}). Or set XDG_CACHE_HOME."
        ) from error
    return folder


def refuse_unused(names: Iterable[str], because: str) -> None:
    """UsageError when an option of these parameters was given on the command line: nothing would use it.

    Args:
        names: the parameters' names.
        because: what keeps the command from using them, after "must not be given ".
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        if (
            parameter.name in names
            and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        ):
            raise click.UsageError(f"{parameter.opts[-1]} must not be given {because}: nothing would use it.")


def refuse_cpu(because: str) -> None:
    """UsageError when `--device cpu` was given where PyTorch computes nothing; `cuda:N` is TensorRT's GPU as well."""
    if cpu_asked():
        refuse_unused(("device",), because)


def loudness_options(function: F) -> F:
    """`-v` (repeatable) or `-q`; UsageError when both are given."""

    @functools.wraps(function)
    def one(*args: Any, verbose: int, quiet: bool, **options: Any) -> Any:
        if verbose and quiet:
            raise click.UsageError("--verbose must not be given with --quiet.")
        return function(*args, verbose=verbose, quiet=quiet, **options)

    verbose = click.option("-v", "--verbose", count=True, help="Show what TensorRT and the stages log; -vv all of it.")
    quiet = click.option("-q", "--quiet", is_flag=True, help="Show only the result.")
    return cast("F", verbose(quiet(one)))


def tls_options(function: F) -> F:
    """`--tls DIR` and `--insecure`, of commands that connect to the scheduler of a fleet."""
    tls = click.option(
        "--tls",
        "credentials",
        metavar="DIR",
        type=InputPath(file_okay=False),
        help="This machine's folder of `trtpipe keygen --fleet`: certificates for the fleet.",
    )
    insecure = click.option(
        "--insecure", is_flag=True, help="Reach a scheduler on another machine without TLS; reports say so."
    )
    return tls(insecure(function))


class Seconds(click.FloatRange):
    """A time, 0 or more; `inf` is no limit. click's ranges hold NaN."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            click.BadParameter: it is none, or below 0.
        """
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("must be a number of seconds (got nan).", param, ctx)
        return seconds


def diagnose_option(function: F) -> F:
    """`--diagnose SECONDS`."""
    return click.option(
        "--diagnose",
        "diagnose_seconds",
        default=DIAGNOSE_SECONDS,
        show_default=True,
        type=Seconds(),
        metavar="SECONDS",
        help="After a failed check of a quantized engine, how long to look for the modules to blame; 0: not at all.",
    )(function)


def jobs_argument(function: F) -> F:
    """`JOB...`: files or folders."""
    return click.argument("jobs", nargs=-1, required=True, type=InputPath(piped=True))(function)


def job_files(paths: Iterable[Path], note: Callable[[str], None] = console.err) -> tuple[Path, ...]:
    """Every path that is no folder (a missing one fails when it is read), and the job files right in folders; `note` is
    told of jobs in their subfolders that no path of `paths` is.

    Raises:
        click.UsageError: a folder holds no job file.
    """
    paths = tuple(paths)
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(filter(is_job_file, path.iterdir()))
        if not inside:
            raise click.UsageError(f"JOB: {path} is a folder without a .yaml file (its subfolders are not read).")
        files.extend(inside)
        if below := [job for job in _jobs_below(path) if job not in paths and job.parent not in paths]:
            many = f"{len(below)} jobs, like {below[0]}" if len(below) > 1 else f"a job, {below[0]}"
            note(f"{path}: its subfolders are not read, which hold {many}: give those folders too if they are meant")
    first: dict[str, Path] = {}  # one file may be given in two spellings
    for file in files:
        first.setdefault(os.path.abspath(file), file)
    return tuple(first.values())


def _jobs_below(folder: Path) -> list[Path]:
    """The files right in the subfolders of a folder of jobs that are written as jobs are; bundles and kits have one."""
    below = [d for d in sorted(folder.iterdir()) if os.path.isdir(d) and not d.name.startswith(".")]
    found: list[Path] = []
    for inside in (d for d in below if not os.path.exists(d / MANIFEST)):
        with contextlib.suppress(OSError):  # it is only a hint: what may not be looked into holds none
            found += filter(is_job_file, sorted(inside.iterdir()))
    return [f for f in found if is_written_as_job(f)]

"""trtpipe build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from calib.types import JsonObject
from trtpipe.bundle.manifest import GRAPH, EngineFile
from trtpipe.bundle.signing import trusted_key
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import key_option, metric_line, said_lines, sign_option, signing
from trtpipe.cli.commands.options import (
    InputPath,
    device_option,
    diagnose_option,
    job_files,
    jobs_argument,
    json_option,
    loudness_options,
    out_option,
    refuse_cpu,
    refuse_unused,
    set_option,
)
from trtpipe.cli.each import Result, Work, each
from trtpipe.errors import FAILED, SUCCESS, ExitCode, InputError
from trtpipe.figures import CONFIDENCE_TEXT
from trtpipe.job.importable import on_path
from trtpipe.job.load import JobErrors, distinct_names
from trtpipe.job.problems import Problem
from trtpipe.pipeline.build import build
from trtpipe.pipeline.kit import finish_kit
from trtpipe.pipeline.replay import bundle_to_replay, compared, timing_cache_of, with_timing_cache
from trtpipe.pipeline.validate import Purpose, plan
from trtpipe.progress import size
from trtpipe.runtime.compatibility import admit
from trtpipe.values import ARCHIVE_SUFFIX, MANIFEST

if TYPE_CHECKING:
    from trtpipe.bundle.format import Bundle, Sign
    from trtpipe.job.job import Job
    from trtpipe.pipeline.build import Built
    from trtpipe.progress import Reporter
    from trtpipe.values import CheckReport

    #: Takes a reporter, and `sign` by that name.
    Building = Callable[..., Built]


@click.command("build", short_help="Build jobs, check each engine, write bundles.")
@jobs_argument
@out_option("out", "Folder the bundles go to, each under the name of its job.")
@device_option
@click.option(
    "--replay",
    metavar="BUNDLE",
    type=InputPath(file_okay=False),
    help="Build one JOB with this bundle's timing cache, and say whether its engine comes out the same.",
)
@set_option
@json_option
@sign_option
@key_option
@diagnose_option
@loudness_options
def command(
    jobs: tuple[Path, ...],
    out: Path,
    replay: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
    sign: Path | None,
    key: Path | None,
    diagnose_seconds: float,
    verbose: int,
    quiet: bool,
) -> ExitCode:
    """Build each JOB (files or folders), check the engine against its baseline, and write a bundle.

    A JOB may also be a kit of `trtpipe prepare`, whose engine is then built for this machine.
    """
    kits = tuple(p for p in jobs if (p / MANIFEST).is_file())
    if kits and overrides:
        raise click.UsageError("--set must not be given with a kit: its job is settled.")
    if not kits and replay is None and not any(p.name.endswith(ARCHIVE_SUFFIX) for p in jobs):  # a packed kit is named
        refuse_unused(("key",), "without a kit or --replay")
    elif kits and len(kits) == len(jobs):
        refuse_unused(("diagnose_seconds",), "with kits alone")
        refuse_cpu("with kits alone")
    with ExitStack() as stack:
        if len(kits) < len(jobs):
            stack.enter_context(on_path(None))
        loaded = load_jobs(tuple(p for p in jobs if p not in kits), overrides, verbose)
        if replay is not None and len(loaded) + len(kits) != 1:
            raise click.UsageError(f"--replay must be given with one job (got {len(loaded) + len(kits)}).")
        if kits and len(jobs) > 1:
            names = [(path, job.name) for path, job in loaded]
            if found := distinct_names([*names, *_named(kits, trusted_key(key))]):
                raise JobErrors(found)
        before = None if replay is None else bundle_to_replay(replay, trusted_key(key))

        signs = signing(sign)
        cache = None if before is None else stack.enter_context(timing_cache_of(before))
        if cache is not None:
            loaded = [(path, with_timing_cache(job, cache)) for path, job in loaded]
        building = partial(build, diagnose_seconds=diagnose_seconds)
        works = [work(path, job, partial(building, job, out), signs, before) for path, job in loaded]
        if kits:
            finish = partial(finish_kit, key=trusted_key(key), timing_cache=cache)
            works += [work(path, None, partial(finish, path, out), signs, before) for path in kits]
        return each(works, as_json=as_json, verbose=verbose, quiet=quiet)


def _named(kits: tuple[Path, ...], key: Path | None) -> Iterator[tuple[Path, str]]:
    """The kits that can be read, with their names: what is wrong with another is told when its turn comes."""
    for kit in kits:
        with suppress(InputError, OSError):
            yield kit, admit(kit, key)[0].manifest.name


def load_jobs(
    paths: tuple[Path, ...],
    overrides: tuple[str, ...],
    verbose: int,
    *,
    purpose: Purpose = "build",
    version: str | None = None,
) -> list[tuple[Path, Job]]:
    """Every job in `paths` with its file, found fit for its purpose here.

    One of several in a file has the name `file#name`.

    Raises:
        JobErrors: the problems of all of them at once; or that two have one name.
    """
    loaded: list[tuple[Path, Job]] = []
    problems: list[Problem] = []
    for path in job_files(paths):
        try:
            jobs = plan(path, overrides, purpose=purpose, version=version)
        except JobErrors as error:
            problems.extend(error.problems)
            continue
        several = len(jobs) > 1
        loaded += [(Path(f"{path}#{job.name}") if several else path, _logged(job, verbose)) for job in jobs]
    if found := problems or distinct_names((path, job.name) for path, job in loaded):
        raise JobErrors(found)
    return loaded


def work(
    path: Path, job: Job | None, task: Building, sign: Sign | None, replay: Bundle | None = None, *, kit: bool = False
) -> Work:
    """A task that ends with a bundle or a `kit`, signed by `sign` unless the check failed.

    The engine is held against that of `replay`.
    """
    return Work(path, partial(_result, path, task, sign, replay, kit), job)


def _result(
    path: Path, task: Building, sign: Sign | None, replay: Bundle | None, kit: bool, reporter: Reporter
) -> Result:
    built = task(reporter, sign=sign)
    signed = built.bundle.signature is not None
    lines = verdict(built.bundle.path.name, built.bundle.path, built.report, kit=kit)
    code = SUCCESS if built.report.passed else FAILED
    found: JsonObject = {
        "job": str(path),
        "bundle": str(built.bundle.path),
        "exit_code": code,
        "check": built.report,
        "signed": signed,
    }
    if replay is not None:
        found["replay"] = replayed = compared(replay, built.bundle)
        lines.append(f"  replay: {replayed}")
    if sign is not None and not signed:
        lines.append("  not signed, as the check failed")
    return Result(code, found, "\n".join(lines))


def _logged(job: Job, verbose: int) -> Job:
    """The job with TensorRT's log level as -v and -vv ask; without them it is the job's own."""
    if not verbose:
        return job
    build = job.build.model_copy(update={"log_level": "info" if verbose == 1 else "verbose"})
    return job.model_copy(update={"build": build})


def verdict(name: str, bundle: Path, report: CheckReport, *, kit: bool = False) -> list[str]:
    """The result of a build in a few lines: what was executed, each figure beside its limit, where the bundle or the
    `kit` is."""
    word = "passed" if report.passed else "FAILED"
    lines = [f"{name}: {word}, {report.who}"]
    several = len({m.output for m in report.metrics}) > 1
    for metric in report.metrics:
        label = f"{metric.output}.{metric.name}" if several else metric.name
        spread = f"{CONFIDENCE_TEXT} {metric.interval_text}" if metric.interval_text else ""
        lines.append(metric_line(label, metric, spread))
    lines += said_lines(report)
    engine = next((bundle / f for f in get_args(EngineFile) if (bundle / f).is_file()), None)
    if engine is not None:
        lines.append(f"  {engine.name}: {size(engine.stat().st_size)}")
    if report.executed == "graph" and engine is not None and engine.name != GRAPH:
        lines.append("  The graph was executed, not the engine: run `trtpipe check` on the bundle where its GPU is.")
    lines.append(f"  {'kit' if kit else 'bundle'}: {console.relative(bundle)}")
    return lines

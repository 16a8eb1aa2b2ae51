"""trtpipe nightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from calib.types import JsonObject
from trtpipe.atomic import write_whole
from trtpipe.bundle.manifest import REPORT
from trtpipe.cli import console
from trtpipe.cli.commands.bundles import sign_option, signing
from trtpipe.cli.commands.options import (
    InputPath,
    OutputFile,
    cache_option,
    cache_or_users,
    device_option,
    diagnose_option,
    job_files,
    json_option,
    out_option,
    refuse_unused,
    set_option,
    tls_options,
)
from trtpipe.cli.watching import Jobs
from trtpipe.errors import SUCCESS, ExitCode
from trtpipe.job.importable import on_path
from trtpipe.nightly.history import History
from trtpipe.nightly.history_plot import series
from trtpipe.nightly.options import HISTORY, JSON_REPORT, NOT_REPEATED, PAGE, TEXT_REPORT, Options
from trtpipe.nightly.outcome import NightlyReport, lines, to_json
from trtpipe.nightly.page import render
from trtpipe.nightly.regressions import parse_limits
from trtpipe.nightly.run import explain, nightly
from trtpipe.pipeline.cache.store import DEFAULT_LIMIT_BYTES, parse_bytes


@click.command("nightly", short_help="Rebuild what changed of many jobs; one report.")
@click.argument("jobs", nargs=-1, type=InputPath())
@out_option("out", "Folder of the bundles, the report and the history.")
@device_option
@set_option
@click.option("--workers", type=click.IntRange(min=0), help="Processes for jobs without a GPU; 0: this one alone.")
@click.option("--memory", metavar="SIZE", help="What all jobs together may take, like 16GB; what is free when absent.")
@click.option("--scheduler", metavar="ADDRESS", default="", help="Dask scheduler of a fleet, like tls://host:8786.")
@tls_options
@cache_option
@click.option(
    "--cache-size",
    metavar="SIZE",
    default=f"{DEFAULT_LIMIT_BYTES // 10**9}GB",
    show_default=True,
    help="What the cache may take.",
)
@click.option("--store", metavar="URL", default="", help="Share the cache: file://, s3:// or gs:// (fsspec).")
@click.option("--history", "history_file", type=OutputFile(), help=f"SQLite file; OUT/{HISTORY} when absent.")
@click.option("--force", is_flag=True, help="Build everything, whatever the cache has.")
@click.option("--explain", "explains", is_flag=True, help="Say what would be built and why, and build nothing.")
@click.option("--resume", is_flag=True, help="Go on with the run that was stopped.")
@click.option(
    "--repeat", type=click.IntRange(min=2), help="Build each job N times without a cache; report differences."
)
@click.option(
    "--limit", "limits", multiple=True, metavar="FIGURE=VALUE", help="How much worse a figure may become, or off."
)
@click.option("--accept", multiple=True, metavar="GLOB", help="Regressions of these jobs are the new normal.")
@sign_option
@diagnose_option
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Show only the report.")
@on_path(None)
def command(jobs: tuple[Path, ...], as_json: bool, quiet: bool, explains: bool, **given: Any) -> ExitCode:
    """Build each JOB (files or folders) whose inputs changed, hold the results against the past, write one report.

    Exit code 1 for a regression, a failed check or drift; else the highest code of a job that could not be built.
    """
    options = _options(jobs, explains, **given)
    if explains:
        return _explain(options, as_json)
    with Jobs(quiet=quiet or as_json).watching() as watcher:
        report = nightly(options, watcher)
    pages = _write(report, options)
    if as_json:
        console.out(to_json(report).rstrip())
    else:
        for line in lines(report):
            console.out(line)
        console.out(f"report: {console.relative(pages[-1])}")
    return report.exit_code


def _explain(options: Options, as_json: bool) -> ExitCode:
    """Say what would be built and why; the highest exit code of what cannot be planned."""
    for note in options.notes:
        console.err(note)
    reasons, errors = explain(options)
    for o in errors:
        console.err(o.error)
    if as_json:
        listed: list[JsonObject] = [{"name": name, "build": bool(why), "reasons": why} for name, why in reasons]
        listed += [{"name": o.name, "error": o.error, "exit_code": o.exit_code} for o in errors]
        console.out_json(listed)
    else:
        for name, why in reasons:
            console.out(f"{name}: {'build: ' + '; '.join(why) if why else 'reuse'}")
        for o in errors:
            console.out(f"{o.name}: error, exit code {o.exit_code}")
    return max((o.exit_code for o in errors), default=SUCCESS)


def _options(jobs: tuple[Path, ...], explains: bool, **given: Any) -> Options:
    if not jobs and not given["resume"]:
        raise click.UsageError("JOB... must be given, or --resume.")
    if explains:
        unused = ("sign", "diagnose_seconds", "resume", "limits", "accept", "repeat", "workers", "memory", "cache_size")
        refuse_unused(unused, "with --explain")
    if given["repeat"]:
        refuse_unused(("limits", "accept", "store", "force", *NOT_REPEATED), "with --repeat")
    if given["scheduler"]:
        refuse_unused(("workers", "memory"), "with --scheduler")
    if not given["scheduler"] and (given["credentials"] or given["insecure"]):
        raise click.UsageError("--tls and --insecure must be given with --scheduler.")
    out = given["out"]
    notes: list[str] = []
    return Options(
        jobs=job_files(jobs, notes.append),
        out=out,
        cache=cache_or_users(given["cache"]),
        history=given["history_file"] or out / HISTORY,
        store=given["store"],
        overrides=given["overrides"],
        workers=given["workers"],
        scheduler=given["scheduler"],
        memory_bytes=parse_bytes(given["memory"], "--memory") if given["memory"] else None,
        cache_limit_bytes=parse_bytes(given["cache_size"], "--cache-size"),
        force=given["force"],
        resume=given["resume"],
        repeat=given["repeat"] or 0,
        accept=given["accept"],
        limits=parse_limits(given["limits"]),
        sign=signing(given["sign"]),
        diagnose_seconds=given["diagnose_seconds"],
        credentials=given["credentials"],
        insecure=given["insecure"],
        notes=tuple(notes),
    )


def _write(report: NightlyReport, options: Options) -> list[Path]:
    """The report's files, each whole or not at all; the page last."""
    out: Path = options.out
    written = []
    for name, text in {
        JSON_REPORT: to_json(report),
        TEXT_REPORT: "\n".join(lines(report)) + "\n",
        **_page(report, options),
    }.items():
        write_whole(out / name, text)
        written.append(out / name)
    return written


def _page(report: NightlyReport, options: Options) -> dict[str, str]:
    """The HTML page; none where jinja2 is not installed, as on a device."""
    try:
        with History(options.history) as history:
            past = {name: series(results) for name, results in history.recent(report.run).items()}
        links = {o.name: f"{o.name}/{REPORT}" for o in report.outcomes if Path(o.bundle, REPORT).is_file()}
        return {PAGE: render(report, past, links)}
    except ModuleNotFoundError as error:
        if error.name == "jinja2":
            return {}
        raise

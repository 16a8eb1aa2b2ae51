"""trtpipe worker."""

from __future__ import annotations

from pathlib import Path

import click

from trtpipe.cli import console
from trtpipe.cli.commands.options import cache_option, cache_or_users, tls_options
from trtpipe.job.importable import on_path
from trtpipe.nightly.fleet_worker import serve


@click.command("worker", short_help="Build jobs for a fleet's scheduler.")
@click.argument("scheduler", metavar="ADDRESS")
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="Announce this too, like jetson-orin.")
@click.option("--name", default="", help="What reports call this worker; host and process when absent.")
@cache_option
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a job; all cores when absent.")
@tls_options
@click.option("--gpu", type=click.IntRange(min=0), help="CUDA index of the GPU it uses; start one worker for each.")
@on_path(None)
def command(
    scheduler: str,
    tags: tuple[str, ...],
    name: str,
    cache: Path | None,
    threads: int | None,
    gpu: int | None,
    credentials: Path | None,
    insecure: bool,
) -> None:
    """Build jobs that `trtpipe nightly --scheduler` sends by the Dask scheduler at ADDRESS, like tls://host:8786.

    A client of the scheduler runs code here: one on another machine needs a certificate (--tls). The worker
    announces its GPU (sm87), its TensorRT (tensorrt=10.3), its processor and its tags.
    """
    serve(
        scheduler,
        ready=lambda: console.err(f"worker of {scheduler}; stop it with Ctrl-C"),
        tags=tags,
        name=name,
        cache=cache_or_users(cache),
        threads=threads,
        gpu=gpu,
        credentials=credentials,
        insecure=insecure,
    )

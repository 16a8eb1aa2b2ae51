"""trtpipe worker."""
from __future__ import annotations
import click
@click.command("worker")
def command() -> int:
    """x"""
    return 0

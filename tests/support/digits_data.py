"""The quickstart's data where a job looks for them."""

from __future__ import annotations

from pathlib import Path


def link_digits(made: Path, folder: Path) -> None:
    """`folder` with what `made` holds, as links: to copy and to remove two thousand images takes ten seconds."""
    folder.mkdir(parents=True)
    for item in made.iterdir():
        (folder / item.name).symlink_to(item)

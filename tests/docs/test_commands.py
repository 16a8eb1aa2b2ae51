"""Commands that stand in the docs and are not run there name subcommands and options that exist; YAML that is shown parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pages
import pytest
import yaml

from trtpipe.cli.main import COMMANDS, group
from trtpipe.job.job import Job

#: What a job file may have beside its sections.
_BESIDE = {"matrix"}


def shown(page: Path) -> list[tuple[int, str]]:
    """(line, command) of each trtpipe command in an indented block or in a block that is not run."""
    lines = page.read_text(encoding="utf-8").splitlines()
    indented = [(i, line[4:]) for i, line in enumerate(lines, 1) if line.startswith("    trtpipe ")]
    skipped = [
        (block.line, line.removeprefix("$ "))
        for block in pages.blocks(page)
        if block.skip is not None and block.language == "console"
        for line in block.text.splitlines()
        if line.startswith("$ trtpipe ")
    ]
    return indented + skipped


PAGES = sorted([pages.ROOT / "README.md", *(pages.ROOT / "docs").glob("*.md")])
SHOWN = [(page.name, line, command) for page in PAGES for line, command in shown(page)]


def parsed(command: str) -> None:
    """Let click read a command without running it; AssertionError where it cannot."""
    words = shlex.split(command, comments=True)
    words = words[1 : words.index(">")] if ">" in words else words[1:]
    assert words[0] in COMMANDS, f"{words[0]} is no command"
    found = group.get_command(click.Context(group), words[0])
    assert found is not None
    found.make_parser(click.Context(found)).parse_args(words[1:])


@pytest.mark.parametrize(("page", "line", "command"), SHOWN, ids=[f"{p}:{n}" for p, n, _ in SHOWN])
def test_a_shown_command_exists(page: str, line: int, command: str) -> None:
    parsed(command)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_in_the_docs(name: str) -> None:
    assert any(re.search(rf"\btrtpipe {name}\b", page.read_text(encoding="utf-8")) for page in PAGES)


def test_a_shown_command_that_does_not_exist_is_found() -> None:
    assert len(SHOWN) > 10
    for wrong in ("trtpipe bild job.yaml", "trtpipe build job.yaml --sing key"):
        with pytest.raises((AssertionError, click.NoSuchOption)):
            parsed(wrong)


def test_yaml_that_is_only_shown_has_keys_of_a_job() -> None:
    keys = {*Job.model_fields, *_BESIDE}
    found = 0
    for page in PAGES:
        for block in pages.blocks(page):
            if block.language == "yaml" and not block.active:
                data = (
                    yaml.safe_load(re.sub(r"^\.\.\.$", "", block.text, flags=re.M)) or {}
                )  # job-file.md shows a comment
                assert set(data) <= keys, f"{block}: {sorted(set(data) - keys)}"
                found += 1
    assert found >= 3

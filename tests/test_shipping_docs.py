"""The commands shown in the pages on bundles, security and images are commands that there are."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import click
import pytest

from trtpipe.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = ("docs/bundle.md", "docs/security.md", "docker/README.md")


def shown(page: str) -> list[list[str]]:
    """The arguments of each trtpipe command in the page's blocks, what follows a # or > left out."""
    found = []
    for line in (ROOT / page).read_text().replace("\\\n", "").splitlines():
        if match := re.match(r"    (?:trtpipe |docker run .* trtpipe:\w+ )([^#>]*)", line):
            found.append(match.group(1).split())
    return found


@pytest.mark.parametrize(("page", "arguments"), [(p, a) for p in PAGES for a in shown(p)], ids=str)
def test_command_and_options_exist(page: str, arguments: list[str]) -> None:
    name, *rest = arguments
    module, _, function = COMMANDS[name].partition(":")
    command: click.Command = getattr(import_module(module), function)
    options = {o for p in command.params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)}
    assert {a for a in rest if a.startswith("-")} <= options


def test_every_page_shows_some() -> None:
    assert all(len(shown(page)) >= 3 for page in PAGES)


def test_every_manifest_key_is_on_its_page() -> None:
    from trtpipe.bundle.manifest import EngineInfo, Manifest

    page = (ROOT / "docs/bundle.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    assert set(Manifest.model_fields) <= documented
    assert set(EngineInfo.model_fields) <= documented

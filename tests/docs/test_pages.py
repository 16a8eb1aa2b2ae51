"""The README and the docs do what they say: every command and every Python block, in order."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pages
import pytest

#: Pages that are read from a checkout; the others begin in an empty folder.
FROM_CHECKOUT = ("README.md", "examples.md", "python.md", "shipping.md", "choosing.md")
PAGES = sorted([pages.ROOT / "README.md", *(pages.ROOT / "docs").glob("*.md")])
#: Blocks that are run; those that say `skip` are held by the test below to say so to readers too.
BLOCKS = [block for page in PAGES for block in pages.blocks(page) if block.active and block.skip is None]


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pages.Reader]:
    return {}


def reader_of(page: Path, readers: dict[str, pages.Reader], tmp_path_factory: pytest.TempPathFactory) -> pages.Reader:
    """The reader of a page; those who begin in a checkout share one, as a person would."""
    key = "checkout" if page.name in FROM_CHECKOUT else page.name
    if key not in readers:
        folder = tmp_path_factory.mktemp(key.partition(".")[0]) / ("trtpipe" if key == "checkout" else "shapes")
        folder.mkdir()
        if key == "checkout":
            for name in ("Makefile", "pyproject.toml"):
                shutil.copy(pages.ROOT / name, folder / name)
            shutil.copytree(pages.ROOT / "configs", folder / "configs")
        readers[key] = pages.Reader(folder)
    return readers[key]


@pytest.mark.parametrize("block", BLOCKS, ids=map(str, BLOCKS))
def test_block(block: pages.Block, readers: dict[str, pages.Reader], tmp_path_factory: pytest.TempPathFactory) -> None:
    reader = reader_of(block.page, readers, tmp_path_factory)
    if block.page.name != "README.md" and block.language == "python" and block.file is None:
        reader = pages.Reader(
            reader.folder, readers.setdefault(block.page.name + " names", pages.Reader(reader.folder)).names
        )
    reader.do(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_skipped_block_says_so_where_people_read(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in pages.blocks(page):
        if block.skip is not None:
            before = "\n".join(text.splitlines()[max(0, block.line - 6) : block.line - 1])
            assert re.search(r"GPU|Jetson|Orin|device|pip|Docker|server|network", before), (
                f"{block} is skipped silently"
            )


def test_blocks_are_found_and_transcripts_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        'a\n```console\n$ echo one \\\n  two\none two\n$ echo 3.14 s\n... s\n```\n\n```console skip="needs a GPU"\n$ false\n```\n'
        "```python\nx = 1\n```\n```python\nassert x == 1\n```\n```yaml file=sub/a.yaml\nname: b\n```\n```text\nno\n```\n"
    )
    first, skipped, *rest = pages.blocks(page)
    assert pages.commands(first.text) == [("echo one \\\n  two", "one two\n"), ("echo 3.14 s", "... s\n")]
    assert (skipped.skip, skipped.active, rest[-1].active) == ("needs a GPU", True, False)
    folder = tmp_path / "reader"
    folder.mkdir()
    reader = pages.Reader(folder)
    for block in (first, *rest[:3]):
        reader.do(block)
    assert (folder / "sub/a.yaml").read_text() == "name: b\n"
    with pytest.raises(AssertionError, match="exit code 1"):
        reader.do(skipped)
    with pytest.raises(AssertionError, match="the page says"):
        reader.do(pages.Block(page, 1, "console", "$ echo a\nb\n"))


def test_any_number_may_stand_where_the_page_has_one(tmp_path: Path) -> None:
    reader = pages.Reader(tmp_path / "reader")
    reader.folder.mkdir()
    page = tmp_path / "page.md"
    text = "$ echo cosine 0.25 in 1.5e-3 s, 80 images\ncosine 0.99 in 2 s, 80 images\n"
    reader.do(pages.Block(page, 1, "console", text, any_number=True))
    with pytest.raises(AssertionError, match="the page says"):
        reader.do(pages.Block(page, 1, "console", text))
    with pytest.raises(AssertionError, match="the page says"):
        reader.do(pages.Block(page, 1, "console", text.replace("2 s, 80 images", "2 s, 80 pictures"), any_number=True))

"""Both pages in a real Chromium, at a phone's and a desk's width, light and dark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import chromium
import night_sample as nights
import pytest
import report_sample as samples

from trtpipe.nightly.page import render as render_nightly
from trtpipe.report.page import render

_LAYOUT = Path(__file__).with_name("layout.js").read_text()
_SECTIONS = {
    "report": ["verdict", "executed", "metrics", "answers", "modules", "calibration", "speed", "notes", "environment"],
    "nightly": ["verdict", "jobs", "machine"],
}

pytestmark = pytest.mark.skipif(
    chromium.program() is None,
    reason="needs Chromium: apt-get install chromium (looked for " + ", ".join(chromium.NAMES) + ")",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    with chromium.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "report": render(samples.content(folder)),
        "undecided": render(samples.undecided(folder)),
        "hostile": render(samples.hostile(folder)),
        "nightly": render_nightly(nights.NIGHT, nights.HISTORY, nights.LINKS),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["report", "undecided", "hostile", "nightly"])
def test_nothing_is_cut_overlaps_or_is_empty(
    browser: chromium.Browser, pages: dict[str, Path], tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    browser.look(width, scheme)
    browser.open(pages[name])
    browser.run("document.querySelectorAll('details').forEach(function (d) { d.open = true; })")
    assert "\n".join(browser.run(_LAYOUT)) == ""
    folder = Path(os.environ.get("TRTPIPE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    shot = folder / f"{name}-{width}-{scheme}.png"
    browser.screenshot(shot)
    _is_a_picture_of(shot, width, scheme)


def _is_a_picture_of(shot: Path, width: int, scheme: str) -> None:
    from PIL import Image

    with Image.open(shot) as image:
        assert image.width == width
        corner = image.convert("L").getpixel((2, 2))
    assert isinstance(corner, int)
    assert (corner > 200) == (scheme == "light")


@pytest.mark.parametrize("name", ["report", "nightly"])
def test_every_section_is_there(browser: chromium.Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    ids = browser.run("Array.from(document.querySelectorAll('section, header.verdict'), function (e) { return e.id; })")
    assert ids == _SECTIONS[name]


def test_a_click_sorts_by_number_and_a_second_one_turns_it(browser: chromium.Browser, pages: dict[str, Path]) -> None:
    browser.look(1280, "light")
    browser.open(pages["report"])
    column = "Array.from(document.querySelectorAll('table.sortable tbody tr'), function (r) { return r.cells[2].innerText; })"
    click = "document.querySelectorAll('table.sortable th button')[2].click()"
    before = browser.run(column)
    browser.run(click)
    values = [float(text.split()[0]) for text in browser.run(column) if "dB" in text]
    assert len(values) >= 3
    assert values == sorted(values)
    assert browser.run(column) != before
    browser.run(click)
    values = [float(text.split()[0]) for text in browser.run(column) if "dB" in text]
    assert values == sorted(values, reverse=True)


def test_pages_ask_no_network_and_run_no_script_of_a_name(browser: chromium.Browser, pages: dict[str, Path]) -> None:
    for page in pages.values():
        browser.events.clear()
        browser.open(page)
        asked = [
            e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"
        ]
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert [e for e in browser.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")] == []
        assert browser.run("window.taken === undefined")
        assert browser.run("document.querySelectorAll('script').length") <= 1

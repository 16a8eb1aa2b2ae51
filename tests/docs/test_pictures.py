"""The pictures of the docs are what their program draws today, and each one is on a page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"


def test_the_pictures_are_drawn_by_the_code(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "pictures.py", tmp_path], cwd=ROOT, check=True)
    drawn = "draw them again: python docs/pictures.py"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in PICTURES.iterdir()), drawn
    for path in PICTURES.iterdir():
        assert _rounded(path.read_text()) == _rounded((tmp_path / path.name).read_text()), f"{path.name}: {drawn}"


def test_every_picture_is_on_a_page_and_every_link_leads_to_one() -> None:
    pages = (ROOT / "docs").glob("*.md")
    shown = {m for page in pages for m in re.findall(r"!\[[^\]]+\]\(pictures/([^)]+)\)", page.read_text())}
    assert shown == {p.name for p in PICTURES.iterdir()}


def _rounded(svg: str) -> str:
    """Numbers to a tenth of a point: another processor may differ in the last digits."""
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}", svg)

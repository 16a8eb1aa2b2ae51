"""The quickstart's own report, in a real Chromium: every section is filled from it, and nothing is cut or overlaps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import chromium
import pytest
from digits_data import link_digits

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["verdict", "executed", "metrics", "answers", "modules", "calibration", "speed", "notes", "environment"]

pytestmark = [pytest.mark.acceptance, pytest.mark.skipif(chromium.program() is None, reason="needs Chromium")]


def test_every_section_is_filled_from_the_quickstart(tmp_path: Path, digits: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    link_digits(digits, tmp_path / "data" / "digits")
    command = [sys.executable, "-m", "trtpipe", "build", "configs/quickstart.yaml", "-q", "--set", "check.bench=true"]
    # Without a C++ compiler: what torch.compile makes is `tests/evaluation/test_modes.py`'s, and takes half a minute.
    subprocess.run(command, cwd=tmp_path, check=True, env={"PYTHONPATH": str(ROOT), "PATH": str(tmp_path)})
    layout = Path(__file__).with_name("layout.js").read_text()
    (tmp_path / "profile").mkdir()
    with chromium.browser(tmp_path / "profile") as page:
        for width in (390, 1280):
            for scheme in ("light", "dark"):
                page.look(width, scheme)
                page.open(tmp_path / "out" / "quickstart" / "report.html")
                ids = "Array.from(document.querySelectorAll('section, header.verdict'), function (e) { return e.id; })"
                assert page.run(ids) == SECTIONS
                assert "\n".join(page.run(layout)) == ""
        assert page.run("document.querySelectorAll('#answers img').length") == 12
        assert page.run("document.querySelectorAll('#calibration svg.hist').length") == 10
        assert page.run("document.querySelectorAll('#modules tbody tr').length") == 14
        assert "Alone quantized" in page.run("document.querySelector('#modules thead').textContent")
        assert page.run("document.querySelectorAll('#speed tbody tr').length") > 2  # a row for each mode
        cells = "document.querySelectorAll('#speed td[data-name^=median]')"
        medians = page.run(f"Array.from({cells}, function (e) {{ return e.textContent; }})")
        assert all(float(text.replace(",", "")) > 0 for text in medians if text != "–")
        assert len([text for text in medians if text != "–"]) > 2

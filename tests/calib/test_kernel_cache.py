"""Where the compiled counting loop is kept, and that it counts where it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import calib

COUNT = """
import pwd
if {homeless}:
    pwd.getpwuid = lambda uid: {{}}[uid]
from calib.histogram import Histogram
from calib.observers import HistogramObserver
import torch
observer = HistogramObserver()
values = torch.arange(100_000.0) - 5
observer.observe(values)
assert observer.histogram == Histogram.of(values.numpy())
"""


@pytest.mark.parametrize("homeless", [True, False])
def test_it_counts_where_nothing_can_be_kept(homeless: bool, tmp_path: Path) -> None:
    """Neither beside the module nor in a home: as of a container's user."""
    site = tmp_path / "site"
    shutil.copytree(Path(calib.__file__).parent, site / "calib", ignore=shutil.ignore_patterns("__pycache__"))
    here = tmp_path / "here"
    here.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    environment |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {} if homeless else {"HOME": "/proc/nowhere"}
    (site / "calib" / "__pycache__").write_text("no folder, so nothing can be kept beside the module")
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(homeless=homeless)], cwd=here, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(here.iterdir()) == []

"""Where modules of a job are looked up, and that the path is left as it was."""

from __future__ import annotations

import sys

from trtpipe.job.importable import on_path


def test_the_path_is_as_it_was_in_the_order_it_was(tmp_path, monkeypatch):
    """The current folder may stand on the path already, before what is installed: it must not move behind it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/installed", str(tmp_path / "other")])
    before = list(sys.path)
    with on_path(tmp_path / "other"):
        assert sys.path == [str(tmp_path / "other"), *before, str(tmp_path)]
    assert sys.path == before

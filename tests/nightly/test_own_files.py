"""A job cannot have the name of a file that the night writes beside the bundles."""

from __future__ import annotations

from pathlib import Path

import nights
import pytest

from trtpipe.cli.main import main

OWN = ("nightly.html", "nightly.json", "nightly.txt", "history.sqlite", "history.sqlite-wal", "history.sqlite-journal")


@pytest.mark.parametrize("name", OWN)
def test_a_job_named_like_one_is_refused_before_it_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), name)
    places = ["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main(["nightly", str(job), *places, "-q", "--workers", "0"]) == 2
    assert f"name: must not be that of a file of the night (got {name!r}). Rename the job." in capsys.readouterr().out
    assert not (tmp_path / "out" / name).is_dir()

"""What stands in a night's folder: its own files, whose names no job can have, and bundles of other inputs."""

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


def test_inputs_that_come_back_are_said_to_be_those_of_an_earlier_night(tmp_path: Path) -> None:
    """The bundle that their own replaces is whole, and nobody has touched it."""
    jobs = nights.make_world(tmp_path / "jobs")
    nights.write_job(jobs, "j", "build: {target: onnxruntime}\n")
    weights = jobs / "w0.safetensors"
    first = weights.read_bytes()
    nights.night(tmp_path)
    nights.write_weights(weights, scale=1.1)
    assert nights.outcomes(nights.night(tmp_path)) == {"j": "built"}
    weights.write_bytes(first)
    report = nights.night(tmp_path)
    assert nights.outcomes(report) == {"j": "reused"}
    assert report["notes"] == ["j: its bundle in out was built of other inputs, and was put back from the cache"]


def test_what_the_code_reads_beside_the_bundles_is_watched(tmp_path: Path) -> None:
    """A teacher's scales, or the data of another bundle: in the folder that the night writes to, and no file of its."""
    jobs = nights.make_world(tmp_path / "jobs")
    read = tmp_path / "out" / "other" / "v"
    source = f"from net import net\ndef make():\n    open({str(read)!r}).read()\n    return net()\n"
    (jobs / "scaled.py").write_text(source)
    path = nights.write_job(jobs, "j", "build: {target: onnxruntime}\n")
    path.write_text(path.read_text().replace("net:net", "scaled:make"))
    read.parent.mkdir(parents=True)
    for content, outcome in (("1", "built"), ("1", "reused"), ("2", "built"), ("2", "reused")):
        read.write_text(content)
        assert nights.outcomes(nights.night(tmp_path)) == {"j": outcome}

"""A tuned job stands beside the one it was made of: a folder, and a night, with both builds both."""

from __future__ import annotations

import json
from pathlib import Path

import nights
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtpipe.cli.main import main
from trtpipe.job.load import read_job
from trtpipe.outputs import MOST_NAME, PLAIN_NAME
from trtpipe.pipeline.tune import TUNED, renamed

INT8 = "precision: {int8_mode: true}\nbuild: {target: onnxruntime}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a job, and what `trtpipe tune` wrote beside it."""
    monkeypatch.chdir(tmp_path)
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), "m", INT8)
    assert main(["tune", str(job), "-o", "out", "-q"]) == 0
    return tmp_path / "jobs"


@pytest.mark.parametrize("line", [("build",), ("nightly", "--workers", "0", "--cache", "cache")], ids=lambda x: x[0])
def test_both_are_built(folder: Path, line: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(p.name for p in folder.glob("*.yaml")) == ["m.tuned.yaml", "m.yaml"]
    assert [read_job(folder / f"{n}.yaml").name for n in ("m", "m.tuned")] == ["m", "m-tuned"]
    assert main([line[0], str(folder), *line[1:], "-o", "built", "-q"]) == 0
    assert {p.parent.name for p in Path("built").glob("*/manifest.json")} == {"m", "m-tuned"}


@given(
    name=st.one_of(
        st.from_regex(PLAIN_NAME, fullmatch=True).filter(lambda n: n.isascii() and len(n) <= MOST_NAME),
        st.integers(1, MOST_NAME).map(lambda n: "a" * n),
        st.integers(1, MOST_NAME - len(TUNED)).map(lambda n: "a" * n + TUNED),
    ),
    again=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tuned_job_has_a_name_of_its_own_that_a_job_may_have(tmp_path: Path, name: str, again: bool) -> None:
    if not (tmp_path / "m.yaml").exists():
        nights.write_job(nights.make_world(tmp_path), "m", INT8)
    job = read_job(tmp_path / "m.yaml", [f"name={json.dumps(name)}"])
    names = [job.name]
    for _ in range(1 + again):
        job = renamed(job)
        names.append(job.name)
        assert read_job(tmp_path / "m.yaml", [f"name={json.dumps(job.name)}"]).name == job.name
    assert len(set(names)) == len(names)


def test_a_tuned_job_that_is_tuned_again_keeps_apart(folder: Path) -> None:
    assert main(["tune", str(folder / "m.tuned.yaml"), "-o", "out", "-q"]) == 0
    names = [read_job(p).name for p in folder.glob("*.yaml")]
    assert len(set(names)) == 3


def test_the_job_itself_is_never_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = folder / "m.yaml"
    before = job.read_bytes()
    Path("link.yaml").symlink_to(job)
    for target in (job, Path("jobs/../jobs/m.yaml"), Path("link.yaml")):
        assert main(["tune", str(job), "--write", str(target), "-o", "out", "-q"]) == 2
        said = f"{target}: must not be what is read ({job}), which would be destroyed. Choose another place."
        assert said in capsys.readouterr().err
    assert job.read_bytes() == before


def test_the_current_folder_is_no_place_where_a_tuned_jobs_code_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another one the job could not be built, unless PYTHONPATH names it."""
    monkeypatch.chdir(folder)
    Path("sub").mkdir()
    asked = ["tune", "m.yaml", "--write", "sub/t.yaml", "-o", "../out", "-q"]
    assert main(asked) == 2
    assert "and from there nothing" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", f"{folder}/")
    monkeypatch.syspath_prepend(str(folder))
    assert main(asked) == 0


def test_a_tuned_job_is_written_where_its_code_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere it would build another network, or none."""
    where = Path("elsewhere")
    where.mkdir()
    for found in ("nothing", where.resolve() / "net.py"):
        if found != "nothing":
            found.write_text("def net(): return None\n")
        assert main(["tune", str(folder / "m.yaml"), "--write", "elsewhere/t.yaml", "-o", "out", "-q"]) == 2
        assert capsys.readouterr().err.strip() == (
            f"model.factory: must be found from {where.resolve()} as it is from the job's own folder (got "
            f"{(folder / 'net.py').resolve()}, and from there {found}). Write beside the job, or set PYTHONPATH."
        )
        assert not (where / "t.yaml").exists()
    (where / "net.py").unlink()
    (where / "net.py").symlink_to(folder / "net.py")
    assert main(["tune", str(folder / "m.yaml"), "--write", "elsewhere/t.yaml", "-o", "out", "-q"]) == 0
    assert read_job(where / "t.yaml").model.factory == "net:net"

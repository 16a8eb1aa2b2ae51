"""A job that is written is read back as the same job, whatever text is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import GOOD, good_folder

from trtpipe.job.dump import job_text, write_job
from trtpipe.job.load import read_job
from trtpipe.job.yamlfile import parse

TEXTS = [
    "1e3", "0o7", "0x1F", "1_000", "12:30", "1.", ".5", "+.inf", ".NaN", "~", "", "null", "yes", "No", "=", "<<",
    "a: b", "a #b", "- a", "a\u0085b", "\u2028\u0085", "a\u2029b", "\ufeffa", "a\nb", "\ta", " a ", "'a'", '"a"',
    "\\n", "\x07", "é", "\U0001f600", "2026-11-27", "0b11", "!x", "&a", "*a", "%a", "@a", "`a", "{a}", "[a]", "?",
    "x" * 300, "x y " * 90,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jobs")
    good_folder(path)
    return path


def read_back(folder: Path, args: dict[str, object]) -> object:
    (folder / "job.yaml").write_text(GOOD)
    job = read_job(folder / "job.yaml")
    changed = job.model_copy(update={"model": job.model.model_copy(update={"args": args})})
    return parse(job_text(changed, folder)).data["model"]["args"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_text(folder: Path, text: str) -> None:
    args: dict[str, object] = {"a": text, "b": [text, {"c": text}]}
    assert read_back(folder, args) == args


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_stays_text(folder: Path, text: str) -> None:
    assert read_back(folder, {"a": text}) == {"a": text}


def test_what_reads_back_as_another_job_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "job.yaml").write_text(GOOD)
    job, target = read_job(folder / "job.yaml"), folder / "tuned.yaml"
    write_job(job, target, "first")
    before = target.read_text()
    monkeypatch.setattr("trtpipe.job.dump.job_text", lambda job, folder: GOOD.replace("name: ", "name: other-"))
    with pytest.raises(AssertionError, match=r"tuned\.yaml reads back as another job"):
        write_job(job, target, "second")
    assert target.read_text() == before
    assert sorted(p.name for p in folder.iterdir() if "tuned" in p.name) == ["tuned.yaml"]


def test_paths_are_relative_in_lists_too(folder: Path) -> None:
    (folder / "job.yaml").write_text(GOOD)
    (folder / "lib").mkdir()
    plugins = tuple(str(folder / "lib" / name) for name in ("a.so", "b.so"))
    job = read_job(folder / "job.yaml")
    changed = job.model_copy(update={"build": job.build.model_copy(update={"plugins": plugins})})
    assert parse(job_text(changed, folder)).data["build"]["plugins"] == ["lib/a.so", "lib/b.so"]

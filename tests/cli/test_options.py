"""Options that exclude each other, or that a command would not use, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import shipping

from trtpipe.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run c x.png --iterations 5", "--iterations must not be given without --benchmark: nothing would use it."),
        ("run c x.png --raw --top 2", "--top must not be given with --raw: nothing would use it."),
        ("run c --benchmark -o x.csv", "--output must not be given with --benchmark: nothing would use it."),
        ("run c --benchmark --format csv", "--format must not be given with --benchmark: nothing would use it."),
        ("run c --benchmark --top 2", "--top must not be given with --benchmark: nothing would use it."),
        ("run c --benchmark --raw", "--raw must not be given with --benchmark: nothing would use it."),
        ("bench b.json --rounds 5", "--rounds must not be given with a .json of --save: nothing would use it."),
        ("bench b.json --set name=x", "--set must not be given with a .json of --save: nothing would use it."),
        ("bench b.json --device cpu", "--device must not be given with a .json of --save: nothing would use it."),
        ("bench c --device cpu", "--device must not be given with a bundle: nothing would use it."),
        ("build c --device cpu", "--device must not be given with kits alone: nothing would use it."),
        ("bench job.yaml --key k", "--key must not be given without a bundle: nothing would use it."),
        ("build job.yaml --key k", "--key must not be given without a kit or --replay: nothing would use it."),
        ("calibrate job.yaml -q -v", "--verbose must not be given with --quiet."),
        ("schema --markdown --json", "--markdown must not be given with --json."),
        (
            "validate job.yaml --deep --job-only",
            "--deep must not be given with --job-only or --for: it runs the model here.",
        ),
        ("history --history b.json --plot p.svg", "NAME must be given with --plot."),
        ("nightly", "JOB... must be given, or --resume."),
        ("nightly job.yaml --explain --sign k", "--sign must not be given with --explain: nothing would use it."),
        ("nightly job.yaml --explain --repeat 2", "--repeat must not be given with --explain: nothing would use it."),
        ("nightly job.yaml --explain --accept x", "--accept must not be given with --explain: nothing would use it."),
        ("nightly job.yaml --explain --workers 2", "--workers must not be given with --explain: nothing would use it."),
        (
            "nightly job.yaml --explain --cache-size 1GB",
            "--cache-size must not be given with --explain: nothing would use it.",
        ),
        ("nightly job.yaml --repeat 2 --force", "--force must not be given with --repeat: nothing would use it."),
        (
            "nightly job.yaml --repeat 2 --limit cosine=1",
            "--limit must not be given with --repeat: nothing would use it.",
        ),
        (
            "nightly job.yaml --scheduler tcp://127.0.0.1:1 --memory 1GB",
            "--memory must not be given with --scheduler: nothing would use it.",
        ),
    ],
)
def test_an_option_that_nothing_would_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shipping.bundle(tmp_path / "c")
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "job.yaml").write_text("name: x\n")
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: {message}"


@pytest.mark.parametrize("home", ["/proc/nowhere", None])
@pytest.mark.parametrize("options", [(), ("--explain",)])
def test_a_cache_that_cannot_be_written_is_said_to_be_the_cache(
    home: str | None,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    else:
        monkeypatch.setenv("HOME", home)
    (tmp_path / "job.yaml").write_text("name: x\n")
    assert main(["nightly", "job.yaml", *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    if home is None:
        assert said.startswith("HOME: must name a folder, as this user has none (got no value). Set HOME or ")
    else:
        assert said.startswith(f"--cache: must be given where the user's cache cannot be written (got {home}/.cache/")

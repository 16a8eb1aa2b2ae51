"""No output of a command destroys what the same command reads: every command that has both."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtpipe.cli.commands.run import _format_of
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.outputs import require_apart, require_writable_file

DESTROYED = "which would be destroyed. Choose another place."


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle, images, a key, a job and a history, all of which must stay as they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundle").mkdir()
    for name in ("manifest.json", "golden.safetensors"):
        (tmp_path / "bundle" / name).touch()
    (tmp_path / "images").mkdir()
    for name in ("images/a.png", "key.pub", "job.yaml", "bench.json", "history.sqlite", "bundle/model.onnx"):
        (tmp_path / name).write_bytes(b"kept")
    return tmp_path


COMMANDS = (
    *[("run", "bundle", "images", "-o", out) for out in ("bundle/x.csv", "bundle/manifest.json", "images/a.png")],
    ("run", "bundle", "images/a.png", "-o", "images/a.png"),
    ("run", "bundle", "images", "--key", "key.pub", "-o", "key.pub"),
    ("run", "bundle", "images", "-o", "bundle/../bundle/deep/x.jsonl"),
    ("pack", "bundle", "bundle/b.trtb"),
    ("export", "bundle", "bundle", "--to", "triton"),
    ("export", "bundle", "bundle/models", "--to", "triton"),
    *[("bench", "bundle", option, "bundle/x.png") for option in ("--save", "--csv", "--plot")],
    ("bench", "bench.json", "--save", "bench.json"),
    ("history", "m", "--history", "history.sqlite", "--plot", "history.sqlite"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_refuses_to_destroy_what_it_reads(
    world: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(world)
    assert main(list(words)) == 2
    err = capsys.readouterr().err
    assert DESTROYED in err or f": must not be in the bundle {world}" in err
    assert content(world) == before


def test_what_is_read_and_what_is_not(tmp_path: Path) -> None:
    data, bundle = tmp_path / "data", tmp_path / "bundle"
    data.mkdir()
    bundle.mkdir()
    (data / "a.png").touch()
    for name in ("manifest.json", "golden.safetensors"):
        (bundle / name).touch()
    (data / "manifest.json").touch()  # of a web page, say: no bundle
    require_writable_file(data / "new.csv")
    for good in (data / "new.csv", tmp_path / "x.csv", tmp_path / "data.csv", Path("/dev/null"), Path("/dev/stdout")):
        require_apart(good, data, bundle, None)
    with pytest.raises(InputError) as error:
        require_apart(data / "a.png", bundle, data)
    assert str(error.value) == f"{data / 'a.png'}: must not be in what is read ({data}), {DESTROYED}"
    with pytest.raises(InputError) as error:
        require_writable_file(bundle / "x")
    assert str(error.value) == f"{bundle / 'x'}: must not be in the bundle {bundle}. Choose another place."


@pytest.mark.parametrize("name", ["x.xml", "x.json.gz", "x.txt", "x.parquet"])
def test_a_suffix_that_names_no_format_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tmp_path), str(tmp_path), "-o", str(tmp_path / name)]) == 2
    said = f"-o: must end in .jsonl, .json or .csv (got {name}). Name it so, or give --format."
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / name).exists()


def test_what_has_no_suffix_or_is_no_file_takes_json_lines(tmp_path: Path) -> None:
    for path, expected in (
        (None, "jsonl"), (Path("x"), "jsonl"), (Path("/dev/null"), "jsonl"), (Path("a.CSV"), "csv"),
        (Path("b.json"), "json"), (Path("c.jsonl"), "jsonl"),
    ):  # fmt: skip
        assert _format_of(path) == expected

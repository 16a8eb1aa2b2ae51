"""Pipes and devices in the place of files: none is waited for, whichever argument of whichever command names it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import nights
import numpy as np
import pytest
import shipping
from jobs import GOOD

from calib.corrections import corrections_path, load_corrections
from calib.errors import CalibError
from calib.trt_calibrator import _read_cached
from trtpipe.atomic import write_whole
from trtpipe.bundle.archive import pack, unpack
from trtpipe.bundle.signing import generate_key, signer
from trtpipe.cli.commands.options import InputPath, OutputFile
from trtpipe.cli.main import COMMANDS, group, main
from trtpipe.errors import InputError
from trtpipe.job.load import PATHS, JobErrors, read_job
from trtpipe.nightly.history import History
from trtpipe.quantization.trials import Trials
from trtpipe.streams import descriptor_of, folder_of, is_stream, open_stream, require_no_stream, take
from trtpipe.trt.timing_cache import _read

REFUSED = "must be a file or a folder (got a pipe or a device). Save its content in a file, and give that."
UNREAD = "is a pipe that nothing reads. Start its reader first, or name a file."
#: What stands for each required argument that is not the one in question.
OTHERS = {
    "archive": "b.trtb", "bundle": "bundle", "directory": "models", "file": "bundle", "folder": "start",
    "job": "job.yaml", "jobs": "job.yaml", "path": "new", "scheduler": "tcp://127.0.0.1:1",
    "server": "triton", "target": "job.yaml", "weights": "bundle",
}  # fmt: skip


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """An error where the block takes longer, also where it waits in open(2)."""

    def late(*_: object) -> None:
        raise AssertionError(f"waited for over {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands read, and `p`, a pipe that nobody has open."""
    folder = tmp_path_factory.mktemp("given")
    bundle = shipping.bundle(folder / "bundle")
    pack(folder / "bundle", folder / "b.trtb")
    np.save(folder / "x.npy", next(iter(bundle.golden().inputs.values())))
    (folder / "job.yaml").write_text(GOOD)
    generate_key(folder / "key")
    os.mkfifo(folder / "p")
    return folder


def cases() -> Iterator[tuple[str, str]]:
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield from ((name, str(p.name)) for p in command.params if isinstance(p.type, click.Path))


def arguments(name: str, asked: str, value: str) -> tuple[list[str], click.ParamType]:
    """A command line that gives `value` to one parameter, and that parameter's type."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    line, kind = [name], None
    for parameter in command.params:
        wanted = value if parameter.name == asked else OTHERS.get(str(parameter.name), "")
        if parameter.name == asked:
            kind = parameter.type
        elif not parameter.required and parameter.name != "jobs":
            continue
        line += [wanted] if isinstance(parameter, click.Argument) else [parameter.opts[-1], wanted]
    assert kind is not None
    return line, kind


@pytest.mark.parametrize(("name", "asked"), list(cases()))
def test_a_pipe_is_never_waited_for(
    name: str, asked: str, given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(given)
    line, kind = arguments(name, asked, "p")
    with within(20):
        assert main(line) == 2, line
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if isinstance(kind, InputPath):
        assert said == f"p: {REFUSED}\n"
    elif isinstance(kind, OutputFile):
        replaced = "must be a file to be replaced (got a pipe or a device). Choose another place."
        assert said == f"p: {UNREAD if kind.piped else replaced}\n"
    else:
        assert f"{'p' if asked != 'destination' else given / 'p'}: " in said
    assert sorted(p.name for p in given.iterdir()) == ["b.trtb", "bundle", "job.yaml", "key", "key.pub", "p", "x.npy"]


@pytest.mark.parametrize("value", [".", "..", "/"])
@pytest.mark.parametrize(("name", "asked"), [c for c in cases() if c not in (("init", "folder"), ("validate", "jobs"))])
def test_a_path_without_a_name_is_refused_in_words(
    name: str, asked: str, value: str, given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`with_name` of it raises ValueError."""
    (given / "in" / "it").mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(given / "in" / "it")
    line, kind = arguments(name, asked, value)
    if not isinstance(kind, (InputPath, OutputFile)) and asked != "destination":
        return  # a folder to write into
    monkeypatch.setitem(OTHERS, "bundle", "../../bundle")
    with within(20):
        assert main(arguments(name, asked, value)[0]) in (2, 3), line
    assert "Traceback" not in capsys.readouterr().err
    assert list((given / "in" / "it").iterdir()) == []
    (given / "in" / "it").rmdir()
    (given / "in").rmdir()


@pytest.mark.parametrize(("section", "key"), [at for at, kind in PATHS.items() if kind != "output"])
def test_a_pipe_that_a_job_names_is_refused(section: str, key: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    (tmp_path / "job.yaml").write_text(GOOD)
    with (
        within(20),
        pytest.raises(JobErrors, match=rf"{section}\.{key}(\[0\])?: must be a .* that exists \(got 'p': not"),
    ):
        read_job(tmp_path / "job.yaml", [f"{section}.{key}={'[p]' if key == 'plugins' else 'p'}"])


@pytest.mark.parametrize(
    "read",
    [
        lambda p: _read(p),
        lambda p: _read_cached(p, {}),
        lambda p: Trials.open(p, {"k": "v"}),
        lambda p: load_corrections(p.with_name("t.json"), (), "0" * 64, ""),
        History,
        lambda p: unpack(p, p.with_name("new")),
    ],
)
def test_nor_is_one_in_the_place_of_a_file_of_trtpipes(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = corrections_path(tmp_path / "t.json")
    os.mkfifo(path)
    with within(20), pytest.raises((OSError, InputError, CalibError), match=r"no regular file|a pipe or a device"):
        read(path)


@pytest.mark.parametrize("command", ["validate", "build", "nightly"])
def test_a_pipe_in_a_folder_of_jobs_is_an_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a link to nothing is: else the night is green without the job."""
    nights.make_world(tmp_path / "jobs")
    os.mkfifo(tmp_path / "jobs" / "q.yaml")
    night = ["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "c")] if command == "nightly" else []
    with within(20):
        assert main([command, str(tmp_path / "jobs"), *night]) == 2
    assert f"{tmp_path}/jobs/q.yaml: must be readable (got no regular file)." in capsys.readouterr().err


@contextlib.contextmanager
def piped(content: bytes) -> Iterator[str]:
    """The path of a pipe that holds `content` and has no writer any more, as a shell has `<(command)`."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    try:
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


def test_what_a_shell_pipes_in_is_read_once_and_as_often_as_needed(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipping.bundle(tmp_path / "signed", sign=signer(given / "key"))
    for command in (["verify", "--no-run"], ["verify"], ["check"], ["run", "--benchmark", "--iterations", "1"]):
        with piped((given / "key.pub").read_bytes()) as key:
            assert main([*command, str(tmp_path / "signed"), "--key", key]) in (0, 1), capsys.readouterr().err
    assert "signed by key" in capsys.readouterr().out
    with piped(b"") as key:
        assert main(["verify", str(tmp_path / "signed"), "--key", key]) == 2
        assert capsys.readouterr().err.startswith(f"{key}: holds no public key in PEM.")
    with piped(GOOD.encode()) as job:
        assert main(["validate", "--job-only", job]) == 0
        monkeypatch.chdir(tmp_path)
        assert main(["validate", job]) == 2  # once taken it stays, and its paths are those of the current folder
        assert f"It is {tmp_path}/" in capsys.readouterr().err
    with piped(GOOD.encode()) as job:
        assert main(["nightly", job, "--cache", str(tmp_path / "c")]) == 2
        assert capsys.readouterr().err == f"{job}: {REFUSED}\n"


def test_a_shells_own_pipes(given: Path, tmp_path: Path) -> None:
    """In a process of its own: standard input and output, and what is written goes to no other file."""
    trtpipe = f"{sys.executable} -m trtpipe"
    (tmp_path / "job.yaml").write_text(GOOD)
    script = (
        f"{trtpipe} validate --job-only <(cat job.yaml) && cat job.yaml | {trtpipe} validate --job-only /dev/stdin && "
        f"{trtpipe} run -q {given}/bundle {given}/x.npy -o /dev/stdout > out.jsonl && "
        f"{trtpipe} run -q {given}/bundle {given}/x.npy -o /dev/stdout | wc -l"
    )
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["/dev/fd/63:", "ok", "/dev/stdin:", "ok", "4"]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.yaml", "out.jsonl"]


def test_a_pipe_with_a_reader_is_written_to(given: Path, tmp_path: Path) -> None:
    pipe, got = tmp_path / "p.csv", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    with within(20):
        while True:  # until the reader has come
            with contextlib.suppress(InputError):
                held = open_stream(pipe)
                break
        assert main(["run", "-q", str(given / "bundle"), str(given / "x.npy"), "-o", str(pipe)]) == 0
        os.close(held)
        reader.join()
    assert len(got[0].splitlines()) == 4
    with pytest.raises(InputError, match=rf"^{pipe}: {UNREAD}$"):
        write_whole(pipe, "text")


def test_what_is_a_stream(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    (tmp_path / "f").touch()
    (tmp_path / "link").symlink_to("f")
    with open(tmp_path / "f") as file:
        own = Path(f"/dev/fd/{file.fileno()}")
        assert descriptor_of(own) == file.fileno()
        assert is_stream(own)
    assert descriptor_of(Path("/dev/stdout")) == 1
    for path, stream in ((tmp_path / "p", True), (Path("/dev/null"), True), (tmp_path / "f", False),
                         (tmp_path / "link", False), (tmp_path, False), (tmp_path / "gone", False)):  # fmt: skip
        assert is_stream(path) == stream
        assert descriptor_of(path) is None
    for path in (tmp_path / "f", tmp_path, tmp_path / "gone"):
        require_no_stream(path)
        take(path)
    assert folder_of(tmp_path / "link") == tmp_path.resolve()
    with pytest.raises(InputError, match=r"^/dev/zero: must be a file or a folder"):
        take(Path("/dev/zero"))


def test_what_a_pipe_gives_without_end_is_not_taken_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        path = f"/dev/fd/{endless.stdout.fileno()}"
        with within(20):
            assert main(["validate", path]) == 2
        endless.kill()
    assert f"{path}: must be a job file of at most 1048576 bytes" in capsys.readouterr().err


def test_a_key_signs_in_another_process_and_is_in_no_repr(given: Path) -> None:
    sign = signer(given / "key")
    assert pickle.loads(pickle.dumps(sign))(b"manifest") == sign(b"manifest")
    assert sign.raw not in repr(sign).encode("utf-8")  # type: ignore[attr-defined]
    assert repr(sign) == "_Signer()"

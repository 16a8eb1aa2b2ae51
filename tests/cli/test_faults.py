"""Disks that fail: every command, with each of the calls by which it writes refused in turn.

Python announces open, mkdir and rename to audit hooks, which may raise in their place. That a disk becomes full while a
file is written is what `ulimit -f` makes of any disk: a write beyond so many bytes fails.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import nights
import numpy as np
import pytest
import shipping

from trtpipe.bundle.archive import pack
from trtpipe.bundle.format import read_bundle
from trtpipe.cli.commands.options import InputPath, OutputFile, OutputFolder, OutputTables
from trtpipe.cli.main import COMMANDS, group, main
from trtpipe.evaluation.bench import Bench, Row
from trtpipe.nightly.history import History
from trtpipe.nightly.outcome import JobOutcome
from trtpipe.outputs import _PROBE_BYTES
from trtpipe.report import bench_page

#: Arguments that name what is read; every other path of every command is an output, and is probed.
READ = {
    ("bench", "target"), ("bench", "key"), ("build", "jobs"), ("build", "sign"), ("build", "key"), ("build", "replay"),
    ("calibrate", "jobs"),
    ("check", "bundle"), ("check", "key"), ("export", "bundle"), ("export", "key"), ("history", "file"),
    ("init", "images"), ("inspect", "file"), ("nightly", "credentials"), ("nightly", "jobs"), ("nightly", "sign"),
    ("pack", "bundle"),
    ("prepare", "jobs"), ("prepare", "sign"), ("refit", "bundle"), ("refit", "key"), ("refit", "sign"),
    ("refit", "weights"), ("run", "bundle"), ("run", "key"), ("run", "source"), ("tune", "job"),
    ("unpack", "archive"), ("unpack", "key"), ("validate", "jobs"), ("verify", "bundle"), ("verify", "key"),
    ("worker", "credentials"),
}  # fmt: skip
#: Types of parameters that are probed while the command line is read.
PROBED = (OutputFile, OutputFolder, OutputTables)
#: Outputs that have a default which depends on other arguments: their commands probe them.
DERIVED = {("unpack", "destination")}


class Faults:
    """Refuses the `at`-th call (counting from 0) that writes below `folder`."""

    folder: str | None = None
    at, seen, code = -1, 0, errno.ENOSPC

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in ("open", "os.mkdir", "os.rename"):
            return
        path = arguments[0]
        if not isinstance(path, (str, bytes)) or not os.path.abspath(os.fsdecode(path)).startswith(self.folder):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if event == "os.mkdir" and os.path.isdir(path):  # it would fail anyhow, and that is expected
            return
        self.seen += 1
        if self.seen - 1 == self.at:
            raise OSError(self.code, os.strerror(self.code), path)

    @contextlib.contextmanager
    def refusing(self, folder: Path, at: int, code: int) -> Iterator[None]:
        self.at, self.seen, self.code, self.folder = at, 0, code, str(folder)
        try:
            yield
        finally:
            self.folder = None


FAULTS = Faults()
sys.addaudithook(FAULTS.hook)

#: What is run, given a folder to read from and one to write to.
CASES: dict[str, Callable[[Path, Path], list[object]]] = {
    "pack": lambda i, o: ["pack", i / "bundle", o / "a" / "b.trtb"],
    "unpack": lambda i, o: ["unpack", i / "b.trtb", o / "a" / "b"],
    "unpack over a bundle": lambda i, o: ["unpack", i / "b.trtb", o / "there"],
    "export": lambda i, o: ["export", i / "bundle", "--to", "triton", o / "models"],
    "keygen": lambda i, o: ["keygen", o / "keys" / "k"],
    "init": lambda i, o: ["init", o / "start"],
    "run": lambda i, o: ["run", i / "bundle", i / "x.npy", "-q", "-o", o / "a" / "b.jsonl"],
    "history": lambda i, o: ["history", "a", "--history", i / "h.sqlite", "--plot", o / "a" / "h.svg"],
    "bench": lambda i, o: ["bench", i / "b.json", "--save", o / "a.json", "--csv", o / "a.csv", "--plot", o / "a.png"],
}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """What the commands read."""
    folder = tmp_path / "given"
    folder.mkdir()
    bundle = shipping.bundle(folder / "bundle")
    pack(folder / "bundle", folder / "b.trtb")
    np.save(folder / "x.npy", next(iter(bundle.golden().inputs.values())))
    with History(folder / "h.sqlite") as history:
        history.record(history.begin({}), JobOutcome("a", "a.yaml", "built", key="k"), {}, green=True)
    bench = Bench("a", 4, 8, 10, 1, "eager", 1, (Row("engine", "gpu", median_ms=1.0, p90_ms=2.0),))
    (folder / "b.json").write_text(bench_page.bench_text(bench))
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def judged(code: int, error: str, out: Path, case: str) -> None:
    """A message that names a path of the user's and what to do; no traceback."""
    assert code == 2, error
    assert "Traceback" not in error
    assert "bug" not in error
    line = error.strip().splitlines()[-1]
    assert line.startswith(str(out)), f"{case}: {line}"
    assert ".part" not in line
    assert "trtpipe-new" not in line
    assert line.count(". ") >= 1, line


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_each_write_of_a_command_refused_in_turn(
    case: str, code: int, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for at in range(100):
        out = tmp_path / f"out{at}"
        out.mkdir()
        if case == "unpack over a bundle":
            shipping.bundle(out / "there", name="older")
        before = everything(out)
        with FAULTS.refusing(out, at, code):
            ended = main([str(a) for a in CASES[case](given, out)])
        error = capsys.readouterr().err
        if FAULTS.seen <= at:  # there is no such write: nothing was refused
            assert ended == 0, error
            assert everything(out) != before or case == "unpack over a bundle"
            break
        judged(ended, error, out, case)
        left = everything(out)
        if case not in ("init", "bench"):  # they write several results, each whole
            assert left == before
        assert not [name for name in left if "/." in f"/{name}"], left
    assert at > 1


@pytest.mark.parametrize("case", [case for case in CASES if case != "history"])  # SQLite's own file is limited too
def test_a_disk_that_becomes_full(case: str, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failed = 0
    for limit in (0, 1, 100, _PROBE_BYTES, 5000, 9000):
        out = tmp_path / f"out{limit}"
        out.mkdir()
        if case == "unpack over a bundle":
            shipping.bundle(out / "there", name="older")
        before = everything(out)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            ended = main([str(a) for a in CASES[case](given, out)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        error = capsys.readouterr().err
        if ended == 0:
            continue
        failed += 1
        judged(ended, error, out, case)
        assert "is larger than the file system or `ulimit -f` allows" in error
        if case not in ("init", "bench"):
            assert everything(out) == before
    assert failed >= 3


@pytest.mark.parametrize("command", ["build", "prepare", "calibrate", "tune", "nightly"])
def test_an_output_that_cannot_be_written_is_found_before_work_begins(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.make_world(tmp_path / "jobs")
    nights.write_job(tmp_path / "jobs", "a")
    (tmp_path / "file").touch()

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("trtpipe.pipeline.prepared.load_model", begun)
    monkeypatch.setattr("trtpipe.job.load.read_job", begun)
    for out, reason in (
        (tmp_path / "file" / "out", "a part of this path is a file, not a folder. Check the path."),
        (tmp_path / ("o" * 300), "the name is too long for the file system. Choose a shorter one."),
    ):
        assert main([command, str(tmp_path / "jobs" / "a.yaml"), "-o", str(out)]) == 2
        assert capsys.readouterr().err == f"{out}: {reason}\n"
    with FAULTS.refusing(tmp_path, 0, errno.EROFS):
        assert main([command, str(tmp_path / "jobs" / "a.yaml"), "-o", str(tmp_path / "out")]) == 2
    reason = "the file system is read-only. Choose another place, or mount it writable."
    assert capsys.readouterr().err == f"{tmp_path / 'out'}: {reason}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["build", "prepare", "nightly"])
@pytest.mark.parametrize("there", ["a folder of something else", "a file", "a link to nothing"])
def test_what_is_no_bundle_in_a_bundles_place_is_found_before_work_begins(
    command: str, there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.make_world(tmp_path / "jobs")
    nights.write_job(tmp_path / "jobs", "a")
    place = tmp_path / "out" / "a"
    place.parent.mkdir()
    if there == "a file":
        place.touch()
    elif there == "a link to nothing":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        (place / "thesis.txt").touch()

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("trtpipe.pipeline.prepared.load_model", begun)
    alone = ["--workers", "0", "--cache", str(tmp_path / "cache")] if command == "nightly" else []
    assert main([command, str(tmp_path / "jobs" / "a.yaml"), "-o", str(place.parent), *alone]) == 2
    printed = "".join(capsys.readouterr())
    assert str(place) in printed
    assert "work began" not in printed
    assert "Traceback" not in printed


def paths() -> Iterator[tuple[str, str, click.ParamType]]:
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter.type, click.Path):
                yield name, str(parameter.name), parameter.type


def test_every_path_that_a_command_writes_to_is_probed() -> None:
    read = {(name, parameter) for name, parameter, kind in paths() if isinstance(kind, InputPath)}
    assert read == READ
    plain = {(name, parameter) for name, parameter, kind in paths() if not isinstance(kind, (*PROBED, InputPath))}
    assert plain == DERIVED
    probed = {(name, parameter) for name, parameter, kind in paths() if isinstance(kind, PROBED)}
    assert {n for n, _ in probed | DERIVED} >= {
        "bench", "build", "calibrate", "export", "history", "init", "keygen", "nightly", "pack", "prepare", "run",
        "tune", "unpack", "worker",
    }  # fmt: skip


def test_standard_output_that_is_full(given: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for arguments in (["schema"], ["inspect", given / "bundle"], ["inspect", given / "bundle", "--json"],
                      ["run", given / "bundle", given / "x.npy", "-q"]):  # fmt: skip
        full = open("/dev/full", "w")  # noqa: SIM115  # what is left in its buffer cannot be written when it is closed
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "stdout", full)
            assert main([str(a) for a in arguments]) == 2
        with contextlib.suppress(OSError):
            full.close()
        error = capfd.readouterr().err
        assert error == "standard output: no space left on the disk. Free some space, or choose another place.\n"


@pytest.mark.parametrize("arguments", [["build", "absent.yaml"], ["build", "--absent"], ["verify", "absent"]])
def test_standard_error_that_is_full_leaves_the_exit_code(arguments: list[str]) -> None:
    """1 would be that of a failed check."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-P", "-m", "trtpipe", *arguments], stderr=full, check=False)
    assert done.returncode == 2


def test_what_is_no_file_is_written_to_as_it_is(given: Path, tmp_path: Path) -> None:
    device = os.stat("/dev/null").st_rdev
    assert main(["run", str(given / "bundle"), str(given / "x.npy"), "-q", "-o", "/dev/null"]) == 0
    assert main(["bench", str(given / "b.json"), "--save", "/dev/null"]) == 0
    assert os.stat("/dev/null").st_rdev == device


def test_a_night_on_a_full_disk_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nights.make_world(tmp_path / "jobs")
    nights.write_job(tmp_path / "jobs", "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_PROBE_BYTES, hard))
    try:
        arguments = ["nightly", tmp_path / "jobs/a.yaml", "-o", tmp_path / "out", "--cache", tmp_path / "cache"]
        ended = main([*map(str, arguments), "--workers", "0"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert ended == 2
    assert "must be a history of trtpipe" not in error
    assert error.startswith(f"{tmp_path / 'out' / 'history.sqlite'}: "), error


def test_json_says_it_too(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    job = tmp_path / "a.yaml"
    assert main(["build", str(job), "--json", "-o", str(tmp_path / "file" / "x")]) == 2
    value = json.loads(capsys.readouterr().out)
    assert value == {
        "error": f"{tmp_path / 'file' / 'x'}: a part of this path is a file, not a folder. Check the path.",
        "exit_code": 2,
    }
    assert read_bundle(given / "bundle").manifest.name == "colour"


@pytest.mark.parametrize("command", ["build", "prepare", "calibrate", "tune"])
def test_a_write_that_is_refused_while_a_job_is_worked_on(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the outputs were probed: the disk became full, or was mounted read-only, meanwhile."""
    nights.make_world(tmp_path / "jobs")
    target = "tensorrt_rtx" if command == "prepare" else "onnxruntime"
    job = nights.write_job(tmp_path / "jobs", "a", f"precision: {{int8_mode: true}}\nbuild: {{target: {target}}}\n")

    def ended(at: int) -> tuple[int, Path]:
        out = tmp_path / f"out{at}"
        with FAULTS.refusing(out, at, errno.ENOSPC):
            return main([command, str(job), "-o", str(out), "-q"]), out

    assert ended(1_000)[0] == 0
    capsys.readouterr()
    writes = FAULTS.seen
    assert writes > 2
    for at in sorted({1, writes // 2, writes - 1}):  # the first is a probe
        code, out = ended(at)
        judged(code, capsys.readouterr().err, out, f"{command} {at} of {writes}")
        left = everything(out)
        assert not [name for name in left if "/." in f"/{name}"], left
        assert not left or command in ("calibrate", "tune")  # which write several results, each whole

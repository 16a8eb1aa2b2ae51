"""stdout is for results: whatever the job's code, native code or a child process prints goes to stderr."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import nights
import pytest
import shipping
from PIL import Image

from trtpipe.cli.main import COMMANDS, group, main
from trtpipe.cli.results import results

#: What the user's code does, and whether `NOISE` is then on stderr.
PRINTS = {
    "print('NOISE')": True,
    "import sys; sys.stdout.write('NOISE\\n')": True,
    "import os; os.write(1, b'NOISE\\n')": True,
    "import ctypes; libc = ctypes.CDLL(None); libc.puts(b'NOISE'); libc.fflush(None)": True,
    "import subprocess; subprocess.run(['echo', 'NOISE'], check=True)": True,
    "import os; os.system('echo NOISE')": True,
    "import sys; sys.stdout = open('elsewhere', 'w'); print('NOISE')": False,
    "import sys; sys.stdout.close()": False,
    "import os; os.close(1)": False,
    "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)": False,
    "import sys; sys.stdout = None": False,
    "import sys; from trtpipe.cli import console; sys.stdout = sys.stderr = None; console.err('NOISE')": True,
}
PROGRAM = """
import sys
from trtpipe.cli import console
from trtpipe.cli.results import results_apart
with results_apart():
    exec(sys.argv[1])
    console.out_json({"name": "a\\udcff"})
console.out("after")
"""


@pytest.mark.parametrize("code", PRINTS)
def test_results_are_alone_on_stdout_whatever_the_code_does(tmp_path: Path, code: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, code], capture_output=True, cwd=tmp_path, env=nights.environment(), check=True
    )
    result, _, after = found.stdout.decode("utf-8").rpartition("}")
    assert json.loads(result + "}") == {"name": "a\udcff"}
    assert after == "\nafter\n"
    assert (b"NOISE" in found.stderr) is PRINTS[code]


def test_without_stdout_or_stderr_the_code_runs_all_the_same(tmp_path: Path) -> None:
    for descriptor in (1, 2):
        shell = f'"$0" -c "$1" "print(1)" {descriptor}>&-'
        found = subprocess.run(
            ["bash", "-c", shell, sys.executable, PROGRAM], capture_output=True, env=nights.environment(), check=False
        )
        closed = b"OSError: [Errno 9] Bad file descriptor: 'standard output'"
        assert (found.returncode, closed in found.stderr) == ((1, True) if descriptor == 1 else (0, False))


def test_a_result_that_cannot_be_given_is_no_success() -> None:
    found = subprocess.run(
        ["bash", "-c", '"$0" -m trtpipe schema >&-', sys.executable],
        capture_output=True,
        env=nights.environment(),
        check=False,
    )
    said = b"standard output: is closed. Open it, or send what is written there to /dev/null.\n"
    assert (found.returncode, found.stderr) == (2, said)


def test_an_error_about_a_name_that_is_no_utf8_is_json_too(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "trtpipe", "inspect", b"a\xff", "--json"],
        capture_output=True,
        cwd=tmp_path,
        env=nights.environment(),
        check=False,
    )
    said = (
        "a\udcff: there is no such file or folder. Give a bundle, an engine, an ONNX file, a calibration table or a "
        "calibration cache."
    )
    assert (found.returncode, json.loads(found.stdout)) == (2, {"error": said, "exit_code": 2})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("schema", 0),
        ("inspect b", 0),
        ("validate --json wrong.yaml", 2),
        ("inspect --json nothing", 2),
        ("verify failed", 1),
        ("run b photos", 141),  # it ends where nobody reads on: not all was done
    ],
)
def test_nobody_reading_the_output_changes_no_verdict(tmp_path: Path, words: str, code: int) -> None:
    """`trtpipe verify | grep -q` ends the pipe early: a failure must not become the 0 of a device that goes on."""
    shipping.bundle(tmp_path / "b")
    report = shipping.manifest().check
    assert report is not None
    failed = dataclasses.replace(report, passed=False, problems=("off",))
    shipping.bundle(tmp_path / "failed", check=failed)
    (tmp_path / "wrong.yaml").write_text("name: a b\n")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    shell = f'{sys.executable} -m trtpipe {words} | true; exit "${{PIPESTATUS[0]}}"'
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", shell], cwd=tmp_path, capture_output=True, env=nights.environment(), check=False
        )
        assert done.returncode == code, done.stderr
        assert b"Traceback" not in done.stderr
        assert b"Exception ignored" not in done.stderr


def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    shell = f'{sys.executable} -m trtpipe schema | head -1; exit "${{PIPESTATUS[0]}}"'
    found = subprocess.run(["bash", "-c", shell], capture_output=True, env=nights.environment(), check=False)
    assert (found.returncode, found.stdout.strip(), found.stderr) == (0, b"{", b"")


def test_help_and_version_are_results(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["run", "--help"], ["--version"]):
        assert main(words) == 0
        printed = capsys.readouterr()
        assert printed.out
        assert printed.err == ""


@pytest.mark.parametrize("command", [("validate", "--deep"), ("build", "-o", "out"), ("calibrate", "-o", "out")])
def test_json_of_a_command_whose_job_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), "m", "build: {target: onnxruntime}\n")
    net = tmp_path / "jobs" / "net.py"
    net.write_text(net.read_text().replace("def net():", "def net():\n    print('NOISE')"))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    main([command[0], str(job), *command[1:], "--json"])
    printed = capfd.readouterr()
    assert json.loads(printed.out)
    assert "NOISE" in printed.err
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_keeps_its_results_apart_each_time_it_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever wraps the function of a command, as its options may."""
    module, _, variable = COMMANDS[name].partition(":")
    own = getattr(importlib.import_module(module), variable)
    seen: list[bool] = []

    @functools.wraps(own.callback)
    def work() -> None:
        print("printed by the job's code")
        seen.append(results() is given)

    monkeypatch.setattr(own, "callback", work)
    given, other = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", given)
    monkeypatch.setattr(sys, "stderr", other)
    for _ in range(2):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert command.callback is not None
        command.callback()
    assert (seen, given.getvalue()) == ([True, True], "")
    assert other.getvalue() == "printed by the job's code\n" * 2

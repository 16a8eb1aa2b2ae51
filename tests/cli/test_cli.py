import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import pytest
from jobs import GOOD

import trtpipe
from trtpipe import packages
from trtpipe.cli.main import COMMANDS, main
from trtpipe.errors import BuildError, Cancelled, InputError, MissingError

ROOT = Path(trtpipe.__file__).resolve().parent.parent
HEAVY = ("torch", "torchvision", "torchao", "onnx", "onnxruntime", "onnxscript", "tensorrt", "tensorrt_rtx", "numba",
         "matplotlib", "scipy", "sklearn", "timm", "dask")  # fmt: skip


def loaded_by(code):
    """Which of HEAVY a fresh interpreter has loaded after `code`, and its other output lines."""
    script = f"{code}\nimport sys\nprint('loaded:', *(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    *lines, last = done.stdout.splitlines()
    return last.split()[1:], lines


@pytest.mark.parametrize("module", ["trtpipe", "calib", "trtpipe.cli.main", "trtpipe.job.load", "trtpipe.cli.console"])
def test_importing_loads_nothing_heavy(module):
    assert loaded_by(f"import {module}")[0] == []


def test_version_loads_nothing_heavy_and_no_pydantic():
    code = "from trtpipe.cli.main import main; main(['--version']); import sys; assert 'pydantic' not in sys.modules"
    heavy, lines = loaded_by(code)
    assert heavy == []
    assert lines == [f"trtpipe {trtpipe.__version__}"]


def test_validating_the_quickstart_loads_nothing_heavy():
    heavy, lines = loaded_by(
        "from trtpipe.cli.main import main; main(['validate', '--job-only', 'configs/quickstart.yaml'])"
    )
    assert heavy == []
    assert lines == ["configs/quickstart.yaml: ok"]


def test_listing_the_commands_loads_nothing_heavy():
    heavy, lines = loaded_by("from trtpipe.cli.main import main; main(['--help'])")
    assert heavy == []
    assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"Usage: trtpipe {name}" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["biuld"]) == 2
    error = capsys.readouterr().err
    assert "COMMAND must be " in error
    assert "(got 'biuld'). Did you mean build?" in error


def test_an_unknown_option_is_refused(capsys):
    assert main(["validate", "x.yaml", "--sett", "a=b"]) == 2
    assert "No such option" in capsys.readouterr().err


def command_that_raises(monkeypatch, error):
    @click.command("schema")
    def command():
        raise error

    monkeypatch.setattr("trtpipe.cli.commands.schema.command", command)
    return main(["schema"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a: must be b (got c)."), 2),
        (MissingError("a: must be b (got c)."), 3),
        (BuildError("a: must be b (got c)."), 4),
    ],
)
def test_user_errors_are_their_message_and_their_exit_code(error, code, monkeypatch, capsys):
    assert command_that_raises(monkeypatch, error) == code
    printed = capsys.readouterr()
    assert printed.err == "a: must be b (got c).\n"
    assert printed.out == ""


def test_a_bug_has_a_traceback_and_an_exit_code_of_its_own(monkeypatch, capsys):
    assert command_that_raises(monkeypatch, ZeroDivisionError("oh")) == 70
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert "ZeroDivisionError: oh" in error
    assert f"this is a bug in trtpipe {trtpipe.__version__}" in error


def test_a_missing_optional_dependency_is_no_bug(monkeypatch, capsys):
    assert command_that_raises(monkeypatch, ModuleNotFoundError("no", name="torch")) == 3
    expected = "torch is not installed. Run: pip install 'trtpipe[build]'\n"
    assert capsys.readouterr().err == expected


def test_a_module_that_is_no_dependency_is_a_bug(monkeypatch, capsys):
    for name in ("trtpipe.nonsense", "torch.nonsense"):  # of a package that is here, a part is missing
        assert command_that_raises(monkeypatch, ModuleNotFoundError("no", name=name)) == 70
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (click.Abort(), "interrupted"),
        (Cancelled("interrupted"), "interrupted"),
        (Cancelled("build: cancelled by the user."), "interrupted: build: cancelled by the user."),
    ],
    ids=repr,
)
def test_an_interrupt_is_130(error, said, monkeypatch, capsys):
    assert command_that_raises(monkeypatch, error) == 130
    assert capsys.readouterr().err.strip() == said


def test_sigterm_ends_as_an_interrupt_does(monkeypatch, capsys):
    @click.command("schema")
    def command():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(10)

    monkeypatch.setattr("trtpipe.cli.commands.schema.command", command)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["schema"]) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(("line", "said"), [
    (["build", "--json"], "Missing argument 'JOBS...'."),
    (["build", "--nonsense", "--json", "job.yaml"], "No such option '--nonsense'. Did you mean '--diagnose'?"),
    (["inspect", "--json", "a", "b"], "Got unexpected extra argument (b)"),
])  # fmt: skip
def test_errors_of_usage_are_json_too(line, said, capsys):
    assert main(line) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": said, "exit_code": 2}
    assert said in printed.err


def test_json_errors_are_json_on_stdout(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text("name: a b\n")
    assert main(["build", "--json", str(path)]) == 2
    printed = capsys.readouterr()
    value = json.loads(printed.out)
    assert value["exit_code"] == 2
    assert value["error"].splitlines() == printed.err.splitlines()
    assert value["problems"][0] == {
        "file": str(path),
        "line": 1,
        "column": 1,
        "path": "name",
        "message": "name: must begin with a letter or digit "
        "and hold only letters, digits, '.', '_' and '-' (got 'a b').",
    }
    assert {p["path"] for p in value["problems"]} == {"name", "model", "inputs", "outputs", "check"}


def test_json_of_validate(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text("name: digits\ncheck: {limits: {}}\n")
    assert main(["validate", "--json", str(path)]) == 2
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["job"], listed["ok"]) == (str(path), False)
    assert {(p["line"], p["path"]) for p in listed["problems"]} >= {(1, "model"), (1, "inputs"), (2, "check.limits")}


def test_a_folder_stands_for_its_job_files(tmp_path, capsys):
    for name in ("b.yaml", "a.yml", "c.txt", "d.YAML", "._a.yml", ".hidden.yaml"):
        (tmp_path / name).write_text("- not a job\n")
    assert main(["validate", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":1:")[0] for line in lines] == [str(tmp_path / n) for n in ("a.yml", "b.yaml", "d.YAML")]


def test_jobs_of_subfolders_that_are_not_read_are_named(tmp_path, capsys):
    """Files that are no jobs are not, nor those of bundles, nor of folders that were given too."""
    job = "name: a\nmodel: {}\ninputs: {}\noutputs: {}\ncheck: {}\n"
    for name in ("a.yaml", "one/b.yaml", "one/c.yaml", "one/.hidden.yaml", "bundle/job.yaml", "data/classes.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("names: [cat]\n" if "data" in name else job)
    (tmp_path / "bundle/manifest.json").write_text("{}")
    line = (
        f"{tmp_path}: its subfolders are not read, which hold 2 jobs, like {tmp_path}/one/b.yaml: give those folders "
        "too if they are meant"
    )
    main(["validate", str(tmp_path)])
    assert line in capsys.readouterr().err.splitlines()
    main(["validate", str(tmp_path), str(tmp_path / "one")])
    assert "its subfolders are not read" not in capsys.readouterr().err
    main(["validate", str(tmp_path), str(tmp_path / "one/c.yaml")])
    said = capsys.readouterr().err
    assert f"which hold a job, {tmp_path}/one/b.yaml: give" in said


def test_one_file_in_two_spellings_is_one_job(tmp_path, capsys):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/a.yaml").write_text(GOOD)
    main(["validate", "--job-only", str(tmp_path / "jobs"), str(tmp_path / "jobs/../jobs/a.yaml")])
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/jobs/a.yaml: ok"]


def test_a_packed_kit_is_no_job(tmp_path, capsys):
    """However long it is."""
    for content, why in ((b"\xff", "UTF-8 text (got byte 0xff at 0)"), (b"a" * (1 << 21), "a job file of at most ")):
        (tmp_path / "k.trtb").write_bytes(content)
        for key in ([], ["--key", str(tmp_path / "k.pub")]):
            assert main(["build", str(tmp_path / "k.trtb"), *key]) == 2
            said = capsys.readouterr().err
            assert why in said
            assert said.endswith("Of a packed kit make a folder first: trtpipe unpack.\n")


def test_a_link_to_nothing_in_a_folder_of_jobs_is_an_error(tmp_path, capsys):
    """A mount that is missing: the night was green without its jobs."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/a.yaml").symlink_to("../shared/a.yaml")
    for command in (["validate"], ["build"], ["nightly", "-o", str(tmp_path / "out"), "--cache", str(tmp_path / "c")]):
        assert main([*command, str(tmp_path / "jobs")]) == 2
        assert f"{tmp_path}/jobs/a.yaml: must be a job file (got a link to nothing)." in capsys.readouterr().err


def test_a_folder_without_a_job_file_is_refused(tmp_path, capsys):
    assert main(["validate", str(tmp_path)]) == 2
    assert f"JOB: {tmp_path} is a folder without a .yaml file (its subfolders are not read)." in capsys.readouterr().err


def test_a_closed_pipe_is_no_error():
    script = f"{sys.executable} -m trtpipe schema | head -c 10; printf '\\n%s' ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


def test_every_extra_that_is_named_exists():
    declared = re.findall(r"^([a-z0-9-]+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert set(packages.EXTRAS.values()) <= set(declared)


#: Modules by the distributions that bring them under another name.
MODULES = {"onnx-ir": "onnx_ir", "cuda-python": "cuda", "scikit-learn": "sklearn", "tensorrt-rtx": "tensorrt_rtx"}
#: What brings a part of a namespace: another part of it that is missing may be anyone's.
OF_NAMESPACES = {"protobuf"}


def test_what_an_extra_brings_is_installed_by_it():
    """And nothing that every installation has."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    release = f">={packages.TORCH_TENSORRT},<{packages.TORCH_TENSORRT[:2]}{int(packages.TORCH_TENSORRT[2:]) + 1}"
    assert project["optional-dependencies"]["torch-tensorrt"] == [f"torch-tensorrt{release}"]
    core = {re.split(r"[\[<>= ]", p)[0].lower() for p in project["dependencies"]}
    for extra in {*packages.EXTRAS.values()}:
        brought = {re.split(r"[\[<>= ]", p)[0].lower() for p in project["optional-dependencies"][extra]}
        assert not brought & core
        named = {m for m, e in packages.EXTRAS.items() if e == extra}
        assert {MODULES.get(p, p) for p in brought - OF_NAMESPACES} <= named, extra


def test_the_environment_of_the_tests_has_the_torch_tensorrt_that_is_known():
    assert f"torch-tensorrt-rtx=={packages.TORCH_TENSORRT}." in (ROOT / "Makefile").read_text()


def test_calibs_own_errors_are_user_errors(monkeypatch, capsys):
    from calib.errors import CalibCancelled, CalibError

    assert command_that_raises(monkeypatch, CalibError("a: must be b (got c).")) == 2
    assert command_that_raises(monkeypatch, CalibCancelled("stopped")) == 130
    assert capsys.readouterr().err.splitlines() == ["a: must be b (got c).", "interrupted: stopped"]


@pytest.mark.parametrize(
    ("arguments", "works"),
    [
        ("validate job.yaml", "validate.validate"),
        ("calibrate job.yaml", "calibrate.load_jobs"),
        ("prepare job.yaml", "prepare.load_jobs"),
        ("tune job.yaml", "tune.plan_one"),
        ("init d --from net:make", "init.starter"),
        ("nightly job.yaml --cache c", "nightly.nightly"),
        ("worker tcp://127.0.0.1:1 --insecure --cache c", "worker.serve"),
    ],
)
def test_modules_of_the_current_folder_are_found_while_a_command_for_jobs_runs(monkeypatch, tmp_path, arguments, works):
    seen = []

    def working(*given, **more):
        seen.append(sys.path[-1])
        raise InputError("a: must be b (got c).")

    module, _, name = works.partition(".")
    monkeypatch.setattr(importlib.import_module(f"trtpipe.cli.commands.{module}"), name, working)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(GOOD)
    assert main(arguments.split()) == 2
    assert seen == [str(tmp_path)]
    assert str(tmp_path) not in sys.path


def test_the_shell_completes_commands_and_options(monkeypatch, capsys):
    monkeypatch.setenv("_TRTPIPE_COMPLETE", "bash_complete")
    for words, position, expected in (
        ("trtpipe val", "1", "plain,validate"),
        ("trtpipe build --qu", "2", "plain,--quiet"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", position)
        assert main([]) == 0
        assert capsys.readouterr().out.split() == [expected]


@pytest.mark.parametrize(
    "command", ["bench job.yaml --seconds", "build job.yaml --diagnose", "nightly job.yaml --diagnose"]
)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nan", "must be a number of seconds (got nan)."),
        ("-1", "-1.0 is not in the range x>=0."),
        ("x", "is not a valid float"),
    ],
)
def test_a_time_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, given: str, message: str
) -> None:
    assert main([*command.split(), given]) == 2
    assert message in capsys.readouterr().err

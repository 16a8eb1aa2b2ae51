"""Packages that are missing, damaged or hidden by another file: each command says so in one line, with exit code 3."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from jobs import good_folder, write

import trtpipe
from calib.errors import CalibError
from calib.user_code import OURS, import_callable, user_code
from trtpipe import import_errors, packages
from trtpipe.cli.main import COMMANDS, main
from trtpipe.errors import InputError, MissingError, user_error
from trtpipe.job.importable import missing
from trtpipe.job.problems import violation
from trtpipe.runtime import device_memory, doctor

ROOT = Path(trtpipe.__file__).resolve().parent.parent
#: A distribution, its module, and a command that needs it.
CORE = (("numpy", "numpy", "--version"), ("click", "click", "--help"), ("pyyaml", "yaml", "validate job.yaml"))
#: What a module may do as it is imported, and how that is said.
ENDS = {
    "raise OSError('libfoo.so.9: cannot open')": "OSError: libfoo.so.9: cannot open",
    "def f(:": "SyntaxError: invalid syntax (__init__.py, line 1)",
    "import sys; sys.exit(0)": "it called sys.exit(0)",
    "raise ImportError('long\\n' * 30) from ImportError('_core: no such\\nfile')": "ImportError: _core: no such file",
}
#: Makes a module one that is not there.
ABSENT = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
sys.argv[1:] = {arguments}
"""


def program(arguments: str, cwd: Path, path: Path | None = None, before: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m trtpipe` with `path` first on Python's path, and `before` executed in its process."""
    folders = os.pathsep.join(map(str, filter(None, (path, ROOT))))
    how = ("-c", f"{before}\nfrom trtpipe.__main__ import main\nsys.exit(main())") if before else ("-m", "trtpipe")
    command = (sys.executable, *how, *arguments.split())
    given = os.environ | {"PYTHONPATH": folders}
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=300, check=False)


def install(
    site: Path, distribution: str, module: str, source: str, version: str = "9.9", lost: tuple[str, ...] = ()
) -> None:
    """Lay out what a wheel leaves behind, its files `lost` later."""
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text(source + "\n")
    info = site / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{module}/__init__.py,,\n")
    with (info / "RECORD").open("a") as record:
        record.writelines(f"{module}/{name},sha256=a,99\n" for name in lost)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text("name: a\n")
    return tmp_path


@pytest.mark.parametrize(("distribution", "module", "command"), CORE)
@pytest.mark.parametrize("source", ENDS)
def test_a_core_package_that_cannot_be_imported(
    job: Path, distribution: str, module: str, command: str, source: str
) -> None:
    install(job / "site", distribution, module, source)
    done = program(f"{command} --json", job, job / "site")
    said = (
        f"{module} is installed and cannot be imported ({ENDS[source]}). It is damaged, or does not fit the packages "
        f"that it needs. Run: pip install --force-reinstall {distribution}"
    )
    assert (done.returncode, done.stderr) == (3, f"{said}\n")
    assert json.loads(done.stdout) == {"error": said, "exit_code": 3}


@pytest.mark.parametrize(("distribution", "module", "command"), CORE)
@pytest.mark.parametrize("lost", ["__init__.py", "core.so"])
def test_a_core_package_that_has_lost_a_file_is_damaged(
    job: Path, distribution: str, module: str, command: str, lost: str
) -> None:
    """It can be imported, and has nothing of what is asked of it."""
    install(job / "site", distribution, module, "", lost=(lost,))
    (job / "site" / module / "__init__.py").write_bytes(b"")
    done = program(f"{command} --json", job, job / "site")
    how = f"its file {module}/{lost} is {'empty' if lost == '__init__.py' else 'not there'}"
    said = f"{module} is installed and cannot be imported ({how}). It is damaged, or does not fit the packages that it "
    assert done.returncode == 3
    assert done.stderr.startswith(said)
    assert json.loads(done.stdout)["error"].startswith(said)


@pytest.mark.parametrize(("distribution", "module", "command"), CORE)
def test_a_core_package_whose_file_was_cut_is_damaged(job: Path, distribution: str, module: str, command: str) -> None:
    """Where something fails for it: somebody's repair has another size too."""
    install(job / "site", distribution, module, "", lost=("__init__.py",))
    done = program(command, job, job / "site")
    how = f"its file {module}/__init__.py is not the one that was installed"
    assert done.returncode == 3
    assert done.stderr.startswith(f"{module} is installed and cannot be imported ({how})")
    assert packages.pip_install(distribution).split()[-1] in done.stderr


@pytest.mark.parametrize("command", ["validate", "doctor"])
@pytest.mark.parametrize("module", ["jinja2", "networkx", "numba"])
def test_a_package_that_a_build_needs_late_and_that_has_lost_a_file_is_said_at_once(
    tmp_path: Path, module: str, command: str
) -> None:
    version = packages.version(module)
    assert version is not None
    install(tmp_path / "site", module, module, "", version, lost=("conftest.py", "core.py"))
    arguments = f"validate {write(good_folder(tmp_path))}" if command == "validate" else command
    done = program(arguments, tmp_path, tmp_path / "site")
    said = f"{module} is installed and cannot be imported (its file {module}/core.py is not there). It is damaged"
    assert said in done.stdout + done.stderr
    assert done.returncode == (3 if command == "validate" else 0)


@pytest.mark.parametrize("module", ["platform", "json", "html", "copy"])
def test_a_file_that_hides_pythons_own_module_is_named(job: Path, module: str) -> None:
    (job / f"{module}.py").write_text("x = 1\n")
    done = program("doctor", job)
    assert done.returncode == 3
    assert done.stderr.startswith(f"{job}/{module}.py hides the package {module} (")
    assert done.stderr.endswith(
        "Rename it, or take its folder off Python's path (PYTHONPATH, or the current folder).\n"
    )


def test_a_folder_alone_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of models called onnx."""
    (tmp_path / "hollow_one").mkdir()
    (tmp_path / "whole_one.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not packages.present("hollow_one")
    __import__("hollow_one")
    assert not packages.present("hollow_one")
    assert packages.present("whole_one")
    assert not packages.present("none_such")


@pytest.mark.parametrize(("distribution", "module", "command"), [*CORE, ("packaging", "packaging", "doctor")])
def test_a_core_package_that_is_missing(job: Path, distribution: str, module: str, command: str) -> None:
    """`packaging` too, which is not needed to say so."""
    arguments = command.split()
    done = program(command, job, before=ABSENT.format(module=module, arguments=arguments))
    assert done.returncode == 3
    assert done.stderr == packages.not_installed(module) + "\n"
    assert done.stderr.startswith(f"{module} is not installed. Run: pip install '{distribution}>=")
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["trtpipe.cli.results", "calib.user_code"])
def test_a_module_of_trtpipes_own_that_is_missing_is_a_bug(tmp_path: Path, name: str) -> None:
    done = program("", tmp_path, before=ABSENT.format(module=name, arguments=["--json"]))
    assert done.returncode == 70
    assert "Traceback (most recent call last)" in done.stderr
    said = "this is a bug in trtpipe; please report it with the lines above"
    assert done.stderr.splitlines()[-1] == said
    assert json.loads(done.stdout) == {"error": said, "exit_code": 70}


@pytest.mark.parametrize(
    ("module", "command", "source", "said"),
    [
        ("numpy", "--version", "", "AttributeError: module 'numpy' has no attribute "),
        ("numpy", "--version", "raise OSError('mine')", "OSError: mine"),
        ("click", "--version", "def command(): pass", "ModuleNotFoundError: No module named 'click."),
        ("yaml", "validate job.yaml", "", "AttributeError: module 'yaml' has no attribute "),
        ("filelock", "nightly job.yaml", "", "ImportError: cannot import name "),
        ("calib", "--version", "def make(): pass", "ModuleNotFoundError: No module named 'calib."),
        ("calib", "--version", "import sys; sys.exit(1)", "it called sys.exit(1)"),
    ],
)
@pytest.mark.parametrize("where", ["the current folder", "PYTHONPATH"])
def test_a_file_that_hides_a_package_is_named(
    job: Path, module: str, command: str, source: str, said: str, where: str
) -> None:
    folder = job if where == "the current folder" else job / "mine"
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source + "\n")
    done = program(command, job, None if folder == job else folder)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{folder / module}.py hides the package {module} ({said}")
    assert line.endswith(". Rename it, or take its folder off Python's path (PYTHONPATH, or the current folder).")


def test_what_no_distribution_brought_is_not_said_to_hide_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of a source tree, which pip knows and has no list of, and one that is not installed at all."""
    install(tmp_path, "tree", "tree", "")
    (tmp_path / "tree-9.9.dist-info" / "RECORD").write_text("tree-9.9.dist-info/METADATA,,\n")
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.py").touch()
    (tmp_path / "alone-1.dist-info").mkdir()
    (tmp_path / "alone-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: alone\nVersion: 1\n")
    (tmp_path / "alone.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [packages.hider(m) for m in ("tree", "tensorrt", "alone", "none")] == [None] * 4
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)  # another test may have imported it
    assert packages.hider("sklearn") is None
    (tmp_path / "sklearn.py").touch()
    importlib.invalidate_caches()
    assert packages.hider("sklearn") == tmp_path / "sklearn.py"


def test_trtpipes_two_packages_are_the_same_everywhere() -> None:
    assert tuple(packages.OWN_FOLDERS) == OURS
    assert [packages.hider(name) for name in OURS] == [None, None]


def test_one_that_lacks_what_is_asked_of_it_and_is_hidden_by_nothing_is_a_bug_of_ours() -> None:
    for code in ("import numpy; numpy.zebra", "from numpy import zebra", "from calib import zebra"):
        with pytest.raises((AttributeError, ImportError)) as raised:
            exec(code, {"__name__": "trtpipe.zebra"})
        assert user_error(raised.value) is None


def test_a_library_that_ends_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A SystemExit of click's own is that of a closed pipe; another, outside of an import, is no success."""
    install(tmp_path, "ends", "ends", "import sys; sys.exit('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "schema", "ends:command")  # type: ignore[misc]
    assert main(["schema"]) == 3
    assert capsys.readouterr().err.startswith(
        "ends is installed and cannot be imported (it called sys.exit('no licence'))."
    )
    monkeypatch.setattr("trtpipe.cli.commands.schema.command.callback", lambda **_: sys.exit(0))
    monkeypatch.setitem(COMMANDS, "schema", "trtpipe.cli.commands.schema:command")  # type: ignore[misc]
    assert main(["schema"]) == 70
    assert "SystemExit: 0" in capsys.readouterr().err


def test_a_factorys_module_that_ends_the_command_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CalibError, match=r"^model\.factory: importing leaves raised SystemExit: 4"):
        import_callable("leaves:make", "model.factory")


def test_a_current_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = "the current folder: it is no longer there. Change to another.\n"
    for command in (["validate", "a.yaml"], ["doctor"], ["verify", "a"], ["init", "a"], ["schema"]):
        assert (main(command), capsys.readouterr().err) == (2, said)


CALIB = "calib is a package of trtpipe's own: rename yours, if it is called so."


@pytest.mark.parametrize(
    ("target", "planned", "raised"),
    [
        ("calib:make", "name something that calib defines (got 'make').",
         "be package.module:callable (got 'calib:make')."),
        ("calib.net:make", "name a module that can be found (got 'calib.net').",
         "name a module that can be imported (got 'calib.net:make')."),
    ],
)  # fmt: skip
def test_a_module_of_the_users_that_a_package_of_ours_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, planned: str, raised: str
) -> None:
    """It is not the one that is imported, wherever it lies."""
    (tmp_path / "calib.py").write_text("def make(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    absent = missing(target, (tmp_path,))
    assert absent is not None
    assert violation(*absent) == f"must {planned} {CALIB}"
    with pytest.raises(CalibError) as error:
        import_callable(target, "model.factory")
    assert str(error.value) == f"model.factory: must {raised} {CALIB}"


def test_a_callable_of_ours_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "trtpipe.py").touch()
    assert missing("trtpipe.examples.digits:resnet", (tmp_path,)) is None
    absent = missing("trtpipe.examples.digits:resent", (tmp_path,))
    assert absent is not None
    assert absent[2] == "Did you mean resnet?"


def test_an_import_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each module's own limit; the others are still tried."""
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)\n")
    (tmp_path / "whole.py").touch()
    (tmp_path / "lacks.py").write_text("import zebra\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_errors.IMPORT_S == 60
    monkeypatch.setattr(import_errors, "IMPORT_S", 1.5)
    assert import_errors.import_failures(("hangs", "whole", "lacks")) == {
        "hangs": "its import did not end within 1.5 s",
        "lacks": "ModuleNotFoundError: No module named 'zebra'",
    }
    monkeypatch.setattr(device_memory, "_TRY_MEMORY", "import time; time.sleep(600)")
    monkeypatch.setattr(device_memory, "IMPORT_S", 0.5)
    assert device_memory.no_memory() == (
        "device memory: asking for it did not end within 0.5 s. See what `python -m trtpipe --version` says."
    )


@pytest.mark.parametrize("distribution", ["safetensors", "filelock", "pillow", "jinja2"])
def test_doctor_tries_whatever_trtpipe_requires_and_a_build_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    module = "PIL" if distribution == "pillow" else distribution
    tried: list[str] = []

    def failures(modules: Sequence[str]) -> dict[str, str]:
        tried.extend(modules)
        return {module: "SyntaxError: invalid syntax"}

    monkeypatch.setattr(doctor, "import_failures", failures)
    found = doctor.examine()
    assert {*packages.core_modules(), *packages.CAPTURE, *packages.IMAGES, *packages.BUILDING} <= set(tried)
    assert set(packages.core_modules()) >= {"numpy", "yaml", "PIL", "safetensors", "filelock", "packaging"}
    said = f"{module} is installed and cannot be imported (SyntaxError: invalid syntax). "
    lost = [a for a in found.abilities if a.reason.startswith(said)]
    assert [a.what for a in lost][:1] == ["capture, calibrate and export a model"]
    assert not any(a.possible for a in found.abilities) or module == "jinja2"
    assert f"pip install --force-reinstall {distribution}" in found.commands


def test_a_deep_validation_names_every_damaged_package(tmp_path: Path) -> None:
    """What a build would end with, the report's jinja2 at its end. An import that fails is seen by --deep alone."""
    damaged = {"torchvision": "0.29.0", "jinja2": "3.1.6", "filelock": "3.20.0"}
    for name, version in damaged.items():
        install(tmp_path / "site", name, name, "raise OSError('libzebra.so: gone')", version)
    path = write(good_folder(tmp_path))
    done = program(f"validate --deep --json {path}", tmp_path, tmp_path / "site")
    assert done.returncode == 3
    (judged,) = json.loads(done.stdout)
    said = "is installed and cannot be imported (OSError: libzebra.so: gone). It is damaged, or does not fit"
    assert {p["message"].partition(" the packages")[0] for p in judged["problems"]} == {f"{n} {said}" for n in damaged}
    assert program(f"validate {path}", tmp_path, tmp_path / "site").returncode == 0


def test_a_job_needs_what_its_own_build_imports(tmp_path: Path) -> None:
    """Deep validation asks for what the job's build imports, and `doctor` tells the two apart."""
    for name, version in (("torchvision", "0.29.0"), ("numba", "0.68.1")):  # nothing is counted either
        install(tmp_path / "site", name, name, "raise OSError('libzebra.so: gone')", version)
    np.save(tmp_path / "x.npy", np.ones((4, 3), np.float32))
    (tmp_path / "job.yaml").write_text(
        "{name: a, model: {factory: 'torch.nn:ReLU'}, inputs: {x: {shape: [2, 3]}}, outputs: {y: {}}, "
        "build: {target: onnxruntime}, check: {arrays: x.npy, limits: {cosine_min: 0.9}}}"
    )
    assert program("validate --deep job.yaml", tmp_path, tmp_path / "site").returncode == 0
    abilities = json.loads(program("doctor --json", tmp_path, tmp_path / "site").stdout)["abilities"]
    assert {a["what"]: a["possible"] for a in abilities[:2]} == {
        "capture, calibrate and export a model": False, "calibrate and check on images": False,
    }  # fmt: skip


def test_what_is_not_installed_is_said_whoever_lacks_it() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        exec("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')", {"__name__": "other"})
    assert str(user_error(raised.value)) == packages.not_installed("rich")


#: The sources of torchvision and timm, and the package that is to blame, in a build of timm's model and of the user's.
CHAINS = {
    "the inner one raises": ("raise RuntimeError('no operator')", "import torchvision", "torchvision"),
    "the outer one raises": ("", "import torchvision; raise RuntimeError('no')", "timm"),
    "a module of Python's own": (
        "raise ModuleNotFoundError(\"No module named '_lzma'\")",
        "import torchvision",
        "torchvision",
    ),
    "one calls the other": ("def f(): raise RuntimeError('no')", "import torchvision; torchvision.f()", "timm"),
}  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("factory", ["timm:create_model", "mine:make", "late:make"])
def test_the_package_that_a_jobs_code_cannot_import(
    chain: str, factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported by another package, by the job's own module, or as that is called."""
    inner, outer, blamed = CHAINS[chain]
    install(tmp_path / "site", "torchvision", "torchvision", inner, "0.1")
    install(tmp_path / "site", "timm", "timm", f"{outer}\ndef create_model(): pass", "0.1")
    (tmp_path / "mine.py").write_text("import timm\ndef make(): return timm.create_model()\n")
    (tmp_path / "late.py").write_text("def make():\n    import timm\n    return timm.create_model()\n")
    for folder in (tmp_path, tmp_path / "site"):
        monkeypatch.syspath_prepend(folder)
    for name in ("torchvision", "timm", "mine", "late"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def make() -> None:
        made = import_callable(factory, "model.factory")
        with user_code("model.factory"):
            made()

    with pytest.raises(CalibError) as raised:
        make()
    shown = user_error(raised.value)
    assert isinstance(shown, MissingError)
    assert str(shown).startswith(f"{blamed} is installed and cannot be imported (")


def test_a_fault_of_a_jobs_own_module_is_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty.py").write_text("import numpy\nraise RuntimeError('mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CalibError) as raised:
        import_callable("faulty:make", "model.factory")
    shown = user_error(raised.value)
    assert str(shown).startswith("model.factory: importing faulty raised RuntimeError: mine\n")
    assert isinstance(shown, InputError)

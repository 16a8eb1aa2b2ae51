"""What a job's code changes of the process is put back: results stand where they were asked for."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nights
import numpy as np
import pytest
import torch
from PIL import Image

import trtpipe
from calib.data import open_source
from calib.process_state import imported, put_back
from calib.samples import DataSpec, InputSpec, TransformSpec
from calib.user_code import _noted
from trtpipe.pipeline.prepared import Stages
from trtpipe.progress import Silent

#: A package that takes its time, and has what it has at its end.
SLOW = """
import time
from pathlib import Path
Path(__file__).with_name("begun").touch()
while not Path(__file__).with_name("go").exists():
    time.sleep(0.005)
ready = True
"""


def test_a_package_that_another_thread_imports_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build in one thread imports torch; one in another asked it for what it did not have yet."""
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    (tmp_path / "broken_to_import.py").write_text("raise RuntimeError('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imported("slow_to_import") is None
    threading.Thread(target=importlib.import_module, args=("slow_to_import",)).start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.005)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(imported("slow_to_import")))
    asking.start()
    asking.join(0.1)
    assert found == []
    (tmp_path / "go").touch()
    asking.join(60)
    assert found[0].ready
    monkeypatch.setitem(sys.modules, "broken_to_import", None)
    assert imported("broken_to_import") is None


CHANGES = {
    "import os; os.chdir('/')": "the job's code went to the folder /; back to ",
    "import sys; sys.stdout = sys.stderr = None": "the job's code replaced sys.stdout or sys.stderr; put back",
    "torch.set_default_dtype(torch.float64)": "the job's code set torch's default dtype to float64; back to float32",
    "torch.set_default_device('meta')": "the job's code set torch's default device to meta; back to cpu",
    "import os; os.umask(0o777)": "the job's code set the umask to 0o777; back to 0o",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)": "the job's code set handlers of SIG",
    "import sys; sys.path.clear()": "the job's code took folders out of sys.path; put back",
    "import sys; sys.path = ['/added', *sys.path[1:]]": "the job's code took folders out of sys.path; put back",
    "import numpy; numpy.seterr(all='raise')": "the job's code changed numpy.seterr; put back",
    "torch.set_autocast_enabled('cpu', True)": "the job's code turned torch's autocast on or off; put back",
}


class Told(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_a_stage_leaves_the_process_as_it_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, fails: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/first", *sys.path])
    folders = set(sys.path)
    errors, mask, ended = np.geterr(), os.umask(0o027), signal.getsignal(signal.SIGTERM)
    told = Told()
    stages = Stages(told)
    try:
        with stages("model"):
            exec(change, {"torch": torch})
            if fails:
                raise ValueError("and then")
    except ValueError:
        assert fails
    assert os.getcwd() == str(tmp_path)
    assert sys.stdout is not None
    assert sys.stderr is not None
    assert (torch.get_default_dtype(), torch.get_default_device()) == (torch.float32, torch.device("cpu"))
    assert np.geterr() == errors
    assert not torch.is_autocast_enabled("cpu")
    assert folders.issubset(sys.path)
    assert ("/added" in sys.path) is ("/added" in change)
    assert signal.getsignal(signal.SIGTERM) is ended
    assert os.umask(mask) == 0o027
    assert [n.startswith(CHANGES[change]) for n in told.notes] == [True]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("change", "note", "opened"),
    [
        ("sys.{0}.close()", "closed sys.stdout or sys.stderr; opened again", True),
        ("sys.{0}.close(); sys.{0} = None", "closed sys.stdout or sys.stderr; opened again", True),
        ("sys.{0} = io.StringIO(); sys.{0}.close()", "replaced sys.stdout or sys.stderr; put back", False),
    ],
)
def test_standard_streams_can_be_written_to_afterwards(
    name: str,
    change: str,
    note: str,
    opened: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, name, open(tmp_path / "given", "w"))  # noqa: SIM115  # closed by the job's code, or below
    told = Told()
    with Stages(told)("model"):
        exec(change.format(name), {"sys": sys, "io": io})
    stream = getattr(sys, name)
    print("still", file=stream, flush=True)
    assert told.notes[-1] == f"the job's code {note}"
    written = "".join(capfd.readouterr()) if opened else (tmp_path / "given").read_text()
    assert written == "still\n"
    stream.close()


def test_folders_that_the_jobs_code_adds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    told = Told()
    with Stages(told)("model"):
        sys.path.insert(0, "/added")
    assert sys.path[0] == "/added"
    assert told.notes == []


def test_a_bundle_is_written_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), "m")
    net = tmp_path / "jobs" / "net.py"
    net.write_text(
        net.read_text().replace("def net():", "def net():\n    import os; os.chdir(os.path.dirname(__file__))")
    )
    monkeypatch.delitem(sys.modules, "net", raising=False)
    trtpipe.build(job, "out")
    assert (tmp_path / "out" / "m" / "manifest.json").is_file()
    assert not (tmp_path / "jobs" / "out").exists()


@pytest.mark.parametrize(
    "change",
    ["torch.set_default_device('meta')", "torch.set_default_dtype(torch.float64)", "import sys; sys.path.clear()"],
)
def test_what_a_factory_leaves_behind_does_not_reach_its_own_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), "m")
    net = tmp_path / "jobs" / "net.py"
    net.write_text(
        net.read_text().replace(
            "def net():", f"def net():\n    made = plain()\n    {change}\n    return made\n\ndef plain():"
        )
    )
    monkeypatch.delitem(sys.modules, "net", raising=False)
    assert trtpipe.build(job, tmp_path / "out").report.passed


@pytest.mark.parametrize("kind", ["transform", "sequence", "iterable", "factory", "module"])
@pytest.mark.parametrize(
    "change", ["import os; os.chdir('/')", "torch.set_default_dtype(torch.float64)", "import sys; sys.stdout = None"]
)
def test_each_call_for_samples_leaves_the_process_as_it_was(
    tmp_path: Path, kind: str, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not only each stage, as another may have begun in another thread meanwhile."""
    (tmp_path / "gives.py").write_text(
        "import numpy as np, torch\n"
        "def change():\n"
        f"    {change}\n"
        f"if {kind == 'module'}: change()\n"
        "def transform(image):\n"
        "    change()\n"
        "    return np.zeros((3, 4, 4), np.float32)\n"
        "class Sequence(list):\n"
        "    def __getitem__(self, at):\n"
        "        change()\n"
        "        return super().__getitem__(at)\n"
        "def samples(): return [np.full((3, 4, 4), i, np.float32) for i in range(4)]\n"
        "def sequence(): return Sequence(samples())\n"
        "def iterable():\n"
        "    for sample in samples():\n"
        "        change()\n"
        "        yield sample\n"
        "def factory():\n"
        "    change()\n"
        "    return samples()\n"
        "module = samples\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gives", raising=False)
    _noted.cache_clear()
    x = (InputSpec("x", "float32", (3, 4, 4)),)
    if kind == "transform":
        (tmp_path / "images").mkdir()
        for i in range(4):
            Image.new("RGB", (4, 4), (i, i, i)).save(tmp_path / "images" / f"{i}.png")
        spec = DataSpec(images=str(tmp_path / "images"), transform=TransformSpec(callable="gives:transform"))
    else:
        spec = DataSpec(factory=f"gives:{kind}")
    before = os.getcwd(), torch.get_default_dtype(), sys.stdout
    for _ in open_source(spec, x).batches(1):
        assert (os.getcwd(), torch.get_default_dtype(), sys.stdout) == before
    assert len([r for r in caplog.records if "the job's code" in r.getMessage()]) == 1


def test_what_the_caller_has_set_counts_for_nothing(tmp_path: Path) -> None:
    """A build within `torch.autocast`, and where NumPy raises: the job says what is computed, and how."""
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), "m")
    plain = trtpipe.build(job, tmp_path / "plain")
    torch.set_default_dtype(torch.float64)
    try:
        with np.errstate(all="raise"), torch.autocast("cpu", torch.bfloat16):
            made = trtpipe.build(job, tmp_path / "out")
            assert trtpipe.check(made.bundle, graph=True).passed
            assert torch.is_autocast_enabled("cpu")
            assert set(np.geterr().values()) == {"raise"}
            assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.report.metrics == plain.report.metrics
    assert made.bundle.manifest.fingerprint == plain.bundle.manifest.fingerprint


def test_a_folder_that_is_gone_is_none_to_go_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trtpipe.build` with paths that are all absolute ended in a FileNotFoundError without one."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    notes: list[str] = []
    with put_back(notes.append):
        pass
    assert notes == []
    with put_back(notes.append):
        os.chdir(tmp_path)
    assert len(notes) == 1


def test_a_program_without_standard_streams_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service has none; torch.export prints to them, and its failure was blamed on the model."""
    job = nights.write_job(nights.make_world(tmp_path / "jobs"), "m")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        made = trtpipe.build(job, tmp_path / "out")
        streams = sys.stdout, sys.stderr
    assert made.report.passed
    assert streams == (None, None)

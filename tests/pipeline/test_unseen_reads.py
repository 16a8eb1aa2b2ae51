"""What a job's code looks for and does not find, and the environment that it reads: in sources, and as it runs."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nights
import numpy as np
import pytest

from trtpipe.pipeline.cache.reads import Read, Reads
from trtpipe.pipeline.cache.recorder import Recorder

#: Ways to read a variable, and what they read.
VARIABLES = {
    "os.environ['ONE']": ("ONE",),
    "os.environ.get('ONE', '')": ("ONE",),
    "os.getenv('ONE')": ("ONE",),
    "os.getenvb(b'ONE')": ("ONE",),
    "'ONE' in os.environ": ("ONE",),
    "os.environ.pop('ONE')": ("ONE",),
    "os.environ.setdefault('ONE', 'x')": ("ONE",),
    "os.path.expandvars('$ONE/${TWO}')": ("ONE", "TWO"),
    "os.path.expanduser('~')": ("HOME",),
    "Path.home()": ("HOME",),
    "dict(os.environ)": ("some",),
    "list(os.environ.items())": ("some",),
    "os.environ.copy()": ("some",),
    "read('ONE')": ("ONE",),
    "exec('import os; os.environ.get(\"ONE\")')": ("ONE",),
    "os.environ.__setitem__('ONE', 'x')": (),
    "__import__('tempfile').gettempdir()": (),
    "__import__('shutil').which('ls')": (),
}


@pytest.mark.parametrize("way", VARIABLES)
def test_every_way_to_read_a_variable_is_recorded(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONE", "TWO"):
        monkeypatch.setenv(name, "x")
    recorder = Recorder(tmp_path)
    with recorder:
        eval(way, {"os": os, "Path": Path, "read": os.environ.get})
    eval("os.environ['HOME']", {"os": os})
    found = recorder.reads
    recorder.close()
    assert found.variables == VARIABLES[way]
    assert Reads.from_plain(found.to_plain()) == found
    assert not [i for i in found.items if i.kind == "file"]


FORMS = ("{}.py", "{}/__init__.py")


@pytest.mark.parametrize(("found", "before"), list(itertools.product(FORMS, FORMS)))
@pytest.mark.parametrize("inside", ["", "holder."])
def test_where_an_imported_module_was_looked_for_counts(
    found: str, before: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever would be imported in its place, once it is there."""
    name = "a_shadowed_module"
    folders = [tmp_path / folder / inside.rstrip(".") for folder in ("first", "second")]
    for folder in folders:
        folder.mkdir(parents=True)
    if inside:
        (tmp_path / "holder.py").write_text(f"__path__ = {[str(f) for f in folders]!r}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
    else:
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(str(folder))
    module = folders[1] / found.format(name)
    module.parent.mkdir(exist_ok=True)
    module.write_text("VALUE = 1\n")
    recorder = Recorder(tmp_path)
    try:
        with recorder:
            assert importlib.import_module(inside + name).VALUE == 1
        reads = recorder.reads
        recorder.close()
        other = folders[0] / before.format(name)
        asked = Read("presence", os.path.relpath(other, tmp_path))
        assert asked in reads.items
        other.parent.mkdir(exist_ok=True)
        other.write_text("VALUE = 2\n")
        for known in (inside + name, "holder"):
            sys.modules.pop(known, None)
        importlib.invalidate_caches()
        assert importlib.import_module(inside + name).VALUE == 2
    finally:
        for known in (inside + name, "holder"):
            sys.modules.pop(known, None)


def optional(name: str) -> int:
    try:
        return int(importlib.import_module(name).VALUE)
    except ImportError:
        return 1


def optional_statement(name: str) -> int:
    given: dict[str, Any] = {}
    exec(f"try:\n    import {name} as found\n    value = found.VALUE\nexcept ImportError:\n    value = 1", given)
    return int(given["value"])


def asked_for(name: str) -> int:
    return 1 if importlib.util.find_spec(name) is None else 2


def parts(name: str) -> int:
    try:
        return len(importlib.import_module(name).__path__)
    except ImportError:
        return 0


@pytest.mark.parametrize("where", ["job", "job/lib", "elsewhere"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ask", [optional, optional_statement, asked_for])
def test_a_module_that_is_not_there_was_looked_for(
    ask: Callable[[str], int], form: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optional module that was installed later was not noticed: the night was green, its engine stale."""
    name, folder = "a_missing_module", tmp_path / where
    for made in (folder, tmp_path / "job"):
        made.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(tmp_path / "job")
    file = folder / form.format(name)
    try:
        with recorder:
            monkeypatch.syspath_prepend(str(folder))
            assert ask(name) == 1
        reads = recorder.reads
        recorder.close()
        shown = os.path.relpath(file, tmp_path / "job") if where.startswith("job") else str(file)
        assert Read("presence", shown) in reads.items
        file.parent.mkdir(exist_ok=True)
        file.write_text("VALUE = 2\n")
        importlib.invalidate_caches()
        assert ask(name) == 2
    finally:
        sys.modules.pop(name, None)


def test_a_part_of_a_namespace_package_that_is_not_there_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a_package_in_parts"
    for folder in ("first", f"second/{name}"):
        (tmp_path / folder).mkdir(parents=True)
    recorder = Recorder(tmp_path)
    try:
        with recorder:
            for folder in ("second", "first"):
                monkeypatch.syspath_prepend(str(tmp_path / folder))
            assert parts(name) == 1
        assert Read("presence", f"first/{name}") in recorder.reads.items
        recorder.close()
        sys.modules.pop(name)
        (tmp_path / "first" / name).mkdir()
        importlib.invalidate_caches()
        assert parts(name) == 2
    finally:
        sys.modules.pop(name, None)


def test_modules_of_the_environment_are_looked_for_in_its_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a record would hold paths of this machine, and count in no other checkout."""
    monkeypatch.syspath_prepend(str(tmp_path / "environment"))
    (tmp_path / "job").mkdir()
    recorder = Recorder(tmp_path / "job")
    with recorder:
        assert optional("a_module_of_nobody") == 1
    assert not [i for i in recorder.reads.items if "a_module_of_nobody" in i.path]
    recorder.close()


@pytest.mark.parametrize(
    "path", ["/proc/self/cwd/v.txt", "/proc/thread-self/cwd/v.txt", "/proc/self/root{}/v.txt", "/dev/fd/{}/v.txt"]
)
def test_what_is_read_through_what_the_process_has_is_the_file(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v.txt").write_text("1")
    monkeypatch.chdir(tmp_path)
    recorder, folder = Recorder(tmp_path), os.open(tmp_path, os.O_RDONLY)
    with recorder:
        Path(path.format(folder if "fd" in path else tmp_path)).read_text()
    os.close(folder)
    assert Read("file", "v.txt") in recorder.reads.items
    recorder.close()


NET = """
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from torch import nn
import torch

HERE = Path(__file__).parent
for folder in ("far", "near"):
    sys.path.insert(0, str(HERE / folder))


def net():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    layer.weight.data *= importlib.import_module("fac" + "tor").FACTOR
    return layer


def cut(batch):
    if (HERE / "cut.txt").exists():
        return {name: x * 0.5 for name, x in batch.items()}
    return batch


class Samples:
    def __len__(self):
        return 8

    def __getitem__(self, k):
        import numpy as np
        return cut({"x": np.full(4, k, np.float32)})
"""
JOB = """
name: {}
model: {{factory: "net:net"}}
inputs: {{x: {{dtype: float32, shape: [N, 4], N: {{min: 1, opt: 4, max: 8}}}}}}
outputs: {{y: {{dtype: float32}}}}
build: {{target: onnxruntime}}
check: {{factory: "net:Samples", batch_size: 8, limits: {{relative_l2_max: 0.01}}}}
"""


def test_what_was_not_there_counts_where_nothing_looks_for_it_again(tmp_path: Path) -> None:
    """In a process that has the module already, and where the stage that looked is taken from the cache."""
    jobs = tmp_path / "jobs"
    for folder in ("far", "near"):
        (jobs / folder).mkdir(parents=True)
    (jobs / "net.py").write_text(NET)
    (jobs / "far" / "factor.py").write_text(
        "import os\nFACTOR = float(os.environ.get('FACTOR', '2'))\ndef never():\n    import onnxruntime\n"
    )
    for name in ("a", "b"):
        (jobs / f"{name}.yaml").write_text(JOB.format(name))
    report = nights.night(tmp_path, "--workers", "0")
    assert set(nights.outcomes(report).values()) == {"built"}
    for outcome in report["outcomes"]:
        assert [n for n in outcome["notes"] if "environment variables (FACTOR)" in n]
        assert [n for n in outcome["notes"] if "imports onnxruntime, whose native code" in n]
    again = nights.night(tmp_path, "--workers", "0")
    assert {name: o["reasons"] for name, o in zip("ab", again["outcomes"], strict=True)} == {"a": [], "b": []}
    assert set(nights.outcomes(again).values()) == {"reused"}
    (jobs / "a.yaml").write_text(JOB.format("a").replace("0.01", "0.02"))
    again = nights.night(tmp_path, "--workers", "0")
    assert next(o for o in again["outcomes"] if o["name"] == "a")["stages_reused"]
    for made in (jobs / "near" / "factor.py", jobs / "cut.txt"):
        made.write_text("FACTOR = 3\n")
        found = nights.night(tmp_path, "--workers", "0")
        assert nights.outcomes(found) == {"a": "built", "b": "built"}
        (reason,) = {reason for o in found["outcomes"] for reason in o["reasons"]}
        assert reason == f"whether the job's code finds {made.relative_to(jobs)} changed"


def test_scratch_that_is_gone_is_forgotten_and_other_absence_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "scratch"))
    (tmp_path / "there").touch()
    items = [Read("presence", name) for name in ("there", "gone", str(tmp_path / "scratch" / "x"))]
    now = Read("presence", str(tmp_path / "scratch" / "y"))
    kept = Reads((*items, now)).without_scratch(Reads((now,)))
    assert kept.items == (*items[:2], now)
    assert np.all([item.value(tmp_path, None) == "absent" for item in kept.items[1:]])  # type: ignore[arg-type]

import sys
import types

from trtpipe.nightly.execute import _forget_modules
from trtpipe.nightly.outcome import Drift, JobOutcome
from trtpipe.nightly.task import from_plain, plain
from trtpipe.values import Metric


def module(monkeypatch, name, path):
    found = types.ModuleType(name)
    found.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, found)


def test_modules_of_the_folder_before_and_shadowed_ones_are_forgotten(tmp_path, monkeypatch):
    first, second, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for folder in (first, second, other):
        folder.mkdir()
    (second / "tt_net.py").touch()
    module(monkeypatch, "tt_net", other / "tt_net.py")
    module(monkeypatch, "tt_net.part", other / "part.py")
    module(monkeypatch, "tt_mine", second / "tt_mine.py")
    module(monkeypatch, "tt_helper", first / "tt_helper.py")
    module(monkeypatch, "tt_elsewhere", other / "tt_elsewhere.py")
    _forget_modules(second, first)
    assert {n for n in sys.modules if n.startswith("tt_")} == {"tt_mine", "tt_elsewhere"}
    _forget_modules(second, second)
    assert {n for n in sys.modules if n.startswith("tt_")} == {"tt_mine", "tt_elsewhere"}


def test_an_outcome_survives_being_plain_data():
    outcome = JobOutcome(
        "a", "a.yaml", "built", 1, "", ("weights changed",), "k", "f", "out/a", "e", 5, "onnxruntime", "graph",
        "ort", 3, (Metric("sqnr_db", "y", float("inf"), 3.0, True, (1.0, 2.0)), Metric("cosine", "y", 0.5)), ("bad",),
        {"compile": 1.5}, ("graph",), "cpu0", ("died",), ("note",), drift=Drift(("x", "y"), 0.5, ("n",)),
    )  # fmt: skip
    assert from_plain(plain(outcome)) == outcome

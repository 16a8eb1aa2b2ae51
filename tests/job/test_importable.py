"""Where modules of a job are looked up, and that the path is left as it was."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest

from trtpipe.job.importable import find_module, missing, on_path


def test_the_path_is_as_it_was_in_the_order_it_was(tmp_path, monkeypatch):
    """The current folder may stand on the path already, before what is installed: it must not move behind it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/installed", str(tmp_path / "other")])
    before = list(sys.path)
    with on_path(tmp_path / "other"):
        assert sys.path == [str(tmp_path / "other"), *before, str(tmp_path)]
    assert sys.path == before


@pytest.mark.parametrize("layout", ["".join(x) for depth in (1, 2, 3) for x in itertools.product("pn", repeat=depth)])
def test_a_module_in_folders_of_any_kind_is_found(layout, tmp_path):
    """`p` is a package, `n` a folder without __init__.py; none of them has been imported."""
    folder = tmp_path
    for kind in layout:
        folder = folder / f"part_{kind}"
        folder.mkdir()
        if kind == "p":
            (folder / "__init__.py").touch()
    (folder / "net.py").write_text("def net(): ...\n")
    module = ".".join([*(f"part_{kind}" for kind in layout), "net"])
    found = find_module(module, (tmp_path,))
    assert found is not None
    assert found.origin == str(folder / "net.py")
    assert missing(f"{module}:net", (tmp_path,)) is None
    assert missing(f"{module}:nothing", (tmp_path,)) is not None
    assert missing(f"{module}er:net", (tmp_path,)) is not None


def test_a_module_called_as_one_of_pythons_is_refused_and_hides_none(tmp_path):
    """Python has loaded its own, or libraries will: what a job's is called decides nothing else."""
    for name in ("json", "colorsys", "sndhdr"):
        (tmp_path / f"{name}.py").write_text("def net(): ...\n")
    expected = ("name a module that is not called as one of Python's own", str(tmp_path / "colorsys.py"), "Rename it.")
    assert missing("colorsys:net", (tmp_path,)) == expected
    assert missing("json:net", (tmp_path,)) is not None
    assert missing("json:loads", ()) is None
    before = list(sys.meta_path)
    sys.modules.pop("colorsys", None)
    with on_path(tmp_path):
        assert importlib.import_module("colorsys").rgb_to_hls(0, 0, 0) == (0, 0, 0)
    assert sys.meta_path == before


@pytest.mark.parametrize(
    "line",
    [
        "def __getattr__(name): ...",
        "eval('1')",
        "exec('net = 1')",
        "globals()['net'] = 1",
        "locals()['net'] = 1",
        "vars()['net'] = 1",
        "import sys; setattr(sys.modules[__name__], 'net', 1)",
        "import me; setattr(me, 'net', 1)",
    ],
)
def test_a_module_whose_text_does_not_show_its_names_may_have_any(line, tmp_path):
    (tmp_path / "me.py").write_text(f"{line}\n")
    assert missing("me:net", (tmp_path,)) is None
    (tmp_path / "me.py").write_text("other = 1\n")
    assert missing("me:net", (tmp_path,)) is not None

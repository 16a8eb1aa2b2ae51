"""Which PyTorch and torchao are taken, and what is said of the others."""

from __future__ import annotations

import importlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from jobs import GOOD

from trtpipe import packages
from trtpipe.errors import MissingError
from trtpipe.model import torch_versions
from trtpipe.model.torch_versions import misfit, needs_torchao, release, unsupported
from trtpipe.packages import _torchvision_for
from trtpipe.pipeline.validate import validate

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

INSTALL = "Run: pip install 'trtpipe[build]'"


@pytest.mark.parametrize(
    ("version", "supported"),
    [("2.5.1", False), ("2.6.0", True), ("2.8.0a0+5228986c39.nv25.6", True), ("2.15.0+cu130", True), ("2.16.0", False),
     ("3.0", False), ("unknown", False)],
)  # fmt: skip
def test_the_range(version, supported):
    assert unsupported(version) == (None if supported else f"torch must be 2.6 to 2.15 (got {version})")


def test_the_package_asks_for_the_same_range():
    (bounds,) = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(map(release, bounds)) == (torch_versions.OLDEST, torch_versions.UNKNOWN)
    assert unsupported(torch.__version__) is None
    ((least, beyond),) = re.findall(r'"torchvision>=0\.(\d+),<0\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert (int(least), int(beyond)) == (torch_versions.OLDEST[1] + 15, torch_versions.UNKNOWN[1] + 15)
    assert _torchvision_for(".".join(map(str, torch_versions.OLDEST))) == f"torchvision==0.{least}.*"


def test_what_was_run_is_all_inside_the_range_and_its_torchao_fits():
    import support_matrix

    for one in support_matrix.RELEASES:
        assert unsupported(one.torch) is None
        assert misfit(one.torch, one.torchao) is None
        assert needs_torchao(one.torch) == (release(one.torch) >= (2, 7))


@pytest.mark.parametrize(
    ("torch_version", "torchao", "command"),
    [("2.6.0", "0.9.0", None), ("2.8.0", "0.17.0", None), ("2.8.0", "0.18.0", "0.17.*"), ("2.11.0", "0.13.0", "0.18.*"),
     ("2.14.1", "0.17.0", "0.18.*"), ("2.14.1", "0.25.0", "0.18.*"), ("2.15.0", "0.19.0", "0.18.*")],
)  # fmt: skip
def test_torchao_that_does_not_fit(torch_version, torchao, command):
    message = f"torchao must be one for torch {torch_version} (got {torchao}). Run: pip install 'torchao=={command}'"
    assert misfit(torch_version, torchao) == (message if command else None)


@pytest.fixture
def versions(monkeypatch):
    """A dictionary of versions that the package metadata shall tell."""
    real, told = metadata.version, {}

    def version(name):
        if name in told and told[name] is None:
            raise metadata.PackageNotFoundError(name)
        return told.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(packages, "present", lambda name: told.get(name, "") is not None)
    return told


@pytest.mark.parametrize(
    ("told", "messages"),
    [
        ({"torch": "2.5.1"}, [f"model: torch must be 2.6 to 2.15 (got 2.5.1). {INSTALL}"]),
        ({"torch": "2.6.0", "torchao": None}, []),
        ({"torch": "2.8.0", "torchao": None}, [f"precision.int8_mode: torchao is not installed. {INSTALL}"]),
        ({"torch": "2.8.0", "torchao": "0.18.0"}, ["precision.int8_mode: torchao must be one for torch 2.8.0 "
         "(got 0.18.0). Run: pip install 'torchao==0.17.*'"]),
    ],
)  # fmt: skip
def test_a_job_is_refused_before_anything_is_imported(tmp_path, versions, told, messages):
    for name in ("calib", "val"):
        (tmp_path / name / "0").mkdir(parents=True)
        (tmp_path / name / "0" / "a.png").write_bytes(b"")
    (tmp_path / "w.safetensors").write_bytes(b"")
    (tmp_path / "job.yaml").write_text(GOOD)
    versions.update(told)
    assert [p.message for p in validate(tmp_path / "job.yaml")] == messages


def test_a_program_of_either_kind_becomes_a_module_without_guards():
    given = []

    class Guarded:
        def module(self, check_guards=True):
            given.append(check_guards)
            return torch.fx.symbolic_trace(torch.nn.Identity())

    class Before:
        def module(self):
            given.append(None)
            return torch.fx.symbolic_trace(torch.nn.Identity())

    for program in (Guarded(), Before()):
        torch_versions.graph_module(program)
    assert given == [False, None]


def test_the_page_is_what_the_program_writes():
    import support_matrix

    rows = json.loads((ROOT / "benchmarks/results/support.json").read_text())
    assert (ROOT / "docs/support.md").read_text() == support_matrix.document(rows)


def test_a_torchao_that_lacks_what_is_taken_of_it_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "trtpipe.model.pt2e", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.utils", None)
    monkeypatch.setattr(torch_versions, "misfit", lambda *_: None)
    with pytest.raises(MissingError) as caught:
        importlib.import_module("trtpipe.model.pt2e")
    assert str(caught.value) == (
        f"torchao {metadata.version('torchao')} cannot be imported with torch {torch.__version__} (got: import of "
        "torchao.quantization.pt2e.utils halted; None in sys.modules). docs/support.md lists releases that fit each "
        "other."
    )

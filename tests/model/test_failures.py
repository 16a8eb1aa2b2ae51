"""Whose line an error is, whatever the folders are called in which a network's own code lies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from trtpipe.errors import InputError
from trtpipe.model.bindings import Bound
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, source_line
from trtpipe.values import LoadedModel, TensorSpec

NET = """\
import torch

class Net(torch.nn.Module):
    def __init__(self, least):
        super().__init__()
        self.least, self.fc = least, torch.nn.Linear(4, 4)

    def forward(self, x):
        if len(x) < self.least:
            raise ValueError("too few")
        return self.fc(x)
"""
FOLDERS = ("plain", "torch", "trtpipe/model", "onnx/jobs", "sympy", "calib", "site-packages/pack")


def loaded(folder: Path, least: int) -> LoadedModel:
    folder.mkdir(parents=True)
    (folder / "own_net.py").write_text(NET)
    spec = importlib.util.spec_from_file_location("own_net", folder / "own_net.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs, outputs = (TensorSpec("x", "float32", (2, 4)),), (TensorSpec("y", "float32", (2, 4)),)
    return LoadedModel(Bound(module.Net(least).eval(), inputs, {}, ("y",)).eval(), inputs, outputs, "w" * 64, "test")


@pytest.mark.parametrize("under", FOLDERS)
def test_a_layer_has_its_line(under: str, tmp_path: Path) -> None:
    captured = capture(loaded(tmp_path / under, 1))
    lines = [source_line(node) for node in calls(captured.graph.graph)]
    assert lines
    assert all(line.endswith("own_net.py:11") for line in lines)


@pytest.mark.parametrize("under", FOLDERS)
def test_what_the_network_raises_is_its_own(under: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the model, run by torch\.export, raised ValueError: too few"):
        capture(loaded(tmp_path / under, 3))


def test_what_pytorch_raises_is_not(tmp_path: Path) -> None:
    from trtpipe.model.failures import place_of, raised_by_the_model

    with pytest.raises(RuntimeError) as caught:
        loaded(tmp_path / "plain", 1).module(torch.ones(2, 5))
    assert not raised_by_the_model(caught.value)
    assert place_of(caught.value) == "own_net.py:11 (return self.fc(x))"
    assert "own_net" not in sys.modules

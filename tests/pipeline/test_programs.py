"""A .pt2 program goes down the whole line, whatever its batch: it is its own baseline."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calib.table import CalibrationTable
from trtpipe.job.load import JobErrors, read_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.deep import deep_problems
from trtpipe.progress import Silent


def job(folder: Path, batch: Any, **model: Any) -> Path:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).eval()
    shapes = {0: torch.export.Dim("N", min=1, max=8)} if batch == "N" else None
    program = torch.export.export(network, (torch.zeros(2, 3, 8, 8),), dynamic_shapes=(shapes,))
    torch.export.save(program, folder / "net.pt2")
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((12, 3, 8, 8)).astype(np.float32))
    x: dict[str, Any] = {"shape": [batch, 3, 8, 8]} | ({"N": {"min": 1, "opt": 4, "max": 8}} if batch == "N" else {})
    text = {
        "name": "program",
        "model": {"program": "net.pt2"} | model,
        "inputs": {"x": x},
        "outputs": {"y": {}},
        "precision": {"int8_mode": True},
        "calibration": {"arrays": "x.npy"},
        "build": {"target": "onnxruntime"},
        "check": {"arrays": "x.npy", "limits": {"cosine_min": 0.999}},
    }
    (folder / "job.yaml").write_text(json.dumps(text))
    return folder / "job.yaml"


@pytest.mark.parametrize("batch", ["N", 2])
def test_a_program_is_built(tmp_path: Path, batch: Any) -> None:
    made = read_job(job(tmp_path, batch))
    assert deep_problems(made) == ()
    built = build(made, tmp_path / "out", Silent())
    assert built.report.passed, built.report.problems
    assert built.bundle.manifest.outputs[0].batch_axis == 0
    table = CalibrationTable.load(built.bundle.path / "calibration.json")
    assert set(table.amax) == {"0:input", "4:input"}  # the modules that it was exported from


class Sized(nn.Module):
    """A convolution of any height, and of two inputs the sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.relu(self.body(x))
        if z is not None:
            x = x + torch.relu(self.body(z))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("precision", [{}, {"int8_mode": True}], ids=["fp32", "int8"])
@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("dims", [("N",), ("N", "H"), ("H",), ()], ids=str)
def test_a_program_of_any_inputs_and_dynamic_dimensions_is_built(
    tmp_path: Path, dims: tuple[str, ...], inputs: int, precision: dict[str, bool]
) -> None:
    names = ("x", "z")[:inputs]
    known = {"N": torch.export.Dim("N", min=1, max=8), "H": torch.export.Dim("H", min=8, max=16)}
    shapes = {axis: known[name] for axis, name in ((0, "N"), (2, "H")) if name in dims}
    example = tuple(torch.zeros(2, 3, 12, 8) for _ in names)
    program = torch.export.export(Sized().eval(), example, dynamic_shapes=(shapes or None,) * inputs)
    torch.export.save(program, tmp_path / "sized.pt2")
    random = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", **{n: random.standard_normal((12, 3, 12, 8)).astype(np.float32) for n in names})
    ranges = {"N": {"min": 1, "opt": 4, "max": 8}, "H": {"min": 8, "opt": 12, "max": 16}}
    size = {"shape": ["N" if "N" in dims else 2, 3, "H" if "H" in dims else 12, 8]} | {n: ranges[n] for n in dims}
    changed = json.loads(job(tmp_path, 2).read_text()) | {
        "model": {"program": "sized.pt2"},
        "inputs": dict.fromkeys(names, size),
        "precision": precision,
        "calibration": {"arrays": "x.npz"},
        "check": {"arrays": "x.npz", "limits": {"cosine_min": 0.99}},
    }
    if not precision:
        del changed["calibration"]
    (tmp_path / "job.yaml").write_text(json.dumps(changed))
    made = read_job(tmp_path / "job.yaml")
    assert deep_problems(made) == ()
    built = build(made, tmp_path / "out", Silent())
    assert built.report.passed, built.report.problems
    assert {d for spec in built.bundle.manifest.inputs for d in spec.dims} == set(dims)


def test_a_program_has_no_other_baseline(tmp_path: Path) -> None:
    with pytest.raises(JobErrors) as caught:
        read_job(job(tmp_path, "N", baseline="script"))
    assert "model.baseline: must be given only with factory (got baseline with program)" in str(caught.value)


#: Saves a program with torchvision's roi_align, or a class, a namedtuple or an operation that an exporter registered.
EXPORTS = """
import sys, torch, torchvision
from collections import namedtuple
from dataclasses import dataclass
@dataclass
class Found:
    y: torch.Tensor
@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
@twice.register_fake
def _(x):
    return torch.empty_like(x)
Pair = namedtuple("Pair", ["y"])
torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="mine.Pair")
torch.export.register_dataclass(Found, serialized_type_name="mine.Found")
class Net(torch.nn.Module):
    def forward(self, x):
        if sys.argv[1] == "roi":
            return torchvision.ops.roi_align(x, x.new_tensor([[0, 0, 0, 4, 4]]), 2)
        return {"class": Found, "tuple": Pair, "operation": twice}[sys.argv[1]](x)
torch.export.save(torch.export.export(Net(), (torch.zeros(2, 3, 8, 8),)), sys.argv[2])
"""


@pytest.mark.parametrize("kind", ["roi", "class", "tuple", "operation"])
def test_what_only_other_code_registers(kind: str, tmp_path: Path) -> None:
    """Read in a process of its own, which has imported nothing but trtpipe."""
    path = tmp_path / "net.pt2"
    subprocess.run([sys.executable, "-c", EXPORTS, kind, path], check=True, capture_output=True)
    code = "import sys; from trtpipe.model.load import _read; _read(sys.argv[1])"
    read = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True, text=True)
    last = (read.stderr.splitlines() or [""])[-1]
    name = {"class": "mine.Found", "tuple": "mine.Pair", "operation": "mine.twice"}.get(kind)
    assert last == (
        ""
        if name is None
        else "trtpipe.errors.InputError: model.program: must hold nothing that only code of yours registers (got "
        f"net.pt2 with {name}). Read it in a model.factory, in a module that imports what registers {name}: return "
        f"torch.export.load({str(path)!r}).module()."
    )
    assert (read.returncode == 0) is (name is None)


def test_what_is_no_program_says_why(tmp_path: Path) -> None:
    path = job(tmp_path, 2)
    (tmp_path / "net.pt2").write_bytes(b"no archive")
    (problem,) = deep_problems(read_job(path))
    assert str(problem).startswith("model.program: must be a file of torch.export.save (got net.pt2: ")
    assert str(problem).endswith(").")
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:  # what another release writes
        archive.writestr("net/format", "of tomorrow")
    (problem,) = deep_problems(read_job(path))
    assert str(problem).startswith("model.program: must be a file of torch.export.save (got net.pt2: ")
    assert str(problem).endswith(f"). If a newer PyTorch saved it, save it by {torch.__version__}.")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_is_told_what_takes_it(tmp_path: Path) -> None:
    """PyTorch says of it that the file is corrupted."""
    path = job(tmp_path, 2)
    torch.jit.script(torch.nn.Linear(4, 3)).save(tmp_path / "net.pt2")
    (problem,) = deep_problems(read_job(path))
    assert str(problem) == (
        "model.program: must be a file of torch.export.save (got net.pt2, of torch.jit.save). Write it as model.onnx, "
        "by torch.onnx.export of torch.jit.load, dynamo=False."
    )

"""A model without an ONNX form, by route torch_tensorrt from its job to its bundle.

Torch-TensorRT and the GPU are doubles: an engine is the quantized program that it was compiled from, run by PyTorch.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import compiled_double
import numpy as np
import pytest
import torch
from trt_double import VERSIONS, plan

from calib.types import Array
from trtpipe.bundle.format import read_bundle
from trtpipe.bundle.manifest import GRAPH
from trtpipe.cli.main import main
from trtpipe.job.job import Job
from trtpipe.progress import Progress
from trtpipe.routes.frontends import graph_of
from trtpipe.trt import driver
from trtpipe.trt.implicit import NativeCalibration
from trtpipe.values import Engine, LoadedModel, Quantized

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is None, reason="torch-tensorrt-rtx is not installed"
)

NETWORK = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(y) + {} * 0.01
"""
#: Operations that torch.onnx has no translation of, on y float32 [N, 32] of 0 and up.
FORMS = {
    "lgamma": "torch.lgamma(y + 1).mean(1, keepdim=True)",
    "bessel": "torch.special.i0(y).mean(1, keepdim=True)",
    "gamma": "torch.igamma(y + 1, y + 1).mean(1, keepdim=True)",
}
PRECISIONS: dict[str, dict[str, bool]] = {
    "fp32": {},
    "fp16": {"fp16_mode": True},
    "int8": {"int8_mode": True},
}


class OfProgram:
    """As `trt.timing.TimedEngine`: `compiled` has the programs of all plans."""

    compiled: dict[bytes, Quantized] = {}  # noqa: RUF012  # emptied for each test
    notes: tuple[str, ...] = ()
    name, device_memory_bytes = "double of TensorRT", 4096

    def __init__(self, engine: bytes, **settings: Any) -> None:
        self._program = self.compiled[engine]

    def __enter__(self) -> OfProgram:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        program = self._program
        with torch.inference_mode():
            outputs = program.program.module()(*(torch.from_numpy(inputs[s.name]) for s in program.inputs))
        return {s.name: o.numpy() for s, o in zip(program.outputs, outputs, strict=True)}

    def milliseconds(self, inputs: Mapping[str, Array], *, transfers: bool) -> float:
        return 0.5


def compile_engine(
    job: Job,
    loaded: LoadedModel,
    quantized: Quantized,
    progress: Progress,
    calibration: NativeCalibration | None = None,
) -> Engine:
    """As `routes.torch_tensorrt.route.compile_engine`."""
    target = job.build.target
    data = plan(target)[:-1] + bytes([len(OfProgram.compiled)])
    OfProgram.compiled[data] = quantized
    graph, notes = graph_of(quantized, "")
    inputs, outputs = quantized.inputs, quantized.outputs
    return Engine(data, target, VERSIONS[target], ("8.9",), inputs, outputs, graph, notes=notes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfProgram, "compiled", {})
    monkeypatch.setattr(driver, "probe", lambda: compiled_double.GPU)
    monkeypatch.setattr("trtpipe.pipeline.validate.lacking_memory", lambda build, device: "")
    monkeypatch.setattr("trtpipe.routes.torch_tensorrt.route.compile_engine", compile_engine)
    for user in ("runtime.executor.EngineRunner", "pipeline.measure.TimedEngine"):
        monkeypatch.setattr(f"trtpipe.{user}", OfProgram)


def write(folder: Path, form: str, precision: str, least: float) -> Path:
    name = f"net_without_form_{form}"
    (folder / f"{name}.py").write_text(NETWORK.format(FORMS[form]))
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32))
    content = {
        "name": "m",
        "model": {"factory": f"{name}:Net"},
        "inputs": {"x": {"shape": ["N", 16], "N": {"min": 1, "opt": 4, "max": 8}}},
        "outputs": {"y": {}},
        "precision": PRECISIONS[precision],
        "build": {"target": "tensorrt_rtx", "route": "torch_tensorrt"},
        "check": {"arrays": "x.npy", "limits": {"cosine_min": least}},
    }
    if precision == "int8":
        content["calibration"] = {"arrays": "x.npy"}
    path = folder / "m.yaml"
    path.write_text(json.dumps(content))
    return path


def test_the_double_is_called_as_the_route_is() -> None:
    from trtpipe.routes.torch_tensorrt import route

    assert inspect.signature(compile_engine) == inspect.signature(route.compile_engine)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_built_and_checked_by_its_engine(
    tmp_path: Path, gpu: None, form: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a control, which is an engine too: there is no graph that could stand in."""
    path = write(tmp_path, form, precision, 0.9)
    assert main(["build", str(path), "-o", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    manifest = read_bundle(tmp_path / "out" / "m").manifest
    assert GRAPH not in manifest.files
    assert manifest.check is not None
    control = manifest.check.control
    assert (manifest.check.executed, manifest.check.passed) == ("engine", True)
    assert control is not None
    assert (control.executed, control.failed) == ("engine", True)
    assert len(OfProgram.compiled) == 2
    assert any(
        n.startswith("the program has no ONNX form, so only the engine can be checked: onnx: torch.onnx has no transla")
        for n in manifest.notes
    )


def test_one_beyond_its_limit_is_written_and_fails(
    tmp_path: Path, gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "lgamma", "int8", 1.0)
    assert main(["build", str(path), "-o", str(tmp_path / "out")]) == 1, capsys.readouterr().err
    check = read_bundle(tmp_path / "out" / "m").manifest.check
    assert check is not None
    assert any(p.startswith("worst quantized modules: ") for p in check.problems)

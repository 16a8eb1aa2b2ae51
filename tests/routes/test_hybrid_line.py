"""A hybrid engine taken down the whole line to its bundle, without a GPU."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import pytest
from driverless import driverless

from trtpipe.bundle.format import read_bundle
from trtpipe.job.load import read_job
from trtpipe.pipeline import stages as pipeline
from trtpipe.pipeline.build import Built, build
from trtpipe.pipeline.cache.keys import StageKeys
from trtpipe.pipeline.cache.recorder import Recorder
from trtpipe.pipeline.cache.store import Cache
from trtpipe.pipeline.cached import CachedResults, Memory
from trtpipe.progress import Silent
from trtpipe.routes import options

NET = """
import torch


class Odd(torch.nn.Module):
    def forward(self, x):
        return torch.erfc(x)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3)
        self.body = torch.nn.Conv2d(8, 8, 3)
        self.odd = Odd()
        self.tail = torch.nn.Conv2d(8, 8, 3)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x):
        x = self.odd(torch.relu(self.body(torch.relu(self.stem(x)))))
        return self.head(torch.relu(self.tail(x)).mean((2, 3)))


def make():
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        for conv in (net.stem, net.body, net.tail):
            conv.weight.mul_(2)
    return net
"""


@pytest.mark.skipif(options.installed_frontend() is None, reason="torch-tensorrt-rtx is not installed")
def test_down_the_whole_line(tmp_path, monkeypatch):
    """Built by the real frontend and the real TensorRT-RTX; the graph is executed, and never said to be the engine."""
    (tmp_path / "net_for_hybrid.py").write_text(NET)
    x = np.random.default_rng(0).random((24, 3, 16, 16)) * np.linspace(0.1, 1.0, 24).reshape(-1, 1, 1, 1)
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    (tmp_path / "job.yaml").write_text(json.dumps({
        "name": "odd",
        "model": {"factory": "net_for_hybrid:make"},
        "inputs": {"image": {"shape": ["N", 3, 16, 16], "N": {"min": 1, "opt": 4, "max": 8}}},
        "outputs": {"logits": {}},
        "precision": {"int8_mode": True},
        "calibration": {"arrays": "x.npy", "batch_size": 8, "algorithm": "minmax"},
        "build": {"route": "torch_tensorrt", "target": "tensorrt_rtx", "allow_torch_fallback": True},
        "check": {"arrays": "x.npy", "batch_size": 8, "limits": {"relative_l2_max": 0.01}},
    }))  # fmt: skip
    original = pipeline.compile_engine

    def compiled(*args: Any) -> Any:
        with driverless():
            return original(*args)

    monkeypatch.setattr(pipeline, "compile_engine", compiled)
    wanted = read_job(tmp_path / "job.yaml")
    keys = StageKeys(**{f.name: hashlib.sha256(f.name.encode()).hexdigest() for f in dataclasses.fields(StageKeys)})

    def built_with_cache(out: str) -> Built:
        cache = Cache(tmp_path / "cache")
        results = CachedResults(cache, keys, Memory(), Silent(), Recorder(), lambda: keys)
        return build(wanted, tmp_path / out, Silent(), results=results)

    built = built_with_cache("out")
    manifest = read_bundle(tmp_path / "out" / "odd").manifest
    assert built.report.executed == "graph"
    assert built.report.passed, [(m.name, m.value) for m in built.report.metrics] + list(built.report.problems)
    assert manifest.engine is not None
    assert [f.module for f in manifest.engine.fallback] == ["odd"]
    assert set(manifest.files) >= {"model.hybrid", "model.onnx", "golden.safetensors", "report.html"}
    assert "torch" in manifest.environment
    assert any(n.startswith("build.allow_torch_fallback: hybrid, 2 engines, and 1 operation") for n in manifest.notes)
    assert "stayed in PyTorch: aten.erfc.default in odd" in built.bundle.read("report.html").decode()

    def not_again(*args: Any) -> Any:
        raise AssertionError("the engine has to come from the cache")

    monkeypatch.setattr(pipeline, "compile_engine", not_again)
    again = built_with_cache("again").bundle
    assert again.manifest.engine == manifest.engine
    assert again.manifest.files["model.hybrid"] == manifest.files["model.hybrid"]

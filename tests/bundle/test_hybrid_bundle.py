"""A bundle of a hybrid engine: built down the whole line, and what it says to whoever opens it."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shipping
from hybrids import hybrid, plan_bytes

import trtpipe
from trtpipe.bundle.format import Bundle, read_bundle
from trtpipe.bundle.hybrid import to_bytes
from trtpipe.bundle.manifest import HYBRID, EngineInfo
from trtpipe.bundle.triton import triton_model
from trtpipe.cli.main import main
from trtpipe.errors import InputError, MissingError
from trtpipe.job.sections import Build
from trtpipe.runtime import session as runner_module
from trtpipe.runtime.compatibility import problems, remarks
from trtpipe.runtime.device import Device, this_device
from trtpipe.values import Fallback

KEPT = (Fallback("odd", "aten.erfc.default", "Torch-TensorRT has no converter for it", "net.py:7"),)
VERSIONS = {"tensorrt_rtx": "1.7.1.116", "torch": "2.14.1+cu130"}
GPU = Device("linux", "x86_64", VERSIONS, "8.6", "RTX A4000")
NO_TORCH = replace(GPU, versions={"tensorrt_rtx": "1.7.1.116"})


def written(path: Path, data: bytes | None = None, **changes: Any) -> Bundle:
    """A bundle around the hybrid of `hybrids`, for 8.6."""
    build = Build.model_validate({"route": "torch_tensorrt", "target": "tensorrt_rtx", "allow_torch_fallback": True})
    engine: dict[str, Any] = {
        "file": HYBRID,
        "target": "tensorrt_rtx",
        "version": "1.7.1.116",
        "compute_capabilities": ("8.6",),
        "os": "linux",
        "machine": "x86_64",
        "fallback": KEPT,
    }
    return shipping.bundle(
        path,
        extra={HYBRID: to_bytes(hybrid()) if data is None else data},
        build=build,
        engine=EngineInfo(**(engine | changes)),
        environment={"torch": "2.14.1+cu130"},
    )


def test_a_bundle_holds_its_hybrid_and_says_what_stayed(tmp_path):
    bundle = read_bundle(written(tmp_path / "b").path)
    engine = bundle.manifest.engine
    assert engine is not None
    assert engine.fallback == KEPT
    assert bundle.manifest.required_files[0] == "model.hybrid"
    assert json.loads(bundle.manifest_bytes)["engine"]["fallback"] == [
        {"module": "odd", "op": "aten.erfc.default", "reason": KEPT[0].reason, "source": "net.py:7"}
    ]


def test_an_engine_is_hybrid_where_something_stayed_and_only_there(tmp_path):
    with pytest.raises(ValueError, match="is not what a tensorrt_rtx engine is kept in"):
        written(tmp_path / "b", file="model.engine")
    with pytest.raises(ValueError, match="is not what a tensorrt_rtx engine is kept in"):
        written(tmp_path / "b", fallback=())


def test_every_engine_in_it_is_held_against_the_manifest(tmp_path):
    for odd, text in (
        (plan_bytes(mask=0x08), r"model\.hybrid: engine 1: must be for 8\.6, as the manifest says \(got 8\.9\)"),
        (plan_bytes(version=(1, 6, 1, 7)), r"model\.hybrid: engine 1: must be of version 1\.7\.1\.116"),
        (b"not a plan", r"model\.hybrid: engine 1: a plan must begin with ftrt, vtrt or ptrt"),
    ):
        data = to_bytes(replace(hybrid(), engines=(plan_bytes(), odd)))
        with pytest.raises(InputError, match=text):
            written(tmp_path / "b", data)
    with pytest.raises(InputError, match=r"model\.hybrid: must be a safetensors file"):
        written(tmp_path / "b", b"damaged")


def test_its_bindings_are_the_manifests(tmp_path):
    other = hybrid(outputs={"scores": {"value": "second"}})
    with pytest.raises(InputError, match=r"model\.hybrid: must have the manifest's bindings \(got image, scores\)\."):
        written(tmp_path / "b", to_bytes(other))


def test_a_device_without_pytorch_is_told_what_to_install(tmp_path):
    manifest = written(tmp_path / "b").manifest
    assert problems(manifest, GPU) == ()
    assert problems(manifest, NO_TORCH) == (
        "runtime: PyTorch with CUDA is not installed, and 1 operation of this hybrid engine runs in it, of odd. "
        "Install it: pip install torch==2.14.1; or build without build.allow_torch_fallback.",
    )
    no_rtx = replace(GPU, versions={"torch": "2.14.1"})
    assert any("TensorRT-RTX 1.7.1.116 is not installed. " in p for p in problems(manifest, no_rtx))


def test_verify_says_that_it_needs_pytorch_and_which(tmp_path):
    manifest = written(tmp_path / "b").manifest
    needs = "The engine is hybrid: 1 operation runs in PyTorch, which every device that runs it has to have."
    assert remarks(manifest, GPU) == (needs,)
    older = replace(GPU, versions={**VERSIONS, "torch": "2.11.0"})
    assert remarks(manifest, older) == (
        needs,
        "PyTorch is 2.11.0 here and was 2.14.1+cu130 when the bundle was built: outputs may differ a little.",
    )


def test_the_runner_without_pytorch_refuses_it(tmp_path, monkeypatch):
    written(tmp_path / "b")
    monkeypatch.setattr(runner_module, "this_device", lambda: NO_TORCH)
    with pytest.raises(MissingError) as caught:
        trtpipe.load(tmp_path / "b")
    assert str(caught.value).startswith("runtime: PyTorch with CUDA is not installed")
    with trtpipe.load(tmp_path / "b", graph=True) as model:
        assert model.executed == "graph"


def test_where_pytorch_is_it_is_opened_by_the_hybrid_runner(tmp_path, monkeypatch):

    bundle = written(tmp_path / "b", version_compatible=True)
    monkeypatch.setattr(runner_module, "this_device", lambda: GPU)
    given = []

    class Opened:
        name = "hybrid"
        notes = ()

        def __init__(self, data: bytes, *, version_compatible: bool, without_lean_runtime: bool) -> None:
            given.append((data, version_compatible, without_lean_runtime))

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, inputs: Any, /) -> Any:
            return {"logits": inputs["image"].mean((2, 3))}

    monkeypatch.setattr("trtpipe.runtime.executor.HybridRunner", Opened)
    with trtpipe.load(tmp_path / "b") as model:
        assert model.executed == "engine"
        assert model(np.zeros((2, 3, 8, 8), np.float32))["logits"].shape == (2, 3)
    assert given == [(bundle.read(HYBRID), True, False)]


def test_the_commands_say_it(tmp_path, capsys, monkeypatch):
    written(tmp_path / "b")
    assert main(["inspect", str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hybrid: needs PyTorch 2.14.1+cu130, in which 1 operation runs" in lines
    assert any(line.split()[:2] == ["odd", "aten.erfc.default"] for line in lines)
    monkeypatch.setattr("trtpipe.cli.commands.verify.device_of", lambda target: NO_TORCH)
    assert main(["verify", str(tmp_path / "b")]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "mismatch: runtime: PyTorch with CUDA is not installed" in said
    assert "note: The engine is hybrid: 1 operation runs in PyTorch" in said


def test_triton_has_no_place_for_it(tmp_path):
    bundle = written(tmp_path / "b")
    engine = bundle.manifest.engine
    assert engine is not None
    with pytest.raises(InputError, match="Add --graph to serve the ONNX graph"):
        triton_model(bundle)
    proper = bundle.manifest.model_copy(update={"engine": engine.model_copy(update={"target": "tensorrt"})})
    with pytest.raises(InputError) as caught:
        triton_model(replace(bundle, manifest=proper))
    assert str(caught.value).endswith(
        "must be a whole engine, which Triton runs (got a hybrid one, which needs PyTorch). Add --graph to serve the "
        "ONNX graph, or build without build.allow_torch_fallback."
    )


def test_this_device_knows_its_pytorch():
    assert this_device().versions.get("torch") == importlib.metadata.version("torch")

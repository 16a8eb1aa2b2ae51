"""What a bundle or a finished build hands to the engine's runner besides the plan."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import shipping
import trt_double

from trtpipe.bundle import signing
from trtpipe.bundle.manifest import GRAPH, EngineInfo
from trtpipe.errors import InputError
from trtpipe.job.sections import Build
from trtpipe.runtime import compatibility as verify
from trtpipe.runtime import executor
from trtpipe.runtime.session import open_model
from trtpipe.trt import driver
from trtpipe.values import Engine, Fallback, OnnxModel


class Recorder:
    """Stands for EngineRunner: keeps what it is made with."""

    notes = ()
    made: ClassVar[list[tuple[bytes, dict[str, object]]]] = []

    def __init__(self, engine, **options):
        Recorder.made.append((engine, options))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def _opened(monkeypatch, tmp_path, specialization=None, target="tensorrt", **fields):
    monkeypatch.setattr("trtpipe.runtime.executor.EngineRunner", Recorder)
    monkeypatch.setattr(verify, "require_fit", lambda manifest, device: None)
    monkeypatch.setattr(Recorder, "made", [])
    bundle = shipping.bundle(tmp_path / "b")
    engine = EngineInfo(file="model.onnx", target=target, version="10.3.0.26", os=None, machine=None, **fields)
    manifest = bundle.manifest.model_copy(update={"engine": engine})
    open_model(
        type(bundle)(bundle.path, manifest, bundle.manifest_bytes, None), as_written=True, specialization=specialization
    )
    ((_, options),) = Recorder.made
    return options


def test_an_engine_with_pytorch_in_it_specializes_nothing(monkeypatch, tmp_path):
    """It was opened, and the specialization had no effect."""
    hybrid = (Fallback("head", "aten.sort", "TensorRT cannot take it"),)
    with pytest.raises(InputError) as caught:
        _opened(monkeypatch, tmp_path, "eager", "tensorrt_rtx", fallback=hybrid)
    assert str(caught.value) == (
        "specialization: must be left out for a bundle whose engine with PyTorch in it is run (got eager)."
    )


def test_a_plain_engine_gets_nothing_more(monkeypatch, tmp_path):
    assert _opened(monkeypatch, tmp_path) == {
        "version_compatible": False, "without_lean_runtime": False, "refit": None, "plugins": {},
        "specialization": None,
    }  # fmt: skip


def test_a_version_compatible_engine_may_run_its_own_code(monkeypatch, tmp_path):
    assert _opened(monkeypatch, tmp_path, version_compatible=True)["version_compatible"] is True


def test_an_engine_without_its_lean_runtime_is_run_by_one_of_its_release(monkeypatch, tmp_path):
    options = _opened(monkeypatch, tmp_path, version_compatible=True, options={"exclude_lean_runtime": True})
    assert options["without_lean_runtime"] is True


def test_kernels_are_specialized_for_shapes_as_the_caller_wants(monkeypatch, tmp_path):
    assert _opened(monkeypatch, tmp_path, "eager", "tensorrt_rtx")["specialization"] == "eager"


def test_a_stripped_plan_gets_the_bundles_graph(monkeypatch, tmp_path):
    options = _opened(monkeypatch, tmp_path, options={"strip_plan": True})
    assert options["refit"] == shipping.graph()
    assert GRAPH == "model.onnx"


def test_a_build_is_checked_with_its_weights(monkeypatch):
    gpu = driver.Driver("12.6", (driver.Gpu(0, "NVIDIA L4", "8.9", 1),))
    monkeypatch.setattr(driver, "probe", lambda: gpu)
    monkeypatch.setattr(executor, "EngineRunner", Recorder)
    monkeypatch.setattr(Recorder, "made", [])
    graph = OnnxModel(b"onnx", 20, (), ())
    options = {"strip_plan": True, "version_compatible": True}
    _, executed = executor.open_engine(Engine(b"plan", "tensorrt", "10.3.0", ("8.9",), (), (), graph, options))
    assert executed == "engine"
    settings = {
        "version_compatible": True,
        "without_lean_runtime": False,
        "refit": b"onnx",
        "plugins": {},
        "specialization": None,
    }
    assert Recorder.made == [(b"plan", settings)]


class Wrong(Recorder):
    """An engine that answers with ones."""

    name = "an engine"
    notes = ("kernels were compiled",)

    def run(self, inputs):
        rows = len(next(iter(inputs.values())))
        return {"logits": np.ones((rows, 3), np.float32)}


def test_an_engine_that_is_further_off_than_its_check_was_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("trtpipe.runtime.executor.EngineRunner", Wrong)
    monkeypatch.setattr(verify, "require_fit", lambda manifest, device: None)
    bundle = shipping.bundle(tmp_path / "b")
    engine = EngineInfo(file="model.onnx", target="tensorrt", version="10.3.0.26", os=None, machine=None)
    manifest = bundle.manifest.model_copy(update={"engine": engine})
    model = open_model(type(bundle)(bundle.path, manifest, bundle.manifest_bytes, None))
    note, compiled = model.notes
    assert compiled == "kernels were compiled"
    assert note.startswith("the engine is further from the baseline than its check was: output logits has ")
    assert note.endswith("Run `trtpipe verify`")


def _with_plugin(monkeypatch, tmp_path, key):
    """The options of the runner of a signed bundle with a plugin, read with this file of trusted keys."""
    monkeypatch.setattr("trtpipe.runtime.executor.EngineRunner", Recorder)
    monkeypatch.setattr(verify, "require_fit", lambda manifest, device: None)
    monkeypatch.setattr(Recorder, "made", [])
    signing.generate_key(tmp_path / "key")
    shipping.bundle(
        tmp_path / "b",
        sign=signing.signer(tmp_path / "key"),
        extra={"libtwice.so": b"native code", "model.engine": trt_double.plan("tensorrt")},
        engine=EngineInfo(file="model.engine", target="tensorrt", version="10.16.1", os=None, machine=None),
        build=Build(target="tensorrt", plugins=("libtwice.so",)),
    )
    bundle, _ = verify.admit(tmp_path / "b", key and tmp_path / key)
    open_model(bundle, as_written=True)
    return Recorder.made


def test_plugins_are_loaded_from_a_bundle_whose_signature_was_verified(monkeypatch, tmp_path):
    ((_, options),) = _with_plugin(monkeypatch, tmp_path, "key.pub")
    assert options["plugins"] == {"libtwice.so": b"native code"}


def test_plugins_of_nobody_in_particular_are_not_loaded(monkeypatch, tmp_path):
    with pytest.raises(InputError) as caught:
        _with_plugin(monkeypatch, tmp_path, None)
    assert str(caught.value) == (
        f"{tmp_path}/b: holds plugins (libtwice.so), native code that is loaded only from a bundle whose signature was "
        "verified. Give the public key of who signed it: --key (key= in Python)."
    )
    assert Recorder.made == []


def test_a_bundle_that_lacks_its_plugin_is_not_whole(tmp_path):
    with pytest.raises(InputError, match=r"libtwice\.so is missing"):
        shipping.bundle(tmp_path / "b", build=Build(target="onnxruntime", plugins=("libtwice.so",)))


def test_an_engine_with_plugins_is_checked_where_it_is_built(monkeypatch):
    graph = OnnxModel(b"graph", 20, (), ())
    engine = Engine(b"plan", "tensorrt", "10.3.0", (), (), (), graph, plugins={"libtwice.so": b""})
    monkeypatch.setattr(executor, "not_executed_here", lambda engine: "no GPU")
    with pytest.raises(InputError) as caught:
        executor.open_engine(engine)
    assert str(caught.value) == (
        "check: an engine with plugins must be executed where it is built, as nothing else computes them (it is not: "
        "no GPU). Build it for the GPU here."
    )

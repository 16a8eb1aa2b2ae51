"""Kits: written, verified, and finished by a real TensorRT-RTX into the engine that a direct build gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shipping

from trtpipe.batching import KEPT_SAMPLES
from trtpipe.bundle import golden, signing
from trtpipe.bundle.format import Bundle, read_bundle, write_bundle
from trtpipe.bundle.kit import bundle_contents, kit_contents, kit_graph
from trtpipe.cli.commands import verify
from trtpipe.cli.main import main
from trtpipe.errors import InputError, MissingError
from trtpipe.job.sections import Build
from trtpipe.pipeline import kit as kits
from trtpipe.pipeline.kit import finish_kit
from trtpipe.progress import Silent
from trtpipe.runtime import device_memory
from trtpipe.runtime.device import Device
from trtpipe.values import CheckReport, Engine, OnnxModel

GRAPH = OnnxModel(shipping.graph(), 18, (shipping.INPUT,), (shipping.OUTPUT,))


def many() -> golden.Golden:
    images = np.random.default_rng(1).standard_normal((20, 3, 8, 8)).astype(np.float32)
    return golden.Golden({"image": images}, {"logits": images.mean((2, 3))}, np.arange(20) % 3, None)


def kit(path: Path, build: Build) -> Bundle:
    made = kit_contents(
        shipping.manifest(build=build, kind="kit", engine=None), GRAPH, many(), b"{}\n", {"report.html": b"r"}
    )
    return write_bundle(path, *made)


def test_a_kit_is_read_as_a_bundle_is(tmp_path: Path) -> None:
    made = kit(tmp_path / "k", Build(target="onnxruntime"))
    read = read_bundle(tmp_path / "k")
    assert read == made
    assert (read.manifest.kind, read.manifest.engine, read.manifest.opset) == ("kit", None, 18)
    assert sorted(read.manifest.files) == ["calibration.json", "golden.safetensors", "model.onnx", "report.html"]
    assert read.golden().samples == 20
    assert kit_graph(read) == dataclasses.replace(GRAPH, precisions=("int8",))


def test_a_bundle_is_no_kit(tmp_path: Path) -> None:
    bundle = shipping.bundle(tmp_path / "c")
    with pytest.raises(InputError, match=r"c: is a finished bundle, not a kit. Run it: trtpipe run"):
        kit_graph(bundle)


def checked(made: Bundle) -> CheckReport:
    assert made.manifest.check is not None
    return made.manifest.check


def test_finishing_keeps_the_kits_own(tmp_path: Path) -> None:
    made = kit(tmp_path / "k", Build(target="onnxruntime"))
    engine = Engine(GRAPH.data, "onnxruntime", "1.31.1", (), GRAPH.inputs, GRAPH.outputs, GRAPH, notes=("a note",))
    contents = bundle_contents(
        made, engine, check=checked(made), fingerprint="ab" * 32, environment={"onnxruntime": "1.31.1"}
    )
    bundle = write_bundle(tmp_path / "b", *contents)
    manifest = bundle.manifest
    assert manifest.notes == ("layer head kept in int8", "a note")
    assert manifest.environment == {"onnx": "1.18", "onnxruntime": "1.31.1"}
    newer = bundle_contents(made, engine, check=checked(made), fingerprint="", environment={"onnx": "1.19"})[0]
    assert newer.environment == {"onnx": "1.19", "onnx (kit)": "1.18"}
    assert manifest.fingerprint == "ab" * 32
    assert bundle.golden().samples == KEPT_SAMPLES
    np.testing.assert_array_equal(bundle.golden().inputs["image"], many().inputs["image"][:8])


def test_a_kit_of_too_many_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trtpipe.bundle.kit.MAX_GOLDEN_BYTES", many().inputs["image"].nbytes - 1)
    with pytest.raises(
        InputError, match=r"colour: a kit holds every check sample, in at most 0 MiB \(got 20 samples of more"
    ):
        kit(tmp_path / "k", Build(target="onnxruntime"))


def test_finishing_with_a_check_of_the_engine(tmp_path: Path) -> None:
    made = kit(tmp_path / "k", Build(target="onnxruntime"))
    engine = Engine(GRAPH.data, "onnxruntime", "1.31.1", (), GRAPH.inputs, GRAPH.outputs, GRAPH)
    check = shipping.manifest().check
    assert check is not None
    manifest, _ = bundle_contents(made, engine, check=check, fingerprint="", environment={})
    assert manifest.check is check


def test_rtx_engine_of_a_kit_is_the_direct_one(tmp_path: Path) -> None:
    """TensorRT-RTX compiles the kit's graph and the original to the same bytes, and the bundle's header agrees."""
    from trtpipe.trt.builder import build_engine

    build = Build.model_validate({"target": "tensorrt_rtx", "compute_capability": ("8.6",)})
    direct = build_engine(GRAPH, build, progress=Silent())
    made = kit(tmp_path / "k", build)
    again = read_bundle(tmp_path / "k")
    engine = build_engine(kit_graph(again), again.manifest.build, progress=Silent())
    assert engine.data == direct.data
    contents = bundle_contents(made, engine, check=checked(made), fingerprint="", environment={})
    bundle = write_bundle(tmp_path / "b", *contents)
    assert bundle.read("model.engine") == direct.data
    info = bundle.manifest.engine
    assert info is not None
    assert (info.target, info.compute_capabilities, info.version) == ("tensorrt_rtx", ("8.6",), direct.version)
    assert info.os is not None

    # The plan's own header is held against the manifest: each of its claims in turn.
    lies: list[tuple[dict[str, Any], str]] = [
        ({"version": "1.6.1.0"}, "must be of version 1.6.1.0, as the manifest says (got 1.7"),
        ({"compute_capabilities": ("8.9",)}, "must be for 8.9, as the manifest says (got 8.6)"),
        ({"compute_capabilities": ()}, "must be for portable, as the manifest says (got 8.6)"),
    ]
    manifest, files = contents
    for lie, message in lies:
        wrong = manifest.model_copy(update={"engine": info.model_copy(update=lie)})
        with pytest.raises(InputError) as caught:
            write_bundle(tmp_path / "b", wrong, files)
        assert message in str(caught.value)
    other = {"engine": info.model_copy(update={"target": "tensorrt"}), "build": Build(target="tensorrt")}
    foreign = manifest.model_copy(update=other)
    with pytest.raises(InputError, match="must be a plan of tensorrt, as the manifest says"):
        write_bundle(tmp_path / "b", foreign, files)
    with pytest.raises(InputError, match="a plan must begin with ftrt, vtrt or ptrt"):
        write_bundle(tmp_path / "b", manifest, {**files, "model.engine": b"#!/bin/sh"})


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_kit_whose_signature_nobody_asked_for_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: bool, keyed: bool
) -> None:
    """Whoever changes a kit can make its digests agree again, but for those that a signature holds."""
    monkeypatch.setattr(kits, "_check", lambda kit, engine, make, progress: (checked(kit), None))
    monkeypatch.setattr(signing, "DEVICE_KEYS", tmp_path / "none.pub")
    key = signing.generate_key(tmp_path / "key")
    made = kit(tmp_path / "k", Build(target="onnxruntime"))
    if signed:
        (made.path / "manifest.sig").write_bytes(signing.signer(tmp_path / "key")(made.manifest_bytes))

    def finished() -> tuple[str, ...]:
        given = key if keyed else None
        return tuple(checked(finish_kit(made.path, tmp_path / "out", Silent(), key=given).bundle).notes)

    if keyed and not signed:
        with pytest.raises(InputError, match="must be signed by a key in"):
            finished()
        return
    said = {
        False: "the kit was taken as it is: unsigned, and this device has no key that demands a signature (--key)",
        True: "the kit was taken as it is: signed, not checked: this device has no key",
    }[signed]
    assert finished() == (() if keyed else (said,)) + tuple(checked(made).notes)


def test_a_kit_without_the_check_of_its_graph_is_not_finished(tmp_path: Path) -> None:
    contents = kit_contents(
        shipping.manifest(build=Build(target="onnxruntime"), kind="kit", engine=None, check=None), GRAPH, many(),
        b"{}\n", {"report.html": b"r"}
    )  # fmt: skip
    write_bundle(tmp_path / "k", *contents)
    with pytest.raises(InputError) as caught:
        finish_kit(tmp_path / "k", tmp_path / "out", Silent())
    assert str(caught.value) == f"{tmp_path / 'k'}: the kit does not hold the check of its graph. Prepare it again."


@pytest.mark.parametrize(
    ("build", "gpu", "asked"),
    [
        (Build(target="tensorrt"), "8.9", True),
        (Build(target="tensorrt", runtime_platform="windows_amd64"), "8.9", False),
        (Build(target="tensorrt_rtx"), "8.9", True),
        (Build(target="tensorrt_rtx", compute_capability=("8.6",)), "8.9", False),
        (Build(target="tensorrt_rtx"), None, False),
        (Build(target="onnxruntime"), "8.9", False),
    ],
)
def test_device_memory_is_asked_for_before_the_compile_where_the_engine_is_to_be_executed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    build: Build,
    gpu: str | None,
    asked: bool,
) -> None:
    releases = {"tensorrt": "10.13.3", "tensorrt_rtx": "1.7.1", "onnxruntime": "1.31.1"}
    device = Device("linux", "x86_64", releases, gpu, "NVIDIA L4", memory_bytes=24 << 30)
    monkeypatch.setattr(kits, "this_device", lambda: device)
    monkeypatch.setattr(
        device_memory, "no_memory", lambda: "device memory: none of torch with CUDA and others works here."
    )

    def compiled(*_: object) -> Engine:
        raise InputError("the compile began.")

    kit(tmp_path / "k", build)
    with pytest.raises((MissingError, InputError)) as caught:
        finish_kit(tmp_path / "k", tmp_path / "out", Silent(), compiler=compiled)
    hidden = " Or let the graph be checked: set CUDA_VISIBLE_DEVICES to nothing." * (build.target == "tensorrt_rtx")
    lacks = "device memory: none of torch with CUDA and others works here."
    said = lacks + hidden if asked else "the compile began."
    assert str(caught.value) == said
    monkeypatch.setattr(verify, "device_of", lambda target: device)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "k")]) == (3 if asked or (gpu is None and build.target == "tensorrt") else 0)
    assert (f"mismatch: {said}" in capsys.readouterr().out) == asked  # it says what the build would refuse

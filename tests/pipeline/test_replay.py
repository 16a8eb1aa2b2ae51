"""An engine built again with a bundle's timing cache, and held against that bundle's. Plans are stand-ins."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import shipping
import yaml
from jobs import GOOD

from trtpipe.bundle.format import read_bundle, write_bundle
from trtpipe.bundle.kit import bundle_contents, kit_contents
from trtpipe.bundle.manifest import TIMING_CACHE
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.job.sections import Build
from trtpipe.pipeline import kit as kits
from trtpipe.pipeline.replay import bundle_to_replay, compared, timing_cache_of
from trtpipe.trt.timing_cache import GIVEN
from trtpipe.values import Engine, OnnxModel

GRAPH = OnnxModel(shipping.graph(), 18, (shipping.INPUT,), (shipping.OUTPUT,))


def plan(content=b"a", version=(10, 3, 0)):
    return b"ftrt" + bytes(20) + bytes(version) + bytes(9) + content


def engine(target="tensorrt", **changes):
    data = GRAPH.data if target == "onnxruntime" else plan()
    values = {"data": data, "target": target, "version": "10.3.0", "compute_capabilities": ("8.7",),
              "inputs": GRAPH.inputs, "outputs": GRAPH.outputs, "graph": GRAPH, "timing_cache": b"timings"}  # fmt: skip
    if target == "onnxruntime":
        values |= {"compute_capabilities": (), "timing_cache": b""}
    return Engine(**(values | changes))


def kit(path, target="tensorrt"):
    made = kit_contents(
        shipping.manifest(build=Build(target=target), kind="kit", engine=None),
        GRAPH,
        shipping.golden_data(),
        b"{}\n",
        {},
    )
    return write_bundle(path, *made)


def bundle(path, **changes):
    target = changes.get("target", "tensorrt")
    before = kit(path / "kit", target)
    check = before.manifest.check
    made = bundle_contents(before, engine(**changes), check=check, fingerprint="", environment={})
    return write_bundle(path / "colours", *made)


def test_where_all_that_decides_is_the_same_other_releases_are_named(tmp_path):
    before = bundle(tmp_path / "a")
    own, releases = kit(tmp_path / "k"), {"python": "3.13.0", "onnx": "1.20"}
    made = bundle_contents(own, engine(data=plan(b"b")), check=own.manifest.check, fingerprint="", environment=releases)
    now = write_bundle(tmp_path / "b", *made)
    assert now.manifest.environment == {"python": "3.13.0", "onnx": "1.20", "onnx (kit)": "1.18"}
    assert compared(before, now).why == (
        "of the same graph and options by the same TensorRT; onnx 1.18 then, 1.20 now; python none then, 3.13.0 now",
    )


def test_the_timing_cache_is_in_the_bundle_with_its_digest(tmp_path):
    before = bundle(tmp_path, options={"timing_cache": "/home/me/timings", "optimization_level": 3})
    assert before.read(TIMING_CACHE) == b"timings"
    assert before.manifest.files[TIMING_CACHE].sha256 == hashlib.sha256(b"timings").hexdigest()
    assert before.manifest.engine.options == {"optimization_level": 3}  # paths of the machine stay there
    assert b"/home/me" not in before.manifest_bytes


def test_tensorrt_is_given_the_bundles_timing_cache(tmp_path, monkeypatch):
    before, seen = bundle(tmp_path / "a"), []

    def compiled(build, precision, graph, progress):
        seen.append(Path(build.timing_cache, GIVEN).read_bytes())
        return engine()

    monkeypatch.setattr(kits, "_compile", compiled)
    monkeypatch.setattr(kits, "_check", lambda kit, *_: (kit.manifest.check, None))
    monkeypatch.setattr(kits, "require_fit", lambda *_: (None, None))
    kit(tmp_path / "k")
    arguments = ["build", str(tmp_path / "k"), "--replay", str(before.path), "-o", str(tmp_path / "out"), "-q"]
    assert main(arguments) == 0
    assert seen == [b"timings"]
    assert read_bundle(tmp_path / "out" / before.manifest.name).manifest.build.timing_cache is None


@pytest.mark.parametrize(("target", "cache", "taken"), [
    ("tensorrt", b"timings", "given"), ("tensorrt", b"", "own"), ("tensorrt_rtx", b"timings", None),
])  # fmt: skip
def test_a_job_is_built_with_the_bundles_in_the_place_of_its_own(tmp_path, monkeypatch, target, cache, taken):
    sections = yaml.safe_load(GOOD)
    sections["build"] = {"target": target, **({"timing_cache": "own"} if target == "tensorrt" else {})}
    before, seen = bundle(tmp_path / "a", timing_cache=cache), []

    def build(job, *_, **__):
        folder = job.build.timing_cache
        seen.append("given" if folder and Path(folder, GIVEN).is_file() else folder)
        raise InputError("here: the build was reached. Go on.")

    file = tmp_path / "job.yaml"
    file.write_text("")
    monkeypatch.setattr("trtpipe.cli.commands.build.load_jobs", lambda *_: [(file, Job.model_validate(sections))])
    monkeypatch.setattr("trtpipe.cli.commands.build.build", build)
    assert main(["build", str(file), "--replay", str(before.path), "-q"]) == 2
    assert seen == [taken]


def test_without_one_nothing_is_given(tmp_path):
    before = bundle(tmp_path, timing_cache=b"")
    assert TIMING_CACHE not in before.manifest.files
    with timing_cache_of(before) as folder:
        assert folder is None


@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        ({}, {}, "the engine is the same, byte for byte"),
        ({}, {"data": plan(b"b")}, "the engine differs: of the same graph and options by the same TensorRT"),
        ({"timing_cache": b""}, {"data": plan(b"b")}, "the engine differs: the bundle holds no timing.cache: it was "
         "built without build.timing_cache, so tactics were timed anew"),
        ({}, {"data": plan(b"b", (10, 9, 0)), "version": "10.9.0"}, "the engine differs: version 10.3.0 then, "
         "10.9.0 now"),
        ({}, {"data": plan(b"b"), "compute_capabilities": ("8.9",), "notes": ("timing cache of the bundle: TensorRT "
         "did not accept it, so it was begun anew", "another")}, "the engine differs: compute capability 8.7 then, 8.9 "
         "now; timing cache of the bundle: TensorRT did not accept it, so it was begun anew"),
        ({}, {"data": plan(b"b"), "options": {"optimization_level": 5}}, "the engine differs: other options "
         "(optimization_level)"),
    ],
)  # fmt: skip
def test_whether_the_engine_is_the_same_and_what_was_different(tmp_path, then, now, line):
    assert str(compared(bundle(tmp_path / "then", **then), bundle(tmp_path / "now", **now))) == line


def test_another_graph_is_said(tmp_path):
    before, now = bundle(tmp_path / "then"), bundle(tmp_path / "now", data=plan(b"b"))
    files = dict(now.manifest.files)
    files["model.onnx"] = files["model.engine"]
    now = dataclasses.replace(now, manifest=now.manifest.model_copy(update={"files": files}))
    assert str(compared(before, now)) == (
        "the engine differs: model.onnx differs: the model, its weights, the calibration or trtpipe's own code changed"
    )
    here = {"numpy": "2.0", "python": "3.11.7", "torch": "2.14.1"}
    then, now = (
        dataclasses.replace(b, manifest=b.manifest.model_copy(update={"environment": environment}))
        for b, environment in ((before, here | {"numpy": "1.26", "torch": "2.6.0"}), (now, here))
    )
    assert str(compared(then, now)).endswith(
        "or trtpipe's own code changed, or what wrote it: torch 2.6.0 then, 2.14.1 now; numpy 1.26 then, 2.0 now"
    )


def test_another_precision_is_said_and_not_the_graph_that_it_makes(tmp_path):
    before, now = bundle(tmp_path / "then"), bundle(tmp_path / "now", data=plan(b"b"))
    files = {**now.manifest.files, "model.onnx": now.manifest.files["model.engine"]}
    half = not before.manifest.precision.fp16_mode
    precision = before.manifest.precision.model_copy(update={"fp16_mode": half})
    manifest = now.manifest.model_copy(update={"files": files, "precision": precision})
    now = dataclasses.replace(now, manifest=manifest)
    assert str(compared(before, now)) == "the engine differs: another precision (fp16_mode)"


@pytest.mark.parametrize(
    ("section", "value", "line"),
    [
        ("inputs", (dataclasses.replace(shipping.INPUT, dims={"N": shipping.DimRange(1, 8, 8)}),),
         "other inputs, or their sizes (image)"),
        ("outputs", (dataclasses.replace(shipping.OUTPUT, name="scores"),),
         "other outputs, or their sizes (logits, scores)"),
        ("build", Build(target="tensorrt", refit="all"), "other options (refit)"),
        ("build", Build(target="tensorrt", timing_cache="elsewhere"),
         "of the same graph and options by the same TensorRT"),
    ],
)  # fmt: skip
def test_whatever_else_decides_an_engine_is_said(tmp_path, section, value, line):
    before, now = bundle(tmp_path / "then"), bundle(tmp_path / "now", data=plan(b"b"))
    now = dataclasses.replace(now, manifest=now.manifest.model_copy(update={section: value}))
    assert str(compared(before, now)) == f"the engine differs: {line}"


def test_a_kit_built_twice_on_the_command_line(tmp_path, capsys):
    kit(tmp_path / "k", "onnxruntime")
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["build", str(tmp_path / "k"), "-o", str(first), "-q"]) == 0
    (made,) = first.iterdir()
    again = ["build", str(tmp_path / "k"), "-o", str(second), "--replay", str(made)]
    assert main(again) == 0
    assert "  replay: the engine is the same, byte for byte\n" in capsys.readouterr().out
    assert main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["replay"] == {"same": True, "why": []}


def test_what_cannot_be_replayed(tmp_path, capsys):
    kit(tmp_path / "k", "onnxruntime")
    kit(tmp_path / "l", "onnxruntime")
    with pytest.raises(InputError, match=r"k: is a kit, which has no engine yet. Give a finished bundle\."):
        bundle_to_replay(tmp_path / "k", None)
    assert main(["build", str(tmp_path / "k"), str(tmp_path / "l"), "--replay", str(tmp_path / "k")]) == 2
    assert "--replay must be given with one job (got 2)." in capsys.readouterr().err

"""A bundle's engine with the weights of a kit; TensorRT's refit and what executes the engine are stand-ins."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
import shipping
from onnx import numpy_helper

from trtpipe.bundle.format import read_bundle, write_bundle
from trtpipe.bundle.kit import bundle_contents, kit_contents
from trtpipe.cli.main import main
from trtpipe.job.sections import Build
from trtpipe.pipeline import kit as kits
from trtpipe.pipeline import refit as line
from trtpipe.runtime.compatibility import require_fit
from trtpipe.runtime.device import Device
from trtpipe.values import Engine, LayerPrecision, OnnxModel, TensorSpec

GRAPH = OnnxModel(shipping.graph(), 18, (shipping.INPUT,), (shipping.OUTPUT,))
PLAN = b"ftrt" + bytes(20) + bytes((10, 3, 0)) + bytes(10)


def kit(path, graph=GRAPH, **changes):
    made = {"build": Build(target="tensorrt", refit="all"), "kind": "kit", "engine": None} | changes
    contents = kit_contents(shipping.manifest(**made), graph, shipping.golden_data(), b"{}\n", {})
    return write_bundle(path, *contents)


def bundle(path, *notes, **changes):
    before = kit(path / "kit", **changes)
    engine = Engine(PLAN, "tensorrt", "10.3.0", ("8.7",), GRAPH.inputs, GRAPH.outputs, GRAPH, notes=notes)
    made = bundle_contents(before, engine, check=before.manifest.check, fingerprint="", environment={})
    return write_bundle(path / "old", *made)


@pytest.fixture
def here(monkeypatch):
    """A machine that fits the engine, but where nothing is executed: what was refitted."""
    seen = []
    monkeypatch.setattr(line, "require_fit", lambda *_: None)
    monkeypatch.setattr(line, "refitted", lambda *given, **how: seen.append((given, how)) or PLAN + b"new")
    monkeypatch.setattr(line.driver, "require", lambda *_: None)
    monkeypatch.setattr(kits, "_check", lambda kit, *_: (kit.manifest.check, None))
    return seen


def run(tmp_path, *more):
    return main(
        ["refit", str(tmp_path / "a" / "old"), "--weights", str(tmp_path / "k"), "-o", str(tmp_path / "out"), *more]
    )


def test_the_bundle_has_the_refitted_engine_and_the_kits_graph_and_data(tmp_path, here):
    before, weights = bundle(tmp_path / "a"), kit(tmp_path / "k", weights_digest="f" * 64)
    assert run(tmp_path, "-q") == 0
    made = read_bundle(tmp_path / "out" / before.manifest.name)
    assert here == [((PLAN, GRAPH.data), {"marked": (), "version_compatible": False})]
    assert made.read("model.engine") == PLAN + b"new"
    assert made.manifest.weights_digest == "f" * 64
    assert made.manifest.files["model.onnx"] == weights.manifest.files["model.onnx"]
    digest = before.manifest.weights_digest
    assert f"refitted: the engine was built with the weights {digest[:16] if digest else 'of no known digest'}" in (
        made.manifest.notes
    )


def test_of_individual_weights_the_changed_ones_have_to_be_marked_and_the_fixed_ones_stay_said(tmp_path, here):
    build = Build(target="tensorrt", refit="individual", version_compatible=True)
    note = "build.refit: 1 of 2 weights cannot be changed: b"
    before = bundle(tmp_path / "a", note, "another", build=build)
    model = onnx.load_from_string(GRAPH.data)
    weight = model.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 1, weight.name))
    other = dataclasses.replace(GRAPH, data=model.SerializeToString())
    kit(tmp_path / "k", graph=other, build=build)
    assert run(tmp_path, "-q") == 0
    assert here == [((PLAN, other.data), {"marked": (weight.name,), "version_compatible": True})]
    notes = read_bundle(tmp_path / "out" / before.manifest.name).manifest.notes
    assert note in notes
    assert "another" not in notes


def test_a_whole_engine_is_refitted_where_it_fits(tmp_path, here, monkeypatch, capsys):
    """TensorRT loads it to refit it; here there is neither that TensorRT nor a GPU."""
    monkeypatch.setattr(line, "require_fit", require_fit)
    bundle(tmp_path / "a")
    kit(tmp_path / "k")
    assert run(tmp_path) == 3
    assert "runtime: TensorRT 10.3.0 is not installed" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(line, "this_device", lambda: Device("linux", "aarch64", {"tensorrt": "10.3.0"}))
    assert run(tmp_path) == 3
    assert "refit: there is no usable NVIDIA GPU here" in capsys.readouterr().err
    assert here == []


def test_a_stripped_engine_takes_the_weights_when_it_is_loaded(tmp_path, here, monkeypatch):
    """So nothing is needed of this machine."""
    monkeypatch.setattr(line, "require_fit", require_fit)
    build = Build(target="tensorrt", refit="all", strip_plan=True)
    before = bundle(tmp_path / "a", build=build)
    kit(tmp_path / "k", build=build)
    assert run(tmp_path, "-q") == 0
    assert here == []
    made = read_bundle(tmp_path / "out" / before.manifest.name)
    assert made.read("model.engine") == PLAN
    assert (
        "refitted: no GPU here gave the engine its weights: only their names, types and shapes were held against the "
        "bundle's graph. trtpipe check on the engine's GPU says whether TensorRT takes them."
    ) in made.manifest.notes


def edited(change):
    """The graph with its first weight changed, as (the weight's name, the graph)."""
    model = onnx.load_from_string(GRAPH.data)
    weight = next(w for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT and len(w.dims) > 1)
    name = weight.name
    change(model.graph, weight)
    return name, dataclasses.replace(GRAPH, data=model.SerializeToString())


def reshaped(graph, weight):
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[:1], weight.name))


def narrowed(graph, weight):
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype("float16"), weight.name))


def renamed(graph, weight):
    weight.name = "another"


@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("change", [reshaped, narrowed, renamed])
def test_weights_of_another_graph_are_refused_with_a_gpu_or_without(tmp_path, here, capsys, change, strip):
    """TensorRT compares them when it is given them, which a stripped engine's are on its GPU alone."""
    build = Build(target="tensorrt", refit="all", strip_plan=strip)
    bundle(tmp_path / "a", build=build)
    name, graph = edited(change)
    kit(tmp_path / "k", graph=graph, build=build)
    assert run(tmp_path) == 2
    said = capsys.readouterr().err
    shape = {w.name: list(w.dims) for w in onnx.load_from_string(GRAPH.data).graph.initializer}[name]
    got = {reshaped: f"float32 {[1, *shape[1:]]}", narrowed: f"float16 {shape}", renamed: "none"}[change]
    assert f"k: weight {name} must be float32 {shape}, as in the bundle's graph (got {got}). Prepare it from" in said
    assert ("weight another must be absent" in said) == (change is renamed)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    assert here == []


def test_many_weights_that_are_not_the_graphs_are_counted(tmp_path, here, capsys):
    bundle(tmp_path / "a")
    model = onnx.load_from_string(GRAPH.data)
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(2, np.float32), f"w{n}") for n in range(5))
    kit(tmp_path / "k", graph=dataclasses.replace(GRAPH, data=model.SerializeToString()))
    assert run(tmp_path) == 2
    assert "k: 2 more weights are not the graph's. Prepare it from the bundle's job." in capsys.readouterr().err


OTHER = TensorSpec("image", "float32", ("N", 3, 8, 8), {"N": shipping.DimRange(1, 2, 8)})


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"build": Build(target="tensorrt")}, {"build": Build(target="tensorrt")},
         "old: the engine must have been built with build.refit: all or individual (got none). Build it so."),
        ({"build": Build(target="tensorrt", refit="identical")}, {"build": Build(target="tensorrt", refit="identical")},
         "old: the engine must have been built with build.refit: all or individual (got identical). Build it so."),
        ({}, {"inputs": (OTHER,)}, "k: inputs must be the bundle's (got others). Prepare it from the bundle's job."),
        ({}, {"layers": ()}, "k: the precision of every operation must be the bundle's (got others)."),
        ({}, {"build": Build(target="tensorrt", refit="all", optimization_level=5)}, "k: the build section must be"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, here, capsys, ours, theirs, message):
    bundle(tmp_path / "a", **ours)
    kit(tmp_path / "k", **theirs)
    assert run(tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    assert here == []


def test_reasons_and_lines_of_code_may_be_others(tmp_path, here):
    """Other weights have other figures in the reasons, and code above a layer grows."""
    layers = [
        (LayerPrecision("stem", "conv2d", "int8", reason, line),) for reason, line in (("a", "n.py:4"), ("b", "n.py:9"))
    ]
    bundle(tmp_path / "a", layers=layers[0])
    kit(tmp_path / "k", layers=layers[1])
    assert run(tmp_path, "-q") == 0


def test_weights_are_a_kit_and_the_engine_one_of_a_bundle(tmp_path, here, capsys):
    bundle(tmp_path / "a")
    old = tmp_path / "a" / "old"
    assert main(["refit", str(old), "--weights", str(old), "-o", str(tmp_path / "out")]) == 2
    assert (
        "old: must be a kit, which holds a graph and what it is checked against (got a bundle)."
        in capsys.readouterr().err
    )
    kit(tmp_path / "k")
    assert main(["refit", str(tmp_path / "k"), "--weights", str(tmp_path / "k")]) == 2
    assert "k: is a kit, which has no engine yet." in capsys.readouterr().err


def test_what_is_no_single_plan_is_not_refitted(tmp_path):
    manifest = bundle(tmp_path).manifest
    graph = manifest.model_copy(
        update={"engine": manifest.engine.model_copy(update={"target": "onnxruntime", "file": "model.onnx"})}
    )
    assert (
        line.fixed(graph)
        == "the engine must be one TensorRT plan (got model.onnx). Build the job with the new weights."
    )

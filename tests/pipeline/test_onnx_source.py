"""An ONNX file goes down the whole line as the PyTorch network that it was exported from does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from calib.table import CalibrationTable
from tests.support.onnx_files import export, network, write_job
from trtpipe.errors import InputError
from trtpipe.job.load import JobErrors, read_job
from trtpipe.model.onnx.external import data_files
from trtpipe.model.onnx.network import load_network, require_bindings
from trtpipe.model.onnx.reference import Reference
from trtpipe.pipeline.build import build
from trtpipe.pipeline.cache.digests import Digests
from trtpipe.pipeline.cache.environment import this_machine
from trtpipe.pipeline.cache.keys import Survey
from trtpipe.pipeline.deep import deep_problems
from trtpipe.progress import Silent


def built(folder: Path, name: str, **sections: Any) -> Any:
    found = build(read_job(write_job(folder, name, **sections)), folder / "out", Silent(), diagnose_seconds=0)
    assert next(m.value for m in found.report.metrics if m.name == "cosine") > 0.99
    return found.bundle


@pytest.mark.parametrize("net", ["residual", "views", "attending"])
@pytest.mark.parametrize("dynamo", [True, False])
def test_same_table_and_size_as_from_pytorch(net: str, dynamo: bool, tmp_path: Path) -> None:
    export(network(net), tmp_path / "file.onnx", dynamo=dynamo)
    of_file = built(tmp_path, "file")
    model = {"factory": "tests.support.onnx_files:network", "args": {"name": net}}
    of_module = built(tmp_path, "module", model=model)
    found, expected = (CalibrationTable.load(b.path / "calibration.json").amax for b in (of_file, of_module))
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-5)
    pairs = [
        Counter(n.op_type for n in onnx.load(b.path / "model.onnx").graph.node if "Linear" in n.op_type)
        for b in (of_file, of_module)
    ]
    assert pairs[0] == pairs[1]
    assert [(layer.module, layer.precision) for layer in of_file.manifest.layers if layer.precision == "int8"] == [
        (layer.module, layer.precision) for layer in of_module.manifest.layers if layer.precision == "int8"
    ]
    assert {b.manifest.baseline for b in (of_file, of_module)} == {"ONNX Runtime FP32", "TorchScript"}
    assert "ONNX Runtime FP32 baseline" in (of_file.path / "report.html").read_text(encoding="utf-8")


def test_external_data_are_read_and_count(tmp_path: Path) -> None:
    path = export(network("residual"), tmp_path / "file.onnx", external=True)
    (data,) = data_files(path)
    assert data.stat().st_size > 4000
    job = read_job(write_job(tmp_path, "file"))
    assert deep_problems(job) == ()

    def key() -> str:
        with Digests() as digests:
            return Survey(digests, this_machine(digests)).ingredients(job).key

    before = key()
    assert key() == before
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert key() != before
    data.unlink()
    assert [str(p) for p in deep_problems(job)] == [
        f"model.onnx: its external data must be beside it (got no file {data.name} in {tmp_path}). Copy it there."
    ]


@pytest.mark.parametrize("places", ["initializers", "attributes", "a branch", "a function"])
def test_all_external_data_count_wherever_they_are(tmp_path: Path, places: str) -> None:
    """Two files of one name in different folders, for initializers and for what nodes hold."""
    tensors = []
    for folder in ("enc", "head"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "w.bin").write_bytes(np.ones(256, np.float32).tobytes())
        tensor = numpy_helper.from_array(np.ones(256, np.float32), folder)
        onnx.external_data_helper.set_external_data(tensor, f"{folder}/w.bin")
        tensor.ClearField("raw_data")
        tensors.append(tensor)
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in tensors]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [256])
    branch = helper.make_graph([helper.make_node("Add", ["enc", "head"], ["y"])], "b", [], [y], tensors)
    nodes = {
        "initializers": [helper.make_node("Add", ["enc", "head"], ["y"])],
        "attributes": [*constants, helper.make_node("Add", ["enc", "head"], ["y"])],
        "a branch": [helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)],
        "a function": [helper.make_node("F", [], ["y"], domain="own")],
    }[places]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.BOOL, [])], [y])
    if places == "initializers":
        graph.initializer.extend(tensors)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    body = [*constants, helper.make_node("Add", ["enc", "head"], ["y"])]
    functions = [helper.make_function("own", "F", [], ["y"], body, versions[:1])] if places == "a function" else []
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=versions, functions=functions).SerializeToString())
    files = (tmp_path / "enc/w.bin", tmp_path / "head/w.bin")
    assert data_files(path) == files
    job = read_job(write_job(tmp_path, "m"))
    keys = set()
    for k in range(3):
        if k:
            files[k - 1].write_bytes(np.full(256, k + 1, np.float32).tobytes())
        with Digests() as digests:
            keys.add(Survey(digests, this_machine(digests)).ingredients(job).key)
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"inputs": {"y": {"shape": [1, 3, 8, 8]}}},
            "inputs: must be those of model.onnx, in its order (got y, and the file has x float32 [N, 3, 8, 8]). "
            "Name them as the file does.",
        ),
        (
            {"inputs": {"x": {"shape": [1, 3, 9, 8]}}},
            "inputs.x.shape: must fit model.onnx (got [1, 3, 9, 8], and the file has x float32 [N, 3, 8, 8]). "
            "Give the file's numbers, or export it with dynamic axes.",
        ),
        (
            {"outputs": {"scores": {}}},
            "outputs: must be among the tensors of model.onnx (got scores, and the file's outputs are logits float32 "
            "[N, 5]). Name them as the file does.",
        ),
    ],
)
def test_bindings_are_the_files(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    export(network("residual"), tmp_path / "file.onnx")
    (problem,) = deep_problems(read_job(write_job(tmp_path, "file", **sections)))
    assert str(problem) == message


def save(
    path: Path, node: Any, kind: int = TensorProto.FLOAT, opset: int = 17, domain: str = "", shape: Any = (1, 4)
) -> None:
    """A file of one node from x to y."""
    values = [helper.make_tensor_value_info(n, kind, shape) for n in ("x", "y")]
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.mark.parametrize(
    ("node", "options", "message"),
    [
        (
            helper.make_node("NonZero", ["x"], ["y"]),
            {},
            "model.onnx: its operators must be among those that trtpipe converts (got NonZero). Cut the network before "
            "them, or behind those it begins with (onnx.utils.extract_model); or build from PyTorch with "
            "model.factory.",
        ),
        (
            helper.make_node("Special", ["x"], ["y"], domain="mine"),
            {"domain": "mine"},
            "model.onnx: its operators must be among those that trtpipe converts (got mine::Special). Cut the network "
            "before them, or behind those it begins with (onnx.utils.extract_model); or build from PyTorch with "
            "model.factory.",
        ),
        *(
            (
                helper.make_node(op, ["x"], ["y"], domain=domain),
                {"domain": domain},
                f"model.onnx: must be quantized as Q/DQ with fixed scales (got {listed}). Quantize it again so (ONNX "
                "Runtime: quantize_static with QuantFormat.QDQ and QInt8, without UseQDQContribOps), or give it in "
                "FP32.",
            )
            for op, domain, listed in (
                ("QLinearConv", "", "QLinearConv"),
                ("MatMulInteger", "", "MatMulInteger"),
                ("DynamicQuantizeLinear", "", "DynamicQuantizeLinear"),
                ("QLinearAdd", "com.microsoft", "com.microsoft::QLinearAdd"),
                ("DynamicQuantizeMatMul", "com.microsoft", "com.microsoft::DynamicQuantizeMatMul"),
                ("DequantizeLinear", "com.microsoft", "com.microsoft::DequantizeLinear"),
            )
        ),
        (
            helper.make_node("Relu", ["x"], ["y"]),
            {"kind": TensorProto.FLOAT16},
            "model.onnx: its floating-point tensors must be FP32 (got FLOAT16). Export it in FP32; precision.fp16_mode "
            "and bf16_mode make it FP16 or BF16.",
        ),
        (
            helper.make_node("Relu", ["x"], ["y"]),
            {"opset": 6},
            "model.onnx: must be of opset 7 to 26 (got 6). Export it again, or run onnx.version_converter.",
        ),
        (
            helper.make_node("Dropout", ["x"], ["kept", "y"], name="drop"),
            {},
            "model.onnx: Dropout (drop) has outputs that only training needs. Export the network in eval mode.",
        ),
        (
            helper.make_node("MaxPool", ["x"], ["high", "y"], name="pool", kernel_shape=[1]),
            {"shape": [1, 1, 4]},
            "model.onnx: MaxPool (pool) has a second output, the places of the maxima, which TensorRT does not compute."
            " Name as the job's outputs what is computed without them.",
        ),
        *(
            (
                helper.make_node("Identity", ["x"], ["y"]),
                {"kind": kind},
                "model.onnx: inputs and outputs must be of float32, float16, uint8, int8, int32, int64, bool (got x, of"
                f" {TensorProto.DataType.Name(kind)}). Cut it off: name as the job's outputs what is computed without "
                "it.",
            )
            for kind in (TensorProto.STRING, TensorProto.UINT16, TensorProto.INT16, TensorProto.COMPLEX64)
        ),
    ],
)
def test_what_cannot_be_converted_is_named(node: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "file.onnx", node, **options)
    shape = list(options.get("shape", (1, 4)))
    sections = {"inputs": {"x": {"shape": shape}}, "outputs": {"y": {}}, "precision": {}, "calibration": None}
    (problem,) = deep_problems(read_job(write_job(tmp_path, "file", **sections)))
    assert str(problem) == message


def test_inputs_that_the_outputs_do_not_need_are_not_asked_for(tmp_path: Path) -> None:
    """Text, say, that another head reads: neither declared, nor given to the reference."""
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("StringConcat", ["name", "name"], ["twice"])]
    kinds = {"name": TensorProto.STRING, "x": TensorProto.FLOAT, "y": TensorProto.FLOAT, "twice": TensorProto.STRING}
    name, x, y, twice = (helper.make_tensor_value_info(n, kind, [1, 4]) for n, kind in kinds.items())
    graph = helper.make_graph(nodes, "g", [name, x], [y, twice])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(made, tmp_path / "file.onnx")
    network = load_network(tmp_path / "file.onnx", ("y",))
    assert [b.name for b in network.file.inputs] == ["x"]
    values = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    assert torch.equal(network(values)["y"], values.relu())
    assert torch.equal(Reference(network.file)(values)["y"], values.relu())
    with pytest.raises(InputError, match=r"\(got name, x, and the job's outputs need x float32 \[1, 4\]\)"):
        require_bindings(network.file, {"name": (1, 4), "x": (1, 4)})


@pytest.mark.parametrize("outputs", [(), ("y",)])
def test_nodes_that_no_output_needs_are_not_converted(outputs: tuple[str, ...], tmp_path: Path) -> None:
    """Whether the job names the file's own outputs or leaves them to it."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in "xy")
    nodes = [
        helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.UINT8),
        helper.make_node("BitShift", ["whole", "whole"], ["shifted"], direction="LEFT"),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "f.onnx")
    network = load_network(tmp_path / "f.onnx", outputs)
    values = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    assert torch.equal(network(values)["y"], values.relu())
    assert torch.equal(Reference(network.file)(values)["y"], values.relu())


@pytest.mark.parametrize("output", [True, False], ids=["an output", "read by none"])
@pytest.mark.parametrize("outputs", [(), ("y",), ("r",)])
def test_what_onnx_runtime_cannot_load_and_no_output_needs_is_in_no_reference(
    output: bool, outputs: tuple[str, ...], tmp_path: Path
) -> None:
    """A file with a plugin of TensorRT's behind its own raw scores."""
    x, y, z = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in "xyz")
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Neg", ["r"], ["y"]),
        helper.make_node("Foo", ["y"], ["z"], domain="my.ops"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y, z] if output else [y])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my.ops", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "f.onnx")
    if output and not outputs:
        with pytest.raises(InputError, match=r"\(got my.ops::Foo\)\. Cut it before them: name as the job's outputs"):
            load_network(tmp_path / "f.onnx", outputs)
        return
    network = load_network(tmp_path / "f.onnx", outputs)
    values = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    wanted = values.relu() if outputs == ("r",) else -values.relu()
    (found,) = Reference(network.file)(values).values()
    assert torch.equal(found, wanted)


def test_a_function_of_another_opset_is_named(tmp_path: Path) -> None:
    one = helper.make_function("own", "R", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])],
                               [helper.make_opsetid("", 16)])  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("R", ["x"], ["y"], domain="own")], "g", [x], [y])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, functions=[one], opset_imports=opsets, ir_version=8), tmp_path / "file.onnx")
    with pytest.raises(InputError) as raised:
        load_network(tmp_path / "file.onnx")
    assert str(raised.value) == (
        "model.onnx: its functions must be of its own opset, 17 (got R of 16). Run "
        "onnx.inliner.inline_local_functions with convert_version=True."
    )


def test_outputs_that_nobody_reads_are_not_asked_for(tmp_path: Path) -> None:
    """Caffe2's exporter names the mask of every Dropout."""
    save(tmp_path / "file.onnx", helper.make_node("Dropout", ["x"], ["y", "mask"], name="drop"))
    sections = {"inputs": {"x": {"shape": [1, 4]}}, "outputs": {"y": {}}, "precision": {}, "calibration": None}
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32))
    found = deep_problems(read_job(write_job(tmp_path, "file", **sections)))
    assert not [p for p in found if "drop" in str(p)]


def test_no_onnx_file(tmp_path: Path) -> None:
    (tmp_path / "file.onnx").write_bytes(b"no protobuf")
    (problem,) = deep_problems(read_job(write_job(tmp_path, "file")))
    assert isinstance(problem, InputError)
    assert str(problem).startswith("model.onnx: must be an ONNX file (got file.onnx: ")


def test_external_data_stay_in_the_folder(tmp_path: Path) -> None:
    path = export(network("residual"), tmp_path / "file.onnx", external=True)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../other.data"
    onnx.save(model, path)
    (problem,) = deep_problems(read_job(write_job(tmp_path, "file")))
    assert str(problem) == (
        "model.onnx: external data must be in the folder of the file (got ../other.data). Save the file again with its "
        "data beside it."
    )


def test_external_data_behind_a_link_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """A model hub's cache is laid out so, and ONNX Runtime, the baseline, opens none."""
    folder, elsewhere = tmp_path / "snapshot", tmp_path / "0123"
    folder.mkdir()
    (data,) = data_files(export(network("residual"), folder / "file.onnx", external=True))
    data.rename(elsewhere)
    data.symlink_to(elsewhere)
    (problem,) = deep_problems(read_job(write_job(folder, "file")))
    assert str(problem) == (
        f"model.onnx: its external data must be a file beside it (got {data.name}, a link to {elsewhere}). Copy both "
        "files without links: cp -L."
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"baseline": "script"}, "model.baseline: must be given only with factory (got baseline with onnx)."),
        ({"weights": "w.pt"}, "model.weights: must be given only with factory (got weights with onnx)."),
        ({"onnx": "file.pb"}, "model.onnx: must end in .onnx (got "),
    ],
)
def test_keys_that_do_not_go_with_it(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    for name in ("file.onnx", "w.pt", "file.pb"):
        (tmp_path / name).touch()
    path = write_job(tmp_path, "file")
    text = json.loads(path.read_text())
    text["model"] |= model
    path.write_text(json.dumps(text))
    with pytest.raises(JobErrors) as caught:
        read_job(path)
    assert message in str(caught.value)


def test_a_wrong_conversion_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.model.onnx import network as converted

    export(network("residual"), tmp_path / "file.onnx")
    wrong = dict(converted.OPERATORS) | {"Relu": lambda node, x: x}
    monkeypatch.setattr(converted, "OPERATORS", wrong)
    with pytest.raises(InputError, match="baseline: the converted network gives other outputs than ONNX Runtime"):
        build(read_job(write_job(tmp_path, "file")), tmp_path / "out", Silent())


def test_places_of_equal_values_are_not_called_a_wrong_conversion(tmp_path: Path) -> None:
    """ONNX puts the first of them first, PyTorch any."""
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Reshape", ["y", "rows"], ["flat"]),
        helper.make_node("TopK", ["flat", "k"], ["best", "places"]),
    ]
    constants = [numpy_helper.from_array(np.array(a), n) for n, a in (("rows", [0, -1]), ("k", [150]))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    best = helper.make_tensor_value_info("best", TensorProto.FLOAT, ["N", 150])
    places = helper.make_tensor_value_info("places", TensorProto.INT64, ["N", 150])
    graph = helper.make_graph(nodes, "best", [x], [best, places], constants)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "file.onnx"
    )
    without = {"precision": None, "calibration": None}
    job = read_job(write_job(tmp_path, "file", outputs={"best": {}, "places": {}}, **without))
    with pytest.raises(
        InputError, match=r"Where places gives places \(of TopK, say\), equal values may come in another"
    ):
        build(job, tmp_path / "out", Silent())


def detector(path: Path) -> Path:
    """One box and one score a pixel, and behind them non-maximum suppression, as detectors are exported."""
    random = np.random.default_rng(0)
    constants = {
        "conv.weight": random.standard_normal((5, 3, 1, 1)).astype(np.float32),
        "rows": np.array([1, 5, -1]), "first": np.array([4, 1]), "most": np.array([10]),
        "overlap": np.array([0.5], np.float32), "least": np.array([0.1], np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["y"], "/conv/Conv"),
        helper.make_node("Reshape", ["y", "rows"], ["flat"]),
        helper.make_node("Split", ["flat", "first"], ["sides", "logits"], axis=1),
        helper.make_node("Transpose", ["sides"], ["/head/boxes"], perm=[0, 2, 1]),
        helper.make_node("Sigmoid", ["logits"], ["/head/scores"]),
        helper.make_node("Shape", ["flat"], ["shape"]),
        helper.make_node("NonMaxSuppression", ["/head/boxes", "/head/scores", "most", "overlap", "least"], ["found"]),
        helper.make_node("Gather", ["/head/boxes", "found"], ["chosen"], axis=1),
        helper.make_node("ArgMax", ["/head/boxes"], ["/head/labels"], axis=2, keepdims=0),
        helper.make_node("Greater", ["/head/scores", "overlap"], ["likely"]),
        helper.make_node("NonZero", ["likely"], ["places"]),
        helper.make_node("Gather", ["/head/labels", "places"], ["labels"], axis=1),
        helper.make_node("Mul", ["/head/scores", "overlap"], ["halved"]),
    ]  # fmt: skip
    values = [
        helper.make_tensor_value_info(n, k, s)
        for n, k, s in (
            ("x", TensorProto.FLOAT, [1, 3, 8, 8]), ("found", TensorProto.INT64, ["K", 3]),
            ("labels", TensorProto.INT64, None), ("chosen", TensorProto.FLOAT, None),
            ("halved", TensorProto.FLOAT, [1, 1, 64]),
        )
    ]  # fmt: skip
    initializers = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


BARE: dict[str, Any] = {"inputs": {"x": {"shape": [1, 3, 8, 8]}}, "precision": None, "calibration": None}


def test_a_detector_is_told_where_to_cut(tmp_path: Path) -> None:
    detector(tmp_path / "file.onnx")
    job = read_job(write_job(tmp_path, "file", **BARE, outputs={n: {"dtype": "int64"} for n in ("found", "labels")}))
    (problem,) = deep_problems(job)
    assert str(problem) == (
        "model.onnx: its operators must be among those that trtpipe converts (got NonMaxSuppression, NonZero). Cut it "
        "before them: name as the job's outputs what is computed without them (/head/boxes, /head/scores, "
        "/head/labels), and do the rest behind the engine; or build from PyTorch with model.factory."
    )


def test_a_detector_that_was_cut_is_built(tmp_path: Path) -> None:
    """Tensors from within the file are outputs too, and what they do not need is dropped."""
    import onnxruntime

    source = detector(tmp_path / "file.onnx")
    names = ["/head/boxes", "/head/scores"]
    job = read_job(write_job(tmp_path, "file", **BARE, outputs={n: {} for n in names}))
    assert deep_problems(job) == ()
    built = build(job, tmp_path / "out", Silent())
    assert built.report.passed, built.report.problems
    assert [(s.name, s.shape) for s in built.bundle.manifest.outputs] == [
        (names[0], (1, 64, 4)),
        (names[1], (1, 1, 64)),
    ]
    x = np.load(tmp_path / "x.npy")[:1]
    found = onnxruntime.InferenceSession(built.bundle.path / "model.onnx").run(names, {"x": x})
    whole = onnx.load(source)
    whole.graph.output.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names)
    expected = onnxruntime.InferenceSession(whole.SerializeToString()).run(names, {"x": x})
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)

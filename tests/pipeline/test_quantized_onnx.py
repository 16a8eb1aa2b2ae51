"""An ONNX file that is quantized already goes down the line with its own scales."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from calib.table import CalibrationTable
from tests.support.nets import images
from tests.support.onnx_files import export, network, write_job
from trtpipe.cli.main import main
from trtpipe.errors import InputError
from trtpipe.job.load import read_job
from trtpipe.pipeline.build import build
from trtpipe.pipeline.deep import deep_problems
from trtpipe.progress import Silent


def quantized(folder: Path, net: torch.nn.Module | None = None, **options: Any) -> Path:
    """The residual network, or another, as ONNX Runtime's static quantization writes it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches: Iterator[dict[str, Any]] = iter([{"x": images(8, 3, 8, 8, seed=2).numpy()}])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.batches, None)

    float_file = export(net or network("residual"), folder / "float.onnx", dynamo=False)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    settings: dict[str, Any] = {
        "per_channel": True,
        "activation_type": QuantType.QInt8,
        "weight_type": QuantType.QInt8,
        "extra_options": {"ActivationSymmetric": True, "WeightSymmetric": True},
    } | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_static(float_file, folder / "file.onnx", Reader(), quant_format=QuantFormat.QDQ, **settings)
    logging.getLogger().setLevel(level)  # or tests after this one see no warning
    return folder / "file.onnx"


def test_calibrate_writes_the_table_of_its_own_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized(tmp_path)
    path = write_job(tmp_path, "file", calibration=None)
    assert main(["calibrate", str(path), "-o", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    table = CalibrationTable.load(tmp_path / "t.json")
    assert shown[0] == f"{len(table.amax)} scales of the quantized model itself, as amax"
    assert [line.split()[0] for line in shown[1:-1]] == list(table.amax)
    made = build(read_job(path), tmp_path / "out", Silent(), diagnose_seconds=0)
    assert table == CalibrationTable.load(made.bundle.path / "calibration.json")


def constants(path: Path) -> dict[str, Any]:
    model = onnx.load(path)
    found = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    return found | {
        n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"
    }


def scales(path: Path, kind: str) -> list[float]:
    """Every scale of the nodes of one kind, sorted; each weight's scales count."""
    known = constants(path)
    found: set[float] = set()
    for node in onnx.load(path).graph.node:
        if node.op_type == kind:
            found |= {float(s) for s in np.asarray(known[node.input[1]]).reshape(-1)}
    return sorted(found)


def int8(path: Path) -> list[Any]:
    """The INT8 weights, by size and content."""
    found = [a for a in constants(path).values() if a.dtype == np.int8 and a.ndim > 1]
    return sorted(found, key=lambda a: (a.size, a.tobytes()))


def test_own_scales_and_weights(tmp_path: Path) -> None:
    source = quantized(tmp_path)
    job = read_job(write_job(tmp_path, "file", calibration=None))
    assert deep_problems(job) == ()
    built = build(job, tmp_path / "out", Silent(), diagnose_seconds=0)
    engine = built.bundle.path / "model.onnx"
    theirs, ours = scales(source, "QuantizeLinear"), scales(engine, "QuantizeLinear")
    assert set(np.float32(ours)) <= set(np.float32(theirs))
    assert len(theirs) - len(ours) <= 1  # that of the network's output, which nothing is fused with
    for a, b in zip(int8(source), int8(engine), strict=True):
        assert a.tobytes() in (b.tobytes(), b.T.tobytes())
    table = CalibrationTable.load(built.bundle.path / "calibration.json")
    assert table.algorithm == "given"
    assert {np.float32(v / 127) for v in table.amax.values()} >= {np.float32(s) for s in ours}
    assert next(m.value for m in built.report.metrics if m.name == "cosine") > 0.99
    notes = "\n".join(built.bundle.manifest.notes)
    assert "quantized by the model and not fused by TensorRT" in notes
    assert "logits: the file's Q/DQ before this output was left out, TensorRT fuses it with nothing" in notes
    assert built.bundle.manifest.baseline == "ONNX Runtime FP32"


class Scaled(torch.nn.Module):
    """Its values are multiplied, divided, and added to constants of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.shift = torch.nn.Parameter(torch.linspace(0.1, 0.4, 4).reshape(4, 1, 1))
        self.one, self.mid, self.two = (torch.nn.Parameter(torch.tensor(v)) for v in ([0.3], 0.5, 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = (self.conv(x) * self.mid + self.two) / self.two
        return {"logits": ((y - self.one) * self.shift - self.mid).flatten(1)}


def test_constants_that_no_product_reads_stay_in_float(tmp_path: Path) -> None:
    """ONNX Runtime quantizes those too; TensorRT refuses INT8 constants without a dimension."""
    source = quantized(tmp_path, Scaled())
    ranks = {a.ndim for a in constants(source).values() if a.dtype == np.int8 and a.any()}
    assert ranks >= {0, 3, 4}
    path = write_job(
        tmp_path, "file", calibration=None, build={"target": "tensorrt_rtx", "compute_capability": ["8.6"]}
    )
    built = build(read_job(path), tmp_path / "out", Silent(), diagnose_seconds=0)
    left = {a.ndim for a in constants(built.bundle.path / "model.onnx").values() if a.dtype == np.int8 and a.any()}
    assert left == {4}  # the convolution's weight
    notes = [n for n in built.bundle.manifest.notes if "Q/DQ of its constant" in n]
    assert len(notes) >= 5
    assert all(n.endswith("was left out, TensorRT fuses it with nothing") for n in notes)
    assert next(m.value for m in built.report.metrics if m.name == "cosine") > 0.99


def by_channel(folder: Path, weight: Any, axis: int, operator: str, *, transposed: bool = False) -> Path:
    """An ONNX file of one operation whose INT8 weight has a scale for each index of an axis, as exporters write it."""
    size = weight.shape[axis]
    scales = np.linspace(0.01, 0.02, size).astype(np.float32)
    known = {"w.q": weight, "w.s": scales, "w.z": np.zeros(size, np.int8), "s": np.float32(0.02), "z": np.int8(0)}
    node = onnx.helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["x.q"]), node("DequantizeLinear", ["x.q", "s", "z"], ["x.d"]),
        node("DequantizeLinear", ["w.q", "w.s", "w.z"], ["w.d"], axis=axis),
        *([node("Transpose", ["w.d"], ["w.t"], perm=[1, 0])] if transposed else []),
        node(operator, ["x.d", "w.t" if transposed else "w.d"], ["logits"]),
    ]  # fmt: skip
    shape = ["N", 3, 8, 8] if operator != "MatMul" else ["N", 3, 8, weight.shape[1 if transposed else 0]]
    made = onnx.helper.make_graph(
        nodes,
        "one",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in known.items()],
    )
    path = folder / "file.onnx"
    onnx.save(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize("kind", [np.int8, np.int32])
def test_equal_integers_of_other_scales_are_other_numbers(tmp_path: Path, kind: type) -> None:
    """Tools merge equal initializers: two weights, or two biases, of one stored tensor."""
    node, whole = onnx.helper.make_node, np.arange(-4, 4).astype(kind)
    nodes = [
        node("DequantizeLinear", ["w", "a"], ["wa"]), node("DequantizeLinear", ["w", "b"], ["wb"]),
        node("DequantizeLinear", ["w", "a"], ["wc"]),
        node("Add", ["x", "wa"], ["xa"]), node("Add", ["xa", "wb"], ["xb"]), node("Add", ["xb", "wc"], ["logits"]),
    ]  # fmt: skip
    known = {"w": whole, "a": np.float32(0.5), "b": np.float32(4)}
    made = onnx.helper.make_graph(
        nodes,
        "one",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 8])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", 8])],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in known.items()],
    )
    onnx.save(
        onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        tmp_path / "m.onnx",
    )
    from trtpipe.model.onnx.network import load_network

    found = load_network(tmp_path / "m.onnx")(torch.zeros(1, 8))["logits"]
    np.testing.assert_array_equal(found.numpy()[0], whole.astype(np.float32) * 5)


CONV, CONV_TRANSPOSE, MATRIX = (4, 3, 3, 3), (3, 4, 3, 3), (8, 8)


@pytest.mark.parametrize(
    ("shape", "axis", "operator", "transposed", "wanted"),
    [
        (CONV, 0, "Conv", False, None), (CONV, -4, "Conv", False, None), (CONV, 1, "Conv", False, 0),
        (CONV_TRANSPOSE, 1, "ConvTranspose", False, None), (CONV_TRANSPOSE, 0, "ConvTranspose", False, 1),
        (MATRIX, 1, "MatMul", False, None), (MATRIX, -1, "MatMul", False, None), (MATRIX, 0, "MatMul", False, 0),
        (MATRIX, 0, "MatMul", True, None), (MATRIX, -2, "MatMul", True, None), (MATRIX, 1, "MatMul", True, 0),
    ],
)  # fmt: skip
def test_the_scales_of_a_weight_are_those_of_its_output_channels(
    tmp_path: Path, shape: tuple[int, ...], axis: int, operator: str, transposed: bool, wanted: int | None
) -> None:
    """Exporters transpose a linear's weight behind its DequantizeLinear; along another axis no kernel has scales."""
    from trtpipe.model.capture import capture
    from trtpipe.model.load import load_model
    from trtpipe.quantization.given import as_given, given_amax

    weight = np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)
    by_channel(tmp_path, weight, axis, operator, transposed=transposed)
    job = read_job(write_job(tmp_path, "file", calibration=None))
    captured = capture(load_model(job))
    assert len(given_amax(captured)) == 1
    if wanted is not None:
        with pytest.raises(InputError) as raised:
            as_given(captured)
        assert str(raised.value).partition(": ")[2] == (
            "a weight must have its scales by output channel (got them along another of its axes). Quantize it so, or "
            "set calibration.recalibrate: true."
        )
        return
    (made,) = as_given(captured).int8.values()
    np.testing.assert_array_equal(made.scales.numpy(), np.linspace(0.01, 0.02, len(made.scales)).astype(np.float32))


def test_its_baseline_is_its_own_fp32_form(tmp_path: Path) -> None:
    from trtpipe.model.onnx.network import load_network
    from trtpipe.model.onnx.reference import Reference

    x = images(4, 3, 8, 8, seed=3)
    quantized(tmp_path)
    of_file, of_float = load_network(tmp_path / "file.onnx"), load_network(tmp_path / "float.onnx")
    found, expected = of_file(x)["logits"], of_float(x)["logits"]
    torch.testing.assert_close(Reference(of_file.file)(x)["logits"], found, rtol=1e-4, atol=1e-5)
    difference = float((found - expected).abs().max())
    assert 0 < difference < 0.02 * float(expected.abs().max())  # the weights alone are on the grid of INT8


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {},
            "calibration: must be left out for a model that is quantized already, whose own scales are taken. Remove "
            "it, or set calibration.recalibrate: true.",
        ),
        (
            {"calibration": None, "precision": {"fp16_mode": True}},
            "precision: must be int8_mode, without other number formats, for a model that is quantized to INT8 "
            "already (got none). Set int8_mode, or calibration.recalibrate to start from its FP32 form.",
        ),
        (
            {"calibration": None, "precision": {"int8_mode": True, "weights": "int4"}},
            "precision: must be int8_mode, without other number formats, for a model that is quantized to INT8 "
            "already (got int8_mode, weights). Set int8_mode, or calibration.recalibrate to start from its FP32 form.",
        ),
    ],
)
def test_the_job_says_what_becomes_of_the_scales(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    quantized(tmp_path)
    (problem,) = deep_problems(read_job(write_job(tmp_path, "file", **sections)))
    assert str(problem) == message


def test_recalibrated_when_asked_for(tmp_path: Path) -> None:
    quantized(tmp_path)
    calibration = {"arrays": "x.npy", "batch_size": 8, "recalibrate": True}
    job = read_job(write_job(tmp_path, "file", calibration=calibration))
    built = build(job, tmp_path / "out", Silent(), diagnose_seconds=0)
    assert CalibrationTable.load(built.bundle.path / "calibration.json").samples


@pytest.mark.parametrize("operator", ["Conv", "Relu"])
def test_one_before_an_output_alone_is_left_out_of_the_baseline_too(operator: str, tmp_path: Path) -> None:
    """Its scale clips: what was not taken out of one of the two shows."""
    pair = [
        helper.make_node("QuantizeLinear", ["h", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["logits"]),
    ]
    product = helper.make_node("Conv", ["x", "w"], ["h" if operator == "Conv" else "c"], pads=[1, 1, 1, 1])
    nodes = [product, *([helper.make_node("Relu", ["c"], ["h"])] if operator == "Relu" else []), *pair]
    weight = np.random.default_rng(0).normal(size=(5, 3, 3, 3)).astype(np.float32)
    constants = {"w": weight, "s": np.float32(0.005), "z": np.int8(0)}
    shape = ["N", 3, 8, 8]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info("logits", 1, ["N", 5, 8, 8])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )  # fmt: skip
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "file.onnx"
    )
    for precision, calibration in (({}, None), ({"int8_mode": True}, {"arrays": "x.npy", "batch_size": 8})):
        job = read_job(write_job(tmp_path, "file", precision=precision, calibration=calibration))
        built = build(job, tmp_path / f"out{len(precision)}", Silent(), diagnose_seconds=0)
        assert built.report.passed, built.report.problems
        left_out = "logits: the file's Q/DQ before this output was left out, TensorRT fuses it with nothing"
        assert left_out in built.report.notes


def test_a_file_without_qdq_has_no_scales(tmp_path: Path) -> None:
    export(network("residual"), tmp_path / "file.onnx")
    (problem,) = deep_problems(read_job(write_job(tmp_path, "file", calibration=None)))
    assert str(problem) == (
        "calibration: must be given for a model in which no operation reads Q/DQ (got none). Add calibration.images, "
        "or calibration.table."
    )
    job = write_job(tmp_path, "file", calibration={"arrays": "x.npy", "batch_size": 8, "recalibrate": True})
    (problem,) = deep_problems(read_job(job))
    assert str(problem) == (
        "calibration.recalibrate: must be left out for a model in which no operation reads Q/DQ (got true), which is "
        "calibrated anyhow. Remove it."
    )


def test_copies_of_its_constants_change_nothing(tmp_path: Path) -> None:
    """Exporters write an Identity where two places read the same weight, codes, scale or zero point."""
    plain = quantized(tmp_path)
    first = build(read_job(write_job(tmp_path, "file", calibration=None)), tmp_path / "a", Silent(), diagnose_seconds=0)
    model = onnx.load(plain)
    copies = []
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            if name in constants(plain):
                node.input[k] = f"{name}.copy{len(copies)}"
                once, twice = f"{name}.once{len(copies)}", node.input[k]
                copies += [[name, once], [once, twice]]
    nodes = [onnx.helper.make_node("Identity", [a], [b]) for a, b in copies]
    nodes += list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, plain)
    second = build(
        read_job(write_job(tmp_path, "file", calibration=None)), tmp_path / "b", Silent(), diagnose_seconds=0
    )
    assert len(copies) > 20
    graphs = [(made.bundle.path / "model.onnx").read_bytes() for made in (first, second)]
    assert graphs[0] == graphs[1]


def test_what_tensorrt_has_not_is_refused(tmp_path: Path) -> None:
    quantized(tmp_path, extra_options={"ActivationSymmetric": False})
    (problem,) = deep_problems(read_job(write_job(tmp_path, "file", calibration=None)))
    assert isinstance(problem, InputError)
    assert str(problem).startswith("model.onnx: DequantizeLinear (")
    assert str(problem).endswith(
        ") has a zero point other than 0. Quantize it symmetrically in INT8 (ONNX Runtime: ActivationSymmetric), or "
        "set calibration.recalibrate: true, which starts from its FP32 form."
    )


@pytest.mark.parametrize("kind", ["QUInt8", "QInt8"])
def test_any_quantization_is_recalibrated(kind: str, tmp_path: Path) -> None:
    """Of a file whose scales are not used, zero points and unsigned types are no matter; ONNX Runtime leaves out the
    ReLUs before them, whose work the range does."""
    from onnxruntime.quantization import QuantType

    from trtpipe.model.onnx.network import load_network
    from trtpipe.model.onnx.reference import Reference

    types = {"activation_type": QuantType.QUInt8, "weight_type": getattr(QuantType, kind)}
    asymmetric = {"ActivationSymmetric": False, "WeightSymmetric": False}
    quantized(tmp_path, **types, per_channel=False, extra_options=asymmetric)
    x = images(4, 3, 8, 8, seed=3)
    network_of = load_network(tmp_path / "file.onnx", recalibrate=True)
    found, expected = network_of(x)["logits"], load_network(tmp_path / "float.onnx")(x)["logits"]
    assert 0 < float((found - expected).abs().max()) < 0.03 * float(expected.abs().max())
    assert float((Reference(network_of.file)(x)["logits"] - found).abs().max()) < 1e-4


@pytest.mark.parametrize("again", [0.05, 0.1])
def test_a_second_scale_on_what_is_quantized_already(again: float, tmp_path: Path) -> None:
    """Of two pairs of Q/DQ in a row the first is not left out without a word: both with one scale are one."""
    from trtpipe.model.onnx.network import load_network

    nodes, values = [], {"zero": np.int8(0), "w": np.ones((3, 4), np.float32)}
    for k, (source, scale) in enumerate((("x", 0.05), ("d0", again))):
        values[f"s{k}"] = np.float32(scale)
        nodes += [
            onnx.helper.make_node("QuantizeLinear", [source, f"s{k}", "zero"], [f"q{k}"], name=f"Q{k}"),
            onnx.helper.make_node("DequantizeLinear", [f"q{k}", f"s{k}", "zero"], [f"d{k}"]),
        ]
    nodes.append(onnx.helper.make_node("MatMul", ["d1", "w"], ["y"]))
    shape = onnx.helper.make_tensor_value_info
    held = [numpy_helper.from_array(np.asarray(v), n) for n, v in values.items()]
    graph = onnx.helper.make_graph(nodes, "g", [shape("x", 1, ["N", 3])], [shape("y", 1, ["N", 4])], held)
    path = tmp_path / "file.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    load_network(path, recalibrate=True)
    if again == 0.05:
        load_network(path)
        return
    with pytest.raises(InputError) as caught:
        load_network(path)
    assert str(caught.value) == (
        "model.onnx: QuantizeLinear (Q1) quantizes with another scale what is quantized already. Give each tensor one "
        "scale, or set calibration.recalibrate: true, which starts from the file's FP32 form."
    )

"""Graphs that ONNX Runtime's own optimizer breaks run as they stand, for whoever runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
import onnx
import pytest
import shipping
import torch
from onnx import TensorProto, helper, numpy_helper

import trtpipe
from trtpipe.bundle import golden
from trtpipe.bundle.format import Bundle
from trtpipe.bundle.manifest import GRAPH
from trtpipe.cli.main import main
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import GOLDEN, CheckReport, Control, DimRange, Metric, TensorSpec

BATCH = {"N": DimRange(1, 4, 8)}


def bundle_around(path: Path, graph: bytes, given: str, out: str, shape: tuple[int, ...]) -> Bundle:
    """A bundle of a graph from `given` [N, ...] to `out`, checked to within two percent of its baseline."""
    x = np.random.default_rng(0).random((6, *shape), np.float32)
    y = OrtRunner(graph, as_written=True).run({given: x})[out]
    report = CheckReport(
        "graph", "onnxruntime", 6,
        (
            Metric("cosine_worst", out, 0.999), Metric("relative_l2", out, 0.02),
            Metric("max_abs", out, 0.05 * float(np.abs(y).max())),
        ),
        Control("w", "zeroed", True, 6), True,
    )  # fmt: skip
    specs = [(TensorSpec(n, "float32", ("N", *a.shape[1:]), BATCH),) for n, a in ((given, x), (out, y))]
    kept = golden.to_bytes(golden.Golden({given: x}, {out: y}, None, None))
    return shipping.bundle(
        path, extra={GRAPH: graph, GOLDEN: kept}, inputs=specs[0], outputs=specs[1], check=report, preprocessing=None,
        class_names=None,
    )  # fmt: skip


def padded_pool(path: Path) -> Bundle:
    """ONNX Runtime (1.31) folds the Pad of zeros into the MaxPool, which pads with -inf."""
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("Abs", ["n"], ["a"]),
        helper.make_node("Neg", ["a"], ["m"]),
        helper.make_node("Pad", ["m", "pads"], ["p"]),
        helper.make_node("MaxPool", ["p"], ["y"], kernel_shape=[3, 3], strides=[2, 2]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 2, s, s]) for n, s in (("x", 6), ("y", 3))]
    pads = numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads")
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [pads])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return bundle_around(path, model.SerializeToString(), "x", "y", (2, 6, 6))


class HalfNet(torch.nn.Module):
    """Two convolutions with something between them that ONNX Runtime's optimizer wants to fuse."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1)
        self.head = torch.nn.Linear(16 * 64, 5)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.middle(torch.relu(self.first(x)))).flatten(1))


def half_graph(middle: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    """The network in INT8 and FP16 as TensorRT is given it, with FP16 scales."""
    return to_onnx(models.line(HalfNet(middle).eval(), 8, 5).quantized(int8=True, half=torch.float16)).data


def half_softmax(path: Path) -> Bundle:
    """ONNX Runtime (1.31) fuses it into a QLinearSoftmax that reads the FP16 scales as something else."""
    return bundle_around(path, half_graph(lambda y: torch.softmax(y, 1)), "image", "logits", (3, 8, 8))


def half_concat(path: Path) -> Bundle:
    """ONNX Runtime (1.31) makes a QLinearConcat of FP16 of it, which it then refuses."""
    graph = half_graph(lambda y: torch.cat([y[:, 8:], y[:, :8]], 1))
    return bundle_around(path, graph, "image", "logits", (3, 8, 8))


class InvertedResidual(torch.nn.Module):
    """A block of MobileNetV2, half of whose depthwise channels BatchNorm has left a bias and next to no weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Linear(16 * 64, 5)
        self.expand, self.project = torch.nn.Conv2d(16, 32, 1), torch.nn.Conv2d(32, 16, 1)
        self.depthwise = torch.nn.Conv2d(32, 32, 3, padding=1, groups=32)
        with torch.no_grad():
            self.depthwise.weight[::2] *= 1e-6
            self.depthwise.bias[::2] = 3 * torch.rand(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.relu6(self.stem(x))
        y = torch.nn.functional.relu6(self.expand(x))
        return self.head((x + self.project(torch.nn.functional.relu6(self.depthwise(y)))).flatten(1))


def half_inverted_residual(path: Path) -> Bundle:
    """ONNX Runtime (1.31) makes INT32 of the biases, by FP16 scales."""
    network = models.line(InvertedResidual().eval(), 8, 5)
    graph = to_onnx(network.quantized(int8=True, half=torch.float16)).data
    return bundle_around(path, graph, "image", "logits", (3, 8, 8))


def inverted_residual(path: Path) -> Bundle:
    """In FP32, with the scales that such weights have and `least_scales` does not let them have: the biases are beyond
    what INT32 holds in units of them."""
    model = onnx.load_from_string(to_onnx(models.line(InvertedResidual().eval(), 8, 5).quantized(int8=True)).data)
    constants = {i.name: i for i in model.graph.initializer}
    (scales,) = (constants[n.input[1]] for n in model.graph.node if n.name == "depthwise/DequantizeLinear")
    values = numpy_helper.to_array(scales).copy()
    values[::2] = 1e-12
    scales.CopyFrom(numpy_helper.from_array(values, scales.name))
    return bundle_around(path, model.SerializeToString(), "image", "logits", (3, 8, 8))


REAL_FAULTS = [padded_pool, half_softmax, half_concat, half_inverted_residual, inverted_residual]


@pytest.mark.parametrize("make", [half_inverted_residual, inverted_residual])
def test_it_is_the_quantization_of_biases_that_breaks_an_inverted_residual(
    make: Callable[[Path], Bundle], tmp_path: Path
) -> None:
    """The network does have the fault that it is here for: 4 of 50 photographs instead of 37, of a trained one."""
    import onnxruntime

    bundle = make(tmp_path / "b")
    kept, options = bundle.golden(), onnxruntime.SessionOptions()
    options.log_severity_level = 4
    errors = []
    for disabled in ([], ["WeightBiasQuantization"]):
        session = onnxruntime.InferenceSession(
            bundle.read(GRAPH), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )
        (got,) = session.run(None, dict(kept.inputs))
        errors.append(float(np.linalg.norm(got - kept.outputs["logits"]) / np.linalg.norm(kept.outputs["logits"])))
    assert errors[0] > 0.3
    assert errors[1] < 0.02


@pytest.mark.parametrize("make", REAL_FAULTS)
def test_what_onnxruntimes_optimizer_breaks_runs_as_it_stands_and_says_so(
    make: Callable[[Path], Bundle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make(tmp_path / "b")
    kept = bundle.golden()
    with trtpipe.load(tmp_path / "b", graph=True) as model:
        (name,) = kept.outputs
        np.testing.assert_array_equal(model(kept.inputs)[name], kept.outputs[name])
        (note,) = model.notes
    said = f"with them {'it refuses the graph' if make is half_concat else f'output {name} has '}"
    assert note.startswith(f"ONNX Runtime executes each node as it stands, without graph optimizations: {said}")
    np.save(tmp_path / "x.npy", next(iter(kept.inputs.values())))
    for quiet in ((), ("-q",)):
        assert main(["run", str(tmp_path / "b"), str(tmp_path / "x.npy"), "--graph", "--raw", *quiet]) == 0
        assert f"note: {note}\n" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "b"), "--benchmark", "--iterations", "1"]) == 0
    assert '"notes": [\n    "ONNX Runtime executes each node as it stands' in capsys.readouterr().out
    assert main(["bench", str(tmp_path / "b"), "--rounds", "1", "--json"]) == 0
    assert "ONNX Runtime executes each node as it stands" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "b"), "--to", "triton", str(tmp_path / "models")]) == 0
    assert "note: graph optimizations are limited to " in capsys.readouterr().err
    config = (tmp_path / "models" / "colour" / "config.pbtxt").read_text()
    assert "optimization {\n  graph {\n    level: " in config

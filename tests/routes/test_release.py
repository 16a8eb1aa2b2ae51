"""Graphs for TensorRT 8.6: what its parser takes, the same answers, and INT8 kernels left whole."""

from __future__ import annotations

from functools import cache

import nets
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from trtpipe.errors import BuildError
from trtpipe.evaluation.control import damaged_copy
from trtpipe.model.bindings import Bound
from trtpipe.model.capture import capture
from trtpipe.model.export import example_inputs
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.trt.parser import refused_nodes
from trtpipe.values import DimRange, LoadedModel, Quantized, TensorSpec

BATCH = DimRange(2, 4, 8)


class Net(torch.nn.Module):
    """A convolution between two others, and `middle` on what it gives: [N, 8, 8, 8] to [N, 4]."""

    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, padding=1)
        self.middle, self.head = middle, torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.second(self.middle(self.first(x))).mean((2, 3)))


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def unequal(x):
    a, b, c = x.tensor_split(3, 1)
    return torch.cat([c, a, b], 1)


#: Operations whose ONNX form changed after opset 17, or that 8.6 has not: by the name of what is used.
MIDDLES = {
    "relu": torch.nn.ReLU,
    "gelu": torch.nn.GELU,
    "gelu_tanh": lambda: torch.nn.GELU("tanh"),
    "silu": torch.nn.SiLU,
    "mish": torch.nn.Mish,
    "hardswish": torch.nn.Hardswish,
    "softplus": torch.nn.Softplus,
    "group_norm": lambda: torch.nn.GroupNorm(2, 8),
    "instance_norm": lambda: torch.nn.InstanceNorm2d(8),
    "layer_norm": lambda: torch.nn.LayerNorm([8, 8, 8]),
    "mean": lambda: Of(lambda x: x - x.mean((1, 2), keepdim=True)),
    "amax": lambda: Of(lambda x: x - x.amax(1, True)),
    "sum": lambda: Of(lambda x: x / (1 + x.sum(1, True).abs())),
    "norm": lambda: Of(lambda x: x / (1 + x.norm(dim=1, keepdim=True))),
    "logsumexp": lambda: Of(lambda x: x - x.logsumexp(1, True)),
    "prod": lambda: Of(lambda x: x + x.prod(1, True)),
    "split": lambda: Of(lambda x: torch.cat(x.split([3, 3, 2], 1)[::-1], 1)),
    "chunk": lambda: Of(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    "unequal": lambda: Of(unequal),
    "upsample": lambda: torch.nn.Sequential(torch.nn.Upsample(scale_factor=2), torch.nn.MaxPool2d(2)),
    "bilinear": lambda: torch.nn.Sequential(torch.nn.Upsample(scale_factor=2, mode="bilinear"), torch.nn.AvgPool2d(2)),
    "pad": lambda: Of(lambda x: torch.nn.functional.pad(x, (1, 1, 1, 1))[..., 1:-1, 1:-1]),
    "shuffle": lambda: torch.nn.ChannelShuffle(2),
    "where": lambda: Of(lambda x: torch.where(x > 0, x, x * 0.1)),
    "softmax": lambda: torch.nn.Softmax(1),
    "residual": lambda: Of(lambda x: x + torch.sigmoid(x)),
    "var": lambda: Of(lambda x: x / (1 + x.var(1, keepdim=True))),
}


class Beside(torch.nn.Module):
    """The network of every one of `MIDDLES`, on the same input: each export takes a second, whatever is in it."""

    def __init__(self):
        super().__init__()
        self.each = torch.nn.ModuleDict({f"of_{name}": Net(middle()) for name, middle in MIDDLES.items()})

    def forward(self, x):
        return tuple(net(x) for net in self.each.values())


def graph_of(module: torch.nn.Module, half: torch.dtype | None, int8: bool, outputs: tuple[str, ...] = ("y",)):
    """The module's quantized graph, every activation's amax 4."""
    spec = TensorSpec("x", "float32", ("N", 3, 8, 8), {"N": BATCH})
    outs = tuple(TensorSpec(name, "float32", ("N", 4), {"N": BATCH}) for name in outputs)
    module = module.eval()
    module(*example_inputs((spec,)))
    captured = capture(LoadedModel(Bound(module, (spec,), {}, outputs).eval(), (spec,), outs, "w", "test"))
    sites = captured.sites
    amax = {s.group: 4.0 for s in sites if s.axis is None}
    return quantize(captured, int8=int8, half=half, keep=Keep(), amax=amax, ranges={})


@cache
def middle(name: str, half: torch.dtype | None = None, int8: bool = True) -> Quantized:
    return graph_of(Net(MIDDLES[name]()), half, int8)


@cache
def beside(half: torch.dtype | None) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`Beside` for 8.6, and what it and the graph for any other release give."""
    program = graph_of(Beside(), half, True, tuple(MIDDLES))
    old, new = to_onnx(program, "8.6.1"), to_onnx(program)
    assert old.opset == 17
    x = {"x": nets.images(3, 3, 8, 8).numpy()}
    with OrtRunner(old.data, as_written=True) as a, OrtRunner(new.data, as_written=True) as b:
        return onnx.load_from_string(old.data), a.run(x), b.run(x)


@pytest.mark.parametrize("half", [None, torch.float16], ids=["int8", "int8+fp16"])
def test_every_operation_is_parsed_by_8_6(half):
    proto, _, _ = beside(half)
    onnx.checker.check_model(proto, full_check=True)
    assert refused_nodes(proto, "8.6.1") == ()


@pytest.mark.parametrize("half", [None, torch.float16], ids=["int8", "int8+fp16"])
@pytest.mark.parametrize("name", MIDDLES)
def test_an_operation_answers_as_before(name, half):
    _, found, expected = beside(half)
    # In FP16, what lies between Q/DQ is float32 here: a value between two INT8 levels may fall either way.
    distance = np.linalg.norm(found[name] - expected[name])
    assert distance <= (1e-6 if half is None else 0.02) * np.linalg.norm(expected[name])


@pytest.mark.parametrize("int8", [False, True])
def test_every_other_release_gets_the_same_file(int8):
    program = middle("gelu", torch.float16, int8)
    assert {to_onnx(program, r).data for r in ("10.0.1", "10.3.0", "11.4.0.106")} == {to_onnx(program).data}


def test_weights_are_quantized_in_the_graph_to_the_int8_that_later_releases_get():
    old = onnx.load_from_string(to_onnx(middle("relu"), "8.6.1").data).graph
    new = onnx.load_from_string(to_onnx(middle("relu")).data).graph
    before = {i.name: numpy_helper.to_array(i) for i in new.initializer}
    after = {i.name: numpy_helper.to_array(i) for i in old.initializer}
    kept = {n.output[0]: n.input[0] for n in new.node if n.op_type == "DequantizeLinear" and n.input[0] in before}
    assert len(kept) == 3
    assert not any(a.dtype == np.int8 and a.any() for a in after.values())
    for dequantized, name in kept.items():
        (q,) = (n for n in old.node if n.op_type == "QuantizeLinear" and n.input[0] == f"{dequantized}_float32")
        steps = after[q.input[1]]
        axis = next((a.i for a in q.attribute if a.name == "axis"), 0)
        along = [-1 if k == axis and steps.size > 1 else 1 for k in range(before[name].ndim)]
        np.testing.assert_array_equal(np.round(after[q.input[0]] / steps.reshape(along)), before[name])


@pytest.mark.parametrize("half", [None, torch.float16], ids=["int8", "int8+fp16"])
def test_weights_of_the_same_codes_keep_their_own_scales(half):
    """One convolution is four times the other: the exporter keeps their equal INT8 codes once."""

    class Codes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.one, self.four = (torch.nn.Conv2d(n, 8, 3, padding=1, bias=False) for n in (3, 8, 8))
            self.four.weight.data = 4 * self.one.weight.data
            self.head = torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.four(self.one(self.first(x)).relu()).mean((2, 3)))

    torch.manual_seed(0)
    program, x = graph_of(Codes(), half, True), {"x": nets.images(3, 3, 8, 8).numpy()}
    with OrtRunner(to_onnx(program, "8.6.1").data, as_written=True) as old:
        found = old.run(x)["y"]
    with OrtRunner(to_onnx(program).data, as_written=True) as new:
        expected = new.run(x)["y"]
    assert np.linalg.norm(found - expected) <= (1e-5 if half is None else 0.02) * np.linalg.norm(expected)


def test_no_cast_stands_between_a_convolution_and_its_q_and_dq():
    """SiLU after an INT8 convolution: all of it float32, FP16 only behind the last convolution."""
    graph = onnx.load_from_string(to_onnx(middle("silu", torch.float16), "8.6.1").data).graph
    makers = {o: n for n in graph.node for o in n.output}
    readers = {i: n for n in graph.node for i in n.input}
    for q in (n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] in makers):
        assert makers[q.input[0]].op_type != "Cast"
    for dq in (n for n in graph.node if n.op_type == "DequantizeLinear"):
        assert readers[dq.output[0]].op_type != "Cast"
    assert [n.op_type for n in graph.node if n.name.startswith("middle")].count("Cast") == 0


def test_the_control_damages_an_activation():
    model = to_onnx(middle("relu"), "8.6.1")
    copy, name, how = damaged_copy(model)
    before = {i.name for i in onnx.load_from_string(model.data).graph.initializer}
    node = next(n for n in onnx.load_from_string(copy.data).graph.node if n.name == name)
    assert node.op_type == "QuantizeLinear"
    assert node.input[0] not in before
    assert how == "scale x 127"


def test_what_8_6_has_no_operator_for_is_refused_by_node():
    with pytest.raises(BuildError) as raised:
        to_onnx(graph_of(Net(Of(lambda x: x * torch.bitwise_and((x > 0).int(), 1))), None, False), "8.6.1")
    text = str(raised.value)
    assert text.startswith("onnx: TensorRT 8.6.1 does not parse this graph (")
    assert "[BitwiseAnd]: not an operator of 8.6" in text
    assert text.endswith("Change the model there, or build with TensorRT 10 or later.")


@pytest.mark.parametrize("net", ["residual", "attention", "concat"])
def test_the_nets_of_the_tests_are_parsed(net):
    captured = nets.captured(net)
    sites = captured.sites
    amax = {s.group: 2.0 for s in sites if s.axis is None}
    for half in (None, torch.float16):
        program = quantize(captured, int8=True, half=half, keep=Keep(), amax=amax, ranges={})
        assert to_onnx(program, "8.6.1").opset == 17

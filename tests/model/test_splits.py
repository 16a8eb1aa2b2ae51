"""Splits along a dynamic dimension: the file has slices, which every TensorRT takes, and answers as the model."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from trtpipe.errors import BuildError
from trtpipe.model.bindings import bind, evaluating
from trtpipe.model.capture import capture
from trtpipe.model.export import _begins, example_inputs, export
from trtpipe.model.output_specs import output_specs
from trtpipe.model.torch_versions import graph_module
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import DimRange, LoadedModel, TensorSpec

N = {"N": DimRange(1, 2, 8)}
INPUTS = tuple(TensorSpec(name, "float32", ("N", 3, 6, 6), N) for name in "ab")
OUTPUT = TensorSpec("y", "float32", ("N", 8, 6, 6), N)

Split = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
#: Two images through one convolution as one batch, which is then taken apart: RAFT, siamese networks.
WAYS: dict[str, Split] = {
    "torch.chunk": lambda y, a: torch.chunk(y, 2, 0),
    "chunk": lambda y, a: y.chunk(2),
    "chunk by name": lambda y, a: y.chunk(chunks=2, dim=0),
    "torch.chunk by name": lambda y, a: torch.chunk(dim=-4, chunks=2, input=y),
    "torch.split by name": lambda y, a: torch.split(split_size_or_sections=a.shape[0], tensor=y),
    "torch.split": lambda y, a: torch.split(y, a.shape[0], 0),
    "split": lambda y, a: y.split(a.shape[0]),
    "split by name": lambda y, a: y.split(split_size=a.shape[0], dim=0),
    "split of the half": lambda y, a: y.split(y.shape[0] // 2),
    "split into sizes": lambda y, a: y.split([a.shape[0], y.shape[0] - a.shape[0]]),
    "tensor_split": lambda y, a: torch.tensor_split(y, 2),
    "along the last": lambda y, a: tuple(piece.t() for piece in y.flatten(1).t().chunk(2, -1)),
}


class Siamese(nn.Module):
    def __init__(self, split: Split) -> None:
        super().__init__()
        self.conv, self.split = nn.Conv2d(3, 8, 3, padding=1), split

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        p, q = self.split(self.conv(torch.cat([a, b])), a)
        return (p - q).reshape(-1, 8, 6, 6)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_two_inputs_is_taken_apart_at_every_size(way: str) -> None:
    network = Siamese(WAYS[way]).eval()
    loaded = LoadedModel(bind(network, INPUTS, {}, ("y",)), INPUTS, (OUTPUT,), "w" * 64, "test")
    graph = capture(loaded)
    model = to_onnx(quantize(graph, int8=False, half=None, keep=Keep(), amax={}, ranges={}))
    types = {n.op_type for n in onnx.load(io.BytesIO(model.data)).graph.node}
    assert "Slice" in types
    assert not types & {"SplitToSequence", "SequenceAt", "Split"}
    rng = np.random.default_rng(0)
    with OrtRunner(model.data) as runner:
        for size in (1, 2, 5, 8):
            a, b = (rng.normal(size=(size, 3, 6, 6)).astype(np.float32) for _ in "ab")
            with torch.inference_mode():
                expected = network(torch.from_numpy(a), torch.from_numpy(b)).numpy()
            np.testing.assert_allclose(runner.run({"a": a, "b": b})["y"], expected, atol=1e-5)


def test_a_program_is_taken_apart_too() -> None:
    """A `.pt2` has the operation of PyTorch, which no function of its sees."""

    class Sizes(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            p, q = torch.ops.aten.split_with_sizes.default(torch.cat([a, b]), [a.shape[0], b.shape[0]])
            return p - 2 * q

    graph = evaluating(graph_module(export(Sizes(), INPUTS)))
    output = TensorSpec("y", "float32", ("N", 3, 6, 6), N)
    loaded = LoadedModel(bind(graph, INPUTS, {}, ("y",)), INPUTS, (output,), "w" * 64, "test")
    names = {n.target.__name__ for n in capture(loaded).graph.graph.nodes if n.op == "call_function"}
    assert not any("split" in name for name in names)
    assert any("slice" in name for name in names)


def test_a_name_has_one_size_in_every_input() -> None:
    """The length of one input is the first dimension of another: their example had two sizes of it."""

    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

    length = {"L": DimRange(1, 5, 8)}
    inputs = TensorSpec("a", "float32", ("N", "L"), {**N, **length}), TensorSpec("b", "float32", ("L", 3), length)
    assert [tuple(x.shape) for x in example_inputs(inputs)] == [(2, 2), (2, 3)]
    program = export(Product(), inputs).module()
    given: list[list[tuple[int, ...]]] = []

    class Watched(Product):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            given.append([tuple(a.shape), tuple(b.shape)])
            return super().forward(a, b)

    output_specs(bind(Watched().eval(), inputs, {}, ("y",)), inputs, {"y": "float32"})
    assert given[0] == [(2, 2), (2, 3)]  # as the export's
    for n, size in ((1, 1), (8, 5), (3, 8)):
        a, b = torch.randn(n, size), torch.randn(size, 3)
        torch.testing.assert_close(program(a, b), a @ b)


@pytest.mark.parametrize(("between", "begins"), [("1 <= H <= 8", 3), ("3 <= H <= 8", None), ("2 <= H <= 8", 3)])
def test_a_range_that_begins_where_a_guard_holds_is_not_told_to_begin_there(between: str, begins: int | None) -> None:
    assert _begins("H", "(H + 1)//2 != 1", between) == begins


def test_what_is_split_unevenly_is_left_to_pytorch() -> None:
    """Of N rows `chunk(2)` gives one piece where N is 1: PyTorch refuses it."""

    class Halves(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a.chunk(2)[0] + b[:1]

    with pytest.raises(BuildError, match=r"^capture: the model fixes a dimension that the job declares as dynamic"):
        export(Halves(), INPUTS)

"""Operations of torch.library as nodes for plugins of TensorRT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from trtpipe.errors import BuildError
from trtpipe.model.capture import capture
from trtpipe.model.load import LoadedModel
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.values import Captured, DimRange, TensorSpec

ROWS = {"N": DimRange(1, 2, 4)}


@torch.library.custom_op("plugin_nodes::scaled", mutates_args=())
def scaled(
    x: Tensor,
    factor: float,
    bias: Tensor | None = None,
    axes: Sequence[int] | None = None,
    mode: str = "plain",
    both: bool = True,
    plugin_version: str = "2",
) -> tuple[Tensor, Tensor]:
    """Two results, an input that may be missing, and attributes of each kind."""
    return x * factor, x.sum(1)


@scaled.register_fake
def _(x: Tensor, factor: float, bias: Any = None, axes: Any = None, mode: str = "", both: bool = True, **_: Any) -> Any:
    return torch.empty_like(x), x.new_empty(x.shape[:1])


@torch.library.custom_op("plugin_nodes::relu", mutates_args=())
def relu(x: Tensor) -> Tensor:
    """No ReLU, whatever it is called."""
    return x.cos()


@relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("plugin_nodes::listed", mutates_args=())
def listed(xs: Sequence[Tensor]) -> Tensor:
    """A list of tensors, which no node has."""
    return xs[0] + xs[1]


@listed.register_fake
def _(xs: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(xs[0])


@torch.library.custom_op("plugin_nodes::parts", mutates_args=())
def parts(x: Tensor) -> list[Tensor]:
    """A list of results, whose number no schema knows."""
    return [x * 2, x * 3]


@parts.register_fake
def _(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


class Net(torch.nn.Module):
    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.layer = which, torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        ops, y = torch.ops.plugin_nodes, self.layer(x)
        if self.which == "listed":
            return ops.listed([y, x])  # type: ignore[no-any-return]
        if self.which == "parts":
            return ops.parts(y)[0]  # type: ignore[no-any-return]
        if self.which == "relu":
            return ops.relu(y) + 1.0  # type: ignore[no-any-return]
        a, b = ops.scaled(y, 2.5, axes=[0, 1], both=False)
        return a + b[:, None]  # type: ignore[no-any-return]


def captured(which: str) -> Captured:
    torch.manual_seed(0)
    x, y = TensorSpec("x", "float32", ("N", 4), ROWS, 0), TensorSpec("y", "float32", ("N", 4), ROWS, 0)
    return capture(LoadedModel(Net(which).eval(), (x,), (y,), "0" * 64, ()))


def node(which: str, half: torch.dtype | None = None) -> Any:
    found = quantize(captured(which), int8=False, half=half, keep=Keep(), amax={}, ranges={})
    graph = onnx.load_from_string(to_onnx(found, plugins=True).data)
    (node,) = [n for n in graph.graph.node if n.domain == "plugin_nodes"]
    assert ("plugin_nodes", 1) in {(o.domain, o.version) for o in graph.opset_import}
    return graph, node


def test_tensors_are_inputs_and_all_else_attributes() -> None:
    _, scaled = node("scaled")
    assert (scaled.op_type, len(scaled.input), len(scaled.output)) == ("scaled", 1, 2)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in scaled.attribute}
    expected = {"factor": 2.5, "axes": [0, 1], "mode": b"plain", "both": 0, "plugin_version": b"2"}
    assert attributes == expected


def test_it_computes_in_fp32_whatever_it_is_called() -> None:
    graph, relu = node("relu", torch.float16)
    casts = {n.output[0]: n.attribute[0].i for n in graph.graph.node if n.op_type == "Cast"}
    assert casts[relu.input[0]] == onnx.TensorProto.FLOAT


def test_without_plugins_it_is_refused() -> None:
    found = quantize(captured("relu"), int8=False, half=None, keep=Keep(), amax={}, ranges={})
    with pytest.raises(BuildError) as caught:
        to_onnx(found)
    assert str(caught.value) == (
        "onnx: torch.onnx has no translation of plugin_nodes.relu.default. Write it in other operations. With "
        "build.target tensorrt a plugin can compute it (build.plugins), and with that or tensorrt_rtx build.route "
        "torch_tensorrt may have it."
    )


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (
            "listed",
            "onnx: plugin_nodes.listed has the argument xs of type List[Tensor], and a node for a plugin takes "
            "tensors, numbers, texts and lists of numbers or texts. Give the operation such arguments.",
        ),
        (
            "parts",
            "onnx: plugin_nodes.parts returns List[Tensor], and a plugin returns tensors. Return a tensor, or a tuple "
            "of them.",
        ),
    ],
)
def test_what_no_node_has_is_named(which: str, message: str) -> None:
    found = quantize(captured(which), int8=False, half=None, keep=Keep(), amax={}, ranges={})
    with pytest.raises(BuildError) as caught:
        to_onnx(found, plugins=True)
    assert str(caught.value) == message

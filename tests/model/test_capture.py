"""The captured graph answers as the eager model does, at batch sizes it was not exported with."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock, patch

import nets
import pytest
import torch
from torch import nn

from trtpipe.errors import BuildError, InputError
from trtpipe.model import pt2e
from trtpipe.model.bindings import evaluating
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, constant_value, copied, module_path, op_name, set_constant, source_line
from trtpipe.model.output_specs import output_specs
from trtpipe.model.torch_versions import graph_module
from trtpipe.values import LoadedModel, TensorSpec


def names(net: str) -> list[str]:
    return [op_name(n) for n in calls(nets.captured(net).graph.graph)]


@pytest.mark.parametrize(("net", "shape"), [("residual", (3, 8, 8)), ("attention", (6, 8))])
def test_answers_as_eager_at_every_batch(net: str, shape: tuple[int, ...]) -> None:
    captured, loaded = nets.captured(net), getattr(nets, net)()
    for batch in (1, 3, 8):
        x = nets.images(batch, *shape, seed=batch)
        with torch.inference_mode():
            torch.testing.assert_close(captured.graph(x)[0], loaded.module(x)[0], rtol=1e-5, atol=1e-6)


def test_folds_batch_norm_into_the_convolution() -> None:
    found = names("residual")
    assert "conv2d" in found
    assert not [n for n in found if "batch_norm" in n]


class _SharedNorm(nn.Module):
    """Two convolutions, a transposed one read twice, and norms that are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 2)
        self.first, self.second, self.last = (nn.BatchNorm2d(c) for c in (8, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.last(self.up(self.first(self.conv(x))))
        return a + self.last(self.up(self.second(self.conv(x * 2))))


def test_dead_nodes_are_looked_for_once_and_the_graph_is_that_of_the_library() -> None:
    """However many batch norms are folded: a walk through the whole graph behind each is quadratic."""
    torch.manual_seed(0)
    exported = torch.export.export(_SharedNorm().eval(), (torch.randn(2, 3, 8, 8),)).run_decompositions({})
    theirs, ours = exported.module(), copy.deepcopy(exported).module()
    pt2e._fuse_conv_bn_(theirs)
    looked = Mock(wraps=ours.graph.eliminate_dead_code)
    with patch.object(torch.fx.Graph, "eliminate_dead_code", looked):
        pt2e.fuse_conv_bn(ours)
    assert looked.call_count == 1
    assert [str(n.target) for n in ours.graph.nodes] == [str(n.target) for n in theirs.graph.nodes]
    assert not any("batch_norm" in str(n.target) for n in ours.graph.nodes)
    for (name, mine), (other, their) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(mine, their)


def test_spells_attention_out() -> None:
    found = names("attention")
    assert "scaled_dot_product_attention" not in found
    assert found.count("matmul") == 2
    assert "softmax" in found


def test_folds_weights_that_are_computed_from_constants() -> None:
    class Standardized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
            return nn.functional.conv2d(x, w).mean((2, 3))

    captured = capture(nets.loaded(Standardized().eval()))
    convolution = next(n for n in calls(captured.graph.graph) if op_name(n) == "conv2d")
    assert convolution.args[1].op == "get_attr"


def test_every_node_knows_its_module_and_line() -> None:
    captured = nets.captured("residual")
    convolutions = [n for n in calls(captured.graph.graph) if op_name(n) == "conv2d"]
    assert [module_path(n) for n in convolutions] == ["stem", "conv1", "conv2", "down"]
    assert all(source_line(n).startswith("nets.py:") for n in convolutions)


def test_digest_follows_the_graph_and_the_weights() -> None:
    one = nets.captured("residual")
    assert one.digest == capture(nets.residual()).digest
    assert one.digest != nets.captured("concat").digest
    other = nets.residual()
    assert one.digest != capture(LoadedModel(other.module, other.inputs, other.outputs, "v" * 64, "test")).digest


def test_a_model_that_branches_on_its_values_is_a_build_error_with_its_line() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(
        BuildError, match=r"capture: the model decides by the values of a tensor at test_capture\.py:\d+ \(return x if"
    ):
        capture(nets.loaded(Branching(), out_shape=("N", 3, 8, 8)))


def _while(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import while_loop

    rounds, value = torch.tensor(0), x
    return while_loop(lambda k, _: k < 3, lambda k, y: (k + 1, y * 2), (rounds, value))[1]  # type: ignore[no-any-return]


def _scan(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, y: (c + y, c * y), torch.zeros(3, 8, 8), x)[1]  # type: ignore[no-any-return]


def _map(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.map import map as each

    return each(lambda row: row * 2, x)  # type: ignore[no-any-return]


def _cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: -y, (x,))  # type: ignore[no-any-return]


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    ("computes", "name"), [(_cond, "cond"), (_while, "while_loop"), (_scan, "scan"), (_map, "map_impl")]
)
def test_a_graph_that_holds_graphs_is_refused(
    computes: Callable[[torch.Tensor], torch.Tensor], name: str, exported: bool
) -> None:
    """Control flow that torch.export keeps as an operation, of a factory's model and of a file of torch.export.save."""

    class Controlled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return computes(x)

    network: nn.Module = Controlled()
    if exported:
        batch = {0: torch.export.Dim("N", min=1, max=8)}
        network = evaluating(
            graph_module(torch.export.export(network, (torch.zeros(2, 3, 8, 8),), dynamic_shapes=(batch,)))
        )
    with pytest.raises(BuildError) as caught:
        capture(nets.loaded(network, out_shape=("N", 3, 8, 8)))
    assert re.fullmatch(
        rf"capture: {name}( at \w+\.py:\d+)? chooses or repeats graphs of its own, and the graph of an engine holds "
        r"none\. Compute both ways and choose with torch\.where\(condition, a, b\); write a loop as a Python loop of a "
        r"fixed number of rounds\.",
        str(caught.value),
    )


def test_a_graph_within_a_context_is_no_graph_of_its_own() -> None:
    """torch.export keeps no_grad and autocast as operations on graphs, until they are taken apart."""

    class Within(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                y = x * 2
            return y + 1

    program = torch.export.export(Within(), (torch.zeros(2, 3, 8, 8),), dynamic_shapes=({0: torch.export.Dim("N")},))
    captured = capture(nets.loaded(evaluating(graph_module(program)), out_shape=("N", 3, 8, 8)))
    assert [op_name(n) for n in calls(captured.graph.graph)] == ["mul", "add"]


def test_a_copy_reads_the_same_constants_and_its_own_are_replaced_alone() -> None:
    graph = nets.captured("residual").graph
    copy = copied(graph)
    for a, b in zip(graph.graph.nodes, copy.graph.nodes, strict=True):
        assert a is not b
        if a.op == "get_attr":
            assert constant_value(graph, a) is constant_value(copy, b)
    x = nets.images(2, 3, 8, 8)
    before = graph(x)[0].clone()
    weight = next(n for n in copy.graph.nodes if n.op == "get_attr")
    set_constant(copy, weight, torch.zeros_like(constant_value(copy, weight)))
    assert torch.equal(graph(x)[0], before)
    assert not torch.equal(copy(x)[0], before)


@torch.library.custom_op("test_capture::doubled", mutates_args={"x"})
def doubled(x: torch.Tensor) -> None:
    """Writes into its argument."""
    x.mul_(2)


def test_operations_that_write_into_their_arguments_are_refused() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            torch.ops.test_capture.doubled(y)
            return y

    spec = TensorSpec("x", "float32", (2, 3))
    with pytest.raises(BuildError) as caught:
        capture(LoadedModel(Net(), (spec,), (TensorSpec("y", "float32", (2, 3), batch_axis=0),), "", ()))
    text = str(caught.value)
    assert text.startswith("capture: test_capture.doubled.default (test_capture.py:")
    assert text.endswith(
        ") writes into its arguments, and no engine does. Return a new tensor from it: mutates_args=()."
    )


@torch.library.custom_op("test_capture::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    """Has no function that says its shape."""
    return x * 2


def test_operations_that_say_no_shape_are_refused() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.ops.test_capture.shapeless(x),)

    spec = TensorSpec("x", "float32", (2, 3))
    with pytest.raises(BuildError) as caught:
        capture(LoadedModel(Net(), (spec,), (TensorSpec("y", "float32", (2, 3), batch_axis=0),), "", ()))
    text = str(caught.value)
    assert text.startswith("capture: the operation test_capture::shapeless at test_capture.py:")
    assert text.endswith(
        " does not say what shape it gives, which torch.export needs. Register a function that does: "
        '@torch.library.register_fake("test_capture::shapeless").'
    )


class _Rows(nn.Module):
    """Rows of all samples in one axis: 4N of 16 numbers, and 8, as many as in two samples, that meet in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.few = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, 16)).sum(1, keepdim=True).reshape(x.shape[0], -1)


class _MaskedScores(_Rows):
    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The scores of an attention with 8 keys, and a mask of all of them."""
        scores = (rows @ self.few.t())[None]
        return torch.softmax(scores + torch.ones(1, 8), -1)[0]


class _Products(_Rows):
    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """A product with something added that has rows of its own."""
        return torch.addmm(rows[:, :8], rows, self.few.t())


@pytest.mark.parametrize("net", [_MaskedScores, _Products])
def test_a_constant_that_equals_a_dynamic_extent_at_the_examples_size_fixes_no_dimension(net: type[_Rows]) -> None:
    """The graph is read by rules that compare shapes, up to Q/DQ; none of them may decide by the example's sizes."""
    from trtpipe.quantization.corrections.domains import find_domains
    from trtpipe.quantization.payoff import gains_nothing
    from trtpipe.quantization.policy import Modes
    from trtpipe.quantization.precision import Keep

    model = net().eval()
    loaded = nets.loaded(model, ("N", 4, 16), out_shape=("N", 4))
    captured = capture(loaded)
    find_domains(captured.graph)
    gains_nothing(captured, "tensorrt_rtx", Modes(frozenset({"int8", "fp8"})), Keep())
    for batch in (1, 2, 3, 8):
        x = nets.images(batch, 4, 16, seed=batch)
        with torch.inference_mode():
            torch.testing.assert_close(captured.graph(x)[0], model(x), rtol=1e-5, atol=1e-6)


def test_a_batch_axis_that_the_graph_has_not_is_refused() -> None:
    loaded = nets.residual()
    (output,) = loaded.outputs
    other = replace(loaded, outputs=(replace(output, batch_axis=None),))
    with pytest.raises(BuildError) as caught:
        capture(other)
    assert str(caught.value) == (
        "outputs.logits: torch.export gives the shape ['N', 5], and the model itself returns ['N', 5]. It computes "
        "another thing for other batch sizes: make it independent of them."
    )


class _Quotients(nn.Module):
    """Rounded divisions of integers: by one number, by a tensor, and of floats."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.register_buffer("by", torch.tensor([3600, -7, 11, 1 << 30]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.div(x, 3600, rounding_mode=self.mode) + torch.div(x, self.by, rounding_mode=self.mode) * 2
        return whole.remainder(1009).float() + torch.div(x.float(), 3.0, rounding_mode=self.mode) * 0


@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_integers_are_divided_exactly(mode: str) -> None:
    """The exporter divides them in FP32: seconds since 1970 were hours off."""
    from trtpipe.quantization.precision import Keep
    from trtpipe.quantization.quantize import quantize
    from trtpipe.routes.onnx import to_onnx
    from trtpipe.runtime.onnxruntime import OrtRunner

    model = _Quotients(mode).eval()
    x = torch.randint(-(1 << 40), 1 << 40, (4, 4), generator=torch.Generator().manual_seed(0))
    loaded = nets.loaded(model, ("N", 4), dtype="int64", out_shape=("N", 4))
    captured = capture(loaded)
    with torch.inference_mode():
        torch.testing.assert_close(captured.graph(x)[0], model(x), rtol=0, atol=0)
    graph = to_onnx(quantize(captured, int8=False, half=None, keep=Keep(), amax={}, ranges={}))
    with OrtRunner(graph.data, as_written=True) as runner:
        (found,) = runner.run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # PyTorch announces the end of quantize_per_tensor
def test_a_quantized_output_is_refused() -> None:
    class Quantized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.quantize_per_tensor(x.flatten(1)[:, :5], 0.1, 0, torch.qint8)

    loaded = nets.loaded(Quantized())
    with pytest.raises(InputError) as caught:
        output_specs(loaded.module, loaded.inputs, {"logits": "float32"})
    assert str(caught.value) == (
        "outputs.logits: must be a plain tensor (got qint8, quantized, which no engine returns). Return dequantize() "
        "of it."
    )


@pytest.mark.parametrize(
    ("head", "shape", "ranges"),
    [
        (lambda y: torch.cat([y, -y]), ("2*N", 5), {"2*N": (2, 16)}),
        (lambda y: y.reshape(-1), ("5*N",), {"5*N": (5, 40)}),
        (lambda y: torch.nn.functional.pad(y, (0, 0, 1, 2)), ("N + 3", 5), {"N + 3": (4, 11)}),
        (lambda y: y.mean(0), (5,), {}),
        (lambda y: y.t(), (5, "N"), {"N": (1, 8)}),
    ],
)
def test_extents_of_outputs_are_the_graphs_own(
    head: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int | str, ...], ranges: dict[str, tuple[int, int]]
) -> None:
    """A number, a dimension of the inputs, or a formula of them with the range that it has where they have theirs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return head(self.linear(x.mean((2, 3))))

    loaded = nets.loaded(Net())
    specs, _ = output_specs(loaded.module, loaded.inputs, {"logits": "float32"})  # type: ignore[arg-type]
    (found,) = capture(replace(loaded, outputs=specs)).outputs
    assert found.shape == shape
    assert {name: (r.min, r.max) for name, r in found.dims.items()} == ranges

"""Batch norms behind convolutions and linear layers, whatever their parameters are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trtpipe.errors import BuildError
from trtpipe.model.capture import capture
from trtpipe.quantization.quantize import prepare

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(3, 8, 3),
    "conv without bias": lambda: nn.Conv2d(3, 8, 3, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(3, 8, 3),
    "linear": lambda: nn.Linear(3, 8),
    "linear without bias": lambda: nn.Linear(3, 8, bias=False),
    "linear over rows": lambda: nn.Linear(16, 8),
}


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def a_buffer(module: nn.Module, name: str) -> None:
    value = getattr(module, name).detach()
    delattr(module, name)
    module.register_buffer(name, value)


#: What makes a parameter of a module something else than a parameter.
MADE: dict[str, Callable[[nn.Module, str], object]] = {
    "a parameter": lambda module, name: None,
    "weight norm": lambda module, name: nn.utils.parametrizations.weight_norm(module, name),
    "parametrized": lambda module, name: nn.utils.parametrize.register_parametrization(module, name, Doubled()),
    "a buffer": a_buffer,
}


class Net(nn.Module):
    """The layer, its norm, and, if `shared`, another reader of what the layer gives."""

    def __init__(self, layer: nn.Module, axis: int, shared: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.shared = layer, [nn.BatchNorm1d, nn.BatchNorm2d][axis](8), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        z = self.norm(y)
        return z + y if self.shared else z


def net(layer: str, made: str, norm: str, shared: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if layer == "linear over rows":
        x = torch.randn(2, 8, 16)
    else:
        x = torch.randn(2, 3) if layer.startswith("linear") else torch.randn(2, 3, 8, 8)
    network = Net(LAYERS[layer](), int("linear" not in layer), shared).eval()
    assert network.norm.running_mean is not None
    assert network.norm.running_var is not None
    for values in (network.norm.running_mean, network.norm.weight, network.norm.bias):
        nn.init.normal_(values)
    nn.init.uniform_(network.norm.running_var, 0.5, 2)
    MADE[made](network.layer, "weight")
    if norm != "weight norm":  # of one dimension it would be a sign
        MADE[norm](network.norm, "weight")
    return network, x


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_norm_is_folded_or_spelt_out_and_the_graph_computes_the_model(layer: str, made: str) -> None:
    """And what PT2E folds by itself when observers are placed is nothing any more."""
    for norm, shared in itertools.product(("a parameter", "parametrized", "a buffer"), (False, True)):
        network, x = net(layer, made, norm, shared)
        with torch.no_grad():
            wanted = network(x)
        captured = capture(nets.loaded(network, ("N", *x.shape[1:]), out_shape=("N", *wanted.shape[1:])))
        assert not [n for n in captured.graph.graph.nodes if "batch_norm" in str(n.target) and n.op == "call_function"]
        torch.testing.assert_close(captured.graph(x)[0], wanted, rtol=1e-5, atol=1e-5)
        observed = prepare(captured).graph
        torch.testing.assert_close(observed(x)[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_norm_goes_into_every_convolution(axes: int, transposed: bool, groups: int) -> None:
    """Of one, two and three axes, transposed or not, with any number of groups: those of 4 have one input each."""
    kinds = [[nn.Conv1d, nn.Conv2d, nn.Conv3d], [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]]
    norms = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    for outputs, bias, affine in itertools.product((4, 12), (False, True), (False, True)):
        torch.manual_seed(0)
        made = kinds[transposed][axes - 1](4, outputs, 3, stride=2, padding=1, groups=groups, bias=bias)
        norm = norms[axes - 1](outputs, affine=affine)
        x = torch.randn(2, 4, *[7] * axes)
        network = nets.settled(nn.Sequential(made, norm, nn.ReLU()), 3 * x + 1)
        with torch.no_grad():
            wanted = network(x)
        captured = capture(nets.loaded(network, ("N", *x.shape[1:]), out_shape=("N", *wanted.shape[1:])))
        names = {str(n.target).split(".")[1] for n in captured.graph.graph.nodes if n.op == "call_function"}
        assert {n for n in names if "conv" not in n} == {"relu"}
        torch.testing.assert_close(captured.graph(x)[0], wanted, rtol=1e-5, atol=1e-5)


class OfTheInput(nn.Module):
    """The norm's parameter at `which`, or the convolution's weight, is computed from the input."""

    def __init__(self, which: int | None) -> None:
        super().__init__()
        self.conv, self.norm, self.which = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, gain = self.norm, x.abs().mean()
        if self.which is None:
            return norm(F.conv2d(x, self.conv.weight * gain))
        held = [norm.running_mean, norm.running_var, norm.weight, norm.bias]
        given = [v * gain if k == self.which else v for k, v in enumerate(held)]
        return F.batch_norm(self.conv(x), *given, training=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", [None, 0, 1, 2, 3])
def test_parameters_computed_from_the_input(which: int | None) -> None:
    torch.manual_seed(0)
    network, x = OfTheInput(which).eval(), torch.randn(2, 3, 8, 8)
    for values in (network.norm.running_mean, network.norm.weight, network.norm.bias):
        nn.init.normal_(values)  # type: ignore[arg-type]
    with torch.no_grad():
        wanted = network(x)
    captured = capture(nets.loaded(network, out_shape=("N", 8, 6, 6)))
    torch.testing.assert_close(captured.graph(x)[0], wanted, rtol=1e-5, atol=1e-5)


def test_a_norm_in_training_mode_is_refused() -> None:
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm.train()
            return self.norm(self.conv(x)).mean((2, 3))

    with pytest.raises(BuildError, match=r"^capture: norm is a norm in training mode, whose running statistics"):
        capture(nets.loaded(Training()))

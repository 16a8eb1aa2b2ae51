"""Domains: whatever scales their channels get, the network computes the same."""

from __future__ import annotations

import functools

import nets
import numpy as np
import pytest
import torch
from torch import nn

from trtpipe.model.capture import capture
from trtpipe.model.nodes import COPIES, constant_value, is_constant
from trtpipe.quantization.corrections.domains import find_domains, groups_of
from trtpipe.quantization.corrections.edits import corrected
from trtpipe.quantization.corrections.equalization import channel_values, equalize, scales_around
from trtpipe.quantization.partial import Partial
from trtpipe.values import Captured


class Inverted(nn.Module):
    """Expansion, depthwise and projection with a skip branch, as in MobileNetV2, and a classifier behind a pool."""

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.expand, self.depth, self.project = (
            nn.Conv2d(6, 12, 1),
            nn.Conv2d(12, 12, 3, 1, 1, groups=12),
            nn.Conv2d(12, 6, 1),
        )
        self.act, self.pool, self.fc = act(), nn.AdaptiveAvgPool2d(1), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        x = x + self.project(self.act(self.depth(self.act(self.expand(x)))))
        return self.fc(torch.flatten(self.pool(self.act(x)), 1))


class Normed(nn.Module):
    """A pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :, 0]
        return (x + self.down(nn.functional.gelu(self.up(self.norm(x))))).mean((1, 2))[:, None]


def built(network: nn.Module, channels: int) -> Captured:
    torch.manual_seed(3)
    network = nets.settled(network, nets.images(8, 3, 8, 8))
    return capture(nets.loaded(network, out_shape=("N", channels)))


def across(pool: nn.Module, out: int) -> Captured:
    """Linear layers along the last axis of images [N, 3, 8, 8], and what joins values of that axis between them."""
    torch.manual_seed(3)
    parts = nn.Linear(8, 16), nn.ReLU(), pool, nn.Linear(out, 4)
    shape = nn.Sequential(*parts)(torch.zeros(1, 3, 8, 8)).shape[1:]
    return capture(nets.loaded(nn.Sequential(*parts).eval(), out_shape=("N", *shape)))


class Mean(nn.Module):
    """Of the last two axes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


#: Between two linear layers none of these keeps the channels, which are on the last axis, apart.
ACROSS = {
    "max pool": (nn.MaxPool2d(2), 8),
    "max pool of one size": (nn.MaxPool2d(3, 1, 1), 16),
    "average pool": (nn.AvgPool2d((1, 2)), 8),
    "adaptive pool": (nn.AdaptiveAvgPool2d((4, 8)), 8),
    "mean": (Mean(), 3),
    "one pixel": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), 3),
}

NETWORKS = {
    **{f"across: {name}": (functools.partial(across, *args), 0) for name, args in ACROSS.items()},
    "relu": (lambda: built(Inverted(nn.ReLU), 5), 3),
    "relu6": (lambda: built(Inverted(nn.ReLU6), 5), 3),
    "gelu": (lambda: built(Inverted(nn.GELU), 5), 0),
    "layer norm": (lambda: built(Normed(), 1), 1),
    "residual": (lambda: nets.captured("residual"), None),
    "attention": (lambda: nets.captured("attention"), None),
    "concat": (lambda: nets.captured("concat"), None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_scaling_a_domain_changes_nothing(name: str) -> None:
    make, count = NETWORKS[name]
    captured = make()
    domains = find_domains(captured.graph)
    assert count is None or len(domains) == count
    x = nets.images(4, *captured.inputs[0].shape[1:])  # type: ignore[arg-type]
    machine = Partial(captured.graph)
    wanted, seen = machine.finish(0, machine.inputs([x]), {}, [c for d in domains for c, _ in d.clips])
    arrays: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)
    for domain in domains:
        channels = domain.readers[0].args[1].meta["val"].shape[1] * groups_of(domain.readers[0])  # type: ignore[union-attr]
        s = torch.from_numpy(2.0 ** rng.uniform(-2, 2, channels))
        for node, bound in domain.clips:  # exact only where the clip cuts the same values
            most = seen[node].movedim(1, 0).flatten(1).amax(1).double()
            s = torch.where(most >= bound, torch.ones_like(s), torch.minimum(s, bound / most.clamp_min(1e-9)))
        for key, array in scales_around(domain, s).items():
            arrays[key] = arrays.get(key, np.float32(1)) * array
    changed = corrected(captured, arrays)
    other = Partial(changed.graph)
    got, _ = other.finish(0, other.inputs([x]), {})
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    if domains:
        pairs = zip(captured.graph.parameters(), changed.graph.parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs)


COPY = {
    "alias": torch.ops.aten.alias,
    "clone": torch.clone,
    "contiguous": torch.Tensor.contiguous,
    "detach": torch.Tensor.detach,
    "lift_fresh_copy": torch.ops.aten.lift_fresh_copy,
}


@pytest.mark.parametrize("name", COPIES)
def test_what_passes_a_tensor_on_leaves_its_domain_as_it_is(name: str) -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(COPY[name](torch.relu(self.first(x)))).mean((2, 3))

    captured = capture(nets.loaded(Copying().eval(), out_shape=("N", 4)))
    (domain,) = find_domains(captured.graph)
    assert [n.name for n in domain.readers] == ["conv2d_1"]


def test_weights_used_twice_are_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(torch.relu(self.conv(x)))

    captured = capture(nets.loaded(Tied().eval(), out_shape=("N", 3, 8, 8)))
    assert sum(is_constant(n) for n in captured.graph.graph.nodes) >= 1
    assert find_domains(captured.graph) == ()


def test_inputs_and_outputs_of_the_network_are_no_domain() -> None:
    captured = capture(nets.loaded(nn.Conv2d(3, 5, 3).eval(), out_shape=("N", 5, 6, 6)))
    assert find_domains(captured.graph) == ()


@pytest.mark.parametrize("seed", range(4))
def test_what_equalization_finds_cuts_nothing_that_was_not_cut(seed: int) -> None:
    """Channels of any ranges, some cut by their ReLU6: the network computes the same on what was seen, and nearly on
    other images."""
    torch.manual_seed(seed)
    network = Inverted(nn.ReLU6)
    captured = built(network, 5)
    with torch.no_grad():
        for name in ("expand", "depth"):
            gains = torch.logspace(-2, 1.2, 12)[torch.randperm(12)]
            weights = [n for n in captured.graph.graph.nodes if is_constant(n) and str(n.target).startswith(name)]
            for node in weights:
                value = constant_value(captured.graph, node)
                value.mul_(gains.reshape(-1, *[1] * (value.dim() - 1)))
    domains = find_domains(captured.graph)
    x, other = nets.images(16, 3, 8, 8, seed=seed), nets.images(16, 3, 8, 8, seed=seed + 100)
    arrays = equalize(captured.graph, domains, channel_values(captured.graph, domains, [[x]]))
    assert arrays
    machine, changed = Partial(captured.graph), Partial(corrected(captured, arrays).graph)
    for images, tolerance in ((x, 1e-4), (other, 0.02)):
        wanted = machine.finish(0, machine.inputs([images]), {})[0][0]
        got = changed.finish(0, changed.inputs([images]), {})[0][0]
        assert float((got - wanted).norm() / wanted.norm()) < tolerance

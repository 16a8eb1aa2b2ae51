"""Operations that may be written in several ways have one form in the captured graph, and compute the same."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import nets
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, op_name


class Of(nn.Module):
    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).flatten(1) + 1


def operations(run: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Counter[str]:
    """The operations that are captured of `run` of [N, *shape], which give what it gives at two batch sizes."""
    network = Of(run)
    size = int(torch.tensor(network(torch.zeros(2, *shape)).shape[1:]).prod())
    captured = capture(nets.loaded(network, shape=("N", *shape), out_shape=("N", size)))
    for n in (1, 3):
        x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(n))
        (found,) = captured.graph(x)
        torch.testing.assert_close(found, network(x))
    return Counter(op_name(n) for n in calls(captured.graph.graph))


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4), data=st.data())
def test_a_transposition_between_reshapes_is_one_permutation(sizes: list[int], data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, len(sizes))))
    edges = [0, *sorted(cuts), len(sizes) + 1]
    groups = [range(a, b) for a, b in itertools.pairwise(edges)]
    order = [0, *data.draw(st.permutations(range(1, len(groups))))]

    def run(x: torch.Tensor) -> torch.Tensor:
        joined = [math.prod(x.shape[k] for k in group) for group in groups]
        return x.reshape(joined).permute(order).reshape([x.shape[k] for g in order for k in groups[g]])

    found = operations(run, *sizes)
    assert sum(found[name] for name in ("view", "reshape", "_unsafe_view")) == 1


def test_other_reshapes_stay() -> None:
    """A channel shuffle, as ShuffleNet has it: the axes come together in another order than they were parted in."""
    found = operations(lambda x: x.reshape(-1, 2, 3, 4).transpose(1, 2).reshape(-1, 6, 4), 6, 4)
    assert sum(found[name] for name in ("view", "reshape", "_unsafe_view")) == 3


@pytest.mark.parametrize(("s", "t"), [(0.5, 0.5), (0.3, 0.7), (1, 0.25)])
def test_two_factors_of_a_product_are_one(s: float, t: float) -> None:
    assert operations(lambda x: (x * s) @ (t * x.mT), 3, 4)["mul"] == 1


@pytest.mark.parametrize(
    "run",
    [
        lambda x: (x * 2) @ (x.mT * 0.25),  # FP16 has to hold what grows
        lambda x: (x * -0.5) @ (x.mT * 0.25),
        lambda x: (x * 0.5) @ (x.mT * torch.tensor([0.5, 0.25, 0.125])),
        lambda x: (x * 0.5) @ (y := x.mT * 0.25) + y.sum(),
    ],
)
def test_other_factors_stay(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert operations(run, 3, 4)["mul"] == 2


def test_a_batched_product_is_a_matmul() -> None:
    assert operations(lambda x: torch.bmm(x, x.mT), 3, 4)["matmul"] == 1


@pytest.mark.parametrize(
    "cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda i, h: nn.RNNCell(i, h, nonlinearity="relu")]
)
def test_a_recurrent_cell_is_linears(cell: Callable[[int, int], nn.Module]) -> None:
    made = cell(4, 5)

    def run(x: torch.Tensor) -> torch.Tensor:
        state = None
        for t in range(3):
            state = made(x[:, t], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    assert operations(run, 3, 4)["linear"] == 6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_a_bilinear_layer_is_a_linear_and_a_matmul(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Bilinear(4, 2, 5, bias=bias)
    found = operations(lambda x: layer(x, x[..., 1:3]), *shape)
    assert (found["linear"], found["matmul"], found["bilinear"]) == (1, 1, 0)


def test_a_mask_that_leaves_each_row_something_is_no_choice() -> None:
    """Made in forward or given to every sample, a causal mask needs no zeros in the place of rows without any."""

    def run(x: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.full((3, 3), -torch.inf), 1).unsqueeze(0).expand(x.shape[0], 3, 3)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    assert "where" not in operations(run, 3, 4)
    assert "where" in operations(
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT > 0), 3, 4
    )


def test_a_mask_of_what_many_layers_compute_is_looked_through_once() -> None:
    """Each residual add doubles the ways back to the input."""

    def deep(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(60):
            y = y + torch.relu(y)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=y @ y.mT)

    assert operations(deep, 3, 4)["where"] == 1

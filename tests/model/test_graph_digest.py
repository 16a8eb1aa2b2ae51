"""A graph's digests: to the letter, and the one that a table of any batch size has."""

from __future__ import annotations

import sys
from collections.abc import Callable

import nets
import pytest
import torch
from torch import nn

from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.graph_digest import exact, operations
from trtpipe.model.nodes import arguments_of, calls, op_name
from trtpipe.pipeline.tables import digests_of
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec

BATCHES: tuple[int | DimRange, ...] = (1, 2, 5, DimRange(1, 1, 1), DimRange(1, 4, 8), DimRange(2, 3, 64))


class Token(nn.Module):
    """A class token for each sample, windows whose number depends on the batch, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.ones(1, 1, 8)), nn.Parameter(torch.ones(1, 5, 8))
        self.qkv, self.norm, self.head = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        x = (x.reshape(count * 2, 2, 8) * 2).reshape(count, 4, 8)
        x = torch.cat([self.token.expand(count, -1, -1), x], 1) + self.place
        q, k, v = self.qkv(self.norm(x)).reshape(count, 5, 3, 8).unbind(2)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])


class Recurrent(nn.Module):
    """An LSTM: its first state is zeros of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {nets.Residual: (3, 8, 8), Token: (4, 8), Recurrent: (4, 8)}


def captured(make: Callable[[], nn.Module], batch: int | DimRange, shape: tuple[int, ...]) -> Captured:
    torch.manual_seed(0)
    first, dims = (batch, {}) if isinstance(batch, int) else ("N", {"N": batch})
    x, y = TensorSpec("x", "float32", (first, *shape), dims), TensorSpec("y", "float32", (first, 5), dims)
    return capture(LoadedModel(bind(make().eval(), (x,), {}, ("y",)), (x,), (y,), "0" * 64, "test"))


@pytest.mark.parametrize("make", SHAPES)
def test_a_batch_size_does_not_change_the_operations(make: Callable[[], nn.Module]) -> None:
    every = [captured(make, batch, SHAPES[make]) for batch in BATCHES]
    assert len({operations(c.graph, "w") for c in every}) == 1
    assert len({tuple(s.key for s in c.sites) for c in every}) == 1
    assert make is not Token or len({exact(c.graph, "w") for c in every}) > 1
    assert operations(every[0].graph, "other") != operations(every[0].graph, "w")


class Changed(nn.Module):
    """Two layers of one shape, joined as `how` says; every variant has the same weights."""

    def __init__(self, how: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head, self.how = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.how(self.a, self.b, x))


VARIANTS: tuple[Callable[..., torch.Tensor], ...] = (
    lambda a, b, x: torch.relu(a(x)) + b(x),
    lambda a, b, x: torch.nn.functional.gelu(a(x)) + b(x),
    lambda a, b, x: torch.relu(b(x)) + a(x),
    lambda a, b, x: b(torch.relu(a(x))),
    lambda a, b, x: torch.relu(a(x)) + b(x) * 2,
    lambda a, b, x: torch.relu(a(x)) + b(x) * 3,
    lambda a, b, x: torch.relu(a(x)) - b(x),
    lambda a, b, x: torch.relu(a(x)) + b(a(x)),
    lambda a, b, x: (torch.relu(a(x)) + b(x)).softmax(-1),
)


def test_another_computation_with_the_same_weights_has_another_digest() -> None:
    digests = [operations(captured(lambda how=how: Changed(how), 2, (8,)).graph, "w") for how in VARIANTS]
    assert len(set(digests)) == len(VARIANTS)


def test_copies_and_arguments_that_are_defaults_or_choose_a_kernel_do_not_count() -> None:
    """Releases of PyTorch write other ones, and machines with and without a GPU."""
    graph = captured(lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GELU(), nn.LayerNorm(6)), 2, (4, 8)).graph
    before, changed = operations(graph, "w"), 0
    for node in calls(graph.graph):
        every = arguments_of(node) | ({"cudnn_enable": False} if op_name(node) == "layer_norm" else {})
        changed += len(every) - len(node.args) - len(node.kwargs)
        node.args, node.kwargs = (), every
    assert changed > 3
    assert operations(graph, "w") == before
    norm = next(n for n in calls(graph.graph) if op_name(n) == "layer_norm")
    for operator, more in ((torch.ops.aten.clone.default, ()), (torch.ops.aten.slice.Tensor, (0, 0, sys.maxsize))):
        source = norm.args[0] if norm.args else norm.kwargs["input"]
        with graph.graph.inserting_before(norm):
            copy = graph.graph.call_function(operator, (source, *more))
        copy.meta["val"] = source.meta["val"]
        norm.replace_input_with(source, copy)
        assert operations(graph, "w") == before
    norm.kwargs = norm.kwargs | {"eps": 1e-3}
    assert operations(graph, "w") != before


class Held(nn.Module):
    """Numbers that are no weights: beside them, made as it runs, or a layer's own."""

    def __init__(self, how: str, number: float) -> None:
        super().__init__()
        self.how, self.number, self.beside = how, number, torch.full((4, 1), number)
        self.norm = nn.BatchNorm1d(4, eps=number if how == "eps" else 1e-5)
        self.conv, self.qkv, self.head = nn.Conv1d(4, 4, 1), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "made":
            x = x - torch.tensor([[self.number], [0.0], [0.0], [1.0]])
        if self.how == "beside":
            x = x - self.beside
        if self.how == "of weights":
            x = x + self.conv.weight.mean() * self.number
        if self.how == "whole":
            x = x + self.conv.weight.mean() * int(self.number * 4)
        if self.how == "function":
            x = x * (self.conv.weight.mean().exp() if self.number < 0.3 else self.conv.weight.mean().sigmoid())
        if self.how == "full":
            x = x + torch.full((x.shape[0], 1, 1), self.number)
        if self.how == "for each":  # as queries of a decoder
            x = x + self.norm.weight.view(1, 4, 1).expand(x.shape[0], -1, 1) * self.number
        if self.how == "ramp":
            x = x + torch.arange(8) * self.number
        if self.how == "normalized":
            x = x + nn.functional.layer_norm(self.norm.weight.expand(x.shape[0], 4), (4,), eps=self.number)[..., None]
        x = self.norm(self.conv(x))
        heads = int(self.number * 4) if self.how == "heads" else 2
        q, k, v = self.qkv(x).view(x.shape[0], 4, 3, heads, 8 // heads).permute(2, 0, 3, 1, 4)
        x = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(x.shape[0], 4, 8)
        return self.head(x.mean(1))


@pytest.mark.parametrize("how", [
    "made", "beside", "eps", "of weights", "whole", "function", "full", "for each", "ramp", "normalized", "heads",
])  # fmt: skip
def test_numbers_that_are_no_weights_are_a_models_own(how: str) -> None:
    """A table is of the model with its own, whatever the batch size."""

    def digests(number: float) -> set[str]:
        every = (captured(lambda: Held(how, number), batch, (4, 8)) for batch in BATCHES)
        return {digests_of(c)["graph"] for c in every}

    one, other = digests(0.25), digests(0.5)
    assert (len(one), len(other)) == (1, 1)
    assert one != other


class Mixing(nn.Module):
    """What is computed of sizes of the batch, and over it, is no other model for another batch."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.a, self.head = nn.Parameter(torch.ones(3, 8)), nn.Linear(8, 8), nn.Linear(8, 5)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        flat = x.mean(1)
        x = x + (flat.t() @ flat)[None] / 8
        queries = nn.functional.layer_norm(self.queries[None].repeat(count, 1, 1) * 0.5, (8,), eps=1e-6)
        first = torch.zeros(count, 3, 8) + 0.1
        x = self.attention(queries + first, self.a(x), x)[0]
        return self.head((x + torch.arange(count)[:, None, None] * 0.5).mean(1))


def test_what_the_batch_decides_is_in_no_digest() -> None:
    every = [captured(Mixing, batch, (8, 8)) for batch in BATCHES]
    assert len({digests_of(c)["graph"] for c in every}) == 1
    assert any(every[0].literals)


def test_what_bindings_normalize_by_is_of_the_model() -> None:
    """Thresholds are of what comes behind it: a table of std 0.5 was taken where the job has 0.25 (84 % for 99.99)."""
    found, network = {}, nets.Residual().eval()
    for mean in (0.0, 0.5):
        for std in (0.5, 0.25):
            normalize = {"x": ((mean,) * 3, (std,) * 3)}
            loaded = nets.loaded(network, dtype="uint8", normalize=normalize)
            found[mean, std] = digests_of(capture(loaded))["graph"]
            again = nets.loaded(network, (4, 3, 8, 8), dtype="uint8", normalize=normalize)
            assert digests_of(capture(again))["graph"] == found[mean, std]
    assert len(set(found.values())) == 4
    plain = nets.loaded(network)
    assert not any(capture(plain).literals)

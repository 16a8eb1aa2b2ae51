"""What is made of weights alone for each sample is made once, for a batch of one size and for a range of them alike."""

from __future__ import annotations

from collections.abc import Callable

import nets
import pytest
import torch
from torch import nn

from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.for_each import fold_for_each
from trtpipe.model.nodes import calls, op_name
from trtpipe.pipeline.tables import digests_of
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec

#: Least and largest batch.
BATCHES = ((1, 1), (2, 2), (4, 4), (1, 8), (2, 8))


class Queries(nn.Module):
    """Queries that are learned, behind a linear, attend to what is computed of the input."""

    def __init__(self, repeat: str) -> None:
        super().__init__()
        self.repeat, self.q = repeat, nn.Parameter(torch.randn(1, 5, 32))
        self.emb, self.norm, self.linear, self.head = (
            nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, count = self.emb(x), x.shape[0]
        q = self.q.expand(count, -1, -1) if self.repeat == "expand" else self.q.repeat(count, 1, 1)
        q = self.linear(self.norm(q + torch.zeros(count, 1, 1) if self.repeat == "zeros" else q))
        out: torch.Tensor = self.head(((q @ y.transpose(1, 2)).softmax(-1) @ y + q).mean(1))
        return out


class Pooling(nn.Module):
    """Heads of a learned query lie before the batch is an axis of its own again."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.q = nn.Linear(8, 32), nn.Parameter(torch.randn(5, 32))
        self.attention, self.head = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(160, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.emb(x)
        out: torch.Tensor = self.head(self.attention(self.q[None].expand(x.shape[0], -1, -1), y, y)[0].flatten(1))
        return out


class Decoder(nn.Module):
    """Its queries attend to each other first, beside a token that is repeated as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.q, self.token = nn.Linear(8, 32), nn.Embedding(5, 32), nn.Parameter(torch.randn(1, 1, 32))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 2)
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), self.emb(x)], 1)
        q = self.q.weight.unsqueeze(0).repeat(x.shape[0], 1, 1)
        out: torch.Tensor = self.head(self.decoder(torch.zeros_like(q) + q, y)).flatten(1)
        return out


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "expand": lambda: Queries("expand"),
    "repeat": lambda: Queries("repeat"),
    "zeros": lambda: Queries("zeros"),
    "pooling": Pooling,
    "decoder": Decoder,
}


def captured(made: Callable[[], nn.Module], least: int, most: int) -> tuple[Captured, nn.Module]:
    torch.manual_seed(0)
    dims = {} if least == most else {"N": DimRange(least, 2, most)}
    batch: int | str = most if least == most else "N"
    inputs, outputs = (TensorSpec(n, "float32", (batch, *s), dims) for n, s in (("x", (6, 8)), ("y", (10,))))
    network = made().eval()
    return capture(LoadedModel(bind(network, (inputs,), {}, ("y",)), (inputs,), (outputs,), "w" * 64, "t")), network


@pytest.mark.parametrize("name", NETWORKS)
def test_a_table_is_for_every_batch(name: str) -> None:
    found = set()
    for least, most in BATCHES:
        graph, network = captured(NETWORKS[name], least, most)
        x = torch.randn(most, 6, 8)
        with torch.inference_mode():
            torch.testing.assert_close(graph.graph(x)[0], network(x), rtol=1e-4, atol=1e-5)
            if least < most:
                torch.testing.assert_close(graph.graph(x[:least])[0], network(x[:least]), rtol=1e-4, atol=1e-5)
        found.add((digests_of(graph)["graph"], tuple((s.key, s.group, s.rule) for s in graph.sites)))
    assert len(found) == 1


def test_other_weights_are_another_model() -> None:
    """Though what is made of them is folded."""

    def other() -> nn.Module:
        network = Queries("expand")
        with torch.no_grad():
            network.linear.weight *= 2
        return network

    one, two = (captured(made, 1, 8)[0] for made in (NETWORKS["expand"], other))
    x = torch.randn(3, 6, 8)
    with torch.inference_mode():
        assert not torch.allclose(one.graph(x)[0], two.graph(x)[0])


class Ramp(nn.Module):
    """Each sample's row is another one, by its place in the batch; or by another size than the batch's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.emb, self.linear, self.head = how, nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0] if self.how == "place" else x.shape[1]
        q = self.linear(torch.arange(size)[:, None].expand(-1, 32) * 0.1)
        y = self.emb(x)
        y = y + (q[:, None] if self.how == "place" else q[None])
        out: torch.Tensor = self.head(y.mean(1))
        return out


@pytest.mark.parametrize("how", ["place", "length"])
def test_what_differs_between_samples_stays_as_it_is(how: str) -> None:
    dims = {"N": DimRange(1, 2, 8), "L": DimRange(4, 6, 9)}
    inputs = TensorSpec("x", "float32", ("N", "L", 8), dims)
    outputs = TensorSpec("y", "float32", ("N", 10), {"N": dims["N"]})
    torch.manual_seed(0)
    network = Ramp(how).eval()
    graph = capture(LoadedModel(bind(network, (inputs,), {}, ("y",)), (inputs,), (outputs,), "w" * 64, "t"))
    assert sum(op_name(n) == "linear" for n in calls(graph.graph.graph)) == 3
    for shape in ((1, 4), (3, 6), (8, 9)):
        x = torch.randn(*shape, 8)
        with torch.inference_mode():
            torch.testing.assert_close(graph.graph(x)[0], network(x), rtol=1e-4, atol=1e-5)


def test_a_graph_without_any_is_left_alone() -> None:
    before = nets.captured("attention").graph
    code = before.code
    fold_for_each(before)
    assert before.code == code

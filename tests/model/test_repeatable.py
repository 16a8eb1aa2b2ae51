"""A model that does not repeat its outputs is refused: nothing can be compared with it."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Literal

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.samples import Batch
from trtpipe.errors import BuildError, InputError
from trtpipe.model.baseline import record_baseline
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, op_name
from trtpipe.progress import Silent

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
X = nets.images(5, 3, 8, 8).numpy()
BATCHES = [
    Batch({"x": X[:3]}, np.array([0, 1, 2]), ("a", "b", "c")),
    Batch({"x": X[3:]}, np.array([3, 4]), ("d", "e")),
]


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) + torch.rand_like(x[:, :, 0, 0])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.mean((2, 3)) * self.calls


class Remembering(nn.Module):
    """Adds what it saw last: twice the same for the same inputs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, x.mean()
        return x.mean((2, 3)) + before


class RememberingOneSize(nn.Module):
    """Adds what it gave last where that is of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.mean((2, 3))
        if self.last is not None and self.last.shape == y.shape:
            y = y + self.last
        self.last = y.detach()
        return y


class Settling(nn.Module):
    """Answers otherwise from some call on, and the same ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.mean((2, 3)) * (2.0 if self.calls > 4 else 1.0)


@pytest.mark.parametrize("kind", ["trace", "script"])
def test_nor_is_one_that_changes_for_good(kind: Literal["trace", "script"]) -> None:
    loaded = nets.loaded(Settling(), out_shape=("N", 3))
    batches = [Batch({"x": X[:1]}, None, ("a",))] * 6
    with pytest.raises(
        InputError, match=r"^model: it gives other outputs for the same inputs \(other values of logits"
    ):
        record_baseline(loaded, batches, 6, batch_size=1, kind=kind, progress=Silent())


@pytest.mark.parametrize(
    "network", [Noisy, Counting, Remembering, RememberingOneSize, lambda: nn.Sequential(Noisy(), nn.ReLU())]
)
def test_a_model_that_does_not_repeat_itself_is_refused(network: Callable[[], nn.Module]) -> None:
    loaded = nets.loaded(network(), out_shape=("N", 3))
    with pytest.raises(InputError) as caught:
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())
    assert str(caught.value) == (
        "model: it gives other outputs for the same inputs (other values of logits when it was run again), so that "
        "nothing can be compared with it. Take out what draws random numbers, reads the clock, counts calls or keeps a "
        "state in eval mode; make a state an input and an output."
    )


def test_nor_is_a_program_that_does_not() -> None:
    loaded = dataclasses.replace(nets.loaded(Noisy(), out_shape=("N", 3)), kind="program")
    with pytest.raises(InputError, match=r"model: it gives other outputs for the same inputs \(other values of logits"):
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())


class Seeded(nn.Module):
    """Draws the same numbers each time."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return self.drawn(x.mean((2, 3)) + torch.randn(3))


class Rarely(nn.Module):
    """Answers otherwise once in a million calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) + (torch.rand(()) < 1e-6)


class Generating(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) * torch.rand(3, generator=torch.Generator().manual_seed(1))


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return nn.functional.dropout(x, 0.5, training=True).mean((2, 3))


@pytest.mark.parametrize("kind", ["trace", "script"])
@pytest.mark.parametrize(
    ("network", "operation"),
    [(Seeded, "randn"), (Rarely, "rand"), (Generating, "rand"), (Dropping, "(native_)?dropout")],
)
def test_nor_is_one_that_draws_what_an_engine_draws_otherwise(
    network: type[nn.Module], operation: str, kind: Literal["trace", "script"]
) -> None:
    loaded = nets.loaded(network(), out_shape=("N", 3))

    def prepared() -> None:
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind=kind, progress=Silent())
        capture(loaded)

    with pytest.raises(
        InputError,
        match=rf"^model: it draws random numbers in eval mode \({operation} at .*test_repeatable\.py:\d+\), and an "
        "engine draws others than PyTorch, whatever the seed",
    ):
        prepared()


class Drawing(nn.Module):
    """Draws where it makes no difference, and has what draws in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.recurrent = nn.Dropout(0.5), nn.GRU(8, 8, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.rrelu, self.alpha = nn.RReLU(), nn.AlphaDropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        y = self.recurrent(self.dropout(x.mean(2)))[0]
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return self.alpha(self.rrelu(self.attention(y, y, y)[0])).mean(2)


def test_what_draws_in_training_alone_is_taken() -> None:
    loaded = nets.loaded(Drawing().eval(), out_shape=("N", 3))
    record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())
    assert capture(loaded).outputs[0].shape == ("N", 3)


class Otherwise(nn.Module):
    """Means of channels, as `change` makes them: of what no input says."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x.mean((2, 3)) + 1)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random, of two": lambda y: y * random.choice([1.0, 2.0]),
    "random, a branch": lambda y: y + 1 if random.random() > 0.5 else y,
    "numpy": lambda y: y + torch.from_numpy(np.random.rand(3)).float(),
    "numpy, its own generator": lambda y: y + np.random.default_rng().random(),
    "torch, as a number": lambda y: y + torch.rand(()).item(),
    "torch, a branch": lambda y: y + 1 if torch.rand(()) > 0.5 else y,
    "the clock": lambda y: y * (1 + time.perf_counter() * 1e6 % 97),
    "the clock, in ns": lambda y: y + time.perf_counter_ns() % 97,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_from_no_input_is_said_to_be_that(change: str) -> None:
    loaded = nets.loaded(Otherwise(CHANGES[change]), out_shape=("N", 3))
    with pytest.raises(
        InputError, match=r"^model: it (gives other outputs for the same inputs|draws random numbers in eval mode)"
    ):
        record_baseline(loaded, BATCHES * 8, 40, batch_size=3, kind="trace", progress=Silent())


def test_and_so_it_is_where_torch_export_stops_at_it() -> None:
    loaded = nets.loaded(Otherwise(CHANGES["torch, a branch"]), out_shape=("N", 3))
    with pytest.raises(InputError, match=r"^model: it gives other outputs for the same inputs .*reads the clock"):
        capture(loaded)


def test_a_size_that_is_drawn_is_no_size_that_the_model_decides_by() -> None:
    change: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.repeat(1, random.randint(1, 9))  # noqa: E731
    loaded = nets.loaded(Otherwise(change), out_shape=("N", 3))
    random.seed(3)
    with pytest.raises(InputError, match=r"^model: it gives other outputs for the same inputs"):
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())


def test_a_model_that_decides_by_values_and_repeats_itself_is_still_told_so() -> None:
    change: Callable[[torch.Tensor], torch.Tensor] = lambda y: y if y.sum() > 100 else -y  # noqa: E731
    with pytest.raises(BuildError, match=r"^capture: the model decides by the values of a tensor at test_repeatable"):
        capture(nets.loaded(Otherwise(change), out_shape=("N", 3)))


class Keeping(nn.Module):
    """Writes a buffer by `write`, and answers from it or not."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object], *, read: bool) -> None:
        super().__init__()
        self.drawn = nn.Linear(3, 3)
        self.register_buffer("kept", torch.ones(3))
        self.write, self.read = write, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drawn(x.mean((2, 3)))
        self.write(self.kept, y)
        return y * self.kept if self.read else y


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a slow gain": lambda kept, y: kept.add_(1e-6),
    "a running mean": lambda kept, y: kept.mul_(0.999).add_(1e-3 * y.mean(0)),
    "a part": lambda kept, y: kept[1:].add_(1e-6),
    "a comparison": lambda kept, y: kept.copy_(torch.where(kept > 40, kept, kept + 1e-6)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_buffer_that_is_written_and_answered_from_is_refused_however_little_it_changes(write: str) -> None:
    loaded = nets.loaded(Keeping(WRITES[write], read=True), out_shape=("N", 3))
    with pytest.raises(InputError) as caught:
        capture(loaded)
    text = str(caught.value)
    assert text.startswith("model: it changes its buffer kept in eval mode (at ")
    assert text.endswith(
        "), and what it gives depends on that: the next call gives something else. Take out what counts calls or keeps "
        "a state in eval mode; make a state an input and an output."
    )


@pytest.mark.parametrize("write", WRITES)
def test_one_that_only_statistics_are_written_to_leaves_no_operation(write: str) -> None:
    captured = capture(nets.loaded(Keeping(WRITES[write], read=False), out_shape=("N", 3)))
    assert {op_name(n) for n in calls(captured.graph.graph)} <= {"mean", "linear"}


def test_one_that_holds_what_this_call_has_written_alone_is_no_state() -> None:
    loaded = nets.loaded(Keeping(lambda kept, y: kept.copy_(y.mean(0)), read=True), out_shape=("N", 3))
    module = loaded.module.eval()
    x = torch.from_numpy(X)
    torch.testing.assert_close(capture(loaded).graph(x)[0], module(x)[0])


def test_attributes_that_calls_change_are_noted() -> None:
    class Switching(nn.Module):
        """Answers otherwise from the 40th call on."""

        def __init__(self) -> None:
            super().__init__()
            self.calls, self.name, self.threshold = 0, "switching", 40.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x.mean((2, 3)) * (2.0 if self.calls > self.threshold else 1.0)

    loaded = nets.loaded(nn.Sequential(Switching()), out_shape=("N", 3))
    recorded = record_baseline(loaded, BATCHES, 5, batch_size=3, kind="script", progress=Silent())
    (note,) = [n for n in recorded.notes if n.startswith("model: each call")]
    assert note.startswith("model: each call may change what it keeps outside its inputs and outputs: 0.calls (")
    assert note.endswith("). An engine answers as in the call in which it was captured")

"""The time that a diagnosis may take, by a clock that advances with each operation executed: nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import hard
import nets
import pytest
import torch
from test_sensitivity import amax_of, captured_of
from torch import nn

from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization import diagnose as diagnosing
from trtpipe.quantization import sensitivity
from trtpipe.quantization.partial import Partial, value_bytes
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.ranking import Sensitivity
from trtpipe.quantization.sensitivity import LEAST, SampleBatch, measure_sensitivity
from trtpipe.values import Captured

SAMPLES = 6


class UNet(nn.Module):
    """118 convolutions, down 3 levels and up again with skips, and one for the output: as many modules as U2-NetP."""

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 4, 4, 4, 4, 4, 4]
        self.stages = nn.ModuleList(
            nn.ModuleList(
                nn.Conv2d(3 if (k, i) == (0, 0) else 8 if k > 3 and not i else 4, w, 3, padding=1) for i in range(17)
            )
            for k, w in enumerate(widths)
        )
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for k, stage in enumerate(self.stages):
            if k > 3:
                x = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1)
            for conv in stage:
                x = conv(x).relu()
            if k < 3:
                skips.append(x)
                x = nn.functional.max_pool2d(x, 2)
        return self.out(x).mean((2, 3))


class ViT(nn.Module):
    """A patch embedding and 12 blocks of attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {n: nn.Linear(8, w) for n, w in (("qkv", 24), ("proj", 8), ("up", 16))} | {"down": nn.Linear(16, 8)}
            )
            for _ in range(12)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for b in self.blocks:
            q, k, v = b["qkv"](nn.functional.layer_norm(x, (8,))).chunk(3, -1)
            x = x + b["proj"](nn.functional.scaled_dot_product_attention(q, k, v))
            x = x + b["down"](nn.functional.gelu(b["up"](nn.functional.layer_norm(x, (8,)))))
        return self.head(x.mean(1))


class Work:
    """A clock whose second is one operation on one sample."""

    def __init__(self) -> None:
        self.seconds, self.most = 0, 0

    def perf_counter(self) -> float:
        return float(self.seconds)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    clock, value = Work(), Partial.value

    def counted(self, node, alive, changed):  # type: ignore[no-untyped-def]
        result = value(self, node, alive, changed)
        if node.op == "call_function":
            first = result[0] if isinstance(result, (tuple, list)) else result
            clock.seconds += len(first) if isinstance(first, torch.Tensor) and first.dim() else 1
            clock.most = max(clock.most, sum(x.numel() for x in alive.values() if isinstance(x, torch.Tensor)))
        return result

    monkeypatch.setattr(Partial, "value", counted)
    monkeypatch.setattr(sensitivity, "time", clock)
    return clock


NETWORKS = {
    "hard": (hard.net, (3, 16, 16)),
    "U-Net": (UNet, (3, 16, 16)),
    "ViT": (ViT, (3, 16, 16)),
    "chain": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 5)), (8,)),
}


@cache
def network(name: str) -> tuple[Captured, dict[str, float], torch.Tensor, int]:
    """The captured network, its amax, its samples, and how many operations it has."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    captured = captured_of(make(), *shape)
    x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2))
    operations = sum(n.op == "call_function" for n in captured.graph.graph.nodes)
    return captured, dict(amax_of(captured, x)), x, operations


def measured(name: str, seconds: float | None) -> tuple[Sensitivity, int]:
    """The sensitivities within `seconds`, sample by sample; and the operations of the network."""
    captured, amax, x, operations = network(name)
    samples: Iterator[SampleBatch] = (SampleBatch((x[i : i + 1],), 1) for i in range(SAMPLES))
    found = measure_sensitivity(
        captured, amax, samples, half=torch.float16, keep=Keep(), progress=Silent(), seconds=seconds
    )
    return found, operations


@pytest.mark.parametrize(("name", "modules"), [("U-Net", 120), ("ViT", 50)])
def test_large_networks_end_within_two_passes_of_the_deadline(work: Work, name: str, modules: int) -> None:
    operations, least = network(name)[-1], 2 + 2 * LEAST + 1
    for passes in (0, 3, 20):
        work.seconds = 0
        found, _ = measured(name, float(passes * operations))
        assert work.seconds <= (max(passes, least) + 2) * operations
        assert len(found.modules) >= LEAST
        assert len(found.modules) + found.left_out >= modules


@pytest.mark.parametrize("name", ["hard", "chain"])
@pytest.mark.parametrize("budget", [0.0, 1.0, 20.0, 60.0, 200.0, 1000.0, 1e9])
def test_the_budget_is_exceeded_by_less_than_one_measurement(work: Work, name: str, budget: float) -> None:
    found, operations = measured(name, budget)
    spent = work.seconds
    # The float values, what each module loses by itself, and one module: none of them takes over two passes.
    least = (2 + 2 * LEAST + 1) * operations
    assert spent <= max(budget, least) + 2 * operations
    assert len(found.modules) >= LEAST
    assert len(found.modules) + found.left_out == measured(name, None)[0].left_out + len(
        measured(name, None)[0].modules
    )


@pytest.mark.parametrize("name", ["hard", "chain"])
def test_with_time_enough_the_figures_are_those_without_a_budget(work: Work, name: str) -> None:
    within, without = measured(name, 1e9)[0], measured(name, None)[0]
    assert [(m.module, m.sqnr_db) for m in within.modules] == [(m.module, m.sqnr_db) for m in without.modules]
    assert within.left_out == 0
    assert within.samples == SAMPLES


@pytest.mark.parametrize("room", [0.5, 1.0, 2.5, 7.9, 100.0])
def test_samples_at_a_time_are_what_their_values_leave_room_for(room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All values of a batch together, as if none were let go: more than is ever alive."""
    captured = capture(nets.residual())
    machine, x = Partial(captured.graph), nets.images(1, 3, 8, 8)
    alive, whole, most = machine.inputs([x]), 0, 0
    for node in machine.nodes:
        value = machine.step(node, alive, {})
        if isinstance(value, torch.Tensor):
            whole += value.nbytes
            most = max(most, sum(v.nbytes for v in alive.values()))
    assert most < whole == value_bytes(captured.graph)
    monkeypatch.setattr(diagnosing, "BATCH_BYTES", int(room * whole))
    assert diagnosing.batch_size(captured) == max(1, min(diagnosing.MOST_BATCH, int(room)))

"""The time that a diagnosis may take, by a clock that advances with each operation executed: nothing waits."""

from __future__ import annotations

from collections.abc import Iterator

import hard
import pytest
import torch
from test_sensitivity import amax_of, captured_of
from torch import nn

from trtpipe.progress import Silent
from trtpipe.quantization import sensitivity
from trtpipe.quantization.partial import Partial
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.ranking import Sensitivity
from trtpipe.quantization.sensitivity import LEAST, Sample, measure_sensitivity

SAMPLES = 6


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
    "chain": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 5)), (8,)),
}


def measured(name: str, seconds: float | None) -> tuple[Sensitivity, int]:
    """The sensitivities within `seconds`, sample by sample; and the operations of the network."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    captured = captured_of(make(), *shape)
    x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2))
    samples: Iterator[Sample] = (Sample((x[i : i + 1],), 1) for i in range(SAMPLES))
    found = measure_sensitivity(
        captured, amax_of(captured, x), samples, half=torch.float16, keep=Keep(), progress=Silent(), seconds=seconds
    )
    return found, sum(n.op == "call_function" for n in captured.graph.graph.nodes)


@pytest.mark.parametrize("name", NETWORKS)
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


@pytest.mark.parametrize("name", NETWORKS)
def test_with_time_enough_the_figures_are_those_without_a_budget(work: Work, name: str) -> None:
    within, without = measured(name, 1e9)[0], measured(name, None)[0]
    assert [(m.module, m.sqnr_db) for m in within.modules] == [(m.module, m.sqnr_db) for m in without.modules]
    assert within.left_out == 0
    assert within.samples == SAMPLES

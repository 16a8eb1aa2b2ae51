"""A table of a PyTorch network is one of its ONNX file, whatever the exporter stores beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import nets
import pytest
import torch
from torch import nn
from torch.nn import functional

from calib.errors import CalibError
from calib.table import CalibrationTable, given_table
from tests.support.onnx_files import export
from trtpipe.job.sections import Calibration
from trtpipe.model.capture import capture
from trtpipe.model.onnx.network import load_network
from trtpipe.model.weights import weights_digest
from trtpipe.pipeline import tables
from trtpipe.values import Captured

#: By name, what comes between a convolution [N, 8, 8, 8] and a linear of the means; exporters store an operand of each.
OPERANDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x * x.mean((2, 3), keepdim=True),
    "reshape": lambda x: x.reshape(x.shape[0], 8, 4, 16),
    "slice": lambda x: x[:, :, 2:7, 1::2],
    "pad": lambda x: functional.pad(x, (1, 2, 0, 1)),
    "pad with a number": lambda x: functional.pad(x, (1, 2, 0, 1), value=0.3),
    "resize by a scale": lambda x: functional.interpolate(x, scale_factor=2.0),
    "resize to a size": lambda x: functional.interpolate(x, size=(20, 20), mode="bilinear"),
    "top": lambda x: x.topk(5).values,
    "split": lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1),
    "expand": lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4),
    "repeat": lambda x: x.repeat(1, 1, 2, 2),
    "squeeze": lambda x: x.mean(2, keepdim=True).squeeze(2).unsqueeze(-1),
    "running sum": lambda x: x.cumsum(2),
    "triangle": lambda x: x.tril(),
    "whole numbers": lambda x: x * ((x > 0).long() * 3 + 1).float(),
    "factor": lambda x: x * 0.1 + 1 / 3,
    "least": lambda x: x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt(),
    "bounds": lambda x: x.clamp(-0.3, 0.7),
    "slope": lambda x: functional.leaky_relu(x, 0.01),
    "threshold": lambda x: torch.where(x > 0.1, x, 0.7),
    "last axis": lambda x: x.softmax(-1),
}
#: What ends in another operation or in a constant without the network's name: such a table is refused.
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "places": lambda x: x[:, [0, 2, 4, 1, 3, 5, 7, 6]],
    "ramp": lambda x: x + torch.arange(8.0),
    "mask": lambda x: x.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -4.0),
}


class Net(nn.Module):
    """A convolution, `how`, and a linear of the means."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor], *, norm: bool = False) -> None:
        super().__init__()
        self.conv, self.head, self.how = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5), how
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.how(self.norm(torch.tanh(self.conv(x)))).mean((2, 3)))


def seeded(how: Callable[[torch.Tensor], torch.Tensor], *, norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nets.settled(Net(how, norm=norm), nets.images(4, 3, 8, 8))


def of_file(module: nn.Module, path: Path, *, dynamo: bool) -> Captured:
    return capture(nets.loaded(load_network(export(module, path, dynamo=dynamo))))


@cache
def of_module(name: str) -> dict[str, str]:
    return tables.digests_of(capture(nets.loaded(seeded((OPERANDS | OTHERS)[name]))))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", OPERANDS)
def test_operands_are_no_weights(name: str, dynamo: bool, tmp_path: Path) -> None:
    assert tables.digests_of(of_file(seeded(OPERANDS[name]), tmp_path / "a.onnx", dynamo=dynamo)) == of_module(name)


@pytest.mark.parametrize("dynamo", [True, False])
def test_what_only_training_counts_is_no_weight(dynamo: bool, tmp_path: Path) -> None:
    """A batch norm that no convolution takes in is exported as it is, without the count of its batches."""
    network = seeded(lambda x: x, norm=True)
    assert any("num_batches" in name for name, _ in network.named_buffers())
    expected = tables.digests_of(capture(nets.loaded(network)))
    assert tables.digests_of(of_file(network, tmp_path / "a.onnx", dynamo=dynamo)) == expected


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_and_constants_without_a_name_are_another_network(
    name: str, dynamo: bool, tmp_path: Path
) -> None:
    assert tables.digests_of(of_file(seeded(OTHERS[name]), tmp_path / "a.onnx", dynamo=dynamo)) != of_module(name)


@pytest.mark.parametrize("dynamo", [True, False])
def test_every_other_weight_and_number_is_another_network(dynamo: bool, tmp_path: Path) -> None:
    def digests(how: Callable[[torch.Tensor], torch.Tensor], change: str = "") -> dict[str, str]:
        network = seeded(how)
        if change:
            network.get_parameter(change).data.view(-1)[0] += 1e-3
        return tables.digests_of(of_file(network, tmp_path / "a.onnx", dynamo=dynamo))

    own = of_module("factor")
    for name, _ in seeded(OPERANDS["factor"]).named_parameters():
        assert digests(OPERANDS["factor"], name)["weights"] != own["weights"]
    numbers = digests(lambda x: x * 0.11 + 1 / 3), digests(lambda x: x * 0.1 + 0.333)
    assert all(found["weights"] == own["weights"] and found["graph"] != own["graph"] for found in numbers)


def test_a_table_of_before_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belonged to all weights, also those that nothing reads, and to numbers with all their digits."""
    network = seeded(OPERANDS["factor"], norm=True)
    captured, weights = capture(nets.loaded(network)), "a" * 64
    digests, older = tables.digests_of(captured), tables.older_digests(captured, weights)
    assert len({d["graph"] for d in (digests, *older)}) == 4
    calibration = Calibration(table="a.json")
    for of_table in (d for d in older if d["weights"] == weights):
        table = given_table({"head": 1.0}, of_table)
        monkeypatch.setattr(CalibrationTable, "load", lambda path, histograms=False, table=table: table)
        assert tables.read_table(calibration, digests, older) is table
        with pytest.raises(CalibError, match=r"a\.json: must belong to this job \(got one for other weights\)"):
            tables.read_table(calibration, digests, tables.older_digests(captured, "b" * 64))
        other = tables.older_digests(capture(nets.loaded(seeded(OPERANDS["least"], norm=True))), weights)
        with pytest.raises(CalibError, match="got one for another graph of the same weights"):
            tables.read_table(calibration, digests, other)


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_table_of_before_is_one_of_the_exported_file_too(dynamo: bool, tmp_path: Path) -> None:
    network = seeded(OPERANDS["slice"])
    before = tables.older_digests(capture(nets.loaded(network)), weights_digest(network))[0]
    loaded = load_network(export(network, tmp_path / "a.onnx", dynamo=dynamo))
    assert before in tables.older_digests(capture(nets.loaded(loaded)), weights_digest(loaded))

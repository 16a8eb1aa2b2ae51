"""Operations on one sample or one vector, without a batch dimension, which PyTorch takes too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from trtpipe.job.sections import CORRECTIONS
from trtpipe.model.capture import capture
from trtpipe.model.nodes import calls, op_name, shape_of
from trtpipe.model.products import WEIGHTED
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections.correct import correct
from trtpipe.quantization.payoff import shape_reason


class Of(nn.Module):
    """A layer on what a convolution gives for the first sample."""

    def __init__(self, layer: nn.Module | None, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.run = nn.Conv2d(3, 8, 3, padding=1), layer, run
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, torch.relu(self.first(x))[0]).reshape(1, -1)


def vector(x: torch.Tensor) -> torch.Tensor:
    return x.mean((1, 2))


FORMS: dict[str, Callable[[], Of]] = {
    "linear": lambda: Of(nn.Linear(8, 4), lambda s, x: s.layer(vector(x))),
    "linear without bias": lambda: Of(nn.Linear(8, 4, bias=False), lambda s, x: s.layer(vector(x))),
    "linear behind a layer norm": lambda: Of(
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), lambda s, x: s.layer(vector(x))
    ),
    "bilinear": lambda: Of(nn.Bilinear(8, 8, 4), lambda s, x: s.layer(vector(x), vector(x).relu())),
    "conv1d": lambda: Of(nn.Conv1d(8, 4, 3), lambda s, x: s.layer(x.flatten(1))),
    "conv2d": lambda: Of(nn.Conv2d(8, 4, 3, stride=2, padding="valid"), lambda s, x: s.layer(x)),
    "conv2d in groups": lambda: Of(nn.Conv2d(8, 8, 3, groups=8), lambda s, x: s.layer(x)),
    "conv3d": lambda: Of(nn.Conv3d(8, 4, (1, 3, 3)), lambda s, x: s.layer(x[:, None])),
    "conv_transpose1d": lambda: Of(nn.ConvTranspose1d(8, 4, 2), lambda s, x: s.layer(x.flatten(1))),
    "conv_transpose2d": lambda: Of(nn.ConvTranspose2d(8, 4, 2, 2), lambda s, x: s.layer(x)),
    "vector by weight": lambda: Of(None, lambda s, x: vector(x) @ s.weight),
    "weight by vector": lambda: Of(None, lambda s, x: s.weight.T @ vector(x)),
    "vector by vector": lambda: Of(None, lambda s, x: torch.matmul(vector(x), vector(x).relu())),
    "vector by matrices": lambda: Of(None, lambda s, x: torch.matmul(vector(x), x)),
    "matrices by vector": lambda: Of(None, lambda s, x: torch.matmul(x, x[0, 0])),
    "gru": lambda: Of(nn.GRU(8, 4), lambda s, x: s.layer(x[:, 0].T)[0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_they_have_a_batch_of_one_in_the_graph_and_are_calibrated_and_corrected(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = FORMS[form]().eval()
    x = np.random.default_rng(0).normal(size=(24, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    size = network(torch.from_numpy(x[:1])).shape[1]
    captured = capture(nets.loaded(network, (1, 3, 8, 8), out_shape=(1, size)))
    torch.testing.assert_close(captured.graph(torch.from_numpy(x[:1]))[0], network(torch.from_numpy(x[:1])))
    for node in calls(captured.graph.graph):
        if op_name(node) in WEIGHTED:
            ranks = [len(shape_of(a)) for a in node.args[:2]]  # type: ignore[arg-type]
            assert ranks[0] == ranks[1] if op_name(node) != "linear" else ranks[0] >= 2
            shape_reason(captured.graph, node)
        if op_name(node) == "matmul":
            assert min(len(shape_of(a)) for a in node.args[:2]) >= 2  # type: ignore[arg-type]
            shape_reason(captured.graph, node)
    source = open_source(DataSpec(arrays=str(tmp_path / "x.npy")), [InputSpec("x", "float32", (3, 8, 8))])
    plain = calibrate(
        captured, source, batch_size=1, algorithm="minmax", percentile=99.99, digests={"graph": "g"}, progress=Silent()
    )
    table = correct(captured, plain, source, which=CORRECTIONS, batch_size=1, progress=Silent())
    assert table.amax.keys() == plain.amax.keys()
    assert table.corrections is not None

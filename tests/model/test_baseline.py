"""The baseline: traced, scripted or given, equal to the eager model on the check data or refused."""

from __future__ import annotations

from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.samples import Batch
from trtpipe.errors import InputError
from trtpipe.model.baseline import record_baseline
from trtpipe.progress import Silent

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
X = nets.images(5, 3, 8, 8).numpy()
BATCHES = [
    Batch({"x": X[:3]}, np.array([0, 1, 2]), ("a", "b", "c")),
    Batch({"x": X[3:]}, np.array([3, 4]), ("d", "e")),
]


@pytest.mark.parametrize("kind", ["trace", "script"])
def test_answers_are_eagers(kind: str) -> None:
    loaded = nets.residual()
    found = record_baseline(loaded, BATCHES, 5, batch_size=3, kind=kind, progress=Silent())  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = loaded.module(torch.from_numpy(X))[0].numpy()
    assert np.allclose(found.outputs["logits"], expected, atol=1e-5)
    assert found.kind == kind
    assert found.ids == ("a", "b", "c", "d", "e")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2, 3, 4]


def test_a_torchscript_file(tmp_path: Path) -> None:
    loaded = nets.residual()
    path = tmp_path / "net.ts"
    torch.jit.script(loaded.module.network).save(str(path))
    found = record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", torchscript=str(path), progress=Silent())
    assert found.kind == "torchscript"


def test_a_torchscript_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.ts"
    other = nets.settled(nets.Residual(), nets.images(16, 3, 8, 8, seed=9))
    nn.init.ones_(other.head.weight)
    torch.jit.script(other).save(str(path))
    with pytest.raises(InputError, match=r"^baseline: TorchScript \(torchscript\) must compute what the eager"):
        record_baseline(
            nets.residual(), BATCHES, 5, batch_size=3, kind="trace", torchscript=str(path), progress=Silent()
        )


def test_tracing_that_loses_a_branch_is_refused() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.mean((1, 2, 3))
            return torch.stack([y, y * 2], 1) if float(x.abs().sum()) > 0 else torch.stack([y, y + 1], 1)

    loaded = nets.loaded(Branching(), out_shape=("N", 2))  # traced on zeros: the branch of data is never seen
    with pytest.raises(InputError, match=r"TorchScript \(trace\) must compute .* Set model\.baseline to script\."):
        record_baseline(loaded, BATCHES, 5, batch_size=3, kind="trace", progress=Silent())


def test_no_sample_is_an_error() -> None:
    with pytest.raises(InputError, match=r"check: the data holds no sample"):
        record_baseline(nets.residual(), [], 0, batch_size=3, kind="trace", progress=Silent())


def test_a_file_that_is_no_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "net.ts"
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"model\.torchscript: must be a TorchScript file"):
        record_baseline(
            nets.residual(), BATCHES, 5, batch_size=3, kind="trace", torchscript=str(path), progress=Silent()
        )

"""Whatever step a correction is in, it ends where it is asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nets
import numpy as np
import pytest
import torch
from torch import nn

from calib.data import open_source
from calib.samples import DataSpec, InputSpec
from trtpipe.errors import Cancelled
from trtpipe.model.capture import capture
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.corrections.correct import correct


class Cancelling(Silent):
    def cancelled(self) -> bool:
        return True


@pytest.mark.parametrize("step", ["equalization", "thresholds", "rounding", "bias"])
def test_a_step_is_cancelled(tmp_path: Path, step: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    with torch.no_grad():
        net[0].weight.mul_(torch.logspace(-2, 0.5, 32)[:, None])  # type: ignore[operator]
    np.save(tmp_path / "x.npy", nets.images(32, 16).numpy())
    source = open_source(DataSpec(arrays=str(tmp_path / "x.npy")), [InputSpec("x", "float32", (16,))])
    captured, options = capture(nets.loaded(net, ("N", 16), out_shape=("N", 4))), dict[str, Any](batch_size=8)
    plain = calibrate(
        captured, source, algorithm="minmax", percentile=99.99, digests={"graph": "g"}, progress=Silent(), **options
    )
    with pytest.raises(Cancelled):
        correct(captured, plain, source, which=(step,), progress=Cancelling(), **options)

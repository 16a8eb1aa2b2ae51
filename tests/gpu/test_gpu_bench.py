"""PyTorch's modes on the GPU: every one answers as FP32 on the CPU does, and is timed by CUDA events."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtpipe.batching import Batching
from trtpipe.evaluation.bench import BenchData, measure_modes
from trtpipe.evaluation.gpu_modes import gpu_modes
from trtpipe.evaluation.torch_modes import ModeSetup, torch_modes
from trtpipe.model.baseline import script
from trtpipe.model.bindings import bind
from trtpipe.progress import Silent
from trtpipe.values import DimRange, LoadedModel, TensorSpec


@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_every_mode_answers_and_is_timed(gpu, capsys):
    torch.manual_seed(0)
    dims = {"N": DimRange(1, 8, 8)}
    x, y = TensorSpec("x", "float32", ("N", 3, 32, 32), dims), TensorSpec("y", "float32", ("N", 10), dims)
    layers = (torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3), torch.nn.ReLU())
    network = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))
    bound = bind(network.eval(), (x,), {}, ("y",))
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)
    setup = ModeSetup(LoadedModel(bound, (x,), (y,), "0" * 64, "test"), {"x": images}, "cuda", lambda: iter([]))
    recorded, _ = script(setup.loaded, "trace", None)
    with torch.inference_mode():
        reference = bound(torch.from_numpy(images))[0].numpy()
    modes = [*torch_modes(setup, recorded), *gpu_modes(setup)]
    data = BenchData(lambda: iter([{"x": images}]), {"y": reference}, None, Batching((x,), (y,), 8))
    rows, _ = measure_modes(modes, data, batch=8, rounds=10, seconds=60, progress=Silent())
    with capsys.disabled():
        for row in rows:
            print(f"\n{row.name}: {row.skipped or f'{row.median_ms:.3f} ms, {row.sqnr_db:.1f} dB'}", end="")
    found = {r.name: r for r in rows}
    compiled = {n for n, r in found.items() if n.startswith("torch.compile") and "compiler" in r.skipped.lower()}
    refused = {n for n, r in found.items() if r.skipped} - compiled
    assert refused == {n for n in found if n.startswith("PyTorch INT8")}
    for name in set(found) - refused - compiled:
        floor = 90 if name.endswith("FP32") else 30
        assert found[name].sqnr_db > floor, name
        assert found[name].median_ms > 0
        assert found[name].peak_memory_bytes > 0
    assert found["eager FP32"].sqnr_db > found["eager TF32"].sqnr_db

"""The modes that only a GPU has: named and explained where none is; TF32 switched and switched back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from trtpipe.evaluation.gpu_modes import _channels_last, gpu_modes
from trtpipe.evaluation.torch_modes import InHalf, ModeSetup, not_in_half, ready, tf32_allowed
from trtpipe.model.bindings import bind
from trtpipe.values import DimRange, LoadedModel, TensorSpec


@pytest.fixture(scope="module")
def setup():
    dims = {"N": DimRange(1, 2, 4)}
    x, y = TensorSpec("x", "float32", ("N", 3, 8, 8), dims), TensorSpec("y", "float32", ("N", 4, 8, 8), dims)
    torch.manual_seed(0)
    bound = bind(torch.nn.Conv2d(3, 4, 3, padding=1).eval(), (x,), {}, ("y",))
    batch = {"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)}
    return ModeSetup(LoadedModel(bound, (x,), (y,), "0" * 64, "test"), batch, "cpu", lambda: iter([batch]))


def test_without_a_gpu_each_says_that_it_needs_one(setup):
    assert {m.name: (m.device, m.cannot) for m in gpu_modes(setup)} == dict.fromkeys(
        ("eager TF32", "eager FP16, channels last", "eager FP16, CUDA graph", "torch.compile FP16",
         "torch.compile FP16, CUDA graphs"), ("cuda", "it needs a GPU that PyTorch can use"),
    )  # fmt: skip


def test_an_onnx_file_is_not_said_to_run_in_half_here_either(setup):
    of_file = replace(setup, device="cuda", loaded=replace(setup.loaded, kind="onnx"))
    cannot = {m.name: m.cannot for m in gpu_modes(of_file)}
    assert cannot.pop("eager TF32") == ""
    assert set(cannot.values()) == {not_in_half(of_file)} != {""}


def test_channels_last_stores_weights_so_and_answers_the_same(setup):
    plain, changed = (InHalf(setup.loaded.module, torch.float32) for _ in range(2))
    call = _channels_last(changed)
    assert changed.network.weight.is_contiguous(memory_format=torch.channels_last)
    assert not plain.network.weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.from_numpy(setup.batch["x"])
    torch.testing.assert_close(call(x), plain(x))


def test_tf32_is_as_it_was_afterwards():
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)

    def state():
        return [p.allow_tf32 for p in places]

    before = state()
    for allowed in (True, False):
        with tf32_allowed("cuda", allowed):
            assert state() == [allowed, allowed]
        assert state() == before
        with pytest.raises(ZeroDivisionError), tf32_allowed("cuda", allowed):
            _ = 1 / 0
        assert state() == before
    with tf32_allowed("cpu", not before[0]):
        assert state() == before


def test_a_mode_keeps_its_notes(setup):
    made = ready(setup, lambda: setup.loaded.module, notes=("so",))
    assert made.notes == ("so",)
    assert made.ms is None
    assert made.infer(setup.batch)["y"].shape == (2, 4, 8, 8)

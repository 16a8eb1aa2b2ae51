"""PyTorch's modes: each answers as the network does, within what its numbers can hold."""

import dataclasses
import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from trtpipe.batching import Batching
from trtpipe.errors import MissingError
from trtpipe.evaluation import torch_modes as modes_module
from trtpipe.evaluation.bench import BenchData, measure_modes
from trtpipe.evaluation.torch_modes import InHalf, ModeSetup, torch_modes
from trtpipe.model.bindings import bind
from trtpipe.progress import Silent
from trtpipe.values import DimRange, LoadedModel, TensorSpec

N = {"N": DimRange(1, 4, 8)}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.relu = nn.ReLU()  # used twice, as in many residual networks
        self.conv2 = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.conv(x))
        return self.head(self.relu(self.conv2(x) + x).mean((2, 3)))


@pytest.fixture(scope="module")
def setup():
    x, y = TensorSpec("x", "float32", ("N", 3, 8, 8), N), TensorSpec("y", "float32", ("N", 5), N)
    bound = bind(Small().eval().requires_grad_(False), (x,), {}, ("y",))
    loaded = LoadedModel(bound, (x,), (y,), "0" * 64, "test")
    images = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    return ModeSetup(loaded, {"x": images[:4]}, "cpu", lambda: iter([{"x": images[:4]}, {"x": images[4:]}]))


@pytest.fixture(scope="module")
def reference(setup):
    with torch.inference_mode():
        parts = [setup.loaded.module(torch.from_numpy(b["x"]))[0].numpy() for b in setup.calibration()]
    return np.concatenate(parts)


def script(setup):
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(setup.loaded.module, torch.from_numpy(setup.batch["x"]), check_trace=False)


def measured(setup, reference, wanted):
    modes = [m for m in torch_modes(setup, script(setup)) if wanted(m.name)]
    how = Batching(setup.loaded.inputs, setup.loaded.outputs, 4)
    data = BenchData(lambda: ({"x": b["x"]} for b in setup.calibration()), {"y": reference}, np.arange(8) % 5, how)
    rows, rounds = measure_modes(modes, data, batch=4, rounds=2, seconds=0.0, progress=Silent())
    assert rounds == 2
    return {r.name: r for r in rows}


def test_eager_autocast_and_torchscript(setup, reference):
    rows = measured(setup, reference, lambda n: n.split()[0] in ("eager", "autocast", "TorchScript"))
    assert [r.skipped for r in rows.values()] == [""] * 8
    weights = sum(p.numel() for p in setup.loaded.module.parameters())
    for name, row in rows.items():
        assert row.median_ms > 0
        floor = {"FP32": 110, "FP16": 50, "BF16": 30}[name.split()[1]]
        assert row.sqnr_db > floor
        assert (row.sqnr_db < 90) == (not name.endswith("FP32"))  # a half mode that is FP32 in disguise is no half mode
        half = name.split()[0] != "autocast" and not name.endswith("FP32")
        assert row.size_bytes == weights * (2 if half else 4)


def test_the_half_wrapper_answers_float32_and_leaves_the_network_alone(setup):
    half = InHalf(setup.loaded.module, torch.float16)
    (answer,) = half(torch.from_numpy(setup.batch["x"]))
    assert answer.dtype == torch.float32
    assert setup.loaded.module.network.conv.weight.dtype == torch.float32


class OfBytes(nn.Module):
    """Answers with a tuple, and sees what its binding has normalised."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.mean((2, 3)),)


def test_a_scripted_network_that_gives_a_tuple_has_its_bindings_too():
    x = TensorSpec("x", "uint8", ("N", 3, 8, 8), N)
    y = TensorSpec("y", "float32", ("N", 3), N)
    bound = bind(OfBytes().eval(), (x,), {"x": ((0.5,), (0.25,))}, ("y",))
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), np.uint8)
    own = ModeSetup(LoadedModel(bound, (x,), (y,), "0" * 64, "test"), {"x": images}, "cpu", lambda: iter(()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(OfBytes().eval())
    mode = next(m for m in torch_modes(own, scripted, whole=False) if m.name == "TorchScript FP32")
    with torch.inference_mode():
        (wanted,) = bound(torch.from_numpy(images))
    np.testing.assert_allclose(mode.prepare().infer({"x": images})["y"], wanted.numpy())


def test_without_a_compiler_the_row_says_so(setup, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    cannot = {m.name: m.cannot for m in torch_modes(setup, None)}
    assert cannot["torch.compile FP32"] == "Inductor needs a C++ compiler; none of g++ and clang++ is on PATH"
    assert cannot["eager FP32"] == ""


@pytest.mark.parametrize(
    ("device", "release", "reason"),
    [
        ("cpu", "2.14.1", ""),
        ("cuda", "2.14.1", "PyTorch's INT8 kernels are for CPUs"),
        ("cpu", "2.6.0", "PyTorch's own INT8 is measured with torchao, which PyTorch before 2.7 does without"),
    ],
)
def test_where_pytorch_has_no_int8_the_row_says_so(setup, monkeypatch, device, release, reason):
    monkeypatch.setattr(torch, "__version__", release)
    rows = {m.name: m.cannot for m in torch_modes(dataclasses.replace(setup, device=device), None)}
    assert [cannot for name, cannot in rows.items() if "INT8" in name] == [reason]


def test_a_processor_without_quantized_kernels_is_said(setup, monkeypatch):
    monkeypatch.setattr(modes_module.torch.backends, "quantized", SimpleNamespace(engine="none"))
    with pytest.raises(MissingError, match=r"^bench: PyTorch has no quantized kernels for this processor\.$"):
        modes_module._pt2e(setup)


def test_an_onnx_file_is_not_said_to_run_in_half(setup):
    of_file = dataclasses.replace(setup, loaded=dataclasses.replace(setup.loaded, kind="onnx"))
    rows = {m.name: m.cannot for m in torch_modes(of_file, None)}
    reason = "an ONNX file has its casts in FP32; the graph of a job with fp16_mode or bf16_mode is in half"
    assert [n for n, cannot in rows.items() if cannot == reason] == [
        "eager FP16", "eager BF16", "TorchScript FP16", "TorchScript BF16", "torch.compile BF16",
    ]  # fmt: skip


def test_a_network_that_pytorch_does_not_quantize_is_not_given_as_int8(setup):
    class Sums(torch.nn.Module):
        def forward(self, x):
            return x.abs().sum((1, 2, 3))[:, None].expand(-1, 5) * 1.0

    bound = bind(Sums(), setup.loaded.inputs, {}, ("y",))
    odd = dataclasses.replace(setup, loaded=dataclasses.replace(setup.loaded, module=bound))
    with pytest.raises(MissingError, match=r"^bench: PyTorch's quantizer found no operation of this network"):
        modes_module._pt2e(odd)


@pytest.mark.acceptance
def test_compiled_and_int8(setup, reference):
    """Where torch.compile knows no vector instructions of the CPU, what it writes may not compile, by the compiler."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    rows = measured(setup, reference, lambda n: "compile" in n or "INT8" in n)
    if not pick_vec_isa():
        failed = "BackendCompilerFailed: backend='inductor' raised: Cpp"
        rows = {n: r for n, r in rows.items() if "compile" not in n or not r.skipped.startswith(failed)}
    assert [r.skipped for r in rows.values()] == [""] * len(rows)
    int8 = next(r for n, r in rows.items() if "INT8" in n)
    assert 15 < int8.sqnr_db < 60
    assert all(r.median_ms > 0 for r in itertools.chain(rows.values()))

"""Where PyTorch computes. GPUs are torch's own fake tensors, or the CPU by another name: "cpu:0"."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from calib.observers import _DeviceCounter
from calib.samples import Batch
from tests.support.second_device import THERE, two_devices
from trtpipe.errors import InputError, MissingError
from trtpipe.model import computing
from trtpipe.model.baseline import record_baseline
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.computing import CPU, CUDA, VARIABLE, apart, computing_device, placed, sent, wanted_device
from trtpipe.progress import Silent
from trtpipe.quantization.calibrate import calibrate
from trtpipe.quantization.precision import Keep, observe_ranges
from trtpipe.quantization.sensitivity import SampleBatch, measure_sensitivity
from trtpipe.values import DimRange, LoadedModel, TensorSpec


class Awkward(torch.nn.Module):
    """Tied weights, a buffer, a tensor that is no buffer, and new tensors in forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.randn(8))
        self.loose = torch.randn(8)

    def forward(self, x):
        steps = torch.arange(8, dtype=torch.float32) + torch.full((8,), 0.5)
        return self.second(torch.relu(self.first(x - self.mean))) * self.loose + steps


@pytest.fixture(autouse=True)
def separate(monkeypatch):
    """Tensors of `THERE` are not the CPU's, and are counted as a GPU's are."""
    monkeypatch.setattr("calib.observers._CpuCounter", lambda: _DeviceCounter(torch.get_default_device()))
    with two_devices():
        yield


@pytest.fixture
def loaded():
    dims = {"N": DimRange(1, 4, 8)}
    x, y = TensorSpec("x", "float32", ("N", 8), dims), TensorSpec("y", "float32", ("N", 8), dims)
    return LoadedModel(bind(Awkward().eval(), (x,), {}, ("y",)), (x,), (y,), "0" * 64, "test")


def arrays(samples=8):
    return {"x": np.random.default_rng(1).normal(size=(samples, 8)).astype(np.float32)}


def tensors_of(module):
    parts = ((part._parameters, part._buffers, part.__dict__) for part in module.modules())
    return [v for held in parts for one in held for v in one.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("captured", [False, True])
def test_everything_is_on_the_gpu_for_the_block_and_the_very_same_afterwards(loaded, captured):
    module = capture(loaded).graph if captured else loaded.module
    before = tensors_of(module)
    arguments = [(n, n.args, n.kwargs) for n in module.graph.nodes] if captured else []
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.zeros(4, 8, device=CUDA)
        with pytest.raises(RuntimeError, match=r"(?i)same device|device"):
            module(x)
        with placed(module, CUDA):
            assert {str(t.device) for t in tensors_of(module)} == {CUDA}
            outputs = module(x)
            assert {str(o.device) for o in outputs} == {CUDA}
    after = tensors_of(module)
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert arguments == ([(n, n.args, n.kwargs) for n in module.graph.nodes] if captured else [])
    assert str(module(torch.zeros(4, 8))[0].device) == "cpu"


def test_all_is_as_it_was_after_an_error(loaded):
    before = tensors_of(loaded.module)
    with pytest.raises(ZeroDivisionError), placed(loaded.module, THERE):
        1 / 0  # noqa: B018
    assert all(a is b for a, b in zip(tensors_of(loaded.module), before, strict=True))


def test_a_module_whose_tensors_cannot_be_moved_is_left_alone():
    class Linear(torch.nn.Linear):
        def modules(self):
            yield self
            raise RuntimeError("no more")

    module = Linear(2, 2)
    before = tensors_of_one(module)
    with pytest.raises(RuntimeError, match="no more"), placed(module, THERE):
        pass
    assert all(a is b for a, b in zip(tensors_of_one(module), before, strict=True))


def tensors_of_one(module):
    return list(module._parameters.values())


@pytest.mark.parametrize(
    ("variable", "gpu", "device"), [("", True, CUDA), ("", False, CPU), ("cpu", True, CPU), ("cuda", True, CUDA)]
)
def test_the_gpu_where_there_is_one_unless_the_user_says_otherwise(monkeypatch, variable, gpu, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv(VARIABLE, variable)
    assert wanted_device() == device


def test_a_gpu_that_was_asked_for_and_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(MissingError) as raised:
        wanted_device()
    assert str(raised.value) == (
        "--device or TRTPIPE_DEVICE: must be cpu where PyTorch sees no GPU (got cuda). Install PyTorch's CUDA build "
        "and NVIDIA's driver, or leave it out."
    )
    monkeypatch.setenv(VARIABLE, "gpu")
    with pytest.raises(InputError, match=r"^TRTPIPE_DEVICE: must be cpu or cuda \(got 'gpu'\)\. Unset it"):
        wanted_device()


def test_a_driver_that_is_too_old_for_pytorch_is_said_as_that(monkeypatch):
    """In PyTorch's own words (c10/cuda/CUDAFunctions.cpp), which are in what is installed."""
    words = b"The NVIDIA driver on your system is too old (found version "
    assert all(words in p.read_bytes() for p in Path(torch.__file__).parent.glob("lib/libc10_cuda.*"))

    def init():
        raise RuntimeError(f"{words.decode()}12020). Please update your GPU driver by downloading and installing a new")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(MissingError) as raised:
        wanted_device()
    assert str(raised.value) == (
        "--device or TRTPIPE_DEVICE: must be cpu where PyTorch sees no GPU (got cuda; the NVIDIA driver is for CUDA "
        "12.2, too old for this PyTorch, which needs 13.0). Update the driver, or leave it out."
    )


@pytest.fixture
def there(monkeypatch):
    """A machine whose GPU is the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(computing, "CUDA", THERE)
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_model_that_gives_the_same_there_is_computed_there(loaded, there):
    assert computing_device(loaded, arrays(), pytest.fail) == THERE


class Otherwise(torch.nn.Module):
    """Another model where new tensors are not made on the CPU as usual."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        away = str(torch.get_default_device()) == THERE
        return self.act(x) if away else x


CASES = {
    "differs": (lambda x: x + 1, r"its outputs differ by up to 1, outputs up to \d"),
    "is not finite": (lambda x: x / 0, r"its outputs differ by up to inf"),
    "has another shape": (lambda x: x[:1], r"an output has the shape \[1, 8\] there and \[8, 8\] on the CPU"),
    "fails": (lambda x: x.no_such, r"it fails there \(.*no_such"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_does_not_is_computed_on_the_cpu_and_that_is_said(loaded, there, monkeypatch, case):
    act, why = CASES[case]
    dims = loaded.inputs[0].dims
    spec = TensorSpec("y", "float32", ("N", 8), dims)
    other = LoadedModel(bind(Otherwise(act), loaded.inputs, {}, ("y",)), loaded.inputs, (spec,), "0" * 64, "test")
    said = []
    assert computing_device(other, arrays(), said.append) == CPU
    (line,) = said
    assert line.startswith(f"the model is computed on the CPU and not on {THERE}: ")
    assert re.search(why, line)
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(InputError, match=rf"^--device or TRTPIPE_DEVICE: the model must compute on {THERE} what "):
        computing_device(other, arrays(), pytest.fail)


@pytest.mark.parametrize("wrapped", [False, True])
def test_without_memory_the_next_step_is_said(loaded, wrapped):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    error = InputError("the model, on sample a") if wrapped else full
    error.__cause__ = full if wrapped else None
    with pytest.raises(MissingError) as raised, placed(loaded.module, THERE):
        raise error
    assert str(raised.value) == (
        f"{THERE}: out of memory (CUDA out of memory. Tried to allocate 2 GiB.). Set a smaller batch_size, or give "
        "--device or TRTPIPE_DEVICE cpu."
    )


def batches(count=24, size=8):
    data = arrays(count)["x"]
    for start in range(0, count, size):
        ids = tuple(f"s{i}" for i in range(start, start + size))
        yield Batch({"x": data[start : start + size]}, None, ids)


def test_the_baseline_is_the_cpus_and_says_where_it_was_computed(loaded):
    both = [
        record_baseline(loaded, batches(), 24, batch_size=8, kind="trace", progress=Silent(), device=d)
        for d in (CPU, THERE)
    ]
    here, there = both
    assert (here.outputs["y"] == there.outputs["y"]).all()
    assert there.notes == (f"baseline: computed by PyTorch on {THERE}", *here.notes)


def test_ranges_and_sensitivities_are_the_cpus(loaded):
    captured = capture(loaded)
    x = torch.from_numpy(arrays(8)["x"])
    ranges = [observe_ranges(captured, [[x]], d) for d in (CPU, THERE)]
    assert ranges[0] == ranges[1]
    amax = {s.group: 3.0 for s in captured.sites if s.axis is None}

    def measured(device):
        samples = [SampleBatch((x,), 8, torch.arange(8))]
        found = measure_sensitivity(
            captured, amax, samples, half=torch.float16, keep=Keep(), progress=Silent(), device=device
        )
        return found.modules

    assert measured(CPU) == measured(THERE)


def test_the_calibration_table_is_the_cpus(loaded, monkeypatch):
    captured = capture(loaded)

    class Data:
        names, ids, sample_digests, recipe, labels, skipped = ("x",), ("a",) * 24, ("0" * 64,) * 24, "", None, ()
        sample_count = 24

        def batches(self, size):
            return batches(24, size)

    tables = [
        calibrate(
            captured, Data(), batch_size=8, algorithm="mse", percentile=99.99, digests={}, progress=Silent(), device=d
        )
        for d in (CPU, THERE)
    ]
    assert tables[0].amax == tables[1].amax
    assert tables[0].digest == tables[1].digest


def test_whole_numbers_are_subtracted_as_such():
    ids = torch.tensor([2**60, -(2**63), 2**63 - 1, 5])
    assert apart(ids, ids + torch.tensor([1, 9, -3, 0])).tolist() == [1.0, 9.0, -3.0, 0.0]
    assert apart(ids[1:2], ids[2:3]).tolist() == [2.0**64]
    assert apart(torch.tensor([True, False]), torch.tensor([False, False])).tolist() == [-1.0, 0.0]
    assert apart(torch.tensor([1.5]).half(), torch.tensor([1])).tolist() == [-0.5]


def test_tensors_are_sent(loaded):
    with FakeTensorMode():
        assert [str(t.device) for t in sent([torch.zeros(2), torch.zeros(3)], CUDA)] == [CUDA, CUDA]

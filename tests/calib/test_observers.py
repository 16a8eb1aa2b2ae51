"""The compiled loop and the device path against NumPy's plain histogram, whatever the tensor looks like."""

import contextlib
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.histogram import ALL_BINS, BINS, SLOTS, Histogram
from calib.observers import HistogramObserver, _CpuCounter, _DeviceCounter, _kernel, dense

torch.manual_seed(0)
TENSORS = {
    "odd size": torch.randn(7, 3, 5, 5),
    "channels last": torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last),
    "every other column": torch.randn(4, 6)[:, ::2],
    "one past an aligned start": torch.randn(12)[1:],
    "one value": torch.tensor(2.5),
    "no value": torch.zeros(0, 3),
    "expanded": torch.randn(3, 1).expand(3, 5),
    "zeros among others": torch.relu(torch.randn(10_001)),
    "many blocks": torch.randn(40_003) * 1e-3,
    "several chunks": torch.randn(900_001),
    "all negative": -torch.rand(100) - 1,
    "negative zero": torch.full((9,), -0.0),
    "not finite": torch.tensor([1.0, math.nan, -3.0, math.inf, -math.inf] * 5),
    "nothing finite": torch.tensor([math.nan, math.inf] * 3),
    "bfloat16": torch.randn(50).bfloat16(),
    "float16": torch.randn(50).half(),
    "float64": torch.randn(50, dtype=torch.float64),
    "denormal and huge": torch.tensor([1e-45, 1e-38, 3.4e38, -1e-40]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_counts_are_those_of_the_plain_histogram(name):
    observer = HistogramObserver()
    observer.observe(TENSORS[name])
    assert observer.histogram == Histogram.of(TENSORS[name].float().numpy())


@pytest.mark.parametrize("name", TENSORS)
def test_the_device_path_counts_the_same(name):
    counter = _DeviceCounter(torch.device("cpu"))
    counter.add(TENSORS[name], 1)
    assert counter.read(1) == Histogram.of(TENSORS[name].float().numpy())
    assert counter.read(0) == Histogram.empty()


def test_batches_add_up_and_halves_are_kept_apart():
    first, second, third = torch.randn(100), torch.randn(51), torch.randn(7)
    observer = HistogramObserver()
    for half, x in ((0, first), (1, second), (0, third)):
        observer.half = half
        observer.observe(x)
    assert observer.histogram == Histogram.of(torch.cat([first, second, third]).numpy())
    assert observer.halves[0] == Histogram.of(torch.cat([first, third]).numpy())
    assert observer.halves[1] == Histogram.of(second.numpy())


def test_reading_changes_nothing():
    observer = HistogramObserver()
    observer.observe(torch.randn(10))
    assert observer.histogram == observer.histogram
    observer.observe(torch.randn(10))
    assert observer.histogram.elements == 20


def test_dense_tensors_are_not_copied():
    for x in (torch.randn(2, 3, 4, 4), TENSORS["channels last"], torch.randn(3, 4).t(), torch.randn(12)[1:]):
        assert dense(x).data_ptr() == x.data_ptr()
        assert dense(x).shape == (x.numel(),)


def test_integer_tensors_are_refused():
    with pytest.raises(CalibError, match=r"must be floating \(got torch.int32\)\. Leave it out of quantization\."):
        HistogramObserver().observe(torch.zeros(3, dtype=torch.int32))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5000), st.data())
def test_splits_orders_and_layouts_change_no_histogram(count, data):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 10.0 ** data.draw(
        st.integers(-20, 20)
    )
    whole, parts = HistogramObserver(), HistogramObserver()
    whole.observe(values)
    shuffled = values[torch.randperm(count, generator=torch.Generator().manual_seed(1))]
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    for start, stop in zip([0, *cuts], [*cuts, count], strict=True):
        parts.half = data.draw(st.integers(0, 1))
        parts.observe(shuffled[start:stop])
    assert parts.histogram == whole.histogram == Histogram.of(values.numpy())


def test_tables_hold_nothing_outside_the_magnitudes_seen():
    """Reading looks only between zero, the least magnitude and the greatest; so every kind of value must be counted."""
    for values in ([1e-45, 3.0], [-1e-38, 0.0, 0.0], [-5.0, -0.25], [math.inf, -1.0, math.nan, 2.0], [0.0] * 3):
        for shift in (0, 1):  # of the first value, in a pair or before it
            x = torch.tensor([*values, 7e-20][: len(values)] * 5 + [0.5])[shift:]
            observer = HistogramObserver()
            observer.observe(x)
            assert observer.histogram == Histogram.of(x.numpy()), (values, shift)


@pytest.mark.parametrize("team", ["OpenMP", "pool"])
def test_threads_lose_and_double_nothing(monkeypatch, team):
    """On the runtime's own team, whatever its size, and on the threads that stand in where there is none."""
    from calib import kernel

    if team == "pool":
        monkeypatch.setattr(kernel, "_openmp_team", lambda: None)
    assert team == "pool" or kernel._openmp_team() is not None
    values = np.random.default_rng(0).normal(size=1_000_002).astype(np.float32)
    values[::3] = 0
    for threads in (1, 2, 5):
        tables = np.zeros((threads, 2, SLOTS), np.int64)
        bounds = np.tile(np.array([2**31 - 1, -(2**31), 2**31 - 1], np.int32), (threads, 1))
        kernel.count(values.view(np.uint64), tables, bounds)
        counts = tables.sum(axis=(0, 1))
        counts[0] += counts[ALL_BINS:].sum()
        np.testing.assert_array_equal(counts[:BINS], Histogram.of(values).counts)
        assert bounds[:, 1].max() == values.max().view(np.int32)
        assert int(bounds[:, 2].min()) + 2**31 + 1 == np.abs(values[values != 0]).min().view(np.int32)


def test_where_the_kernel_cannot_be_compiled_torch_counts_the_same(monkeypatch, caplog):
    class OnCuda(torch.Tensor):
        is_cuda = True

    def refuses(*_):
        raise RuntimeError("nvrtcResult: NVRTC_ERROR_INVALID_OPTION")

    monkeypatch.setattr("calib.gpu_kernel.count", refuses)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    counter, x = _DeviceCounter(torch.device("cpu")), torch.randn(1000)
    monkeypatch.setattr("calib.observers.dense", lambda t: dense(t).as_subclass(OnCuda))
    counter.add(x, 0)
    _DeviceCounter(torch.device("cpu")).add(x, 0)  # of another tensor
    why = "slower counting, as its kernel cannot be compiled here: nvrtcResult: NVRTC_ERROR_INVALID_OPTION"
    assert caplog.messages == [why]
    assert not counter._in_one_launch
    monkeypatch.undo()
    counter.add(x, 0)
    assert counter.read(0) == Histogram.of(x.numpy()) + Histogram.of(x.numpy())


@pytest.mark.parametrize("kind", [_CpuCounter, lambda: _DeviceCounter(torch.device("cpu"))])
def test_the_half_is_read_where_values_are_counted(kind):
    """A tensor says which half it is, and may be changed between batches."""
    counter, half = kind(), torch.zeros(1, dtype=torch.int32)
    x, y = torch.randn(30), torch.randn(50)
    for k, values in enumerate((x, y, x)):
        counter.add(values, half.fill_(k % 2))
    assert counter.read(0) == Histogram.of(torch.cat([x, x]).numpy())
    assert counter.read(1) == Histogram.of(y.numpy())


def test_a_numba_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "calib.kernel", None)
    with pytest.raises(CalibError) as caught:
        _kernel()
    assert str(caught.value) == ("observer: numba, which counts on the CPU, cannot be imported. Install it.")


def test_the_openmp_region_refers_to_nothing_around_it() -> None:
    """Or numba's cache never has it: each process would compile it anew, and leave another copy there."""
    kernel = pytest.importorskip("calib.kernel")
    assert kernel._region.__code__.co_cellvars == ()

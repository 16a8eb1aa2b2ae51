"""calib's observers on CUDA tensors."""

import math

import pytest
import torch

from calib.histogram import Histogram
from calib.observers import HistogramObserver

TENSORS = {
    "channels last": lambda: torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last),
    "zeros among others": lambda: torch.relu(torch.randn(1_000_001)),
    "not finite": lambda: torch.tensor([1.0, math.nan, -3.0, math.inf, -math.inf] * 5),
    "float16": lambda: torch.randn(50).half(),
    "no value": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_gpu_counts_what_numpy_counts_and_never_waits(name):
    torch.manual_seed(0)
    x = TENSORS[name]()
    on_gpu, observer = x.cuda(), HistogramObserver()
    torch.cuda.set_sync_debug_mode("error")
    try:
        observer.observe(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert observer.histogram == Histogram.of(x.float().numpy())

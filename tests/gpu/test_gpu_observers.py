"""calib's observers on CUDA tensors."""

import math

import pytest
import torch

from calib.algorithms import threshold
from calib.histogram import Histogram
from calib.observers import HistogramObserver
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.recorded import replayed
from trtpipe.quantization.quantize import prepare
from trtpipe.values import DimRange, LoadedModel, TensorSpec

TENSORS = {
    "channels last": lambda: torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last),
    "zeros among others": lambda: torch.relu(torch.randn(1_000_001)),
    "not finite": lambda: torch.tensor([1.0, math.nan, -3.0, math.inf, -math.inf] * 5),
    "float16": lambda: torch.randn(50).half(),
    "bfloat16": lambda: torch.randn(5000).bfloat16(),
    "beyond the window": lambda: torch.randn(70_001) * 10.0 ** torch.linspace(-44, 38, 70_001),
    "not at 16 bytes": lambda: torch.randn(100_003)[1:],
    "fewer than before the first 16 bytes": lambda: torch.randn(3)[1:],
    "no value": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_gpu_counts_what_numpy_counts_and_never_waits(name, nothing_waits):
    torch.manual_seed(0)
    x = TENSORS[name]()
    on_gpu, observer = x.cuda(), HistogramObserver()
    observer.observe(on_gpu)  # the first compiles the kernel
    with nothing_waits():
        observer.observe(on_gpu)
    once = Histogram.of(x.float().numpy())
    assert observer.histogram == once + once
    assert all(c._in_one_launch for c in observer._counters.values())


def test_observing_a_network_never_waits_and_gives_the_scales_of_the_cpu(nothing_waits):
    """Four batches through a captured network with observers: no synchronisation, and each amax within 1e-5 of what
    the CPU makes of the very same tensors (a convolution's own rounding on the GPU is not what is asked about)."""
    prepared = small_network()
    seen = {key: [] for key in prepared.observers}
    for key, observer in prepared.observers.items():
        observer.register_forward_pre_hook(lambda _, inputs, key=key: seen[key].append(inputs[0]))
    graph, batches = prepared.graph.cuda(), [torch.randn(4, 3, 16, 16).cuda() for _ in range(4)]
    with torch.inference_mode():
        graph(batches[0])  # libraries load their kernels and allocate in the first run
    for key, observer in prepared.observers.items():
        seen[key].clear()
        observer.histogram = HistogramObserver()
    torch.cuda.synchronize()
    with nothing_waits(), torch.inference_mode():
        for x in batches:
            graph(x)
    assert len(prepared.observers) == 3
    for key, observer in prepared.observers.items():
        here = HistogramObserver()
        for x in seen[key]:
            here.observe(x.cpu())
        assert here.histogram.elements > 0
        for algorithm in ("minmax", "entropy_2", "entropy", "percentile", "mse"):
            wanted = threshold(here.histogram, algorithm)
            assert threshold(observer.histogram.histogram, algorithm) == pytest.approx(wanted, rel=1e-5)


def test_replayed_batches_count_what_batches_count():
    """As calibration does: halves in turns, the first batch as it is, then one recording and its replays; and a last
    batch of another size."""
    batches = [torch.randn(4, 3, 16, 16).cuda() for _ in range(9)] + [torch.randn(2, 3, 16, 16).cuda()]
    found = []
    for replays in (False, True):
        prepared = small_network()
        graph, half = prepared.graph.cuda(), torch.zeros(1, dtype=torch.int32, device="cuda")
        for observer in prepared.observers.values():
            observer.histogram = HistogramObserver()
            observer.histogram.half = half
        with (
            torch.inference_mode(),
            replayed(lambda inputs, graph=graph: graph(*inputs), "cuda:0" if replays else "cpu") as run,
        ):
            for k, x in enumerate(batches):
                half.fill_(k % 2)
                run((x,))
            if replays:
                assert len(run._made) == 1
        found.append([o.histogram.halves for o in prepared.observers.values()])
    for ours, theirs in zip(*found, strict=True):
        for here, there in zip(ours, theirs, strict=True):
            assert here.elements == there.elements > 0
            for algorithm in ("minmax", "entropy_2", "mse"):
                assert threshold(there, algorithm) == pytest.approx(threshold(here, algorithm), rel=1e-5)
    assert found[0][0] == found[1][0]


def small_network():
    """Two convolutions and a linear layer, captured, with an observer before each."""
    torch.manual_seed(0)
    dims = {"N": DimRange(1, 4, 8)}
    x, y = TensorSpec("x", "float32", ("N", 3, 16, 16), dims), TensorSpec("y", "float32", ("N", 10), dims)
    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU())
    network = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8 * 12 * 12, 10)).eval()
    return prepare(capture(LoadedModel(bind(network, (x,), {}, ("y",)), (x,), (y,), "0" * 64, "test")))

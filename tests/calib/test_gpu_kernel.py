"""The kernel for CUDA: compiled by the real NVRTC, and its very source by a C++ compiler with CUDA's words for one
thread a block, which runs on the CPU against NumPy's plain histogram. tests/gpu runs it on a GPU."""

import ctypes
import math
import shutil
import subprocess

import numpy as np
import pytest

from calib.histogram import ALL_BINS, BINS, SHIFT, Histogram
from calib.observers import _UNSEEN, _histogram

pytest.importorskip("cuda.bindings.nvrtc")
from calib.gpu_kernel import SOURCE, compiled

#: CUDA's words where a block is one thread: nothing is shared, nobody waits, and blocks run one after the other.
WORDS = """
#include <algorithm>
#include <cstring>
using std::max;
using std::min;
#define __global__
#define __device__
#define __shared__ static
#define warpSize 1
struct float4 { float x, y, z, w; };
static struct { int x; } threadIdx, blockIdx, blockDim, gridDim;
static void __syncthreads() {}
template <class T> static T __shfl_down_sync(unsigned, T value, int) { return value; }
template <class T> static void atomicAdd(T *at, T value) { *at += value; }
static void atomicMin(int *at, int value) { *at = min(*at, value); }
static void atomicMax(int *at, int value) { *at = max(*at, value); }
static int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
"""
LAUNCH = """
extern "C" void launch(int blocks, const float *x, long long size, const int *half, unsigned long long *counts,
                       int slots, int *low, int *high) {
    blockDim.x = 1;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        count(x, size, half, counts, slots, low, high);
}
"""
RNG = np.random.default_rng(0)
VALUES = {
    "several blocks": RNG.normal(size=9000),
    "a rectifier's zeros": np.maximum(RNG.normal(size=9001), 0),
    "not finite": [1.0, math.nan, -3.0, math.inf, -math.inf] * 5,
    "nothing finite": [math.nan, math.inf] * 3,
    "denormal and both zeros": [1e-40, -1e-42, 0.0, -0.0, 3e38],
    "beyond the window": RNG.normal(size=5000) * 10.0 ** np.linspace(-44, 37, 5000),
    "the window's edges": [2.0**-20, np.nextafter(np.float32(2.0**-20), np.float32(0)), 2.0**12, 4095.99],
    "one value": [-2.5],
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """The kernel on the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "count.cpp").write_text(WORDS + SOURCE + LAUNCH)
    options = [f"-DSHIFT={SHIFT}", f"-DBINS={BINS}", "-O1", "-shared", "-fPIC", "-fsanitize=undefined"]
    command = [compiler, *options, "-static-libubsan", "-fno-sanitize-recover", "count.cpp", "-o", "count.so"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "count.so")).launch


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("blocks", [1, 7])
def test_it_counts_what_numpy_counts(name, start, blocks, launch):
    """From every place between 16 bytes, into either half, twice."""
    values = np.asarray(VALUES[name], np.float32)
    room = np.zeros(values.size + 8, np.float32)
    at = (-room.ctypes.data // 4) % 4 + start
    x = room[at : at + values.size]
    x[:] = values
    counts, half = np.zeros((2, ALL_BINS + 5), np.int64), np.zeros(1, np.int32)
    low, high = (np.full(2, unseen, np.int32) for unseen in _UNSEEN[:2])
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, half, counts, low, high)]
    data, which, to, least, most = pointers
    for half[0], part in ((0, x.size), (1, x.size), (1, 1)):
        launch(blocks, data, ctypes.c_longlong(part), which, to, counts.shape[1], least, most)
    assert not counts[:, ALL_BINS:].any()
    found = [_histogram(counts[k, :ALL_BINS], int(low[k]), int(high[k])) for k in (0, 1)]
    assert found == [Histogram.of(values), Histogram.of(values) + Histogram.of(values[:1])]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_87", "sm_90", "sm_120"])
def test_nvrtc_compiles_it(architecture):
    code = compiled(architecture)
    assert code[:4] == b"\x7fELF"
    assert b"count" in code


def test_an_architecture_that_nvrtc_does_not_know_is_said():
    with pytest.raises(RuntimeError, match="nvrtcResult: NVRTC_ERROR_INVALID_OPTION"):
        compiled("sm_1")

"""The counting loop for CUDA, compiled by NVRTC. Import it lazily: PyTorch's CUDA builds bring cuda-bindings.

One launch reads a tensor once; the same by torch's own operations takes a dozen launches and reads it as often.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from calib.histogram import BINS, SHIFT

#: CUDA C++; SHIFT and BINS are those of `calib.histogram`.
SOURCE = r"""
// Most values of a network lie between 2^-20 and 2^12: each block counts those in its shared memory, and adds what it
// counted once. The others go to the counters directly.
#define FLIP 0x7fffffff
#define FIRST (107 << (23 - SHIFT))
#define WINDOW (32 << (23 - SHIFT))

struct Seen {
    unsigned zeros;
    int low, high;
};

static __device__ void see(float value, unsigned *window, unsigned long long *counts, Seen &seen) {
    int bits = __float_as_int(value);
    int index = (bits & FLIP) >> SHIFT;
    if (index < BINS) {
        // As integers, float patterns sort as the floats do once the negative ones are flipped.
        int ordered = bits ^ ((bits >> 31) & FLIP);
        seen.low = min(seen.low, ordered);
        seen.high = max(seen.high, ordered);
    }
    unsigned at = (unsigned)(index - FIRST);
    if (index == 0)
        seen.zeros++;
    else if (at < WINDOW)
        atomicAdd(window + at, 1u);
    else
        atomicAdd(counts + index, 1ull);
}

static __device__ void see(float4 values, unsigned *window, unsigned long long *counts, Seen &seen) {
    see(values.x, window, counts, seen);
    see(values.y, window, counts, seen);
    see(values.z, window, counts, seen);
    see(values.w, window, counts, seen);
}

// x: `size` values. counts [2][slots], low [2] and high [2]: of both halves; *half says which one counts, 0 or 1.
extern "C" __global__ void count(const float *x, long long size, const int *half, unsigned long long *counts,
                                 int slots, int *low, int *high) {
    __shared__ unsigned window[WINDOW];
    for (int i = threadIdx.x; i < WINDOW; i += blockDim.x)
        window[i] = 0;
    __syncthreads();

    int which = *half;
    counts += (long long)which * slots;
    Seen seen = {0, FLIP, -FLIP - 1};
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
    // Four at a time where they begin at 16 bytes; the few before and after one by one.
    long long before = (16 - (unsigned long long)x % 16) % 16 / 4;
    if (before > size)
        before = size;
    long long fours = (size - before) / 4, after = before + 4 * fours;
    for (long long i = first; i < before; i += step)
        see(x[i], window, counts, seen);
    for (long long i = after + first; i < size; i += step)
        see(x[i], window, counts, seen);
    const float4 *wide = (const float4 *)(x + before);
    long long i = first;
    for (; i + step < fours; i += 2 * step) {
        float4 one = wide[i], other = wide[i + step];
        see(one, window, counts, seen);
        see(other, window, counts, seen);
    }
    if (i < fours)
        see(wide[i], window, counts, seen);

    for (int lanes = warpSize / 2; lanes; lanes /= 2) {
        seen.zeros += __shfl_down_sync(~0u, seen.zeros, lanes);
        seen.low = min(seen.low, __shfl_down_sync(~0u, seen.low, lanes));
        seen.high = max(seen.high, __shfl_down_sync(~0u, seen.high, lanes));
    }
    if (threadIdx.x % warpSize == 0) {
        if (seen.zeros)
            atomicAdd(counts, (unsigned long long)seen.zeros);
        atomicMin(low + which, seen.low);
        atomicMax(high + which, seen.high);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WINDOW; i += blockDim.x)
        if (window[i])
            atomicAdd(counts + FIRST + i, (unsigned long long)window[i]);
}
"""
#: Threads of a block, and values that are worth a thread: of a small tensor, few blocks add what they counted.
_THREADS, _VALUES = 1024, 16
_TYPES = (*[ctypes.c_void_p, ctypes.c_longlong], *[ctypes.c_void_p] * 2, ctypes.c_int, *[ctypes.c_void_p] * 2)


def compiled(architecture: str) -> bytes:
    """The machine code of `SOURCE` for a GPU.

    Args:
        architecture: as NVRTC names it, like "sm_90".

    Raises:
        RuntimeError: NVRTC is not there, or does not know the GPU.
    """
    options = [f"--gpu-architecture={architecture}".encode(), b"-DSHIFT=%d" % SHIFT, b"-DBINS=%d" % BINS]
    program = _done(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"count", 0, [], []))
    try:
        _done(nvrtc.nvrtcCompileProgram(program, len(options), options))
        code = bytes(_done(nvrtc.nvrtcGetCUBINSize(program)))
        _done(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def count(x: torch.Tensor, half: torch.Tensor, counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """Add the values of a tensor to counters on its device; nothing waits.

    Args:
        x: float32 [N], N > 0, contiguous, on a CUDA device, as are the others.
        half: int32 [1], 0 or 1, which half of the counters is added to; read on the device.
        counts: int64 [2, S], by the buckets of `calib.histogram`, S at least their number.
        low, high: int32 [2], updated: least and greatest finite pattern, in a form that sorts as the floats do.

    Raises:
        RuntimeError: the kernel cannot be compiled, or launched.
    """
    kernel, processors = _kernel(x.device.index)
    blocks = min(processors, -(-x.numel() // (_THREADS * _VALUES)))
    pointers = [a.data_ptr() for a in (x, half, counts, low, high)]
    values = (pointers[0], x.numel(), *pointers[1:3], counts.shape[1], *pointers[3:])
    stream = torch.cuda.current_stream(x.device).cuda_stream
    _done(driver.cuLaunchKernel(kernel, blocks, 1, 1, _THREADS, 1, 1, 0, stream, (values, _TYPES), 0))


@functools.cache
def _kernel(device: int) -> tuple[Any, int]:
    """The kernel loaded on a GPU, and how many processors that has."""
    major, minor = torch.cuda.get_device_capability(device)
    module = _done(driver.cuModuleLoadData(compiled(f"sm_{major}{minor}")))
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return _done(driver.cuModuleGetFunction(module, b"count")), processors


def _done(answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA's gave beside its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *found = answer
    if status:
        raise RuntimeError(f"{type(status).__name__}: {status.name}")
    return found[0] if found else None

"""A recording stand-in for cuda-python's runtime module, over host memory. A test holds its signatures to the real."""

from __future__ import annotations

import ctypes
import itertools
import types
from types import MappingProxyType


class Status(int):
    """An error code, named as CUDA names it."""

    NAMES = MappingProxyType({2: "cudaErrorMemoryAllocation", 100: "cudaErrorNoDevice", 999: "cudaErrorUnknown"})

    @property
    def name(self):
        return self.NAMES[self]


class Runtime:
    """Each function returns (error code, results...), as cuda-python's do.

    Args:
        failing: function name to the error code or exception that it ends with.

    Attributes:
        calls: (name, arguments) in order.
        live: what was made and not given back: handle or address to its kind.
    """

    FUNCTIONS = (
        "cudaGetDeviceCount", "cudaStreamCreate", "cudaStreamDestroy", "cudaStreamSynchronize", "cudaMalloc",
        "cudaFree", "cudaMallocHost",
        "cudaFreeHost", "cudaMemcpyAsync", "cudaStreamBeginCapture", "cudaStreamEndCapture",
        "cudaGraphInstantiate", "cudaGraphDestroy", "cudaGraphExecDestroy", "cudaGraphLaunch",
    )  # fmt: skip
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, **failing):
        self.failing, self.calls, self.live = failing, [], {}
        self.capturing = False
        self._blocks, self._handles, self._fails_at = {}, itertools.count(0x57AE), None

    def names(self):
        """The functions that were called, in order."""
        return [name for name, _ in self.calls]

    def kinds(self):
        """What is live, sorted."""
        return sorted(self.live.values())

    def fail_at(self, number, failure=999):
        """Let call `number` (from 0) end with this error code or exception, and be without effect."""
        self._fails_at = number, failure

    def entered(self, name, arguments=()):
        """Record a call and raise what it is to fail with; the error code, None where it is to work."""
        failure = self.failing.get(name)
        if self._fails_at is not None and self._fails_at[0] == len(self.calls):
            failure = self._fails_at[1]
        self.calls.append((name, arguments))
        if name == "cudaStreamEndCapture":
            self.capturing = False  # also where the capture is not valid
        if isinstance(failure, Exception):
            try:
                raise failure
            finally:
                failure = None  # else a cycle holds this frame and its callers
        return failure

    def __getattr__(self, name):
        if name not in self.FUNCTIONS:
            raise AttributeError(name)

        def call(*arguments):
            failure = self.entered(name, arguments)
            if failure is not None:
                return Status(failure), None
            result = getattr(self, f"do_{name}")(*arguments)
            return (Status(0),) if result is None else (Status(0), result)

        return call

    def _make(self, kind):
        handle = next(self._handles)
        self.live[handle] = kind
        return handle

    def _block(self, kind, size):
        block = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.live[address], self._blocks[address] = kind, block
        return address

    def _end(self, kind, handle):
        assert self.live.pop(handle) == kind, f"{handle} is no {kind}"

    def do_cudaGetDeviceCount(self):
        return 1

    def do_cudaStreamCreate(self):
        return self._make("stream")

    def do_cudaStreamDestroy(self, stream):
        self._end("stream", stream)

    def do_cudaStreamSynchronize(self, stream):
        assert self.live[stream] == "stream"
        assert not self.capturing

    def do_cudaMalloc(self, size):
        return self._block("memory", size)

    def do_cudaFree(self, devPtr):
        self._end("memory", devPtr)

    def do_cudaMallocHost(self, size):
        return self._block("host", size)

    def do_cudaFreeHost(self, ptr):
        self._end("host", ptr)

    def do_cudaMemcpyAsync(self, dst, src, count, kind, stream):
        assert self.live[stream] == "stream"
        assert self.live[dst if kind == 1 else src] == "memory"
        ctypes.memmove(dst, src, count)

    def do_cudaStreamBeginCapture(self, stream, mode):
        self.capturing = True

    def do_cudaStreamEndCapture(self, stream):
        return self._make("graph")

    def do_cudaGraphInstantiate(self, graph, flags):
        assert self.live[graph] == "graph"
        return self._make("executable graph")

    def do_cudaGraphDestroy(self, graph):
        self._end("graph", graph)

    def do_cudaGraphExecDestroy(self, graphExec):
        self._end("executable graph", graphExec)

    def do_cudaGraphLaunch(self, graphExec, stream):
        assert self.live[graphExec] == "executable graph"

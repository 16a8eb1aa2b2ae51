"""A stub engine with bindings and the memory of its GPU, for the contract cases of the runner.

Only imported in a process whose path begins with a stub site.
"""

from __future__ import annotations

import ctypes

import numpy as np
import tensorrt as trt
import tensorrt_libs as stub
from world import VERSION

from trtpipe.trt.memory import Buffer, Graph, HostBuffer
from trtpipe.trt.owned import Owned

#: Two profiles: batches of 1, and of 2 to 8.
PROFILES = (((1, 4), (1, 4), (1, 4)), ((2, 4), (4, 4), (8, 4)))


class HostMemory:
    """Stands for a GPU's memory with the host's, so that what is uploaded and downloaded can be seen."""

    provider = "torch"
    stream = 0x57AE

    def __init__(self):
        self.synchronized = 0
        self.captured = 0
        self.launched = 0
        self.destroyed = 0
        self.closed = 0
        self.uploads = []

    def allocate(self, size):
        owner = ctypes.create_string_buffer(max(size, 1))
        return Buffer(ctypes.addressof(owner), size, Owned(owner))

    def allocate_host(self, size):
        array = np.zeros(size, np.uint8)
        return HostBuffer(array, Owned(array))

    def close(self):
        self.closed += 1

    def upload(self, buffer, array):
        self.uploads.append(array.copy())
        ctypes.memmove(buffer.address, array.ctypes.data, array.nbytes)

    def download(self, buffer, array):
        ctypes.memmove(array.ctypes.data, buffer.address, array.nbytes)

    def synchronize(self):
        self.synchronized += 1

    def capture(self, enqueue):
        self.captured += 1
        enqueue()

        def launch():
            self.launched += 1

        def destroy(graph):
            self.destroyed += 1

        return Graph(launch, Owned(object(), destroy))


class World:
    """An engine with input x float32 [-1, 4] and output y float16 [-1, 2]; `seen` is what its context was told."""

    def __init__(self):
        stub.reset()
        self.seen = []
        self.runtime = trt.Runtime(trt.Logger())
        self.engine = self.runtime.deserialize_cuda_engine(b"x" * 64)
        self.context = self.engine.create_execution_context()
        engine, context = self.engine, self.context
        stub.answer(lambda: engine.num_optimization_profiles, len(PROFILES))
        if VERSION >= (10,):
            stub.answer(lambda: engine.streamable_weights_size, 0)
        self.tensors(engine, context)
        self.note("deserialize", lambda: self.runtime.deserialize_cuda_engine(b"x" * 64), lambda a, b, c, s: ())
        self.note("set_profile", lambda: context.set_optimization_profile_async(0, 1), lambda a, b, c, s: (a, b))
        self.seen.clear()

    def tensors(self, engine, context):
        stub.answer(lambda: engine.num_io_tensors, 2)
        stub.keyed(lambda: engine.get_tensor_name(0), "int")
        stub.answer(lambda: engine.get_tensor_name(0), "x", key=0)
        stub.answer(lambda: engine.get_tensor_name(1), "y", key=1)
        for method in ("get_tensor_dtype", "get_tensor_mode", "get_tensor_shape"):
            stub.keyed(lambda m=method: getattr(engine, m)("x"), "name")
        for name, dtype, mode, shape in (("x", "FLOAT", "INPUT", (-1, 4)), ("y", "HALF", "OUTPUT", (-1, 2))):
            stub.answer(lambda n=name: engine.get_tensor_dtype(n), getattr(trt.DataType, dtype), key=name)
            stub.answer(lambda n=name: engine.get_tensor_mode(n), getattr(trt.TensorIOMode, mode), key=name)
            stub.answer(lambda n=name: engine.get_tensor_shape(n), stub.dims(*shape), key=name)
        self.note("set_shape", lambda: context.set_input_shape("x", (1, 4)), self.named_dims)
        self.note("set_address", lambda: context.set_tensor_address("x", 1), lambda a, b, c, s: (stub.text(a), b))
        self.note("execute", lambda: context.execute_async_v3(1), lambda a, b, c, s: (a,))
        stub.answer(lambda: context.get_tensor_shape("y"), stub.dims(3, 2))

    def note(self, name, call, read):
        stub.hook(call, lambda *raw: self.seen.append((name, read(*raw))))

    @staticmethod
    def named_dims(a, b, c, stack):
        return stub.text(a), stub.read_dims(b)

    def asked(self, name):
        return [arguments for called, arguments in self.seen if called == name]

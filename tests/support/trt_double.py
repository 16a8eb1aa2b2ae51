"""A recording stand-in for TensorRT's runtime, over the memory of `cuda_double`; a test holds its signatures to the
real ones'.

The engine gives y = 2 * (x's first two columns): x float32 [N, 3] and y float16 [N, 2], N 1 to 3 in its first profile
and 4 to 8 in its second.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from types import SimpleNamespace

import numpy as np

from trtpipe.trt.driver import Driver, Gpu
from trtpipe.trt.flavour import Flavour, expected

GPU = Driver("12.6", (Gpu(0, "NVIDIA L4", "8.9", 24 << 30),))
VERSIONS = {"tensorrt": "10.16.1", "tensorrt_rtx": "1.7.1"}
PROFILES = (((1, 3), (2, 3), (3, 3)), ((4, 3), (4, 3), (8, 3)))
DataType = Enum("DataType", ["FLOAT", "HALF"])
TensorIOMode = Enum("TensorIOMode", ["INPUT", "OUTPUT"])
EngineValidity = Enum("EngineValidity", ["VALID", "SUBOPTIMAL", "INVALID"])


def plan(name):
    """The bytes of a plan of this flavour."""
    version = bytes(int(n) for n in VERSIONS[name].split(".")) + b"\0"
    return (
        {"tensorrt": b"ftrt", "tensorrt_rtx": b"vtrt"}[name]
        + bytes(12)
        + b"\x40"
        + bytes(7)
        + version
        + bytes(4)
        + b"\x08"
        + bytes(31)
    )


class Thing:
    """An object of TensorRT's: alive until it is dropped, which is recorded as "~" and its kind.

    A method that is to fail raises what it is given, or answers as TensorRT's does: False, None, or nothing at all. Of
    one that works an error is logged, as a parser or a tactic that is passed over logs one.
    """

    def __init__(self, cuda, kind, *needs):
        self._cuda, self._kind, self._needs = cuda, kind, needs
        self._handle = cuda._make(kind)

    def __del__(self):
        self._cuda.calls.append((f"~{self._kind}", ()))
        self._cuda._end(self._kind, self._handle)

    def _do(self, name, arguments, refused, result):
        if self._cuda.entered(name, arguments) is not None:
            return refused
        self._cuda.logger.log("Severity.ERROR", f"{name} went well in the end")
        return result()


class Runtime(Thing):
    def __init__(self, cuda, world):
        super().__init__(cuda, "runtime")
        self._world = world

    def get_engine_validity(self, buffer):
        valid = EngineValidity.VALID, 0
        return self._do("get_engine_validity", (), valid, lambda: (self._world.validity, 0))

    def deserialize_cuda_engine(self, serialized_engine):
        return self._do("deserialize_cuda_engine", (), None, lambda: Engine(self._cuda, self._world, self))


class Engine(Thing):
    num_io_tensors, num_optimization_profiles, streamable_weights_size = 2, len(PROFILES), 0

    def __init__(self, cuda, world, runtime):
        super().__init__(cuda, "engine", runtime)
        self._world = world

    def get_tensor_name(self, index):
        return "xy"[index]

    def get_tensor_dtype(self, name):
        return {"x": DataType.FLOAT, "y": DataType.HALF}[name]

    def get_tensor_mode(self, name):
        return {"x": TensorIOMode.INPUT, "y": TensorIOMode.OUTPUT}[name]

    def get_tensor_shape(self, name):
        return {"x": (-1, 3), "y": (-1, 2)}[name]

    def get_tensor_profile_shape(self, name, profile_index):
        return PROFILES[profile_index]

    def create_runtime_config(self):
        return self._do("create_runtime_config", (), None, lambda: Config(self._cuda, "config", self))

    def create_execution_context(self, runtime_config=None):
        config = runtime_config
        self._world.strategy = None if config is None else config.dynamic_shapes_kernel_specialization_strategy
        return self._do("create_execution_context", (), None, lambda: Context(self._cuda, self._world, self))


class Config(Thing):
    dynamic_shapes_kernel_specialization_strategy = None

    def create_runtime_cache(self):
        return self._do("create_runtime_cache", (), None, lambda: Cache(self._cuda, "cache"))

    def set_runtime_cache(self, cache):
        return self._do("set_runtime_cache", (), False, lambda: True)


class Cache(Thing):
    def serialize(self):
        return self._do("serialize", (), None, lambda: memoryview(b"kernels"))

    def deserialize(self, blob):
        return self._do("deserialize", (), False, lambda: bytes(blob) == b"kernels")


class Context(Thing):
    def __init__(self, cuda, world, engine):
        super().__init__(cuda, "context", engine)
        self._world, self._shape, self._profile = world, (), 0
        self._addresses, self._allocators = {}, {}

    def set_optimization_profile_async(self, profile_index, stream_handle):
        assert self._cuda.live[stream_handle] == "stream"

        def work():
            self._profile, self._shape = profile_index, ()
            return True

        return self._do("set_optimization_profile_async", (profile_index,), False, work)

    def set_input_shape(self, name, shape):
        low, _, high = PROFILES[self._profile]
        assert all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True))

        def work():
            self._shape = shape
            return True

        return self._do("set_input_shape", (name, shape), False, work)

    def get_tensor_shape(self, name):
        rows = -1 if self._world.decides else self._shape[0]
        return self._do("get_tensor_shape", (name,), (rows, 2), lambda: (rows, 2))

    def set_tensor_address(self, name, memory):
        assert self._cuda.live[memory] == "memory"

        def work():
            self._addresses[name] = memory
            return True

        return self._do("set_tensor_address", (name,), False, work)

    def set_output_allocator(self, name, output_allocator):
        def work():
            self._allocators[name] = output_allocator
            return True

        return self._do("set_output_allocator", (name,), False, work)

    def execute_async_v3(self, stream_handle):
        assert self._cuda.live[stream_handle] == "stream"
        return self._do("execute_async_v3", (), False, lambda: self._execute(stream_handle))

    def _execute(self, stream):
        if self._cuda.capturing:
            return True
        size = 4 * int(np.prod(self._shape))
        x = np.frombuffer(ctypes.string_at(self._addresses["x"], size), np.float32).reshape(self._shape)
        y = (2 * x[:, :2]).astype(np.float16)
        address = self._addresses.get("y")
        if self._world.decides:
            y = y[: len(y) - self._world.dropped]
            address = self._allocators["y"].reallocate_output_async("y", 0, y.nbytes, 256, stream)
            if not address:
                return False
            if self._world.says_shapes:
                self._allocators["y"].notify_shape("y", y.shape)
        ctypes.memmove(address, y.tobytes(), y.nbytes)
        return True


def flavour(cuda, name="tensorrt", *, decides=False, dropped=0, validity=EngineValidity.VALID):
    """The flavour whose module this is; its `world` can be changed while an engine is open.

    Args:
        cuda: records the calls of both, and has some fail.
        name: "tensorrt" or "tensorrt_rtx".
        decides: only the execution decides how many rows y has.
        dropped: the last rows of x that y then has no row for.
        validity: what TensorRT-RTX says of a plan on the GPU here.
    """
    base = type("Base", (), {})
    world = SimpleNamespace(decides=decides, dropped=dropped, says_shapes=True, validity=validity)

    def runtime(logger):
        cuda.entered("Runtime")
        cuda.logger = logger
        return Runtime(cuda, world)

    module = SimpleNamespace(
        Runtime=runtime, ILogger=base, IOutputAllocator=base, world=world,
        DynamicShapesKernelSpecializationStrategy=Enum("Strategy", ["LAZY", "EAGER", "NONE"]),
    )  # fmt: skip
    return Flavour(name, module, VERSIONS[name], expected(name, VERSIONS[name]))

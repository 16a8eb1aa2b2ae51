"""What the stub libraries answer in the contract cases, a small network and a plan, and a record of what was asked.

Only imported in a process whose path begins with a stub site.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorrt as trt
import tensorrt_libs as stub

from trtpipe.job.sections import Build
from trtpipe.trt.driver import Driver, Gpu
from trtpipe.values import DimRange, OnnxModel, TensorSpec

VERSION = tuple(int(p) for p in stub.VERSION.split("."))
PLAN = b"ftrt" + bytes(20) + bytes((*VERSION, 0)[:4]) + bytes(36)
GPU = Driver("12.6", (Gpu(0, "NVIDIA L4", "8.9", 24 << 30),))
#: With a DLA.
ORIN = Driver("12.6", (Gpu(0, "Orin", "8.7", 32 << 30),))
BATCH = DimRange(1, 4, 8)
MODEL = OnnxModel(
    b"\x3a\x07\x2a\x05\x10\x01\x42\x01w",  # a graph with the floating initializer w
    17,
    (TensorSpec("image", "float32", ("N", 3, 8, 8), {"N": BATCH}),),
    (TensorSpec("logits", "float32", ("N", 10), {"N": BATCH}),),
)
#: Layers of the network: name, type, output dtype, output tensor, input tensor.
LAYERS = (
    ("layer1.conv", "CONVOLUTION", "HALF", "t0", "image"),
    ("layer1.q", "QUANTIZE", "INT8", "t1", "t0"),
    ("layer1.dq", "DEQUANTIZE", "FLOAT", "t2", "t1"),
    ("layer2.conv", "CONVOLUTION", "FLOAT", "t3", "t2"),
    ("head.fc", "MATRIX_MULTIPLY", "FLOAT", "logits", "t3"),
)
#: Attributes of the builder config that hold a number, and those that hold an enum: (attribute, enum, a member).
NUMBERS = (
    "builder_optimization_level", "max_aux_streams", "avg_timing_iterations", "DLA_core", "l2_limit_for_tiling",
    "max_num_tactics",
)  # fmt: skip
ENUMS = (
    ("profiling_verbosity", "ProfilingVerbosity", "NONE"),
    ("hardware_compatibility_level", "HardwareCompatibilityLevel", "NONE"),
    ("runtime_platform", "RuntimePlatform", "SAME_AS_BUILD"),
    ("tiling_optimization_level", "TilingOptimizationLevel", "NONE"),
    ("default_device_type", "DeviceType", "GPU"),
)
#: The slot of ILogger.log: from 11 on, ILogger is a versioned interface like the progress monitor.
LOG_SLOT = 0 if VERSION < (11,) else 4
Reader = Callable[[int, int, int, int], tuple[Any, ...]]


def build(**options: Any) -> Build:
    """A job's build section for the stubbed TensorRT."""
    return Build(target="tensorrt", **options)


def _nothing(a: int, b: int, c: int, stack: int) -> tuple[Any, ...]:
    return ()


def _integer(a: int, b: int, c: int, stack: int) -> tuple[Any, ...]:
    return (a & 0xFFFFFFFF,)


class World:
    """The fakes that the code under test is given, and `seen`: the calls it made, in order, as (name, arguments)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        #: Addresses of the native sides of the Python objects that were set.
        self.monitor: list[int] = []
        self.calibrator: list[int] = []
        stub.reset()
        self.logger = trt.Logger()
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(0 if VERSION >= (10,) else 1)
        self.config = self.builder.create_builder_config()
        self.profile = self.builder.create_optimization_profile()
        self.parser = trt.OnnxParser(self.network, self.logger)
        self.parse(accepted=True)
        self.bindings({"image": ("FLOAT", (-1, 3, 8, 8))}, {"logits": ("FLOAT", (-1, 10))})
        self.layers(LAYERS)
        stub.answer(lambda: self.config.add_optimization_profile(self.profile), 0)
        stub.host_memory(lambda: self.builder.build_serialized_network(self.network, self.config), PLAN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._watch()

    def asked(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of this name."""
        return [arguments for called, arguments in self.seen if called == name]

    def names(self) -> list[str]:
        """The names of the calls, in order."""
        return [name for name, _ in self.seen]

    def flags(self) -> set[str]:
        """The builder flags that were set, by the names that this release gives their integers."""
        names = {int(value): name for name, value in trt.BuilderFlag.__members__.items()}
        return {names[number] for (number,) in self.asked("set_flag")}

    def parse(self, *, accepted: bool) -> None:
        """Let the parser accept or refuse every model."""
        stub.answer(lambda: self.parser.parse(b"x"), accepted)
        stub.answer(lambda: self.parser.num_errors, 0 if accepted else 1)

    def bindings(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Let the network have these inputs and outputs: name to (dtype, shape)."""
        network = self.network
        for get, tensors in ((network.get_input, inputs), (network.get_output, outputs)):
            stub.keyed(lambda get=get: get(0), "int")
            for index, (name, (dtype, shape)) in enumerate(tensors.items()):
                _tensor(get(index), name, dtype, shape)
        stub.answer(lambda: network.num_inputs, len(inputs))
        stub.answer(lambda: network.num_outputs, len(outputs))

    def layers(self, layers: tuple[tuple[str, str, str, str, str], ...]) -> None:
        """Let the network have these layers, described as in LAYERS."""
        stub.answer(lambda: self.network.num_layers, len(layers))
        stub.keyed(lambda: self.network.get_layer(0), "int")
        for index, (name, kind, dtype, output, fed_by) in enumerate(layers):
            layer = self.network.get_layer(index)
            stub.answer(lambda layer=layer: layer.name, name)
            stub.answer(lambda layer=layer: layer.type, getattr(trt.LayerType, kind))
            stub.answer(lambda layer=layer: layer.num_outputs, 1)
            stub.answer(lambda layer=layer: layer.num_inputs, 1)
            _tensor(layer.get_output(0), output, dtype, (1,))
            _tensor(layer.get_input(0), fed_by, "FLOAT", (1,))

    def during_build(self, act: Callable[[], None]) -> None:
        """Do this inside the native build, as TensorRT calls back."""

        def build(*_: int) -> None:
            self.seen.append(("build", ()))
            act()

        call = lambda: self.builder.build_serialized_network(self.network, self.config)  # noqa: E731
        stub.hook(call, build)
        self.seen.clear()

    def _note(self, name: str, call: Callable[[], object], read: Reader) -> None:
        """Record each call of the method that `call()` calls, with what `read` makes of its raw arguments."""
        stub.hook(call, lambda *raw: self.seen.append((name, read(*raw))))

    def _watch(self) -> None:
        """Record what the builder is told. The calls made here come before the code under test and are forgotten."""
        builder, config, network, note = self.builder, self.config, self.network, self._note
        flag = next(iter(trt.BuilderFlag.__members__.values()))
        note("create_network", lambda: builder.create_network(0 if VERSION >= (10,) else 1), _integer)
        note("parse", lambda: self.parser.parse(b"x"), _nothing)
        note("build", lambda: builder.build_serialized_network(network, config), _nothing)
        note("set_flag", lambda: config.set_flag(flag), _integer)
        note("clear_flag", lambda: config.clear_flag(flag), _integer)
        note("add_profile", lambda: config.add_optimization_profile(self.profile), _nothing)
        note("set_shape", lambda: self.profile.set_shape("x", (1,), (1,), (1,)), _shape)
        workspace = trt.MemoryPoolType.WORKSPACE
        note("set_memory_pool_limit", lambda: config.set_memory_pool_limit(workspace, 1),
             lambda a, b, c, s: (a & 0xFFFFFFFF, b))  # fmt: skip
        note("set_tactic_sources", lambda: config.set_tactic_sources(1), _integer)
        note("set_device_type", lambda: config.set_device_type(network.get_layer(0), trt.DeviceType.GPU), self._placed)
        for attribute in NUMBERS:
            if hasattr(type(config), attribute):
                note(attribute, lambda a=attribute: setattr(config, a, 1), _integer)
        for attribute, enum, member in ENUMS:
            if hasattr(type(config), attribute):
                value = getattr(getattr(trt, enum), member)
                note(attribute, lambda a=attribute, v=value: setattr(config, a, v), _integer)
        for tensor in (network.get_input(0), network.get_output(0)):
            name = f"allowed_formats.{tensor.name}"
            note(name, lambda t=tensor: setattr(t, "allowed_formats", 1), _integer)
        note("create_timing_cache", lambda: config.create_timing_cache(b""), _nothing)
        note("set_timing_cache", lambda: config.set_timing_cache(config.create_timing_cache(b""), False), _nothing)
        if hasattr(type(config), "progress_monitor"):
            note("progress_monitor", lambda: setattr(config, "progress_monitor", None), self._keep(self.monitor))
        if hasattr(type(config), "int8_calibrator"):
            note("int8_calibrator", lambda: setattr(config, "int8_calibrator", None), self._keep(self.calibrator))
            note("set_calibration_profile", lambda: config.set_calibration_profile(self.profile), _nothing)
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if hasattr(type(layer), "precision"):
                read = lambda a, b, c, s, name=layer.name: (name, a & 0xFFFFFFFF)  # noqa: E731
                note("layer.precision", lambda layer=layer: setattr(layer, "precision", trt.float32), read)
        self.monitor.clear()
        self.calibrator.clear()
        self.seen.clear()

    def _keep(self, into: list[int]) -> Reader:
        def read(a: int, b: int, c: int, stack: int) -> tuple[Any, ...]:
            into.append(a)
            return ()

        return read

    def _placed(self, a: int, b: int, c: int, stack: int) -> tuple[Any, ...]:
        layers = [self.network.get_layer(i) for i in range(len(LAYERS))]
        (name,) = [layer.name for layer in layers if stub.address(lambda layer=layer: layer.name) == a]
        return name, b & 0xFFFFFFFF


def _tensor(tensor: Any, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    stub.answer(lambda: tensor.name, name)
    stub.answer(lambda: tensor.dtype, getattr(trt.DataType, dtype))
    stub.answer(lambda: tensor.shape, stub.dims(*shape))


def _shape(a: int, b: int, c: int, stack: int) -> tuple[Any, ...]:
    """8.6 passes the Dims by value, on the stack; 10 by reference."""
    return stub.text(a), ("min", "opt", "max")[b & 0xFF], stub.read_dims(c if VERSION >= (10,) else stack)

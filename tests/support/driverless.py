"""Drive Torch-TensorRT's dynamo frontend on a machine without an NVIDIA driver, for tests and benchmarks.

TensorRT-RTX's Builder compiles for other machines, so it needs no GPU. What does need one is a handful of torch.cuda
queries, answered here with constants, and `Runtime.deserialize_cuda_engine`, which Torch-TensorRT calls only to
serialize the result again: a stand-in keeps the bytes. Nothing between the exported program and the engine's bytes is
replaced: lowering, converters, network and build are the real ones. Of a hybrid module, partitioning is too; what has
no GPU to go to is the modules that stay in PyTorch, kept on the CPU, and the engines, which nothing loads.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

#: Every torch.cuda answer that Torch-TensorRT 2.14 asks for: the first two while importing, the third converting.
CUDA_ANSWERS = {
    "get_device_capability": lambda *a, **k: (8, 9),
    "current_device": lambda: 0,
    "mem_get_info": lambda *a, **k: (8 << 30, 8 << 30),
}


class CapturedEngine:
    """What the interpreter reads from an ICudaEngine, from bytes alone."""

    def __init__(self, plan: Any) -> None:
        self._plan = bytes(plan)

    def serialize(self) -> bytes:
        return self._plan

    def get_aliased_input_tensor(self, name: str) -> str:
        return ""


class CapturingRuntime:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, plan: Any) -> CapturedEngine:
        return CapturedEngine(plan)


class UnloadedEngine:
    """What a TorchTensorRTModule asks of the engine that it has just loaded."""

    def set_output_tensors_as_unowned(self, enabled: bool) -> None:
        pass


@dataclass(frozen=True)
class Part:
    """One network that was built: the graph it was converted from, and what stood in it, as in `Network`.

    `profiles` has, for each profile, the (min, opt, max) shapes of every input.
    """

    graph: Any
    scales: dict[str, np.ndarray]
    bindings: dict[str, tuple[tuple[int, ...], str]]
    profiles: list[dict[str, tuple[tuple[int, ...], ...]]]


@dataclass
class Network:
    """What stood in the network that TensorRT was given, read just before the build.

    `kinds` maps a layer's name to its type, `feeds` to the types of the layers that its inputs come from. `scales`
    maps the name of each Q or DQ layer to its float32 scale or scales; `dtypes` counts layers by the dtype of their
    first output; `bindings` maps a binding's name to its shape and dtype; `calls` are the patched entry points that
    were used. `parts` has an entry for each network, oldest first.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    feeds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scales: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    bindings: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    config: Any = None
    calls: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def read(self, network: Any, trt: Any) -> None:
        self.scales, self.dtypes, self.bindings, self.layers = {}, {}, {}, []
        producers = {}
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        made_by = {layer.get_output(0).name: _kind(layer) for layer in layers}
        for layer in layers:
            given = [layer.get_input(k) for k in range(layer.num_inputs)]
            self.kinds[layer.name] = _kind(layer)
            self.feeds[layer.name] = tuple(made_by.get(t.name, "INPUT") for t in given if t is not None)
            if layer.type == trt.LayerType.CONSTANT:
                layer.__class__ = trt.IConstantLayer
                producers[layer.get_output(0).name] = layer.weights
        for layer in layers:
            kind = str(layer.get_output(0).dtype).rpartition(".")[2]
            self.dtypes[kind] = self.dtypes.get(kind, 0) + 1
            self.layers.append(layer.name)
            if layer.type in (trt.LayerType.QUANTIZE, trt.LayerType.DEQUANTIZE):
                scale = producers.get(layer.get_input(1).name)
                self.scales[layer.name] = np.empty(0) if scale is None else _floats(scale, trt)  # NVFP4's are computed
        for count, get in ((network.num_inputs, network.get_input), (network.num_outputs, network.get_output)):
            for i in range(count):
                t = get(i)
                self.bindings[t.name] = (tuple(t.shape), str(t.dtype).rpartition(".")[2])


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _floats(weights: Any, trt: Any) -> np.ndarray:
    array = weights if isinstance(weights, np.ndarray) else None
    if array is None:
        return np.full(weights.size, np.nan, np.float32)  # BF16, which NumPy does not have
    return np.asarray(array, np.float32).reshape(-1).copy()


def _noting(calls: list[str], name: str, function: Any) -> Any:
    def wrapped(*a: Any, **k: Any) -> Any:
        calls.append(name)
        return function(*a, **k)

    return wrapped


@contextlib.contextmanager
def driverless() -> Iterator[Network]:
    """Import and use torch_tensorrt inside; on a machine with a GPU only the network is read."""
    import tensorrt_rtx
    import torch

    from trtpipe.trt import driver

    seen = Network()
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            gpu = driver.Driver("13.0", (driver.Gpu(0, "none: driverless tests", "8.9", 8 << 30),))
            stack.enter_context(mock.patch.object(driver, "probe", return_value=gpu))
            for name, answer in CUDA_ANSWERS.items():
                stack.enter_context(
                    mock.patch.object(torch.cuda, name, _noting(seen.calls, f"torch.cuda.{name}", answer))
                )
            runtime = _noting(seen.calls, "tensorrt_rtx.Runtime", CapturingRuntime)
            stack.enter_context(mock.patch.object(tensorrt_rtx, "Runtime", runtime))
        stack.enter_context(_reading(seen, tensorrt_rtx))
        yield seen


@contextlib.contextmanager
def _reading(seen: Network, trt: Any) -> Iterator[None]:
    """Read the network where Torch-TensorRT has finished it and not yet built."""
    from trtpipe.routes.torch_tensorrt import route

    with contextlib.suppress(Exception):
        route.load("tensorrt_rtx")
    import torch
    from torch_tensorrt.dynamo import _compiler
    from torch_tensorrt.dynamo.conversion._TRTInterpreter import TRTInterpreter
    from torch_tensorrt.dynamo.runtime import TorchTensorRTModule

    original = TRTInterpreter._populate_trt_builder_config

    def populate(self: Any, *a: Any, **k: Any) -> Any:
        seen.read(self.ctx.net, trt)
        seen.config = original(self, *a, **k)
        names = [self.ctx.net.get_input(i).name for i in range(self.ctx.net.num_inputs)]
        profiles = [{n: tuple(map(tuple, p.get_shape(n))) for n in names} for p in self.optimization_profiles or []]
        seen.parts.append(Part(copy.deepcopy(self.module), seen.scales, seen.bindings, profiles))
        return seen.config

    def setup_engine(self: Any) -> None:
        self.engine = UnloadedEngine()

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(TRTInterpreter, "_populate_trt_builder_config", populate))
        if not torch.cuda.is_available():
            stack.enter_context(
                mock.patch.object(
                    TorchTensorRTModule, "setup_engine", _noting(seen.calls, "setup_engine", setup_engine)
                )
            )
            stack.enter_context(mock.patch.object(_compiler, "to_torch_device", return_value=torch.device("cpu")))
        yield

"""How torch2trt 0.5.0 converts: Python functions replaced by name while the module runs, and a network written to.

Written from its observed behaviour, for the double. The network computes nothing: its layers know their kind, their
inputs and what was set on them.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    BOOL = 4


KINDS = {torch.float32: DataType.FLOAT, torch.float16: DataType.HALF, torch.bool: DataType.BOOL}
#: What the double has a converter for: one layer each.
ABLE = (
    "torch.nn.functional.conv2d", "torch.nn.functional.linear", "torch.nn.functional.relu", "torch.relu", "torch.add",
    "torch.Tensor.__add__", "torch.mean", "torch.Tensor.mean", "torch.cat", "torch.matmul", "torch.flatten",
    "torch.Tensor.reshape", "torch.nn.functional.max_pool2d", "torch.nn.functional.adaptive_avg_pool2d", "torch.mul",
    "torch.Tensor.softmax", "torch.transpose", "torch.Tensor.permute", "torch.nn.functional.hardtanh",
    "torch.Tensor.__getitem__", "torch.Tensor.expand", "torch.nn.functional.batch_norm",
)  # fmt: skip


class Tensor:
    def __init__(self, name: str, dtype: DataType, shape: tuple[int, ...] = ()) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self.layer: Layer | None = None


class Layer:
    def __init__(self, *inputs: Tensor, kind: str = "", dtype: DataType = DataType.FLOAT, **given: Any) -> None:
        self._inputs, self.kind, self.given, self.name = list(inputs), kind, given, ""
        self._output = Tensor(f"({kind})", dtype)
        self._output.layer = self

    num_inputs = property(lambda self: len(self._inputs))

    def get_input(self, index: int) -> Tensor:
        return self._inputs[index]

    def set_input(self, index: int, tensor: Tensor) -> None:
        self._inputs[index:] = [tensor]

    def get_output(self, index: int) -> Tensor:
        assert index == 0
        return self._output


class Network:
    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.layers: list[Layer] = []

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))
    num_layers = property(lambda self: len(self.layers))

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    def add(self, kind: str, *inputs: Tensor, **given: Any) -> Layer:
        assert all(isinstance(t, Tensor) for t in inputs), inputs
        self.layers.append(Layer(*inputs, kind=kind, **given))
        return self.layers[-1]

    def add_constant(self, shape: tuple[int, ...], weights: Any) -> Layer:
        assert isinstance(weights, np.ndarray)
        assert weights.dtype == np.float32  # 8.6 has no INT8 constants
        assert weights.flags.c_contiguous
        assert tuple(shape) == weights.shape
        return self.add("CONSTANT", value=weights)

    def add_quantize(self, input: Tensor, scale: Tensor, output_type: DataType = DataType.INT8) -> Layer:
        assert output_type is DataType.INT8
        assert (input.dtype, scale.dtype) == (DataType.FLOAT, DataType.FLOAT)
        return self.add("QUANTIZE", input, scale, dtype=DataType.INT8)

    def add_dequantize(self, input: Tensor, scale: Tensor, output_type: DataType = DataType.FLOAT) -> Layer:
        assert output_type is DataType.FLOAT
        assert (input.dtype, scale.dtype) == (DataType.INT8, DataType.FLOAT)
        return self.add("DEQUANTIZE", input, scale)

    def add_cast(self, input: Tensor, to_type: DataType) -> Layer:
        return self.add("CAST", input, dtype=to_type)

    def add_shuffle(self, input: Tensor) -> Layer:
        return self.add("SHUFFLE", input)

    def add_matrix_multiply(self, input0: Tensor, op0: Any, input1: Tensor, op1: Any) -> Layer:
        return self.add("MATRIX_MULTIPLY", input0, input1, operations=(op0, op1))

    def add_elementwise(self, input1: Tensor, input2: Tensor, op: Any) -> Layer:
        return self.add("ELEMENTWISE", input1, input2, operation=op)

    def add_convolution_nd(
        self, input: Tensor, num_output_maps: int, kernel_shape: Any, kernel: Any, bias: Any
    ) -> Layer:
        return self.add("CONVOLUTION", input, maps=num_output_maps, window=kernel_shape, kernel=kernel, bias=bias)

    def add_deconvolution_nd(
        self, input: Tensor, num_output_maps: int, kernel_shape: Any, kernel: Any, bias: Any
    ) -> Layer:
        return self.add("DECONVOLUTION", input, maps=num_output_maps, window=kernel_shape, kernel=kernel, bias=bias)


class Named:
    """The network as a converter sees it: each new layer is named after the module that runs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._context.bare, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            made = found(*args, **kwargs)
            if isinstance(made, Layer):
                scope = self._context.names[self._context.stack[-1]]
                k = self._counts[scope] = self._counts.get(scope, -1) + 1
                made.name = f"{scope}:{k}:{made.kind}:GPU"
            return made

        return wrapper if callable(found) else found


class Config:
    def __init__(self) -> None:
        self.flags: list[Any] = []

    def set_flag(self, flag: Any) -> None:
        self.flags.append(flag)


class Context:
    def __init__(self, network: Network, module: torch.nn.Module, asked: dict[str, Any]) -> None:
        self.bare, self.names, self.torch2trt_kwargs = network, {m: n for n, m in module.named_modules()}, asked
        self.stack: list[torch.nn.Module] = []
        self.lock = False
        self.method_args: Any = None
        self.method_kwargs: Any = None
        self.method_return: Any = None
        self.network, self.builder_config = Named(self), Config()


class Hooks:
    """`CONVERTERS` and `tensorrt_converter` of the package, and the conversion by them."""

    def __init__(self) -> None:
        self.converters: dict[Any, dict[str, Any]] = {}
        for name in ABLE:
            self.tensorrt_converter(name)(one_layer)

    def tensorrt_converter(self, method: str, is_real: bool = True, enabled: bool = True, imports: Any = ()) -> Any:
        parts = method.split(".")
        for k in range(len(parts) - 1, 0, -1):
            with contextlib.suppress(ImportError):
                owner = importlib.import_module(".".join(parts[:k]))
                break
        for part in parts[k:-1]:
            owner = getattr(owner, part)

        def register(converter: Callable[[Any], None]) -> Callable[[Any], None]:
            self.converters[method] = {"converter": converter, "is_real": is_real, "owner": owner, "name": parts[-1]}
            return converter

        return register

    @contextlib.contextmanager
    def attached(self, ctx: Context) -> Iterator[None]:
        before = [(c["owner"], c["name"], getattr(c["owner"], c["name"])) for c in self.converters.values()]
        handles = []
        for module in ctx.names:
            handles.append(module.register_forward_pre_hook(lambda m, _: ctx.stack.append(m)))
            handles.append(module.register_forward_hook(lambda m, _, answer: ctx.stack.pop() and None))
        try:
            for (owner, name, method), converter in zip(before, self.converters.values(), strict=True):
                setattr(owner, name, _attached(ctx, method, converter))
            yield
        finally:
            for owner, name, method in before:
                setattr(owner, name, method)
            for handle in handles:
                handle.remove()


def _attached(ctx: Context, method: Any, converter: dict[str, Any]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        skip = ctx.lock
        if not skip and converter["is_real"]:
            ctx.lock = True
        outputs = method(*args, **kwargs)
        if not skip:
            ctx.method_args, ctx.method_kwargs, ctx.method_return = args, kwargs, outputs
            converter["converter"](ctx)
            outputs = ctx.method_return
            ctx.method_args = ctx.method_kwargs = ctx.method_return = None
            ctx.lock = False
        return outputs

    return wrapper


def one_layer(ctx: Context) -> None:
    """A converter: one layer that reads every tensor of the network among the arguments."""
    read: list[Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor) and hasattr(value, "_trt"):
            read.append(value._trt)
        elif isinstance(value, (list, tuple)):
            for v in value:
                look(v)

    look(ctx.method_args)
    if read:
        ctx.method_return._trt = ctx.network.add("OTHER", *read).get_output(0)

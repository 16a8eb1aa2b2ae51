"""What FP8 makes of an eager network, in PyTorch's own `float8_e4m3fn`: no code of it is trtpipe's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

LARGEST = 448.0
#: An activation's key in the calibration table and its value, to its value after Q and DQ.
Quantizer = Callable[[str, torch.Tensor], torch.Tensor]


class Emulation(TorchFunctionMode):
    """The eager network with FP8 at the inputs of its convolutions, linears and matmuls, one tensor for each input.

    Attention is spelt out with its scale at the query. A tensor that several read is quantized once, by the key of its
    first reader.

    Args:
        network: without batch norms behind convolutions (see `folded`).
        quantizer: of activations.
        wide: (module path, operation) of what stays in FP32.
    """

    def __init__(self, network: torch.nn.Module, quantizer: Quantizer, wide: frozenset[tuple[str, str]]) -> None:
        super().__init__()
        self._network, self._quantizer, self._wide = network, quantizer, wide
        self._path: list[str] = []
        self._ordinals: Counter[str] = Counter()
        self._quantized: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The network's output."""

        def entered(path: str) -> Callable[..., None]:
            return lambda *_: self._path.append(path)

        def left(*_: object) -> None:
            self._path.pop()

        hooks = []
        for path, module in self._network.named_modules():
            hooks += [module.register_forward_pre_hook(entered(path)), module.register_forward_hook(left)]
        try:
            with torch.inference_mode(), self:
                output: torch.Tensor = self._network(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, path = getattr(func, "__name__", ""), self._path[-1] if self._path else ""
        if name in ("linear", "conv2d", "conv_transpose2d") and (path, name) not in self._wide:
            x = self._activation(f"{path}:input", args[0])
            return func(x, through_weight(args[1]), *args[2:], **kwargs)
        if name in ("matmul", "__matmul__"):
            return self._matmul(path, *args)
        if name == "scaled_dot_product_attention":
            q, k, v = args
            scale = float(np.float32(1 / math.sqrt(q.shape[-1])))
            scores = self._matmul(path, q * scale, k.transpose(-2, -1))
            return self._matmul(path, torch.softmax(scores, -1), v)
        return func(*args, **kwargs)

    def _matmul(self, path: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        k = self._ordinals[path]
        self._ordinals[path] += 1
        key = f"{path}:matmul" + (f"_{k}" if k else "")
        if (path, "matmul") in self._wide:
            return torch.matmul(a, b)
        return torch.matmul(self._activation(f"{key}.input_0", a), self._activation(f"{key}.input_1", b))

    def _activation(self, key: str, x: torch.Tensor) -> torch.Tensor:
        if id(x) not in self._quantized:
            self._quantized[id(x)] = (x, self._quantizer(key, x))  # x is kept, so that its id stays its own
        return self._quantized[id(x)][1]


def through(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`x`, as float32, to E4M3 and back by PyTorch's own type, saturated; in x's dtype."""
    return ((x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def through_weight(w: torch.Tensor) -> torch.Tensor:
    """The same for a weight, by its own largest."""
    return through(w, scale_of(float(w.abs().max())))


def by_table(amax: Mapping[str, float]) -> Quantizer:
    """Activations by the scales amax / 448 of a table, by key."""
    return lambda key, x: through(x, scale_of(amax[key]))


def scale_of(amax: float) -> float:
    """The float32 scale of an amax."""
    return float(np.float32(amax) / np.float32(LARGEST))


def folded(network: torch.nn.Module) -> torch.nn.Module:
    """The network with the batch norm behind each convolution of a Sequential folded into it; changed in place."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    for module in network.modules():
        if isinstance(module, torch.nn.Sequential):
            for k in range(len(module) - 1):
                conv, norm = module[k], module[k + 1]
                if isinstance(conv, torch.nn.Conv2d | torch.nn.ConvTranspose2d) and isinstance(
                    norm, torch.nn.BatchNorm2d
                ):
                    transposed = isinstance(conv, torch.nn.ConvTranspose2d)
                    module[k], module[k + 1] = fuse_conv_bn_eval(conv, norm, transposed), torch.nn.Identity()
    return network

"""Q/DQ as PyTorch operators of our own: `trtpipe::quantize`, `dequantize`, `dequantize_per_channel` and `_beside`.

`dequantize_beside` is `dequantize_per_channel` with one tensor more, which it does not read: where a program is cut
into parts, it stays in the part of that tensor. Their arithmetic is that of `quantized_decomposed` with a zero point of
0. The tag `nondeterministic_seeded` makes constant folders leave them alone, which would turn INT8 weights back into
FP32. Importing this module registers them.
"""

from __future__ import annotations

from typing import Any

import torch

from calib.algorithms import INT8_RANGE
from trtpipe.bundle.hybrid import OWN_OPERATORS

_library: Any = torch.library.Library("trtpipe", "FRAGMENT")  # type: ignore[no-untyped-call]


def _quantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """INT8 as TensorRT rounds and saturates it: half to even, to [-128, 127]."""
    return torch.clamp(torch.round(x.to(torch.float32) * (1.0 / scale)), *INT8_RANGE).to(torch.int8)


def _dequantize(q: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (q.to(torch.float32) * scale).to(dtype)


def _dequantize_per_channel(q: torch.Tensor, scales: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    shape = [-1 if d == axis else 1 for d in range(q.dim())]
    return (q.to(torch.float32) * scales.reshape(shape)).to(dtype)


def _dequantize_beside(
    q: torch.Tensor, scales: torch.Tensor, axis: int, dtype: torch.dtype, beside: torch.Tensor
) -> torch.Tensor:
    return _dequantize_per_channel(q, scales, axis, dtype)


for _name, _function, _signature in zip(
    OWN_OPERATORS,
    (_quantize, _dequantize, _dequantize_per_channel, _dequantize_beside),
    (
        "(Tensor x, float scale)",
        "(Tensor q, float scale, ScalarType dtype)",
        "(Tensor q, Tensor scales, int axis, ScalarType dtype)",
        "(Tensor q, Tensor scales, int axis, ScalarType dtype, Tensor beside)",
    ),
    strict=True,
):
    _library.define(f"{_name}{_signature} -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    _library.impl(_name, _function, "CompositeExplicitAutograd")

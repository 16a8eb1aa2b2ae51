"""The number formats below 16 bits: their ranges, their scales, and tensors rounded to them.

    int8   -127 to 127 for weights, -128 to 127 for activations; a scale a tensor, or an output channel of a weight
    fp8    E4M3 without infinities: 3 bits of mantissa from 2^-6 to 448, subnormal down to 2^-9; scales as INT8 has them
    int4   weights alone: -8 to 7, a scale for every block of 128 (or 64) numbers along the inputs of a linear
    nvfp4  E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) in blocks of 16; a block's scale is itself E4M3, times one FP32 a tensor

Sources: NVIDIA's TensorRT documentation, "Quantization Schemes" and "Working with Quantized Types"; the ONNX operators
QuantizeLinear and DequantizeLinear; P. Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calib.algorithms import INT8_MAX, SMALLEST_SCALE
from calib.audit import DEAD_AMAX
from trtpipe.errors import InputError
from trtpipe.trt.formats import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK
from trtpipe.values import NumberFormatName

if TYPE_CHECKING:
    from calib.table import CalibrationTable


@dataclass(frozen=True)
class NumberFormat:
    """One format. `largest` is what a block's amax is mapped to; `blocks` are the block sizes, none for a whole tensor
    or channel."""

    name: NumberFormatName
    title: str
    bits: int
    largest: float
    blocks: tuple[int, ...] = ()


INT8 = NumberFormat("int8", "INT8", 8, float(INT8_MAX))
FP8 = NumberFormat("fp8", "FP8", 8, E4M3_MAX)
INT4 = NumberFormat("int4", "INT4", 4, 7.0, (128, 64))
NVFP4 = NumberFormat("nvfp4", "NVFP4", 4, E2M1_MAX, (NVFP4_BLOCK,))
FORMATS: Mapping[str, NumberFormat] = {f.name: f for f in (INT8, FP8, INT4, NVFP4)}


def rounded_up(scales: torch.Tensor, half: torch.dtype | None) -> torch.Tensor:
    """The float32 scales, or the smallest numbers of `half` that are not below them, as float32.

    An FP16 engine holds its scales in FP16; quantizing with the very same numbers leaves no mismatch between Q and DQ.
    """
    if half is None:
        return scales
    near = scales.to(half)
    up = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.to(torch.float32) < scales, up, near).to(torch.float32)


def scales_of(amax: torch.Tensor, number_format: NumberFormat, half: torch.dtype | None) -> torch.Tensor:
    """float32 scales, of amax's shape: amax / largest, positive, rounded up to `half` where there is one.

    What is zero, or has no normal scale, is exact in any: it gets that of `DEAD_AMAX`, as a dead activation does. The
    least one would not do: ONNX Runtime divides a bias by the product of its operation's scales.
    """
    exact = amax.to(torch.float32) / number_format.largest
    dead = torch.full_like(exact, DEAD_AMAX / number_format.largest)
    return rounded_up(torch.where(exact < SMALLEST_SCALE, dead, exact), half)


def least_scales(bias: torch.Tensor, input_scale: float) -> torch.Tensor:
    """float32 scales, of the shape of `bias`, below which no channel's weight scale may be.

    Where an operation's input has a scale too, runtimes add its bias in INT32, in units of the two scales' product: it
    is at most 2^30 of them, with room for the sum of products. A weight whose scale is raised to that is nothing beside
    its bias: the rounding costs at most 2^-24 of the bias for each input of the channel.
    """
    return bias.detach().abs().to(torch.float32) / (input_scale * 2.0**30)


def block_size(number_format: NumberFormat, inputs: int) -> int | None:
    """The largest block that divides `inputs`, a linear's number of inputs; None where none does."""
    return next((b for b in number_format.blocks if inputs % b == 0), None)


def maxima(table: CalibrationTable) -> dict[str, float]:
    """The exact largest |x| by table key: FP8's thresholds, from the audit of a table of any algorithm.

    FP8's rounding error is relative, so that clipping buys no resolution; a clipped value is lost as it is in INT8.
    With corrections the table's audit is of the corrected model: what scales its tensors is followed by a second pass
    over all samples, and thresholds, levels and biases are read by INT8 alone. Of a table of given scales the
    thresholds are all that is known.
    """
    live = {key: seen for key, seen in table.audit.tensors.items() if seen.state != "dead"}
    return {key: live[key].max if key in live else amax for key, amax in table.amax.items()}


def check_complete(amax: Mapping[str, float], keys: Iterable[str]) -> None:
    """Nothing, where the calibration table has an amax for every key.

    Raises:
        InputError: a key is missing.
    """
    missing = [k for k in keys if k not in amax]
    if missing:
        raise InputError(
            f"calibration: the table must hold every quantized tensor (got none for {', '.join(missing[:5])}). "
            "Calibrate again: run `trtpipe calibrate`."
        )


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """`x` saturated to +-448 and rounded to the nearest E4M3, ties to even: float8_e4m3fn of the same shape."""
    return x.to(torch.float32).clamp(-FP8.largest, FP8.largest).to(torch.float8_e4m3fn)


def to_fp4(x: torch.Tensor) -> torch.Tensor:
    """`x` saturated to +-6 and rounded to the nearest E2M1, ties to even, as float32 of the same shape.

    The step between neighbours is 0.5 below 2, 1 below 4 and 2 above; an even multiple of it has an even mantissa.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-NVFP4.largest, NVFP4.largest)


#: The numbers of E2M1 by their code; 8 more are the same with the sign bit.
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """The codes of E2M1 numbers (float, any shape): uint8, 0 to 7, 8 more for a negative sign."""
    table = torch.tensor(_FP4_VALUES, dtype=values.dtype)
    codes = torch.searchsorted(table, values.abs().contiguous())
    return (codes + 8 * (values < 0)).to(torch.uint8)


def fp4_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 numbers of E2M1 codes."""
    exponent, fraction = ((codes >> 1) & 3).to(torch.float32), (codes & 1).to(torch.float32)
    size = torch.where(exponent == 0, fraction / 2, (1 + fraction / 2) * torch.exp2(exponent - 1))
    return torch.where(codes >= 8, -size, size)


def global_scale(amax: float) -> float:
    """NVFP4's one FP32 scale for a tensor: its largest block then has the largest E4M3 for its scale."""
    return max(float(np.float32(amax) / np.float32(NVFP4.largest * FP8.largest)), SMALLEST_SCALE)


def block_scales(amax: torch.Tensor, scale: float) -> torch.Tensor:
    """E4M3 scales of NVFP4 blocks, float8_e4m3fn of amax's shape, in units of `scale`."""
    return to_fp8(amax / NVFP4.largest / scale)

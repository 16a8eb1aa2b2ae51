"""Observers that PT2E puts on the captured graph: symmetric INT8, one scale a tensor or one an output channel."""

from __future__ import annotations

import torch

from calib.algorithms import INT8_RANGE
from calib.observers import HistogramObserver
from trtpipe.model.pt2e import UniformQuantizationObserverBase
from trtpipe.quantization.formats import INT8, rounded_up, scales_of


class ActivationObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """Observes into a histogram while calibrating; gives the scale of the table's amax when converting.

    `forward` takes any float tensor of any shape and returns it unchanged. `filled`: how many samples a batch of how
    many has, the rest of which are copies and not observed.
    """

    def __init__(self, dtype: torch.dtype = torch.int8, **_: object) -> None:
        low, high = INT8_RANGE
        super().__init__(dtype=dtype, qscheme=torch.per_tensor_symmetric, quant_min=low, quant_max=high)
        self.histogram: HistogramObserver | None = None
        self.filled: tuple[int, int] | None = None
        self.scale = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, floating and of any shape, after it was added to the histogram."""
        if self.histogram is not None:
            self.histogram.observe(x if self.filled is None else _of_samples(x, *self.filled))
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 scale [1] and int64 zero point [1] (always 0)."""
        return torch.tensor([self.scale], dtype=torch.float32), torch.zeros(1, dtype=torch.int64)


def _of_samples(x: torch.Tensor, samples: int, size: int) -> torch.Tensor:
    """What `samples` gave of a tensor of a batch of `size` that copies of them fill up: along the first axis of that
    size, or where that of a batch is cut into several (heads, windows); all of a tensor that has neither."""
    axis = next((k for k, extent in enumerate(x.shape) if extent == size), None)
    if axis is not None:
        return x.narrow(axis, 0, samples)
    return x[: len(x) // size * samples] if x.dim() and len(x) % size == 0 else x


class PerChannelWeightObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """The exact maximum of |w| by output channel; scale = amax / 127 (NVIDIA, 8-bit Inference with TensorRT, 2017).

    A corrected weight comes with its own `scales` (float32 [C]). None is below `least` (float32 [C]), if that is given.
    """

    def __init__(self, dtype: torch.dtype = torch.int8, ch_axis: int = 0, half: torch.dtype | None = None, **_: object):
        low, high = INT8_RANGE
        super().__init__(dtype=dtype, qscheme=torch.per_channel_symmetric, quant_min=low, quant_max=high)
        self.ch_axis = ch_axis
        self.half = half
        self.amax = torch.zeros(0)
        self.scales: torch.Tensor | None = None
        self.least: torch.Tensor | None = None

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """`w` [..., C at ch_axis, ...], after its maxima were taken: once, since it is a constant of the graph."""
        if not self.amax.numel():
            self.amax = w.detach().abs().amax(dim=[d for d in range(w.dim()) if d != self.ch_axis])
        return w

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 scales [C] and int64 zero points [C] (all 0)."""
        scales = scales_of(self.amax, INT8, None) if self.scales is None else self.scales
        if self.least is not None:
            scales = torch.maximum(scales, self.least)
        scales = rounded_up(scales, self.half)
        return scales, torch.zeros_like(scales, dtype=torch.int64)

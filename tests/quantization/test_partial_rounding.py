"""Rounding an activation to INT8 while a graph is run in pieces, against PyTorch's own fake quantization."""

from __future__ import annotations

import pytest
import torch

from calib.algorithms import INT8_RANGE
from trtpipe.quantization.partial import per_tensor


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(()),
        torch.randn(0, 4),
        torch.randn(7),
        torch.randn(3, 1 << 19),  # a row is more than is rounded together
        torch.randn(9, 70_000),
        torch.randn(4, 6, 5).transpose(1, 2),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(1, 5).expand(6, 5),
        torch.nn.Parameter(torch.randn(3, 4)),
    ],
    ids=lambda x: str(tuple(x.shape)),
)
@pytest.mark.parametrize("amax", [1.0, 0.03, 60.0])
def test_every_element_is_quantized_and_dequantized(x: torch.Tensor, amax: float) -> None:
    before = x.detach().clone()
    found = per_tensor(amax)(x)
    wanted = torch.fake_quantize_per_tensor_affine(x.detach(), amax / 127, 0, *INT8_RANGE)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=0, atol=1.001 * amax / 127)  # a tie may go to either side
    assert int((found != wanted).sum()) <= 0.01 * x.numel()
    assert torch.equal(x.detach(), before)

"""The numbers of FP8, INT4 and NVFP4 against ml_dtypes, hand-worked cases and exhaustive search."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from trtpipe.quantization import formats
from trtpipe.quantization.formats import FORMATS, FP8, INT4, NVFP4, block_size


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_the_largest_number_of_each_format_is_that_of_its_type():
    assert ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max == FP8.largest == torch.finfo(torch.float8_e4m3fn).max
    assert ml_dtypes.finfo(ml_dtypes.float4_e2m1fn).max == NVFP4.largest
    assert ml_dtypes.iinfo(ml_dtypes.int4).max == INT4.largest
    assert {f.name: f.bits for f in FORMATS.values()} == {"int8": 8, "fp8": 8, "int4": 4, "nvfp4": 4}


@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0, 30.0, 1e4])
def test_fp8_rounds_as_ml_dtypes_does_and_saturates(scale):
    x = normal(4096, scale=scale)
    reference = np.clip(x.numpy(), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(formats.to_fp8(x).float().numpy(), reference)


def test_fp8_by_hand():
    # Between 1 and 2 the step is 1/8, and ties go to the even mantissa; 449 and infinity saturate.
    x = torch.tensor([1.0, 1.0625, 1.1875, 449.0, float("inf"), -1e9, 2.0**-9, 2.0**-11])
    assert formats.to_fp8(x).float().tolist() == [1.0, 1.0, 1.25, 448.0, 448.0, -448.0, 2.0**-9, 0.0]


def test_fp4_rounds_as_ml_dtypes_does():
    # 4096 numbers and every tie between two neighbours.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat((normal(4096, scale=3.0), ties, -ties, torch.tensor([0.0, 7.0, -100.0])))
    reference = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(formats.to_fp4(x).numpy(), reference)


def test_the_codes_of_fp4_are_those_of_its_type():
    codes = torch.arange(16, dtype=torch.uint8)
    values = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(formats.fp4_values(codes).numpy(), values)
    positive = torch.from_numpy(values)[torch.from_numpy(values) != 0]
    assert torch.equal(formats.fp4_values(formats.fp4_codes(positive)), positive)


def test_a_block_divides_the_inputs():
    assert [block_size(INT4, k) for k in (768, 192, 64, 100, 32)] == [128, 64, 64, None, None]
    assert [block_size(NVFP4, k) for k in (768, 16, 24)] == [16, 16, None]


@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
def test_int4_by_an_exhaustive_search(half):
    """No share of the amax among those searched leaves less weighted error than the one chosen, block by block."""
    w, importance = normal(3, 256, scale=0.05), normal(256, seed=1).square()
    codes, scales = formats.quantize_int4(w, 128, half, importance)
    assert codes.dtype == torch.int8
    assert (int(codes.min()), int(codes.max())) >= (-8, -8)
    assert int(codes.max()) <= 7
    blocks = w.reshape(3, 2, 128)
    got = ((codes.reshape(3, 2, 128) * scales[..., None] - blocks).square() * importance.reshape(2, 128)).sum(-1)
    for share in formats.CLIPPED_SHARES:
        tried = formats.scales_of(blocks.abs().amax(-1) * share, INT4, half)[..., None]
        near = (blocks / tried).round().clamp(-8, 7) * tried
        assert (got <= ((near - blocks).square() * importance.reshape(2, 128)).sum(-1) + 1e-9).all()
    if half is not None:
        assert torch.equal(scales, scales.to(half).float())


def test_importance_changes_what_is_kept():
    """The search serves the inputs that matter: their error falls, at the cost of the others."""
    w = normal(16, 128, scale=0.05)
    important = torch.ones(128)
    important[:8] = 1e4

    def error(features):
        codes, scales = formats.quantize_int4(w, 128, None, features)
        return ((codes * scales.repeat_interleave(128, 1) - w)[:, :8]).square().sum()

    assert error(important) < error(None)


def test_nvfp4_by_hand():
    # One block of 16 whose amax is 6 and one whose amax is 3: scales 448 and 224 in units of 6 / (6 * 448).
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1], w[0, 16], w[0, 17] = 6.0, -1.5, 3.0, 0.5
    codes, scales, scale = formats.quantize_nvfp4(w, None)
    assert scale == pytest.approx(1 / 448, rel=1e-6)
    assert scales.float().tolist() == [[448.0, 224.0]]
    assert formats.fp4_values(codes)[0, [0, 1, 16, 17]].tolist() == [6.0, -1.5, 6.0, 1.0]


@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-6, 1e-7])
def test_blocks_of_nvfp4_have_scales_that_the_half_precision_holds(half, size):
    """An engine casts a block's scale to FP16, whose smallest number is 6e-8: no block becomes zeros there."""
    torch.manual_seed(0)
    w = torch.randn(64, 128) * size
    codes, scales, scale = formats.quantize_nvfp4(w, None, half)
    wide = (scales.float() * scale).to(half or torch.float32).float()
    assert bool((wide > 0).all())
    near = formats.fp4_values(codes).reshape(64, -1, 16) * wide[..., None]
    lost = (near.reshape(64, 128) - w).double().square().sum() / w.double().square().sum()
    assert -10 * torch.log10(lost) > (18 if size < 1e-5 and half is torch.float16 else 20.5)


def test_a_weight_of_zeros_stays_zeros():
    for codes, scales in (
        formats.quantize_int4(torch.zeros(2, 128), 128, torch.float16, None),
        formats.quantize_nvfp4(torch.zeros(2, 128), None)[:2],
    ):
        assert not codes.any()
        assert torch.isfinite(scales.float()).all()

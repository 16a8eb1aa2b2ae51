"""Weights in 4 bits: hand-worked cases, an exhaustive search, and what fitting them to their inputs gains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.quantization import blocks, formats
from trtpipe.quantization.formats import INT4
from trtpipe.quantization.moments import shrunk

HALVES = [None, torch.float16, torch.bfloat16]


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def moments_of(x, size):
    """E[x x^T] of [rows, K] within blocks of `size`, by definition."""
    parts = x.reshape(len(x), -1, size).transpose(0, 1)
    return parts.mT @ parts / len(x)


def int4(w, moments, half=None):
    codes, scales = blocks.quantize_int4(w, 128, half, moments)
    return codes * scales.repeat_interleave(128, 1)


def nvfp4(w, moments, half=None):
    codes, scales, scale = blocks.quantize_nvfp4(w, moments, half)
    return formats.fp4_values(codes) * (scales.float() * scale).repeat_interleave(16, 1)


@pytest.mark.parametrize("half", HALVES)
def test_int4_by_an_exhaustive_search(half):
    """Where no input moves with another, no share of the amax leaves less error at the output, block by block."""
    w, powers = normal(3, 256, scale=0.05), normal(256, seed=1).square()
    codes, scales = blocks.quantize_int4(w, 128, half, torch.diag_embed(powers.reshape(2, 128)))
    assert codes.dtype == torch.int8
    assert -8 <= int(codes.min()) <= int(codes.max()) <= 7
    parts = w.reshape(3, 2, 128)
    got = ((codes.reshape(3, 2, 128) * scales[..., None] - parts).square() * powers.reshape(2, 128)).sum(-1)
    for share in blocks.SHARES:
        tried = formats.scales_of(parts.abs().amax(-1) * share, INT4, half)[..., None]
        near = (parts / tried).round().clamp(-8, 7) * tried
        assert (got <= ((near - parts).square() * powers.reshape(2, 128)).sum(-1) + 1e-9).all()
    if half is not None:
        assert torch.equal(scales, scales.to(half).float())


@pytest.mark.parametrize("half", HALVES)
def test_without_moments_a_weight_is_rounded_to_the_nearest(half):
    w = normal(3, 256, scale=0.05)
    codes, scales = blocks.quantize_int4(w, 128, half, None)
    parts = w.reshape(3, 2, 128)
    assert torch.equal(scales, formats.scales_of(parts.abs().amax(-1), INT4, half))
    assert torch.equal(codes, (parts / scales[..., None]).round().clamp(-8, 7).reshape(3, 256).to(torch.int8))
    unknown = torch.full((2, 128, 128), float("nan"))  # inputs that overflow
    assert torch.equal(blocks.quantize_int4(w, 128, half, unknown)[0], codes)


@pytest.mark.parametrize("quantized", [int4, nvfp4])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mean", [0.0, 0.3, 2.0])
def test_a_weight_that_is_fitted_to_its_inputs_loses_less_at_the_output(quantized, half, mean):
    """Also on inputs that it was not fitted to; what has one sign, as behind a GELU, gains most: its errors add up."""
    mixed = normal(24, 256, seed=2) / 5
    fitted, held_out = (normal(2000, 24, seed=s) @ mixed + 0.5 * normal(2000, 256, seed=s + 10) + mean for s in (3, 4))
    w = normal(64, 256, scale=0.05)
    y = held_out @ w.T

    def lost(moments):
        return float(10 * torch.log10((held_out @ quantized(w, moments, half).T - y).square().sum() / y.square().sum()))

    plain, made = lost(None), lost(moments_of(fitted, 128))
    assert made < plain - (3.0 if mean == 2.0 else 0.8)


@pytest.mark.parametrize("quantized", [int4, nvfp4])
@pytest.mark.parametrize("rows", [1, 2, 8, 64, 500])
@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_a_weight_is_not_fitted_to_what_few_rows_show_by_chance(quantized, rows, mean):
    """Of independent inputs there is little to learn, whose moments over 64 rows cost INT4 4 dB as they are."""
    w, held_out = normal(64, 256, scale=0.05), normal(3000, 256, seed=8) + mean
    y = held_out @ w.T

    def lost(moments):
        return float(10 * torch.log10((held_out @ quantized(w, moments).T - y).square().sum() / y.square().sum()))

    seen = normal(rows, 256, seed=9) + mean
    found = shrunk(moments_of(seen, 128).double(), rows).float()
    assert lost(found) < lost(None)
    if mean and rows >= 64:
        assert lost(found) < lost(None) - 0.4


def test_independent_inputs_have_nothing_in_common_after_shrinking():
    """And what has a mean keeps what it has in common, but for what those rows show by chance."""
    alone, common = (shrunk(moments_of(normal(64, 128, seed=3) + m, 128).double(), 64)[0] for m in (0.0, 2.0))
    apart = ~torch.eye(128, dtype=torch.bool)
    assert float(alone[apart].abs().max()) < 0.02
    assert float(common[apart].mean()) == pytest.approx(4.0, rel=0.1)
    never = shrunk(torch.zeros(1, 16, 16, dtype=torch.float64), 5)
    assert not never.any()


@given(st.sampled_from((128, 64, 16)), st.sampled_from((64, 16)), st.integers(1, 3))
def test_the_moments_of_smaller_blocks_lie_within_those_of_larger_ones(large, small, count):
    if large % small:
        return
    x = normal(50, large * count, seed=5)
    torch.testing.assert_close(blocks._within(moments_of(x, large), small), moments_of(x, small))


def test_nvfp4_by_hand():
    # One block of 16 whose amax is 6 and one whose amax is 3: scales 448 and 224 in units of 6 / (6 * 448).
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1], w[0, 16], w[0, 17] = 6.0, -1.5, 3.0, 0.5
    codes, scales, scale = blocks.quantize_nvfp4(w, None)
    assert scale == pytest.approx(1 / 448, rel=1e-6)
    assert scales.float().tolist() == [[448.0, 224.0]]
    assert formats.fp4_values(codes)[0, [0, 1, 16, 17]].tolist() == [6.0, -1.5, 6.0, 1.0]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("known", [False, True])
def test_blocks_of_nvfp4_have_scales_that_the_half_precision_holds(half, size, known):
    """An engine casts a block's scale to FP16, whose smallest number is 6e-8: no block becomes zeros there."""
    w = normal(64, 128) * size
    moments = torch.eye(16).expand(8, 16, 16) if known else None
    codes, scales, scale = blocks.quantize_nvfp4(w, moments, half)
    wide = (scales.float() * scale).to(half or torch.float32).float()
    assert bool((wide > 0).all())
    near = formats.fp4_values(codes).reshape(64, -1, 16) * wide[..., None]
    lost = (near.reshape(64, 128) - w).double().square().sum() / w.double().square().sum()
    assert -10 * torch.log10(lost) > (17 if size < 1e-5 and half is torch.float16 else 19.5)


@pytest.mark.parametrize("moments", [None, torch.zeros(1, 128, 128), torch.eye(128)[None]])
def test_a_weight_of_zeros_stays_zeros(moments):
    for codes, scales in (
        blocks.quantize_int4(torch.zeros(2, 128), 128, torch.float16, moments),
        blocks.quantize_nvfp4(torch.zeros(2, 128), moments)[:2],
    ):
        assert not codes.any()
        assert torch.isfinite(scales.float()).all()


@pytest.mark.parametrize("quantized", [int4, nvfp4])
def test_inputs_that_are_always_zero_change_nothing_for_the_others(quantized):
    x = normal(200, 128, seed=6)
    x[:, 40:] = 0
    made = quantized(normal(8, 128), moments_of(x, 128))
    assert torch.isfinite(made).all()
    assert torch.isfinite(quantized(normal(8, 128), torch.zeros(1, 128, 128))).all()

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

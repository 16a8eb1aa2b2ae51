"""The scales of quantizers in a PyTorch model, as they are checked one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trtpipe.errors import InputError
from trtpipe.model.marks import Mark
from trtpipe.model.quantizers import _mark


def test_scales_are_a_mark() -> None:
    assert _mark([0.5, 0.25], None, -128, 127, 1, "a") == Mark((0.5, 0.25), 1)


@pytest.mark.parametrize(
    ("scale", "zero", "low", "what"),
    [
        ([0.5, math.inf], 0, -128, "must have finite scales (got inf). Calibrate the model again."),
        (0.5, 3, -128, "must have the zero point 0 (got 3). "),
        (0.5, 0, 0, "must quantize to -128 to 127 (got 0 to 127). "),
    ],
)
def test_scales_that_tensorrt_cannot_have(scale: Any, zero: int, low: int, what: str) -> None:
    with pytest.raises(InputError) as caught:
        _mark(scale, zero, low, 127, None, "model.factory: stem.input")
    assert str(caught.value).startswith(f"model.factory: stem.input {what}")

"""Adaptive pools over dynamic dimensions: the file answers as the model at sizes it was not captured with, or is
refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import nets
from trtpipe.errors import BuildError
from trtpipe.model import adaptive
from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import DimRange, LoadedModel, OnnxModel, TensorSpec

RANGES = {"N": DimRange(1, 2, 4), "L": DimRange(7, 8, 24), "H": DimRange(9, 12, 24), "W": DimRange(5, 8, 16)}
SAID = (
    " divides a dynamic dimension into windows, whose sizes ONNX has to know, or gives indices in one. Declare one "
    "size of that dimension in inputs, pool it to 1, or pool it with a kernel and a stride of their own (avg_pool2d, "
    "max_pool2d)."
)


class Pooled(nn.Module):
    """A convolution, an adaptive pool, and one value of each channel: its shape does not show how it was pooled."""

    def __init__(self, kind: str, sizes: list[int | None], dimensions: int) -> None:
        super().__init__()
        self.conv = getattr(nn, f"Conv{dimensions}d")(2, 3, 3, padding=1)
        self.pool = getattr(nn, f"Adaptive{kind}Pool{dimensions}d")(sizes if dimensions > 1 else sizes[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.conv(x)).flatten(2)
        result: torch.Tensor = (pooled * torch.arange(pooled.shape[2])).mean(2)
        return result


def behind(network: nn.Module, shape: tuple[int | str, ...]) -> LoadedModel:
    spec = TensorSpec("x", "float32", shape, {d: RANGES[d] for d in shape if isinstance(d, str)})
    output = TensorSpec("y", "float32", ("N", 3), {"N": RANGES["N"]})
    return LoadedModel(bind(network.eval(), (spec,), {}, ("y",)), (spec,), (output,), "w" * 64, "test")


def converted(network: nn.Module, shape: tuple[int | str, ...]) -> OnnxModel:
    return to_onnx(quantize(capture(behind(network, shape)), int8=False, half=None, keep=Keep(), amax={}, ranges={}))


@pytest.mark.parametrize("kind", ["Avg", "Max"])
@pytest.mark.parametrize(
    ("sizes", "shape", "taken"),
    [
        ([1], ("N", 2, "L"), True),
        ([3], ("N", 2, "L"), False),
        ([1, 1], ("N", 2, "H", "W"), True),
        ([4, 1], ("N", 2, "H", "W"), False),
        ([4, 1], ("N", 2, 12, "W"), True),
        ([1, 4], ("N", 2, "H", 8), True),
        ([4, 2], ("N", 2, 12, 8), True),
        ([3, 3], ("N", 2, "H", "W"), False),
        ([None, 1], ("N", 2, 12, "W"), True),
        ([1, 1, 1], ("N", 2, 4, "H", "W"), True),
        ([2, 2, 1], ("N", 2, 4, "H", "W"), False),
    ],
)
def test_other_sizes(kind: str, sizes: list[int | None], shape: tuple[int | str, ...], taken: bool) -> None:
    torch.manual_seed(0)
    network = Pooled(kind, sizes, len(shape) - 2).eval()
    if not taken:
        with pytest.raises(BuildError, match=r"capture: adaptive_\w+_pool\dd at test_adaptive.py:\d+ d") as raised:
            converted(network, shape)
        assert str(raised.value).endswith(SAID)
        return
    model = converted(network, shape)
    with OrtRunner(model.data, as_written=True) as runner:
        for at in ("min", "max", "between"):
            among = {n: r.max - 3 if at == "between" else getattr(r, at) for n, r in RANGES.items()}
            x = nets.images(*[among[d] if isinstance(d, str) else d for d in shape])
            found = runner.run({"x": x.numpy()})["y"]
            np.testing.assert_allclose(found, network(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Indexed(nn.Module):
    """Where the largest of each channel is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = nn.functional.adaptive_max_pool2d(x.repeat(1, 2, 1, 1)[:, :3], (1, 1), return_indices=True)
        return (values + indices).flatten(1)


def test_indices_of_a_dynamic_dimension_are_refused() -> None:
    with pytest.raises(BuildError) as raised:
        converted(Indexed(), ("N", 2, "H", "W"))
    assert str(raised.value).endswith(SAID)


def test_a_dimension_that_the_exporter_fixes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever operation it is of, as a pool of 4 by 1 is for PyTorch 2.14."""

    def left(*_: Any) -> None:
        return None

    monkeypatch.setattr("trtpipe.model.capture.spell_out_adaptive_pools", left)
    assert adaptive.spell_out_adaptive_pools is not left
    with pytest.raises(BuildError, match="exporter fixed the dynamic dimension W of input x at 8: it translates"):
        converted(Pooled("Avg", [4, 1], 2), ("N", 2, "H", "W"))

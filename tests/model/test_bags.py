"""nn.EmbeddingBag of a matrix of indices: the file answers as the model, at sizes it was not captured with too."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner
from trtpipe.values import DimRange, LoadedModel, OnnxModel, TensorSpec

RANGES = {"N": DimRange(2, 4, 8), "T": DimRange(2, 12, 30)}


class Bag(nn.Module):
    def __init__(self, mode: str, padding: int | None, weighted: bool = False) -> None:
        super().__init__()
        self.bag, self.weighted = nn.EmbeddingBag(20, 6, mode=mode, padding_idx=padding), weighted

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.bag(ids, per_sample_weights=ids.float() if self.weighted else None)
        return result


def converted(network: nn.Module, shape: tuple[int | str, ...]) -> OnnxModel:
    spec = TensorSpec("ids", "int64", shape, {d: RANGES[d] for d in shape if isinstance(d, str)})
    output = TensorSpec("y", "float32", ("N", 6), {"N": RANGES["N"]})
    loaded = LoadedModel(bind(network.eval(), (spec,), {}, ("y",)), (spec,), (output,), "w" * 64, "test")
    return to_onnx(quantize(capture(loaded), int8=False, half=None, keep=Keep(), amax={}, ranges={}))


@pytest.mark.parametrize("shape", [("N", "T"), ("N", 12)])
@pytest.mark.parametrize(
    "network",
    [Bag(m, p) for m in ("sum", "mean", "max") for p in (None, 3, -1)] + [Bag("sum", None, True)],
    ids=lambda n: f"{n.bag.mode}-{n.bag.padding_idx}-{n.weighted}",
)
def test_every_mode(network: Bag, shape: tuple[int | str, ...]) -> None:
    model = converted(network, shape)
    assert {"Loop", "SequenceEmpty"}.isdisjoint(n.op_type for n in onnx.load_from_string(model.data).graph.node)
    with OrtRunner(model.data, as_written=True) as runner:
        for n, t in ((2, 2), (7, 29), (8, 12)):
            ids = torch.randint(0, 20, (n, t if "T" in shape else 12))
            ids[0] = network.bag.padding_idx or 0  # a row of absent ones
            wanted = network(ids).detach().numpy()
            np.testing.assert_allclose(runner.run({"ids": ids.numpy()})["y"], wanted, rtol=1e-5, atol=1e-5)

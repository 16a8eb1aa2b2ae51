"""ONNX Runtime's optimizer is tried in a process of its own: where it crashes nothing of the user's ends."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from tests.support import nets
from trtpipe.errors import BuildError
from trtpipe.model.capture import capture
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime import onnxruntime as module
from trtpipe.runtime.onnxruntime import OrtRunner

CRASH = "import os, signal, sys\nsys.stdin.buffer.read()\nos.kill(os.getpid(), signal.SIGSEGV)\n"


def relu() -> bytes:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def test_a_crash_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.float32([-1, 1])
    with OrtRunner(relu()) as runner:
        assert runner.run({"x": x})["y"].tolist() == [0, 1]
    monkeypatch.setattr(module, "_TRY", CRASH)
    with pytest.raises(BuildError) as raised:
        OrtRunner(relu())
    assert str(raised.value) == (
        "graph: ONNX Runtime crashes as it optimizes it (SIGSEGV). Build it in another precision, or install another "
        "release of onnxruntime."
    )
    with OrtRunner(relu(), as_written=True) as runner:  # nothing is optimized
        assert runner.run({"x": x})["y"].tolist() == [0, 1]


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)[0]
        return result


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_networks_in_fp16(kind: str) -> None:
    """ONNX Runtime 1.31.1 crashes on them; whether a release does or not, this process goes on."""
    torch.manual_seed(0)
    captured = capture(nets.loaded(Recurrent(kind).eval(), ("N", 5, 8), outputs=("y",), out_shape=("N", 5, 8)))
    model = to_onnx(quantize(captured, int8=False, half=torch.float16, keep=Keep(), amax={}, ranges={}))
    x = nets.images(2, 5, 8).numpy()
    with OrtRunner(model.data, as_written=True) as runner:
        wanted = runner.run({"x": x})["y"]
    refused = ""
    try:
        with OrtRunner(model.data) as runner:
            np.testing.assert_allclose(runner.run({"x": x})["y"], wanted, atol=0.02)
    except BuildError as error:
        refused = str(error)
    assert refused == "" or "crashes as it optimizes it" in refused

"""Scales and casts of tensors that FP16 cannot hold: FP16 beside any number format costs what FP16 alone costs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from models import Line, line

from trtpipe.progress import Silent
from trtpipe.quantization.narrow import Statistics
from trtpipe.quantization.partial import Partial
from trtpipe.quantization.policy import Modes
from trtpipe.quantization.precision import Keep, observe_ranges, scale_types
from trtpipe.quantization.quantize import Narrow, plan_sites, quantize
from trtpipe.quantization.sensitivity import SampleBatch, measure_sensitivity, planned
from trtpipe.routes.onnx import to_onnx
from trtpipe.runtime.onnxruntime import OrtRunner

FORMATS = {
    "int8": None,
    "fp8": Modes(frozenset({"fp8"})),
    "nvfp4": Modes(frozenset({"nvfp4"})),
    "int4": Modes(weights="int4"),
}
IMAGES = torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(2))


class Scaled(torch.nn.Module):
    """A linear whose input is `gain` and whose weight is `weight` times what the others have; its output is both."""

    def __init__(self, gain: float, weight: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.scaled, self.after = (torch.nn.Linear(n, m) for n, m in ((48, 128), (128, 128), (128, 16)))
        self.gain, self.factor = gain, gain * weight
        with torch.no_grad():
            self.scaled.weight.mul_(weight)
            self.scaled.bias.mul_(self.factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x.flatten(1))) * self.gain
        return self.after(torch.tanh(self.scaled(x) / self.factor))


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module", params=[(1e6, 1e-6), (1e9, 1.0), (1.0, 1e7), (1.0, 1e-9)], ids=str)
def scaled(request: pytest.FixtureRequest) -> tuple[Line, Mapping[str, float], torch.Tensor]:
    """A network, the ranges of its tensors, and its output for `IMAGES`."""
    network = Scaled(*request.param).eval()
    model = line(network, 4, 16)
    with torch.inference_mode():
        return model, observe_ranges(model.captured, [[IMAGES]]), network(IMAGES)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.02), ("fp8", 0.08), ("nvfp4", 0.3), ("int4", 0.2)])
def test_what_fp16_cannot_hold_stays_in_fp32_in_every_format(
    scaled: tuple[Line, Mapping[str, float], torch.Tensor], name: str, most: float
) -> None:
    """Scales of 1e6 or 1e-10 are no FP16 numbers, and neither is what a scale of 1e4 gives back."""
    model, ranges, wanted = scaled
    modes = FORMATS[name]
    narrow = None if modes is None else Narrow(modes, Statistics(model.amax, {}))
    found = quantize(
        model.captured, int8=narrow is None, half=torch.float16, keep=Keep(), amax=model.amax, ranges=ranges,
        narrow=narrow,
    )  # fmt: skip
    assert [x.precision for x in found.layers if x.op == "linear"][1:] == [name] * 2
    with torch.inference_mode():
        program = found.program.module()(IMAGES)[0]
    assert error(program, wanted) < most
    if name != "nvfp4":  # which ONNX Runtime has no kernels of
        with OrtRunner(to_onnx(found).data, as_written=True) as runner:
            file = torch.from_numpy(runner.run({"image": IMAGES.numpy()})["logits"])
        assert error(file, wanted) < most


@pytest.mark.parametrize(("name", "most"), [("int8", 0.02), ("fp8", 0.08), ("nvfp4", 0.3), ("int4", 0.2)])
def test_what_previews_a_build_rounds_by_the_scales_of_the_build(
    scaled: tuple[Line, Mapping[str, float], torch.Tensor], name: str, most: float
) -> None:
    """A candidate of the search, and each module alone: both would lose everything with their scales in FP16."""
    model, ranges, wanted = scaled
    modes, half, keep = FORMATS[name], torch.float16, Keep()
    narrow = None if modes is None else Narrow(modes, Statistics(model.amax, {}))
    graph, int8 = model.captured.graph, narrow is None
    plan = plan_sites(model.captured, int8=int8, keep=keep, modes=None if narrow is None else narrow.modes)
    changed = planned(model.captured, plan, model.amax, scale_types(graph, half, keep, ranges), narrow)
    machine = Partial(graph)
    with torch.inference_mode():
        (output,), _ = machine.finish(0, machine.inputs((IMAGES,)), changed)
    assert error(output, wanted) < most
    found = measure_sensitivity(
        model.captured, model.amax, [SampleBatch((IMAGES,), 8, None)], half=half, keep=keep, progress=Silent(),
        ranges=ranges, int8=int8, narrow=narrow,
    )  # fmt: skip
    assert all(m.sqnr_db > -20 * math.log10(most) for m in found.modules)

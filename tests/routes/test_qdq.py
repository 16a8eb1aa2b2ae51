"""Our Q/DQ operators against torchao's, bit for bit, and what keeps them out of constant folding."""

from __future__ import annotations

import pytest
import torch
import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401  registers quantized_decomposed
from models import line, tiny

from trtpipe.model.export import export
from trtpipe.model.nodes import calls
from trtpipe.model.torch_versions import graph_module
from trtpipe.routes.own_qdq import rewritten

OURS = torch.ops.trtpipe
THEIRS = torch.ops.quantized_decomposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantize_and_dequantize_are_torchaos(dtype):
    scale = 0.0371
    halves = (torch.arange(-140, 140) + 0.5) * scale  # between two steps: half to even; outside: saturated
    x = torch.cat([halves, torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3]).to(dtype)
    theirs = THEIRS.quantize_per_tensor.default(x, scale, 0, -128, 127, torch.int8)
    ours = OURS.quantize.default(x, scale)
    assert torch.equal(ours, theirs)
    assert (int(ours.min()), int(ours.max())) == (-128, 127)
    back = THEIRS.dequantize_per_tensor.default(theirs, scale, 0, -128, 127, torch.int8, out_dtype=torch.float32)
    assert torch.equal(OURS.dequantize.default(ours, scale, torch.float32), back)


@pytest.mark.parametrize("axis", [0, 1])
def test_dequantize_per_channel_by_hand(axis):
    q = torch.tensor([[1, -2], [3, 127]], dtype=torch.int8)
    scales = torch.tensor([0.5, 2.0])
    wanted = torch.tensor([[0.5, -1.0], [6.0, 254.0]] if axis == 0 else [[0.5, -4.0], [1.5, 254.0]])
    assert torch.equal(OURS.dequantize_per_channel.default(q, scales, axis, torch.float32), wanted)
    assert OURS.dequantize_per_channel.default(q, scales, axis, torch.float16).dtype is torch.float16


def test_they_are_tagged_so_that_no_constant_folder_takes_them():
    for op in (OURS.quantize.default, OURS.dequantize.default, OURS.dequantize_per_channel.default):
        assert torch.Tag.nondeterministic_seeded in op.tags


@pytest.mark.parametrize("half", [None, torch.float16])
def test_the_rewritten_program_computes_the_same_and_holds_int8_weights(half):
    model = line(tiny(), 16, 5)
    quantized = model.quantized(int8=True, half=half)
    graph = rewritten(graph_module(quantized.program))
    assert not any("quantized_decomposed" in str(n.target) for n in calls(graph.graph))
    program = export(graph, quantized.inputs)
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        before = graph_module(quantized.program)(x)[0]
        after = graph_module(program)(x)[0]
    assert torch.equal(before, after)
    weights = [n for n in calls(program.graph) if n.target is OURS.dequantize_per_channel.default]
    assert len(weights) == 4
    assert all(n.args[0].meta["val"].dtype is torch.int8 for n in weights)


def test_what_symmetric_int8_does_not_cover_is_an_error():
    class Shifted(torch.nn.Module):
        def forward(self, x):
            return THEIRS.quantize_per_tensor.default(x, 0.1, 3, -128, 127, torch.int8)

    graph = graph_module(torch.export.export(Shifted(), (torch.zeros(2, 2),)))
    with pytest.raises(ValueError, match=r"the zero point must be 0 \(got 3\)"):
        rewritten(graph)


def test_a_weight_that_is_quantized_when_it_runs_is_an_error():
    class Runs(torch.nn.Module):
        def forward(self, x):
            scales, zeros = torch.full((2,), 0.1), torch.zeros(2, dtype=torch.int64)
            return THEIRS.quantize_per_channel.default(x, scales, zeros, 0, -128, 127, torch.int8)

    graph = graph_module(torch.export.export(Runs(), (torch.zeros(2, 2),)))
    with pytest.raises(ValueError, match=r"quantize_per_channel: weights must be stored as INT8 \(got a Q that runs\)"):
        rewritten(graph)

"""Batch norms behind convolutions that something else reads too: nothing of what that gets is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trtpipe.model.bindings import Bound
from trtpipe.model.capture import capture
from trtpipe.model.corners import require_same
from trtpipe.model.nodes import calls, op_name
from trtpipe.quantization.precision import Keep
from trtpipe.quantization.quantize import quantize
from trtpipe.values import Captured, DimRange, LoadedModel, TensorSpec

KINDS = {
    1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


class Net(nn.Module):
    """`how` says what reads the convolution, or its weight, beside the first batch norm."""

    def __init__(self, dims: int, transposed: bool, bias: bool, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv, up, norm = KINDS[dims]
        self.conv = (up if transposed else conv)(8, 8, 3, padding=1, bias=bias)
        self.first, self.second, self.how = norm(8), norm(8), how
        for one in (self.first, self.second):
            one.running_mean.uniform_(-1, 1)  # type: ignore[union-attr, operator]
            one.running_var.uniform_(0.2, 3)  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = torch.relu(self.first(y))
        if self.how == "skip":
            z = z + y
        elif self.how == "another norm":
            z = z + self.second(y)
        elif self.how == "twice":
            z = z + self.second(self.conv(x * 0.5))
        elif self.how == "twice, once without":
            z = z + self.conv(x * 0.5)
        elif self.how == "weight":
            z = z * self.conv.weight.square().mean()
        return z


def loaded(net: nn.Module, dims: int, batch: DimRange) -> LoadedModel:
    size = (8,) * dims
    spec = TensorSpec("x", "float32", ("N", 8, *size), {"N": batch})
    out = TensorSpec("y", "float32", ("N", 8, *size), {"N": batch})
    return LoadedModel(Bound(net.eval(), (spec,), {}, ("y",)).eval(), (spec,), (out,), "w", "test")


HOW = ["skip", "another norm", "twice", "twice, once without", "weight", "alone"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dims", "transposed"), [(1, False), (2, False), (2, True), (3, False)])
def test_what_else_reads_a_convolution_reads_it_unchanged(dims: int, transposed: bool, bias: bool, how: str) -> None:
    net = Net(dims, transposed, bias, how).eval()
    model = loaded(net, dims, DimRange(4, 4, 4))
    x = torch.randn(4, 8, *(8,) * dims)
    with torch.inference_mode():
        wanted = net(x)
        captured = capture(model)
        torch.testing.assert_close(captured.graph(x)[0], wanted, rtol=1e-4, atol=1e-4)
        require_same(model, captured, {"x": x.numpy()})
        sites = captured.sites
        amax = {s.group: 6.0 for s in sites if s.axis is None}
        if not amax:
            return
        program = quantize(captured, int8=True, half=None, keep=Keep(), amax=amax, ranges={}).program
        lost = program.module()(x)[0] - wanted
    assert 10 * torch.log10(wanted.square().sum() / lost.square().sum()) > 20
    names = [op_name(n) for n in calls(captured.graph.graph)]
    assert not [name for name in names if "batch_norm" in name]
    if how == "alone":  # and a pair is still folded
        assert "mul" not in names


def test_a_graph_that_is_not_the_model_ends_the_build_at_its_own_size() -> None:
    """Whatever the check's limits take."""
    from trtpipe.errors import BuildError

    net = Net(2, False, True, "skip").eval()
    fixed = loaded(net, 2, DimRange(4, 4, 4))
    captured = capture(fixed)
    x = torch.randn(4, 8, 8, 8).numpy()
    net.conv.weight = nn.Parameter(net.conv.weight * 1.5)
    with pytest.raises(BuildError) as caught:
        require_same(fixed, captured, {"x": x})
    assert str(caught.value).startswith(
        "capture: the graph gives other outputs than the model for x [4, 8, 8, 8], samples "
    )
    assert str(caught.value).endswith(
        "other values in output y). No job can mend that: either the model computes something else where it is "
        "exported (by torch.compiler.is_exporting or its like), or it is a fault of trtpipe or of torch.export. Report "
        "it with the model."
    )
    require_same(fixed, captured, {"x": x[:3]})  # of a size that the job does not declare
    assert isinstance(captured, Captured)

"""Outputs that the model sorts are no class scores, whatever it does to each of their entries afterwards."""

from __future__ import annotations

import nets
import pytest
import torch
from torch import nn

from trtpipe.model.bindings import bind
from trtpipe.model.capture import capture
from trtpipe.model.output_specs import output_specs
from trtpipe.values import LoadedModel, TensorSpec

X = (TensorSpec("x", "float32", ("N", 6), {"N": nets.N}),)
SORTED = {
    "topk": lambda y: y.topk(3, 1)[0],
    "places": lambda y: y.topk(3, 1)[1],
    "least": lambda y: y.topk(3, 1, largest=False).values,
    "sort": lambda y: y.sort(1, descending=True).values,
    "softmax": lambda y: y.topk(3, 1)[0].softmax(1),
    "sigmoid": lambda y: y.topk(3, 1)[0].sigmoid().to(torch.float16).float(),
    "shares": lambda y: (v := y.topk(3, 1)[0]) / v.sum(1, keepdim=True),
    "some": lambda y: y.sort(1).values[:, 2:],
}
SCORES = {
    "plain": lambda y: y,
    "softmax": lambda y: y.softmax(1),
    "above the third": lambda y: y * (y >= y.topk(3, 1)[0][:, -1:]),
    "less the median": lambda y: y - y.sort(1).values[:, 2:3],
    "head behind a sort": lambda y: y.sort(1).values @ torch.ones(6, 4),
}


class Net(nn.Module):
    def __init__(self, last: object) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(6, 6), last

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        return y, self.last(y)  # type: ignore[operator]


@pytest.mark.parametrize(("of", "name"), [*((SORTED, n) for n in SORTED), *((SCORES, n) for n in SCORES)])
def test_what_a_model_sorts_has_ranks_and_no_classes(of: dict[str, object], name: str) -> None:
    module = bind(Net(of[name]), X, {}, ("y", "z"))
    dtypes = {"y": "float32", "z": "int64" if name == "places" else "float32"}
    specs, _ = output_specs(module, X, dtypes)
    assert [s.classes for s in specs] == [True, of is SCORES]
    captured = capture(LoadedModel(module, X, specs, "w" * 64, "test"))
    assert [s.classes for s in captured.outputs] == [True, of is SCORES]

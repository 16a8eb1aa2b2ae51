"""What the model returns by name and the job leaves out is said."""

from __future__ import annotations

import pytest
import torch

from trtpipe.model.bindings import bind
from trtpipe.model.output_specs import output_specs
from trtpipe.values import DimRange, TensorSpec


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a", "b", "c.d"), ()),
        (("b",), ("outputs: the model returns a, c.d too, which the job leaves out",)),
        (("a", "c.d"), ("outputs: the model returns b too, which the job leaves out",)),
    ],
)
def test_named_outputs_that_a_job_leaves_out_are_noted(names, said):
    class Named(torch.nn.Module):
        def forward(self, x):
            return {"a": x, "b": 2 * x, "c": {"d": x + 1}}

    inputs = (TensorSpec("x", "float32", ("N", 3), {"N": DimRange(1, 2, 4)}),)
    assert output_specs(bind(Named(), inputs, {}, names), inputs, dict.fromkeys(names, "float32"))[1] == said
    many = bind(Many(), inputs, {}, ("0",))
    assert output_specs(many, inputs, {"0": "float32"})[1] == (
        "outputs: the model returns 1, 2, 3, 4, 5, 6 and 3 more too, which the job leaves out",
    )


class Many(torch.nn.Module):
    def forward(self, x):
        return {str(k): x for k in range(10)}

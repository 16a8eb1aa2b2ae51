"""The inputs of an exported program: sizes that it takes from each other, and tensors within an argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trtpipe.errors import InputError
from trtpipe.job.job import Job
from trtpipe.job.load import read_jobs
from trtpipe.model import load
from trtpipe.model.load import load_model
from trtpipe.values import DimRange, TensorSpec

_H, _W = (torch.export.Dim(name, min=4, max=32) for name in "hw")
_SIZES = {"H": DimRange(8, 16, 32), "W": DimRange(8, 16, 32), "one": DimRange(16, 16, 16)}
_STEP = "Give equal sizes one name, and sizes of a formula numbers; or export the program with a Dim for each axis."


@pytest.mark.parametrize(("exported", "asked", "said"), [
    ({0: _H, 1: _H}, ("H", "H"), None),
    ({0: _H, 1: _H}, (16, "one"), None),  # one size alone is a number, whatever it is called
    ({0: _H, 1: _H}, ("H", "W"), "n on axis 0 of x and n on axis 1 of x (got H and W)"),
    ({0: _H, 1: _H}, (16, "W"), "n on axis 0 of x and n on axis 1 of x (got 16 and W)"),
    ({0: _H, 1: _H}, (16, 24), "n on axis 0 of x and n on axis 1 of x (got 16 and 24)"),
    ({0: _H, 1: _W}, ("H", "W"), None),
    ({0: _H, 1: _W}, ("H", "H"), None),
    ({0: 2 * _H}, ("H", 16), "2*n on axis 0 of x (got H)"),
    ({0: 2 * _H}, (18, 16), None),
    ({0: 2 * _H}, (19, 16), "2*n on axis 0 of x (got 19)"),
    ({0: _H, 1: 2 * _H}, (8, 16), None),
    ({0: _H, 1: 2 * _H}, (10, 16), "n on axis 0 of x and 2*n on axis 1 of x (got 10 and 16)"),
    ({0: _H, 1: 2 * _H}, ("H", 16), "n on axis 0 of x and 2*n on axis 1 of x (got H and 16)"),
    ({0: 2 * _H, 1: _H}, (16, "H"), "2*n on axis 0 of x and n on axis 1 of x (got 16 and H)"),
])  # fmt: skip
def test_sizes_that_a_program_takes_from_each_other(exported: Any, asked: Any, said: str | None) -> None:
    """Its guards are not checked when it runs: what it computes of the one axis it would read of the other."""
    formula = [axis for axis, dim in exported.items() if dim not in (_H, _W)]
    plain = 8 if formula else 16
    sample = torch.zeros(*(16 if axis in formula or axis not in exported else plain for axis in (0, 1)))
    program = torch.export.export(torch.nn.ReLU(), (sample,), dynamic_shapes=(exported,))
    specs = (TensorSpec("x", "float32", asked, {n: _SIZES[n] for n in asked if n in _SIZES}),)
    if said is None:
        load._require_sizes(program, specs)
        return
    with pytest.raises(InputError) as caught:
        load._require_sizes(program, specs)
    assert str(caught.value) == f"inputs.x.shape: must be sizes that the program was exported for, {said}. {_STEP}"


def test_sizes_that_a_program_takes_from_each_other_across_inputs() -> None:
    """Beside an argument that is no tensor."""

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: int, y: torch.Tensor) -> torch.Tensor:
            return x.sum(1) * times + y.sum(1)

    n = torch.export.Dim("n", min=1, max=8)
    given = (torch.zeros(2, 3), 2, torch.zeros(2, 4))
    program = torch.export.export(Sum(), given, dynamic_shapes=({0: n}, None, {0: n}))
    dims = {"N": DimRange(1, 2, 8), "M": DimRange(1, 2, 8)}
    specs = [TensorSpec(i, "float32", (d, k), {d: dims[d]}) for i, d, k in (("x", "N", 3), ("y", "M", 4))]
    with pytest.raises(InputError, match=r"exported for, n on axis 0 of x and n on axis 0 of y \(got N and M\)\."):
        load._require_sizes(program, tuple(specs))


class Nested(torch.nn.Module):
    """2 a + 3 b + ids of tensors within one argument and one beside it."""

    def forward(self, feats: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        return 2 * feats["a"] + 3 * feats["b"][0] + ids


def nested(folder: Path, program: bool, names: tuple[str, ...]) -> Job:
    if program:
        example = ({"a": torch.zeros(2, 4), "b": (torch.zeros(2, 4),)}, torch.zeros(2, 4))
        torch.export.save(torch.export.export(Nested(), example), folder / "p.pt2")
    raw = {
        "name": "t",
        "model": {"program": "p.pt2"} if program else {"factory": f"{__name__}:Nested"},
        "inputs": {name: {"shape": [2, 4]} for name in names},
        "outputs": {"y": {}},
        "check": {"arrays": "x.npz", "limits": {"cosine_min": 0.9}},
    }
    (folder / "job.yaml").write_text(json.dumps(raw))
    return read_jobs(folder / "job.yaml", paths_exist=False)[0]


@pytest.mark.parametrize(
    ("program", "names", "place"),
    [
        (False, ("feats.a", "feats.b.0", "ids"), (0, 1, 2)),
        (False, ("feats.b.0", "feats.a", "ids"), (1, 0, 2)),
        (True, ("feats.a", "feats.b.0", "ids"), (0, 1, 2)),
        (True, ("feats_a", "feats_b_0", "ids"), (0, 1, 2)),
        (True, ("p", "q", "r"), (0, 1, 2)),
    ],
)
def test_tensors_within_an_argument_are_named_by_their_paths(
    tmp_path: Path, program: bool, names: tuple[str, ...], place: tuple[int, ...]
) -> None:
    """Those of a factory are put together by them; those of a program are given in order."""
    loaded = load_model(nested(tmp_path, program, names))
    values = [torch.full((2, 4), v) for v in (1.0, 10.0, 100.0)]
    assert loaded.module(*(values[k] for k in place))[0].unique().tolist() == [132.0]


@pytest.mark.parametrize(
    ("program", "names", "step"),
    [
        (False, ("a", "b", "ids"), "Name tensors within one argument by their paths, as feats.key or feats.0."),
        (False, ("p", "q", "r"), "Name tensors within one argument by their paths, as feats.key or feats.0."),
        (False, ("ids", "feats.a", "feats.b.0"), "Reorder or rename them."),
        (True, ("feats.b.0", "feats.a", "ids"), "Reorder or rename them."),
        (True, ("feats_b_0", "feats_a", "ids"), "Reorder or rename them."),
        (True, ("ids", "feats.a", "feats.b.0"), "Reorder or rename them."),
    ],
)
def test_tensors_within_an_argument_are_not_taken_in_another_order(
    tmp_path: Path, program: bool, names: tuple[str, ...], step: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_model(nested(tmp_path, program, names))
    taken = "feats.a, feats.b.0, ids" if program else "feats, ids"
    got = ", ".join(names if program else dict.fromkeys(n.partition(".")[0] for n in names))
    assert str(caught.value) == (
        f"inputs: must be in the order of the model's forward({taken}) (got {got}), "
        f"which is given them in order. {step}"
    )

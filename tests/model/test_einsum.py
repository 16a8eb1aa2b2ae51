"""An einsum that is a product of two tensors is captured as a matmul, or as a linear where one is a weight."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support import nets
from trtpipe.model.capture import capture
from trtpipe.model.einsum import contracted, contraction
from trtpipe.model.nodes import calls, op_name

SIZES = dict(zip("abcdefg", (2, 3, 4, 5, 2, 3, 4), strict=True))


@st.composite
def products(draw: st.DrawFn) -> str:
    """Labels of two tensors that are in both, in one, and in the output, each in any order."""
    of = {
        c: draw(st.sampled_from(("batch", "summed", "left", "right"))) for c in draw(st.sets(st.sampled_from("abcdef")))
    }
    of["g"] = "summed"

    def labels(*roles: str) -> str:
        return "".join(draw(st.permutations([c for c, role in of.items() if role in roles])))

    a, b = labels("batch", "summed", "left"), labels("batch", "summed", "right")
    return f"{a},{b}->{labels('batch', 'left', 'right')}"


@given(products())
def test_it_is_what_torch_computes(equation: str) -> None:
    a, b = (
        torch.randn([SIZES[c] for c in term], dtype=torch.float64) for term in equation.partition("->")[0].split(",")
    )
    how = contraction(equation, [[str(n) for n in x.shape] for x in (a, b)])
    assert how is not None
    torch.testing.assert_close(contracted(a, b, astuple(how), False, ()), torch.einsum(equation, a, b))


@pytest.mark.parametrize(
    ("equation", "a", "b", "taken"),
    [
        ("bhid,bhjd->bhij", (2, 3, 5, 4), (2, 3, 6, 4), True),
        ("...id,...jd->...ij", (2, 3, 5, 4), (2, 3, 6, 4), True),
        ("b i d, b j d", (2, 5, 4), (2, 6, 4), True),  # the output is bij... of letters that are once: ij
        ("ik,kj", (5, 4), (4, 6), True),
        ("...ik,kj->...ij", (2, 5, 4), (4, 6), True),
        ("ii,ij->j", (4, 4), (4, 6), False),
        ("ik,j->ikj", (5, 4), (6,), False),
        ("ik,kj->j", (5, 4), (4, 6), False),
        ("ik,kj->ij", (5, 1), (4, 6), False),
    ],
)
def test_forms(equation: str, a: tuple[int, ...], b: tuple[int, ...], taken: bool) -> None:
    x, y = torch.randn(a), torch.randn(b)
    how = contraction(equation, [[str(n) for n in t.shape] for t in (x, y)])
    assert (how is not None) == taken
    if how is not None:
        torch.testing.assert_close(contracted(x, y, astuple(how), False, ()), torch.einsum(equation, x, y))


class Attention(nn.Module):
    """As many public ViTs write it, with a projection that is an einsum too and one that no matmul is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 96), nn.Parameter(torch.randn(2, 16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.flatten(2)).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        seen = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        y = torch.einsum("bhij,bhjd->bihd", seen, v)
        return torch.einsum("bihd,hdo,o->bo", y, self.out, self.out[0, 0]) + torch.einsum(
            "bihd,hdo->bio", y, self.out
        ).mean(1)


def test_attention_of_einsums_can_be_quantized() -> None:
    torch.manual_seed(0)
    loaded = nets.loaded(Attention(), out_shape=("N", 10))
    captured = capture(loaded)
    found = [op_name(n) for n in calls(captured.graph.graph)]
    assert (found.count("matmul"), found.count("linear"), found.count("einsum")) == (2, 2, 1)
    assert [s.rule for s in captured.sites] == ["Q1", "Q2", "Q1", "Q1", "Q1", "Q1", "Q1", "Q2"]
    assert [s.reason for s in captured.skipped] == ["an einsum that is no matmul of two tensors has no Q/DQ rule"]
    x = nets.images(3, 3, 8, 8)
    torch.testing.assert_close(captured.graph(x)[0], loaded.module(x)[0])

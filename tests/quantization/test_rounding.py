"""Second-order rounding against exhaustive search, plain rounding and closed forms."""

import itertools

import pytest
import torch

from trtpipe.quantization import rounding


def moments(columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = mix @ torch.randn(columns, 500, generator=generator)
    return (x @ x.T / 500)[None]


def second_order(w: torch.Tensor, scales: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Of one target alone."""
    return rounding.second_order([w], [scales], second)[0]


def loss(w: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, second: torch.Tensor) -> float:
    delta = (levels * scales[..., None] - w)[0]
    return float((delta @ second[0] * delta).sum())


@pytest.mark.parametrize(("groups", "columns", "rows"), [(1, 1, 3), (3, 9, 5), (1, 128, 7), (2, 129, 4), (1, 1500, 40)])
def test_moments_are_added_up_in_the_upper_triangle(groups: int, columns: int, rows: int) -> None:
    parts = torch.randn(2, groups, columns, rows, generator=torch.Generator().manual_seed(3))
    added = torch.zeros(groups, columns, columns)
    for part in parts:
        rounding.add_moments(added, part)
    wanted = (parts.double() @ parts.double().mT).sum(0)
    torch.testing.assert_close(added.triu(), wanted.triu().float(), rtol=1e-4, atol=1e-4)


def test_uncorrelated_inputs_give_the_nearest_levels() -> None:
    w = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    scales = rounding.weight_scales(w)
    second = torch.diag_embed(torch.rand(2, 7, generator=torch.Generator().manual_seed(2)) + 0.1)
    assert torch.equal(second_order(w, scales, second), rounding.nearest(w, scales))


@pytest.mark.parametrize("seed", range(5))
def test_it_comes_closer_to_the_best_of_all_roundings_than_the_nearest(seed: int) -> None:
    w = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(seed))
    scales, second = torch.full((1, 1), 0.5), moments(8, seed)
    low = torch.floor(w / 0.5)
    best = min(
        loss(w, low + torch.tensor(bits, dtype=torch.float32), scales, second)
        for bits in itertools.product((0, 1), repeat=8)
    )
    plain = loss(w, rounding.nearest(w, scales), scales, second)
    ours = loss(w, second_order(w, scales, second), scales, second)
    assert ours - best <= 0.5 * (plain - best) + 1e-6


def test_groups_are_rounded_each_by_its_own_inputs() -> None:
    w = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3))
    scales = rounding.weight_scales(w)
    second = torch.cat([moments(6, s) for s in range(3)])
    whole = second_order(w, scales, second)
    for g in range(3):
        alone = second_order(w[g : g + 1], scales[g : g + 1], second[g : g + 1])
        assert torch.equal(whole[g : g + 1], alone)


def test_targets_are_rounded_together_as_alone() -> None:
    targets = [torch.randn(2, 4, 300, generator=torch.Generator().manual_seed(s)) for s in (7, 8)]
    scales, second = [rounding.weight_scales(t) for t in targets], torch.cat([moments(300, s) for s in range(2)])
    for one, w, steps in zip(rounding.second_order(targets, scales, second), targets, scales, strict=True):
        assert torch.equal(one, second_order(w, steps, second))


def test_long_rows_are_rounded_in_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(1, 3, 40, generator=torch.Generator().manual_seed(4))
    scales, second = rounding.weight_scales(w), moments(40, 4)
    whole = second_order(w, scales, second)
    monkeypatch.setattr(rounding, "BLOCK", 7)
    assert (second_order(w, scales, second) != whole).float().mean() < 0.05  # but for ties in the last bit


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    w = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(5))
    second = moments(6, 5)
    second[0, 2], second[0, :, 2] = 0, 0
    for one in (second, torch.zeros_like(second)):
        assert second_order(w, rounding.weight_scales(w), one).isfinite().all()


def test_scales_are_numbers_of_every_half_precision() -> None:
    scales = rounding.weight_scales(torch.randn(64, 9, generator=torch.Generator().manual_seed(6)))
    for half in (torch.bfloat16, torch.float16):
        assert torch.equal(scales.to(half).to(torch.float32), scales)


def test_a_regressed_weight_is_the_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(6, 400, generator=generator)
    q = x + 0.3 * torch.randn(6, 400, generator=generator)
    w = torch.randn(2, 6, generator=generator)
    found = rounding.regressed(w[None], (q @ q.T / 400)[None], (w @ (x - q) @ q.T / 400)[None], 1e-7)[0]
    expected = torch.linalg.lstsq(q.T, (w @ x).T).solution.T
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

"""The job's limits, as a few golden samples can be held against them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import shipping
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpipe.job.limits import SHARE_LIMITS, Limits
from trtpipe.runtime.recheck import _OF_MEANS, golden_limits
from trtpipe.values import CheckReport, Control, Metric


def checked(measured: tuple[Metric, ...], golden: dict[str, float]) -> CheckReport:
    return CheckReport("graph", "r", 360, measured, Control("a", "b", True, 64), True, golden=golden)


def test_golden_limits_where_the_job_has_only_shares() -> None:
    check = checked((Metric("cosine_worst", "logits", 0.97),), {})
    manifest = shipping.manifest(limits=Limits(accuracy_drop_max=0.01), check=check)
    limits, notes = golden_limits(manifest, 8)
    assert limits == Limits(cosine_worst_min=0.96)
    assert notes == (
        "accuracy_drop_max is a share of samples, and was not judged on 8",
        "no limit of the job can be judged on 8: each held to a cosine of 0.96, that of the build's worst sample less "
        "0.01",
    )
    assert golden_limits(manifest, 99)[0] == limits
    assert golden_limits(manifest, 100) == (Limits(accuracy_drop_max=0.01), ())


@settings(max_examples=200, deadline=None)
@given(
    of_all=st.floats(1e-4, 0.5),
    more=st.floats(0.2, 5.0),
    spare=st.floats(1.0, 3.0),
    figure=st.sampled_from(["sqnr_db_min", "relative_l2_max"]),
)
def test_what_passed_its_check_passes_on_golden_samples_that_are_further_off(
    of_all: float, more: float, spare: float, figure: str
) -> None:
    """Their error is another than that of all samples, by chance: an unchanged bundle failed."""
    largest = of_all * spare
    own: dict[str, Any] = {figure: largest if figure == "relative_l2_max" else -20 * math.log10(largest)}
    limits = Limits(**own)
    check = checked((Metric("relative_l2", "logits", of_all),), {"logits": of_all * more})
    held, notes = golden_limits(shipping.manifest(limits=limits, check=check), 8)
    value = getattr(held, figure)
    allowed = value if figure == "relative_l2_max" else 10 ** (-value / 20)
    assert allowed == pytest.approx(largest * max(1.0, more), rel=1e-4)  # as much is left as there was, and never less
    assert bool(notes) == (more > 1)


@pytest.mark.parametrize(("worst", "held"), [(0.5, 0.5), (0.97, 0.97), (0.995, 0.99), (-0.2, 0.0)])
def test_no_cosine_is_let_below_that_of_the_builds_worst_sample(worst: float, held: float) -> None:
    """However far the golden samples are from the baseline beside all."""
    measured = (Metric("relative_l2", "logits", 0.01), Metric("cosine_worst", "logits", worst))
    manifest = shipping.manifest(limits=Limits(cosine_min=0.99), check=checked(measured, {"logits": 0.1}))
    assert golden_limits(manifest, 8)[0].cosine_min == pytest.approx(held, abs=2e-6)


def test_limits_of_golden_samples_are_said() -> None:
    check = checked((Metric("relative_l2", "a", 0.01), Metric("relative_l2", "b", 0.0)), {"a": 0.02, "b": 0.0})
    own = Limits(cosine_min=0.99, sqnr_db_min=30, max_abs_max=0.5)
    manifest = shipping.manifest(limits=own, check=check)
    limits, notes = golden_limits(manifest, 8)
    assert (limits.cosine_min, limits.sqnr_db_min) == (pytest.approx(0.96), pytest.approx(30 - 6.0206))
    assert limits.max_abs_max == 0.5
    assert notes == (
        "cosine_min is 0.99 of all samples and 0.96 of these 8, whose outputs were 2.00 times as far from the baseline "
        "in the build",
        "sqnr_db_min is 30 of all samples and 23.9794 of these 8, whose outputs were 2.00 times as far from the "
        "baseline in the build",
    )
    assert golden_limits(manifest, 8, all_of_them=True) == (own, ())
    assert golden_limits(shipping.manifest(limits=own, check=None), 8) == (own, ())


def test_each_limit_is_known_as_one_on_a_mean_or_not() -> None:
    """One on a mean that is not known as such fails unchanged bundles whose golden samples are further off."""
    others = {"cosine_worst_min", "max_abs_max", "speedup_over_fp16_min", *SHARE_LIMITS}
    assert {*_OF_MEANS} | others == {*Limits.model_fields} - {"confident", "metrics"}
    assert not {*_OF_MEANS} & others
    for name, limit_of in _OF_MEANS.items():
        assert limit_of(0.9, 1.0) == pytest.approx(0.9)
        assert limit_of(0.9, 2.0) > 0.9 if name.endswith("_max") else limit_of(0.9, 2.0) < 0.9

"""The search, on networks whose noise is known: each module in INT8 adds its own power to the output's."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpipe.job.limits import Limits
from trtpipe.quantization.ranking import ModuleSensitivity, Sensitivity
from trtpipe.quantization.search import (
    Candidate,
    Laboratory,
    Preview,
    Trial,
    Tuned,
    at_output,
    best_of,
    keeping,
    ladder,
    left,
    pareto,
    search,
    shortfall,
)
from trtpipe.report.tune_page import after_search, page, table, verdict
from trtpipe.values import Metric, shortcomings

LIMITS = Limits(sqnr_db_min=30.0)


class Network:
    """Modules m0, m1, ... with a noise power each, relative to a signal of 1; algorithms scale all of it.

    `misled` multiplies what the preview sees of the noise.
    """

    def __init__(self, noise, algorithms=("entropy_2",), factor=None, misled=1.0, half_db=60.0):
        self.noise = {f"m{i}": p for i, p in enumerate(noise)}
        self.algorithms, self.factor, self.misled = algorithms, factor or {}, misled
        self.half_db = half_db
        self.evaluated = []

    def sqnr(self, candidate):
        power = sum(p for m, p in self.noise.items() if m not in candidate.kept)
        power *= self.factor.get(candidate.algorithm, 1.0)
        return math.inf if power == 0 else -10 * math.log10(power)

    def evaluate(self, candidate):
        self.evaluated.append(candidate)
        db = self.sqnr(candidate)
        metrics = (Metric("sqnr_db", "y", db, 30.0, db >= 30),)
        share = 1 - len(candidate.kept) / len(self.noise)
        return Trial(candidate, db >= 30, shortfall(metrics, LIMITS), metrics, (), share, 1000)

    def preview(self, candidate):
        db = self.sqnr(candidate) - 10 * math.log10(self.misled)
        return Preview((30 - db) / 10, db)

    def rank(self, algorithm):
        def figures(m, p):
            own = -10 * math.log10(p)
            return ModuleSensitivity(m, "net.py:1", "conv2d", own, own, self.half_db, 100)

        ranked = sorted((figures(m, p) for m, p in self.noise.items()), key=lambda m: m.sqnr_db)
        return Sensitivity(tuple(ranked), 32, 100 * len(self.noise), 1.0, 1.0, 0.1)

    def search(self, allowance=10):
        return search(Laboratory(self.evaluate, self.preview, self.rank, self.algorithms), allowance)


def test_a_job_that_passes_is_left_alone_after_one_evaluation():
    network = Network([1e-6] * 5)
    tuned = network.search()
    assert tuned.met
    assert network.evaluated == [Candidate("entropy_2")]
    assert tuned.sensitivity is None


def test_only_the_one_bad_module_is_kept():
    network = Network([1e-6] * 30 + [1e-1] + [1e-6] * 23)
    tuned = network.search()
    assert tuned.met
    assert tuned.best.candidate == Candidate("entropy_2", half=("m30",))
    assert len(network.evaluated) == 2


class Judged(Network):
    """A network of which the limits are about some modules' noise alone: where no other is quantized either, a copy
    that is damaged in what is left passes too."""

    def __init__(self, noise, judged):
        super().__init__(noise)
        self.judged = {f"m{i}" for i in judged}

    def sqnr(self, candidate):
        unjudged = {m: p for m, p in self.noise.items() if m not in self.judged}
        own, self.noise = self.noise, {m: p for m, p in self.noise.items() if m not in unjudged}
        try:
            return super().sqnr(candidate)
        finally:
            self.noise = own

    def evaluate(self, candidate):
        trial = super().evaluate(candidate)
        kept_ranked_first = {"m0", "m1"} <= candidate.kept
        return replace(trial, passed=trial.passed and not kept_ranked_first, problems=("the check cannot fail",))


def test_what_no_limit_is_about_is_given_back_until_the_check_can_fail():
    """m0 and m1 are the noisiest, and the limit is about m2 alone."""
    network = Judged([1e-1, 1e-1, 1e-2, 1e-6, 1e-6], judged=(2, 3, 4))
    tuned = network.search()
    assert tuned.met
    assert "m2" in tuned.best.candidate.kept
    assert not {"m0", "m1"} <= tuned.best.candidate.kept


def test_another_algorithm_alone_may_be_enough():
    network = Network([1e-3] * 10, ("entropy_2", "minmax", "mse"), {"minmax": 5.0, "mse": 0.05})
    tuned = network.search()
    assert tuned.met
    assert tuned.best.candidate == Candidate("mse")
    assert len(network.evaluated) == 2


def test_the_algorithm_under_which_fewest_are_kept_is_taken():
    noise = [1e-2, 2e-3, 1e-3, 5e-4, 1e-4, 1e-4]
    assert len(Network(noise).search().best.candidate.kept) == 3
    network = Network(noise, ("entropy_2", "minmax"), {"minmax": 0.4})
    tuned = network.search()
    assert tuned.met
    assert tuned.best.candidate == Candidate("minmax", half=("m0", "m1"))


@given(st.lists(st.floats(1e-7, 1e-2), min_size=54, max_size=54), st.sampled_from([0.01, 0.3, 1.0, 3.0, 100.0]))
@settings(deadline=None, max_examples=100)
def test_54_modules_take_at_most_ten_evaluations_and_no_module_too_many(noise, misled):
    network = Network(noise, misled=misled)
    tuned = network.search()
    assert len(network.evaluated) <= 10
    assert len(set(network.evaluated)) == len(network.evaluated)
    ranked = sorted(noise, reverse=True)
    needed = next(k for k in range(55) if sum(ranked[k:]) <= 1e-3)
    assert tuned.met
    if misled == 1.0:
        assert len(tuned.best.candidate.kept) <= needed
    if len(network.evaluated) < 10:
        assert len(tuned.best.candidate.kept) <= needed


def test_a_module_that_need_not_be_kept_goes_back_to_int8():
    class Entangled(Network):
        """m1 is the second worst alone, and yet it is m0 and m2 that have to be kept."""

        def sqnr(self, candidate):
            return 40.0 if {"m0", "m2"} <= candidate.kept else 20.0

    network = Entangled([1e-2, 5e-3, 1e-3, 1e-4, 1e-4])
    tuned = network.search()
    assert tuned.met
    assert tuned.best.candidate.kept == {"m0", "m2"}
    assert len(network.evaluated) == 4  # nothing, three, two, and three less m1


def test_a_budget_that_cannot_be_met_gives_the_closest_and_tries_fp32():
    class Hopeless(Network):
        def sqnr(self, candidate):
            return min(super().sqnr(candidate), 20.0 + len(candidate.kept) + 0.5 * len(candidate.fp32))

    network = Hopeless([1e-9] * 4, half_db=200.0)
    tuned = network.search()
    assert not tuned.met
    assert tuned.notes == (
        "at least one module stays quantized in each trial: where the limits need none, build without "
        "precision.int8_mode, fp8_mode and weights",
    )
    assert tuned.best.candidate == Candidate("entropy_2", fp32=("m0", "m1", "m2"))
    assert "m3" not in tuned.best.candidate.kept  # something is left to quantize
    assert verdict(tuned) == (
        "budget NOT met; closest: `m0`, `m1`, `m2` in FP32, entropy_2; 25 % of the MACs quantized, "
        "with sqnr_db 24.5 (limit 30) (3 evaluations)"
    )
    assert after_search(tuned) == (
        "check.on_fail: tune has tried 3 candidates: none met the limits, and this is the closest. Set limits that it "
        "can meet, calibrate on more samples, or build without quantization."
    )
    met = replace(tuned, best=replace(tuned.best, passed=True), trials=tuned.trials[:1])
    assert after_search(met).startswith(
        "check.on_fail: tune has tried 1 candidate: one that met the limits in its trial is this one. Set"
    )


def test_what_is_missed_names_its_output_where_there_are_several():
    """Two figures of one name and one limit said nothing."""
    tuned = Network([1e-9] * 4).search()
    few, many = (
        tuple(Metric("sqnr_db", name, 20.0 + k, 30.0, False) for k, name in enumerate(names))
        for names in (["feats"], ["feats", "scores"])
    )
    assert shortcomings((*few, Metric("latency_ms", "", 9.0, 5.0, False)), ("p",)) == (
        "sqnr_db 20 (limit 30)", "latency_ms 9 (limit 5)", "p",
    )  # fmt: skip
    best = replace(tuned.best, passed=False, metrics=many)
    assert "with feats.sqnr_db 20 (limit 30), scores.sqnr_db 21 (limit 30) (" in verdict(replace(tuned, best=best))
    assert shortcomings((*many, Metric("latency_ms", "", 9.0, 5.0, False)), ())[-1] == "latency_ms 9 (limit 5)"


class Stepped(Network):
    """Modules that have a noise power in each of INT8, FP8 and half; none in FP32."""

    def __init__(self, noise, **more):
        super().__init__([n[0] for n in noise], **more)
        self.powers = {
            f"m{i}": dict(zip(("own", "fp8", "half", "fp32"), (*n, 0.0), strict=True)) for i, n in enumerate(noise)
        }

    def sqnr(self, candidate):
        where = {m: k for k in ("fp8", "half", "fp32") for m in getattr(candidate, k)}
        power = sum(p[where.get(m, "own")] for m, p in self.powers.items())
        return math.inf if power == 0 else -10 * math.log10(power)

    def rank(self, algorithm):
        def figures(m, p):
            own, fp8, half = (-10 * math.log10(p[k]) for k in ("own", "fp8", "half"))
            return ModuleSensitivity(m, "net.py:1", "linear", own, own, half, 100, fp8_sqnr_db=fp8)

        ranked = sorted((figures(m, p) for m, p in self.powers.items()), key=lambda m: m.sqnr_db)
        return Sensitivity(tuple(ranked), 32, 100 * len(self.powers), 1.0, 1.0, 0.1)


def test_where_the_next_format_is_a_little_short_the_worst_takes_the_one_after_it():
    """Five linears in NVFP4 whose FP8 is 0.9 dB short: all of them went to FP32 at once."""
    network = Stepped([(1e-2, 2e-4, 1e-7)] * 4 + [(3e-2, 5e-4, 1e-7), (1e-9, 1e-9, 1e-9)])
    tuned = network.search()
    assert tuned.met
    assert tuned.best.candidate == Candidate("entropy_2", fp8=("m0", "m1", "m2", "m3"), half=("m4",))
    assert len(network.evaluated) <= 10


def test_the_worst_is_what_does_most_to_the_models_outputs():
    """Of two modules that are alike at their own outputs, the one whose noise reaches the model's steps up first."""

    def one(sqnr, own, fp8):
        return ModuleSensitivity("a", "", "linear", sqnr, own, 60.0, 1, fp8_sqnr_db=fp8)

    assert at_output(one(20.0, 20.0, 30.0), 30.0) == 30.0
    assert at_output(one(40.0, 20.0, 30.0), 30.0) == 50.0
    assert at_output(one(math.inf, math.inf, math.inf), math.inf) == math.inf


@given(
    st.lists(st.tuples(st.floats(1e-5, 1e-1), st.floats(1e-6, 1e-2), st.floats(1e-8, 1e-3)), min_size=2, max_size=12),
    st.sampled_from([0.3, 1.0, 3.0]),
)
@settings(deadline=None, max_examples=150)
def test_what_fp32_can_meet_is_met_and_each_module_is_on_its_ladder(noise, misled):
    """With evaluations enough; the last module is left quantized, as something has to be."""
    network = Stepped([*noise, (1e-9, 1e-9, 1e-9)], misled=misled)
    tuned = network.search(200)
    assert tuned.met
    if misled == 1.0 and tuned.sensitivity is not None:
        modules = {m.module: m for m in tuned.sensitivity.modules}
        kept = {m: k for k in ("fp8", "half", "fp32") for m in getattr(tuned.best.candidate, k)}
        assert all(k in dict(ladder(modules[m])) for m, k in kept.items())
        assert len(set(network.evaluated)) == len(network.evaluated)


def test_the_allowance_is_kept_and_its_end_is_said():
    network = Network([1e-3] * 54, misled=1e-9)
    ends = set()
    for count in range(2, 9):
        tuned = network.search(count)
        assert len(tuned.trials) <= count
        might = "keep less" if tuned.met else "meet the limits"
        ended = (f"the search ended at its {count} evaluations; a longer one might {might}",)
        ends |= {tuned.met} if tuned.notes == ended else set()
        assert tuned.notes == ended or len(tuned.trials) < count
    assert ends == {True, False}


def test_a_module_is_kept_in_fp32_where_half_precision_is_no_better():
    def one(half, own):
        return ModuleSensitivity("a", "", "conv2d", 1.0, own, half, 1)

    base = Candidate("minmax")
    assert keeping(base, [one(70.0, 30.0)]) == Candidate("minmax", half=("a",))
    assert keeping(base, [one(35.9, 30.0)]) == Candidate("minmax", fp32=("a",))
    assert keeping(base, [one(-math.inf, 30.0)]) == Candidate("minmax", fp32=("a",))
    assert keeping(base, [one(None, 30.0)]) == Candidate("minmax", fp32=("a",))


def test_a_module_is_kept_in_the_other_8_bits_where_those_are_clearly_better():
    """Each of INT8, FP8, FP16 and FP32 is chosen by some module, and 8 bits before more."""

    def one(path, fp8=None, int8=None, half=36.0):
        return ModuleSensitivity(path, "", "linear", 1.0, 30.0, half, 1, fp8_sqnr_db=fp8, int8_sqnr_db=int8)

    modules = [
        one("a", fp8=36.0), one("b", int8=36.0), one("c", fp8=35.9), one("d", int8=35.9, half=35.9),
        one("e", fp8=35.9, int8=40.0), one("f", fp8=36.0, int8=40.0),  # in 4 bits now
    ]  # fmt: skip
    found = keeping(Candidate("minmax"), modules)
    assert found == Candidate("minmax", fp8=("a", "f"), int8=("b", "e"), half=("c",), fp32=("d",))
    assert found.kept == {"a", "b", "c", "d", "e", "f"}


def test_what_lies_in_a_module_that_is_kept_wider_is_not_named():
    """Its keep takes all that is inside."""

    def one(path, int8=None, half=36.0):
        return ModuleSensitivity(path, "", "linear", 1.0, 30.0, half, 1, int8_sqnr_db=int8)

    found = keeping(Candidate("minmax"), [one("blocks.0"), one("blocks.0.mlp", int8=36.0), one("blocks.01", int8=36.0)])
    assert found == Candidate("minmax", half=("blocks.0",), int8=("blocks.01",))
    found = keeping(Candidate("minmax"), [one("blocks.0", half=30.0), one("blocks.0.mlp")])
    assert found == Candidate("minmax", fp32=("blocks.0",))


def test_what_is_inside_a_kept_module_is_kept_too():
    def named(path):
        return ModuleSensitivity(path, "", "linear", 1.0, 1.0, None, 1)

    modules = [named(p) for p in ("attn", "attn.qkv", "attn2", "mlp")]
    assert [m.module for m in left(modules, ["attn"])] == ["attn2", "mlp"]


@pytest.mark.parametrize(
    ("limits", "values", "expected"),
    [
        ({"sqnr_db_min": 30}, {"sqnr_db": 25}, 0.5),
        ({"cosine_min": 0.99}, {"cosine": 0.97}, 2.0),
        ({"accuracy_drop_max": 0.01}, {"accuracy_drop": 0.03}, 2.0),
        ({"max_abs_max": 0.5}, {"max_abs": 0.25}, -0.5),
        ({"cosine_min": 0.99, "max_abs_max": 0.5}, {"cosine": 0.995, "max_abs": 0.75}, 0.5),
        ({"top1_agreement_min": 0.9}, {}, math.inf),
        ({"cosine_min": 0.9}, {"cosine": math.nan}, math.inf),
        ({}, {"cosine": 0.1}, 0.0),
    ],
)
def test_the_shortfall_is_that_of_the_worst_limit_in_units_of_what_it_allows(limits, values, expected):
    metrics = [Metric(n, "y", v) for n, v in values.items()]
    assert shortfall(metrics, Limits(**limits)) == pytest.approx(expected)


def trial(share, size, db, passed=True, kept=()):
    return Trial(Candidate("mse", half=kept), passed, 0.0, (Metric("sqnr_db", "y", db, 30.0, passed),), (), share, size)


def test_the_pareto_front_holds_what_nothing_beats():
    a, b, c, d = trial(1.0, 10, 20), trial(0.9, 11, 30), trial(0.8, 12, 25), trial(0.9, 11, 30, kept=("x",))
    assert pareto([a, b, c, d]) == (a, b, d)
    assert pareto([trial(1.0, 1, math.nan)]) == ()


def test_what_a_build_refuses_is_no_result_and_its_reason_is_shown():
    refused = Trial(Candidate("mse", fp32=("x",)), False, math.inf, (), ("keep: not for 7.5.",), 0.0, None)
    missed = replace(trial(1.0, 1, 20, passed=False), shortfall=1.0)
    assert pareto([refused, missed]) == (missed,)
    assert best_of([refused, missed]) is missed
    shown = table([refused, missed]).splitlines()
    assert [cell.strip() for cell in shown[2].split("|")[4:8]] == ["0 %", "", "", "refused"]
    alone = verdict(Tuned(refused, (refused,), None, ()))
    assert alone.endswith("with keep: not for 7.5. (1 evaluation)")


def test_the_best_trial_passes_and_has_most_in_int8():
    failed, good, better = trial(1.0, 1, 1, passed=False), trial(0.5, 1, 50), trial(0.9, 1, 31)
    assert best_of([failed, good, better]) is better


def test_several_outputs_are_judged_by_the_worst_and_the_budgets_own_figures_are_shown():
    def of(db, lost):
        metrics = (
            Metric("sqnr_db", "anchors", float("inf")), Metric("sqnr_db", "scores", db),
            Metric("map_drop", "scores", lost, 0.5, True),
        )  # fmt: skip
        return replace(trial(0.5, 1, 1), metrics=metrics)

    better, noisier = of(30.0, 0.1), of(20.0, 0.2)
    assert pareto([better, noisier]) == (better,)
    shown = table([better, noisier]).splitlines()
    assert shown[0] == "|  | calibration | kept out | quantized MACs | size MB | SQNR dB | map lost | budget |"
    assert [cell.strip() for cell in shown[2].split("|")[6:8]] == ["30", "0.1"]
    assert of(float("nan"), 0.0).value("sqnr_db") != of(1.0, 0.0).value("sqnr_db")
    assert math.isnan(of(float("nan"), 0.0).value("sqnr_db") or 0.0)


def test_the_page_holds_verdict_trials_and_ranking():
    network = Network([1e-6] * 3 + [1e-1])
    tuned = network.search()
    text = page("net", tuned, LIMITS)
    assert "# net: tuning\n\nbudget met: `m3` in half, entropy_2; 75 % of the MACs quantized (2 evaluations).\n" in text
    assert "Budget: sqnr_db_min 30." in text
    assert "| * | entropy_2 | `m3` in half | 75 % | 0.001 | 55.23 | met |" in text
    assert "| * | entropy_2 | nothing kept | 100 % |" in text
    assert "| `m3` | net.py:1 | 10 | 10 | 60 |" in text
    assert (
        table(tuned.trials).splitlines()[0]
        == "|  | calibration | kept out | quantized MACs | size MB | SQNR dB | budget |"
    )

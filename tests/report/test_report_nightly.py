from __future__ import annotations

import dataclasses
import re

import night_sample as nights
import pytest
import report_sample as samples

from trtpipe.nightly.outcome import STANDINGS, Comparison, Drift, NightlyReport, drift_line
from trtpipe.nightly.page import at_a_glance, comparison_row
from trtpipe.nightly.page import render as render_nightly


def test_rows_are_in_the_order_of_need_and_a_regression_leads_the_page() -> None:
    page = render_nightly(nights.NIGHT, nights.HISTORY, nights.LINKS)
    words = re.findall(r'<span class="badge tiny (?:bad|warn|good|plain)">([a-z ]+)</span>\n', page)
    assert words == list(STANDINGS)
    assert page.index(nights.REGRESSION) < page.index("<h2>Jobs</h2>")
    assert page.count("<details") == 7 + 1  # and the packages
    assert page.count('<details class="job" open') == 4


def test_a_night_says_at_its_top_what_went_wrong_in_words() -> None:
    page = render_nightly(nights.NIGHT, nights.HISTORY, nights.LINKS)
    top = page[: page.index("<h2>Jobs</h2>")]
    badges = re.findall(r'<span class="badge (?:bad|warn)">([^<]+)</span>', top)
    assert badges == ["1 regression", "1 failed check", "1 error", "1 drift", "1 cancelled", "interrupted"]
    assert "exit code" not in top
    assert f"<dt>Exit code</dt><dd>{nights.NIGHT.exit_code}</dd>" in page


@pytest.mark.parametrize(
    ("drift", "state", "word", "code"),
    [
        (Drift(("aa", "bb"), 0.0), "good", "built", 0),  # a builder that times kernels chooses among equal ones
        (Drift(("aa", "bb"), None), "good", "built", 0),
        (Drift(("aa", "bb"), 1e-7), "bad", "drift", 1),
        (Drift(("aa", "aa"), 1e-7), "bad", "drift", 1),
    ],
)
def test_drift_is_of_outputs_in_the_row_and_the_exit_code(drift: Drift, state: str, word: str, code: int) -> None:
    night = NightlyReport(1, nights.NIGHT.began, 1.0, (nights.built("detector", drift=drift),))
    assert at_a_glance(night.outcomes[0]) == (state, drift_line(drift))
    assert night.outcomes[0].standing == word
    assert night.exit_code == code


def test_a_jobs_report_is_linked_without_opening_its_row() -> None:
    page = render_nightly(nights.NIGHT, nights.HISTORY, nights.LINKS)
    for link in nights.LINKS.values():
        assert f'<div class="row"><a class="report" href="{link}">report</a>' in page
    outside = re.sub(r"<details class=\"job\".*?</details></div>", "", page, flags=re.S)
    assert outside.count('class="report"') == len(nights.LINKS)


def test_packages_are_listed_once_and_behind_a_click() -> None:
    made_with = {"tensorrt-rtx": "1.7.1", "tensorrt_rtx": "1.7.1", "torch": "2.14.1"}
    page = render_nightly(dataclasses.replace(nights.NIGHT, environment=made_with))
    closed = re.search(r"<details><summary>2 packages</summary>.*?</details>", page, re.S)
    assert closed is not None
    assert re.findall(r"<dt>([^<]*)</dt>", closed[0]) == ["tensorrt_rtx", "torch"]


def test_a_night_without_trouble_is_green() -> None:
    good = dataclasses.replace(nights.NIGHT, outcomes=nights.NIGHT.outcomes[:2])
    page = render_nightly(good)
    assert "all 2 jobs are green" in page
    assert "all green" in page
    assert "<dt>Exit code</dt><dd>0</dd>" in page


def test_an_empty_night_is_still_a_page() -> None:
    assert "There were none." in render_nightly(NightlyReport(1, "2026-11-21T02:00:00Z", 0.0, ()))


def test_what_a_row_says() -> None:
    by_name = {o.name: (at_a_glance(o)[0], o.standing, at_a_glance(o)[1]) for o in nights.NIGHT.outcomes}
    assert by_name["bit-m-int8"] == (
        "bad", "failed check", "Cosine similarity missed its limit; output logits holds NaN or infinity in what was executed",
    )  # fmt: skip
    assert by_name["mobilenet-fp16"] == ("good", "built", "weights changed")
    assert by_name["two-inputs"][1] == "cancelled"


def test_a_comparison_is_in_its_own_terms() -> None:
    row = comparison_row(Comparison("size_bytes", "", 2e6, None, 3e6, 0.5, 0.05, True, True))
    assert (row.before, row.trend, row.now, row.worse_by, row.limit) == ("2.0 MB", "–", "3.0 MB", "50 %", "5 %")
    row = comparison_row(Comparison("cosine", "y", 0.9, 0.9, 0.95, -0.05, None, False, False))
    assert (row.title, row.worse_by, row.limit) == ("Cosine similarity (y)", "better", "–")
    row = comparison_row(Comparison("max_abs", "y", 0.1, None, 0.3, 0.2, None, False, False))
    assert (row.worse_by, row.limit) == ("0.2", "–")
    for now, said in ((0.9, "same"), (0.1, "changed")):
        row = comparison_row(Comparison("val_engine", "y", 0.9, None, now, None, None, False, False))
        assert (row.worse_by, row.limit) == (said, "–")


def test_names_stay_text() -> None:
    bad = dataclasses.replace(
        nights.NIGHT.outcomes[2], name=samples.HOSTILE, file=samples.HOSTILE, bundle=samples.HOSTILE, error=samples.HOSTILE,
        notes=(samples.HOSTILE,), regressions=(samples.HOSTILE,), seconds={samples.HOSTILE: 1.0},
    )  # fmt: skip
    history = {samples.HOSTILE: {samples.HOSTILE: [1.0, 2.0]}}
    page = render_nightly(
        dataclasses.replace(nights.NIGHT, outcomes=(bad,)), history, {samples.HOSTILE: "javascript:alert(1)"}
    )
    assert "<script" not in page
    assert "<img" not in page
    assert 'href="javascript:' not in page


def test_the_same_night_gives_the_same_bytes() -> None:
    assert render_nightly(nights.NIGHT, nights.HISTORY) == render_nightly(nights.NIGHT, nights.HISTORY)
